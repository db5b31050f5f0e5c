//! Parses the header of a message, finds the file of its node id, and dispatches to the operation.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use coracle_types::IdMapping;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use zerocopy::FromBytes as _;

use super::handles::{Handle, Handles, OpenMode};
use super::nodes::Change;
use super::table::Table;
use super::wire::{
    Arguments, Attr, BatchForgetIn, Body, DATA_MAX, ForgetIn, ForgetOne, INIT_FLAGS, InHeader, InitIn,
    InitOut, MAJOR, MINOR, MINOR_MIN, Op, REQUEST_MAX, ROOT,
};
use super::{SharedDirSpec, tree};

/// Maximum number of background requests (read-ahead) of the guest's kernel, and the threshold at which it slows down.
const BACKGROUND_MAX: u16 = 16;
const CONGESTION: u16 = 12;
/// Tries to find an id whose name moves at the same time.
const FIND_TRIES: usize = 3;

/// Server that answers the FUSE messages of one mount in a guest (see the module).
#[derive(Debug)]
pub struct SharedDirServer {
    pub(super) root: OwnedFd,
    pub(super) root_device: u64,
    pub(super) read_only: bool,
    /// Mount id of a read-only directory whose submounts may be changed; `None`: submounts are read-only as well.
    fixed_mount: Option<u64>,
    /// Whether the daemon may change owners, so that new files belong to the user in the guest.
    pub(super) owned: bool,
    /// User namespace of the owners (see [`SharedDirSpec`]).
    ids: Option<IdMapping>,
    pub(super) handles: Handles,
    table: Mutex<Table>,
}

/// Request without its header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) op: Op,
    pub(super) unique: u64,
    pub(super) node: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) args: Arguments<'a>,
    /// Whether the request was carried out before and is sent again, because its reply did not arrive.
    pub(super) repeated: bool,
}

/// File that a node id stands for.
#[derive(Debug)]
pub(super) enum FoundNode<'a> {
    Root(&'a OwnedFd),
    Path(OwnedFd),
    Open(Arc<Handle>),
}

impl AsFd for FoundNode<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Root(root) => root.as_fd(),
            Self::Path(path) => path.as_fd(),
            Self::Open(handle) => handle.as_fd(),
        }
    }
}

impl SharedDirServer {
    /// Opens the root and loads the table of node ids. Blocking.
    ///
    /// # Errors
    /// When the root is neither a directory nor a plain file or cannot be opened, or the table cannot be read or written.
    pub fn open(spec: SharedDirSpec) -> io::Result<Self> {
        let SharedDirSpec { root, read_only, submounts, ids, table } = spec;
        let named = |path: &std::path::Path, what: &str, error: io::Error| {
            io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
        };
        let handle = tree::open_root(&root, submounts.private)
            .map_err(|e| named(&root, "open host directory", e.into()))?;
        let stat = tree::stat(&handle).map_err(|e| named(&root, "stat host directory", e.into()))?;
        let nodes = Table::open(table.clone()).map_err(|e| named(&table, "open table of node ids", e))?;
        Ok(Self {
            root: handle,
            root_device: tree::device(&stat),
            read_only,
            fixed_mount: tree::mount_id(&stat).filter(|_| submounts.writable),
            owned: rustix::process::geteuid().is_root(),
            ids,
            handles: Handles::new(nodes.nodes().epoch()),
            table: Mutex::new(nodes),
        })
    }

    /// Answers one message of the guest's kernel. `None` for messages without a reply in the protocol (such as FORGET and
    /// INTERRUPT), and for data that is too short for a message. Blocking; several threads may call it at once. Never panics,
    /// for any bytes.
    #[must_use]
    pub fn answer(&self, message: &[u8]) -> Option<Vec<u8>> {
        let (header, body) = InHeader::read_from_prefix(message).ok()?;
        let op = Op::of(header.opcode);
        if matches!(op, Some(Op::Forget | Op::BatchForget | Op::Interrupt | Op::NotifyReply)) {
            // A malformed message forgets nothing.
            let _ = op.map(|op| self.forget(op, header.node, Arguments(body)));
            return None;
        }
        let result = (|| {
            let whole = u32::try_from(message.len()) == Ok(header.len) && message.len() <= REQUEST_MAX;
            // Request extensions exist only after a negotiation.
            if !whole || header.ext_len != 0 {
                return Err(Errno::INVAL);
            }
            let op = op.ok_or(Errno::NOSYS)?;
            // An operation on a handle was permitted when the handle was opened for writing; the source of a copy may be
            // read-only.
            let was_allowed = op.uses_handle() && self.fixed_mount.is_some();
            if op.changes() && !was_allowed {
                self.may_change(header.node)?;
            }
            let repeated = op.changes() && self.table().nodes().was_done(header.unique);
            let InHeader { unique, node, .. } = header;
            let (uid, gid) = (self.maker_id(header.uid), self.maker_id(header.gid));
            self.perform(Request { op, unique, node, uid, gid, args: Arguments(body), repeated })
        })();
        Some(Body::seal(result, header.unique))
    }

    /// Fails with EROFS if the guest may not change the file.
    pub(super) fn may_change(&self, node: u64) -> Result<(), Errno> {
        match (self.read_only, self.fixed_mount) {
            (false, _) => Ok(()),
            (true, None) => Err(Errno::ROFS),
            (true, Some(fixed)) => match tree::mount_id(&tree::stat(self.find(node)?)?) {
                Some(mount) if mount != fixed => Ok(()),
                _ => Err(Errno::ROFS),
            },
        }
    }

    fn perform(&self, request: Request<'_>) -> Result<Body, Errno> {
        match request.op {
            Op::Init => self.init(request),
            Op::Destroy => Ok(self.reset()),
            Op::Lookup => self.lookup(request),
            Op::Getattr => self.getattr(request),
            Op::Setattr => self.setattr(request),
            Op::Readlink => self.readlink(request),
            Op::Symlink => self.symlink(request),
            Op::Mknod => self.mknod(request),
            Op::Mkdir => self.mkdir(request),
            Op::Unlink | Op::Rmdir => self.remove(request),
            Op::Rename | Op::Rename2 => self.rename(request),
            Op::Link => self.link(request),
            Op::Open => self.open_file(request),
            Op::Create => self.create(request),
            Op::Read => self.read(request),
            Op::Write => self.write(request),
            Op::Statfs => self.statfs(request),
            Op::Release | Op::Releasedir => self.release(request),
            Op::Fsync | Op::Fsyncdir => self.fsync(request),
            Op::Flush => self.flush(request),
            Op::Setxattr => self.setxattr(request),
            Op::Getxattr => self.getxattr(request),
            Op::Listxattr => self.listxattr(request),
            Op::Removexattr => self.removexattr(request),
            Op::Opendir => self.open_folder(request),
            Op::Readdir | Op::Readdirplus => self.list(request),
            Op::Access => self.access(request),
            Op::Fallocate => self.fallocate(request),
            Op::Lseek => self.lseek(request),
            Op::CopyFileRange => self.copy_range(request),
            Op::Ioctl => Err(Errno::NOTTY),
            Op::Forget | Op::BatchForget | Op::Interrupt | Op::NotifyReply => Err(Errno::NOSYS), // have no reply
        }
    }

    /// Answers INIT: a mount begins, and look-ups of an earlier mount no longer count.
    fn init(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let asked: InitIn = args.take()?; // newer kernels append more
        if asked.major < MAJOR || asked.major == MAJOR && asked.minor < MINOR_MIN {
            return Err(Errno::PROTO);
        }
        let _ = self.reset();
        let mut agreed = InitOut { major: MAJOR, minor: MINOR, ..InitOut::default() };
        if asked.major == MAJOR {
            let most = u32::try_from(DATA_MAX).unwrap_or(u32::MAX);
            agreed.minor = asked.minor.min(MINOR);
            agreed.max_readahead = asked.max_readahead.min(most);
            agreed.flags = asked.flags & INIT_FLAGS;
            agreed.max_background = BACKGROUND_MAX;
            agreed.congestion = CONGESTION;
            agreed.max_write = most;
            agreed.time_gran = 1;
        } // a newer major version asks again with this one
        Ok(Body::of(&agreed))
    }

    fn reset(&self) -> Body {
        self.handles.clear();
        self.table().clear();
        Body::empty()
    }

    fn forget(&self, op: Op, node: u64, mut args: Arguments<'_>) -> Result<(), Errno> {
        let mut forgotten = Vec::new();
        if op == Op::Forget {
            let ForgetIn { count } = args.take()?;
            forgotten.push(Change::Forgotten { id: node, count });
        } else if op == Op::BatchForget {
            let BatchForgetIn { count, .. } = args.take()?;
            for _ in 0..count {
                let ForgetOne { node, count } = args.take()?; // ends with the message, regardless of the count
                forgotten.push(Change::Forgotten { id: node, count });
            }
        }
        let mut table = self.table();
        forgotten
            .retain(|change| matches!(change, Change::Forgotten { id, .. } if table.nodes().contains(*id)));
        table.commit(&forgotten);
        Ok(())
    }

    /// Locks the table. The only system call under the lock is the append to the table's file.
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Finds the file of an id, by one of its names, or else by an open handle.
    ///
    /// # Errors
    /// ESTALE if the id is unknown, or the host has removed or replaced its file.
    pub(super) fn find(&self, id: u64) -> Result<FoundNode<'_>, Errno> {
        if id == ROOT {
            return Ok(FoundNode::Root(&self.root));
        }
        let mut tried = None;
        for _ in 0..FIND_TRIES {
            let place = self.table().nodes().place(id).ok_or(Errno::STALE)?;
            if tried.as_ref() == Some(&place) {
                break;
            }
            for path in &place.paths {
                match tree::walk(self.root.as_fd(), path) {
                    Ok(found) if tree::ident(&tree::stat(&found)?) == place.ident => {
                        return Ok(FoundNode::Path(found));
                    }
                    Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::STALE) => {}
                    Err(error) => return Err(error),
                }
            }
            tried = Some(place);
        }
        self.handles.of_node(id).map(FoundNode::Open).ok_or(Errno::STALE)
    }

    /// Returns the handle of a request.
    pub(super) fn handle(&self, fh: u64, node: u64) -> Result<Arc<Handle>, Errno> {
        self.handles.get(fh, node, |how| {
            if how.writes() {
                self.may_change(node)?;
            }
            tree::reopen(self.find(node)?, how.flags(), how == OpenMode::Directory)
        })
    }

    /// Host id of a guest user that makes a file.
    fn maker_id(&self, id: u32) -> u32 {
        self.ids.map_or(id, |ids| ids.inside(id).unwrap_or(0))
    }

    /// Host id of a guest user that becomes the owner of a file.
    ///
    /// # Errors
    /// EOVERFLOW if the id has no mapping, as on a mount with mapped ids (mount_setattr(2)).
    pub(super) fn owner_id(&self, id: u32) -> Result<u32, Errno> {
        self.ids.map_or(Ok(id), |ids| ids.inside(id).ok_or(Errno::OVERFLOW))
    }

    /// File attributes as the guest sees them.
    pub(super) fn attributes(&self, of: &Statx) -> Attr {
        let attr = tree::attributes(of, self.root_device);
        match self.ids {
            None => attr,
            Some(ids) => Attr {
                uid: ids.outside_or_overflow(attr.uid),
                gid: ids.outside_or_overflow(attr.gid),
                ..attr
            },
        }
    }

    /// Records that a change gave the file another inode, as an overlay does when it copies a file up.
    pub(super) fn settle(&self, id: u64, file: impl AsFd) -> Result<(), Errno> {
        if id == ROOT {
            return Ok(());
        }
        let ident = tree::ident(&tree::stat(file)?);
        let mut table = self.table();
        if table.nodes().place(id).is_some_and(|place| place.ident != ident) {
            table.commit(&[Change::InodeChanged { id, ident }]);
        }
        Ok(())
    }

    /// Removes set-id bits of a file that the guest writes. An unprivileged daemon cannot do that for the files of other users;
    /// there the host's kernel removes the bits at the first write.
    pub(super) fn strip(&self, file: impl AsFd) -> Result<(), Errno> {
        match tree::drop_set_id(file) {
            Err(Errno::PERM) if !self.owned => Ok(()),
            result => result,
        }
    }

    /// Flags of open(2) that are passed to the host.
    pub(super) fn open_flags(how: OpenMode, asked: OFlags) -> OFlags {
        how.flags() | asked & OFlags::TRUNC
    }
}
