//! Shared directories: the server that answers the messages of a guest's FUSE mount.
//!
//! The guest agent mounts FUSE and passes each message on; the transport is the caller's. The guest is
//! hostile: what it sends is parsed with bounds, it names one component at a time, and nothing outside the root can be
//! reached by it. It cannot make devices, set-id programs or attributes other than `user.*` on the host.
//!
//! ```text
//! message ─▶ wire (parse) ─▶ server (dispatch) ─▶ names · files · listing · attributes ─▶ tree (system calls) ─▶ host
//!                                 │                    └─ handles: what the guest holds open
//!                                 └─ table (log) · nodes: what its node ids stand for
//! ```
//! Node ids are kept in a file and handles are opened again by them, so that a mount outlives the daemon: a file that was
//! deleted while open is the one thing lost (ESTALE). A request that was carried out by a daemon which was killed before
//! its reply arrived may be sent again: it is not carried out twice.
//!
//! A daemon that is not root serves what its own user may open: the guest's root has no privilege here, new files belong to
//! that user, and a file that was made without rights for its owner is not opened again after a restart (EACCES).
//!
//! The host may change the directory, too. The guest asks again after [`CACHED`] and at each open, and never delays writes.

mod attributes;
mod files;
mod handles;
mod listing;
mod names;
mod nodes;
mod server;
mod table;
mod tree;
mod wire;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use coracle_types::IdMapping;

pub use server::SharedDirServer;
pub use table::begin_copied_table;

/// Seconds for which the guest caches names and attributes.
const CACHED: u64 = 1;

/// What a guest sees of the file systems that the host has mounted below a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submounts {
    /// Only those that are there when the directory is opened. Without CAP_SYS_ADMIN all of them are seen.
    pub private: bool,
    /// They may be changed although the directory is read-only, as those below a read-only bind mount.
    pub writable: bool,
}

/// A directory of the host that a guest mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedDirSpec {
    /// The directory, or a single plain file (the guest then mounts with a file as its root mode).
    pub root: PathBuf,
    /// Every change is answered with EROFS.
    pub read_only: bool,
    /// What is mounted below the directory.
    pub submounts: Submounts,
    /// Owners on the host are ids of this user namespace, whose outside is the guest. What the guest's other users make belongs
    /// to the namespace's root. `None`: owners are those of the guest.
    pub ids: Option<IdMapping>,
    /// File of node ids, with which a restarted daemon continues. One per mount and served by one process at a time; made
    /// anew when it is not there. A copy of a running guest needs a copy of it. Its next version is written beside it
    /// under the extension `tmp`: two tables in one directory must differ in more than their extensions.
    pub table: PathBuf,
}
