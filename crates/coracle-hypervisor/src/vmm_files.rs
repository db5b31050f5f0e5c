//! Files that a VMM makes: its sockets and what it saves. One without a jail makes them in its `run_dir`, one in a jail in
//! [`crate::JAIL_RUN_DIR`] of its own root, which is memory of its own and gone with it.
//!
//! A VMM that a guest has taken over chooses what stands behind these names: no link is followed, and what is not of the
//! expected kind is refused.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use tokio::net::UnixStream;

use crate::{ProcessId, launch};

/// The directory in which a VMM makes its files.
#[derive(Debug)]
pub struct VmmFiles {
    dir: OwnedFd,
    jailed: Option<ProcessId>,
}

impl VmmFiles {
    /// Those of the living VMM with this `run_dir`.
    ///
    /// # Errors
    /// `NotFound` without a VMM.
    pub fn of(run_dir: &Path) -> io::Result<Self> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, "no VMM");
        let vmm = launch::find_in(run_dir)?.ok_or_else(absent)?;
        let its_root = PathBuf::from(format!("/proc/{}/root", vmm.pid));
        let jailed = is_jailed(&its_root)?.then_some(vmm);
        let files = Self::in_dir(&if jailed.is_some() { its_root.join("run") } else { run_dir.to_owned() })?;
        // Another process may have had the number when the directory was opened: then this VMM is gone.
        if vmm.is_alive()? { Ok(Self { jailed, ..files }) } else { Err(absent()) }
    }

    /// Those that it makes in a directory of the host.
    ///
    /// # Errors
    /// Without the directory.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: rustix::fs::open(dir, flags, Mode::empty())?, jailed: None })
    }

    /// The VMM, if it is in a jail.
    #[must_use]
    pub fn jailed(&self) -> Option<ProcessId> {
        self.jailed
    }

    /// Connects to a socket.
    ///
    /// # Errors
    /// Without the socket, or when something else has its name.
    pub async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
        expect(&socket, FileType::Socket, name)?;
        // A name without a limit of 107 bytes, and one that leads to this very socket.
        UnixStream::connect(launch::own_file(socket.as_raw_fd())).await
    }

    /// Opens a regular file to read it.
    ///
    /// # Errors
    /// Without the file, or when something else has its name.
    pub fn open(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
        expect(&file, FileType::RegularFile, name)?;
        Ok(file.into())
    }
}

/// Whether a process has another root than this one.
fn is_jailed(its_root: &Path) -> io::Result<bool> {
    let (its, ours) = (rustix::fs::stat(its_root)?, rustix::fs::stat("/")?);
    Ok((its.st_dev, its.st_ino) != (ours.st_dev, ours.st_ino))
}

fn expect(file: &OwnedFd, kind: FileType, name: &str) -> io::Result<()> {
    let found = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    if found == kind {
        return Ok(());
    }
    let why = format!("invalid file \"{name}\" of a VMM: {found:?} instead of {kind:?}");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// A directory of the host in which a VMM saves its machine, or finds a saved one. It is new, and gone when this is.
#[derive(Debug)]
pub struct SavedDir(PathBuf);

impl SavedDir {
    /// Empties `path` first, which only the VMM's instance uses. Blocking.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(path: PathBuf) -> io::Result<Self> {
        let _absent = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SavedDir {
    fn drop(&mut self) {
        let _absent = std::fs::remove_dir_all(&self.0);
    }
}
