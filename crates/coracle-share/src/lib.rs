//! Shared directories: the server that answers the messages of a guest's FUSE mount.
//!
//! The guest agent mounts FUSE and passes each message on; the caller provides the transport. The guest is hostile: its
//! messages are parsed with bounds, it names one path component at a time, and it cannot reach anything outside the root. On
//! the host it cannot make devices, set-id programs or attributes other than `user.*`.
//!
//! ```text
//! message ─▶ wire (parse) ─▶ server (dispatch) ─▶ names · files · listing · attributes ─▶ tree (system calls) ─▶ host
//!                                 │                    └─ handles: files that the guest holds open
//!                                 └─ table (log) · nodes: inodes of the guest's node ids
//! ```
//! Node ids are stored in a file, and handles are opened again by node id, so a mount outlives the daemon. Only a file that was
//! deleted while open is lost (ESTALE). A request that a killed daemon carried out before its reply arrived may be sent again;
//! it is not carried out twice.
//!
//! A daemon that is not root serves what its own user may open: the guest's root has no privilege here, new files belong to
//! that user, and a file that was made without permissions for its owner cannot be opened again after a restart (EACCES).
//!
//! The host may change the directory as well. The guest revalidates after [`CACHED`] and at each open, and never delays writes.

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

/// Time for which the guest caches names and attributes, seconds.
const CACHED: u64 = 1;

/// Visibility of file systems that the host has mounted below a shared directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submounts {
    /// Shows only the mounts that exist when the directory is opened. Without CAP_SYS_ADMIN all mounts are visible.
    pub private: bool,
    /// Permits changes in submounts although the directory is read-only, as below a read-only bind mount.
    pub writable: bool,
}

/// Host directory that a guest mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedDirSpec {
    /// Path of the directory, or of a single plain file (the guest then mounts with a file as its root mode).
    pub root: PathBuf,
    /// Answers every change with EROFS.
    pub read_only: bool,
    /// Visibility of file systems mounted below the directory.
    pub submounts: Submounts,
    /// User namespace of the owners: owners on the host are inside ids, owners in the guest are outside ids. Files that other
    /// users of the guest make belong to root of the namespace. `None`: owners are the same on both sides.
    pub ids: Option<IdMapping>,
    /// File of node ids, with which a restarted daemon continues. It belongs to one mount, is used by one process at a time,
    /// and is made if it is missing. A copy of a running guest needs a copy of it. Its next version is written next to it under
    /// the extension `tmp`: two tables in one directory must differ in more than their extensions.
    pub table: PathBuf,
}
