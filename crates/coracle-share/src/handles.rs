//! Files that the guest holds open.
//!
//! The number of a handle contains its access mode and the epoch of the process that opened it. After a restart of the daemon,
//! an unknown handle of an earlier epoch is opened again by its node id.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Maximum number of files that a guest holds open in one directory.
pub(super) const HANDLES_MAX: usize = 1024;
/// Lowest bits of a handle number: access mode, and the flag of a directory.
const ACCESS: u64 = 0b11;
const DIRECTORY: u64 = 0b100;
/// First bit of the counter, and first bit of the epoch above it.
const COUNT_SHIFT: u32 = 3;
const EPOCH_SHIFT: u32 = 40;

/// Open file or directory.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) node: u64,
    pub(super) file: OwnedFd,
    pub(super) how: OpenMode,
    /// Lock to hold while a directory is read at a position.
    pub(super) position: Mutex<()>,
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Mode in which a handle was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpenMode {
    Read,
    Write,
    Both,
    Directory,
}

impl OpenMode {
    /// Mode from the flags of open(2).
    ///
    /// # Errors
    /// EINVAL for an undefined access mode.
    pub(super) fn of_flags(flags: OFlags) -> Result<Self, Errno> {
        match flags & OFlags::RWMODE {
            OFlags::RDONLY => Ok(Self::Read),
            OFlags::WRONLY => Ok(Self::Write),
            OFlags::RDWR => Ok(Self::Both),
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write => OFlags::WRONLY,
            Self::Both => OFlags::RDWR,
            Self::Directory => OFlags::RDONLY | OFlags::DIRECTORY,
        }
    }

    pub(super) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Both)
    }

    fn bits(self) -> u64 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Both => 2,
            Self::Directory => DIRECTORY,
        }
    }

    fn of_number(fh: u64) -> Option<Self> {
        match (fh & DIRECTORY, fh & ACCESS) {
            (0, 0) => Some(Self::Read),
            (0, 1) => Some(Self::Write),
            (0, 2) => Some(Self::Both),
            (DIRECTORY, 0) => Some(Self::Directory),
            _ => None,
        }
    }
}

/// Handles of one shared directory.
#[derive(Debug)]
pub(super) struct Handles {
    open: Mutex<HashMap<u64, Arc<Handle>>>,
    next: AtomicU64,
    epoch: u64,
}

impl Handles {
    /// `epoch` counts the processes that have served the directory, this one included.
    pub(super) fn new(epoch: u64) -> Self {
        Self { open: Mutex::default(), next: AtomicU64::new(0), epoch: epoch << EPOCH_SHIFT }
    }

    /// Adds an opened file and returns its handle number.
    ///
    /// # Errors
    /// ENFILE at [`HANDLES_MAX`].
    pub(super) fn add(&self, node: u64, file: OwnedFd, how: OpenMode) -> Result<u64, Errno> {
        let count = self.next.fetch_add(1, Ordering::Relaxed) << COUNT_SHIFT;
        let fh = self.epoch | count & ((1 << EPOCH_SHIFT) - 1) | how.bits();
        self.keep(fh, node, file, how)?;
        Ok(fh)
    }

    /// Fails with ENFILE when no handle can be added. Callers check this before they make a file.
    pub(super) fn check_room(&self) -> Result<(), Errno> {
        if self.lock().len() < HANDLES_MAX { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Returns the handle. If an earlier process gave out the number, the file is opened again by `reopen`.
    ///
    /// # Errors
    /// EBADF for a number that was never given out, was closed, or belongs to another node; errors of `reopen`.
    pub(super) fn get(
        &self,
        fh: u64,
        node: u64,
        reopen: impl FnOnce(OpenMode) -> Result<OwnedFd, Errno>,
    ) -> Result<Arc<Handle>, Errno> {
        if let Some(handle) = self.lock().get(&fh) {
            return if handle.node == node { Ok(Arc::clone(handle)) } else { Err(Errno::BADF) };
        }
        let before = 1..self.epoch >> EPOCH_SHIFT;
        let how =
            OpenMode::of_number(fh).filter(|_| before.contains(&(fh >> EPOCH_SHIFT))).ok_or(Errno::BADF)?;
        self.keep(fh, node, reopen(how)?, how)
    }

    /// Returns any handle on the node: a file without a name still exists while it is held open.
    pub(super) fn of_node(&self, node: u64) -> Option<Arc<Handle>> {
        self.lock().values().find(|handle| handle.node == node).cloned()
    }

    pub(super) fn close(&self, fh: u64) {
        let closed = self.lock().remove(&fh);
        drop(closed); // after the lock: closing can write
    }

    pub(super) fn clear(&self) {
        let closed = std::mem::take(&mut *self.lock());
        drop(closed);
    }

    fn keep(&self, fh: u64, node: u64, file: OwnedFd, how: OpenMode) -> Result<Arc<Handle>, Errno> {
        let mut open = self.lock();
        if open.len() >= HANDLES_MAX && !open.contains_key(&fh) {
            return Err(Errno::NFILE);
        }
        let handle = Arc::new(Handle { node, file, how, position: Mutex::default() });
        // If two threads reopen a handle at once, the first one stays.
        let kept = open.entry(fh).or_insert(handle);
        if kept.node == node { Ok(Arc::clone(kept)) } else { Err(Errno::BADF) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Handle>>> {
        self.open.lock()
    }
}
