//! Files that a VMM creates: its sockets and saved state. A VMM without a jail creates them in its `run_dir`, a jailed VMM in
//! [`crate::JAIL_RUN_DIR`] of its own root, a file system in memory that ends with the VMM.
//!
//! A compromised VMM chooses what is behind these names. Therefore symbolic links are not followed, and files of an unexpected
//! type are refused.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use tokio::net::UnixStream;

use crate::{ProcessId, launch};

/// Directory in which a VMM creates its files.
#[derive(Debug)]
pub struct VmmFiles {
    dir: OwnedFd,
    jailed: Option<ProcessId>,
}

impl VmmFiles {
    /// Opens the directory of the living VMM with this `run_dir`.
    ///
    /// # Errors
    /// `NotFound` if there is no VMM.
    pub fn of(run_dir: &Path) -> io::Result<Self> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, "no VMM");
        let vmm = launch::find_in(run_dir)?.ok_or_else(absent)?;
        let its_root = PathBuf::from(format!("/proc/{}/root", vmm.pid));
        let jailed = is_jailed(&its_root)?.then_some(vmm);
        let files = Self::in_dir(&if jailed.is_some() { its_root.join("run") } else { run_dir.to_owned() })?;
        // The pid may have been reused before the directory was opened: this VMM has then ended.
        if vmm.is_alive()? { Ok(Self { jailed, ..files }) } else { Err(absent()) }
    }

    /// Opens a directory of the host in which a VMM creates its files.
    ///
    /// # Errors
    /// If the directory does not exist.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: rustix::fs::open(dir, flags, Mode::empty())?, jailed: None })
    }

    /// Returns the VMM, if it has a jail.
    #[must_use]
    pub fn jailed(&self) -> Option<ProcessId> {
        self.jailed
    }

    /// Connects to a socket.
    ///
    /// # Errors
    /// If the socket does not exist, or the name belongs to a file of another type.
    pub async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
        expect(&socket, FileType::Socket, name)?;
        // This path is not subject to the limit of 107 bytes, and leads to this very socket.
        UnixStream::connect(launch::own_file(socket.as_raw_fd())).await
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// If the file does not exist, or the name belongs to a file of another type.
    pub fn open(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
        expect(&file, FileType::RegularFile, name)?;
        Ok(file.into())
    }
}

/// Returns whether a process has a root other than that of this process.
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

/// Host directory in which a VMM saves its state, or finds a saved state. The directory is created empty, and removed on drop.
#[derive(Debug)]
pub struct SavedDir(PathBuf);

impl SavedDir {
    /// Creates the directory after removing an earlier `path`, which only this VMM instance uses. Blocking.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn new(path: PathBuf) -> io::Result<Self> {
        let _absent = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Returns the path.
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
