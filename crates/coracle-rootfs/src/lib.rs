//! Root directory of a container. An image or the workload chose everything in it, so the kernel resolves every path inside
//! that root: no symlink, `..` or mount leads out of it.

pub mod pack;
pub mod unpack;
pub mod users;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Maximum length of a path in a request, bytes (PATH_MAX).
pub const PATH_MAX: usize = 4096;

/// Number of attempts: `openat2` returns EAGAIN when a rename raced with the path walk.
const RACE_TRIES: usize = 32;

/// Open root directory.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    chroot: bool,
}

impl Root {
    /// Opens `path` as the root that workloads see.
    ///
    /// # Errors
    /// When `path` is not a directory or cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let dir =
            rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { dir, chroot: path != Path::new("/") })
    }

    /// Returns a handle of the directory, for `fchdir` + `chroot`; `None` when it is the root of this system.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn chroot_dir(&self) -> io::Result<Option<OwnedFd>> {
        if self.chroot { self.dir.try_clone().map(Some) } else { Ok(None) }
    }

    /// Opens `path`, resolved inside the root. Adds close-on-exec.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn resolve(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        if path.as_os_str().len() > PATH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..RACE_TRIES {
            match rustix::fs::openat2(&self.dir, path, flags | OFlags::CLOEXEC, Mode::empty(), inside) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
        Err(Errno::AGAIN.into())
    }

    /// Opens the directory `path` as a handle.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn dir(&self, path: &Path) -> io::Result<OwnedFd> {
        self.resolve(path, OFlags::PATH | OFlags::DIRECTORY)
    }

    /// Opens the parent directory of `path`, and returns the last component.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn parent(&self, path: &Path) -> io::Result<(OwnedFd, OsString)> {
        let name = leaf(path)?.to_owned();
        let parent = path.parent().unwrap_or(Path::new("/"));
        let parent = if parent.as_os_str().is_empty() { Path::new("/") } else { parent };
        Ok((self.dir(parent)?, name))
    }

    /// Opens the directory `path`; creates it and its parents where missing. Idempotent.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn ensure_dir(&self, path: &Path, mode: Mode) -> io::Result<OwnedFd> {
        match self.dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let mut so_far = PathBuf::from("/");
        let mut dir = self.dir(&so_far)?;
        for component in path.components() {
            let name = match component {
                Component::RootDir | Component::CurDir => continue,
                Component::Normal(name) => name,
                Component::ParentDir | Component::Prefix(_) => return Err(io::ErrorKind::InvalidInput.into()),
            };
            so_far.push(name);
            dir = match self.dir(&so_far) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    match rustix::fs::mkdirat(&dir, name, mode) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(e) => return Err(e.into()),
                    }
                    self.dir(&so_far)?
                }
                other => other?,
            };
        }
        Ok(dir)
    }

    /// Reads a regular file of at most `max` bytes.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn read(&self, path: &Path, max: usize) -> io::Result<Vec<u8>> {
        let fd = self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        if !is(&fd, FileType::RegularFile)? {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut text = Vec::new();
        let limit = u64::try_from(max).unwrap_or(u64::MAX);
        io::Read::read_to_end(
            &mut io::Read::take(std::fs::File::from(fd), limit.saturating_add(1)),
            &mut text,
        )?;
        if text.len() > max { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(text) }
    }

    /// Replaces `path` by a new regular file. A symlink there is replaced, not followed. Idempotent.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn replace(&self, path: &Path, text: &[u8], mode: Mode) -> io::Result<()> {
        let name = leaf(path)?;
        let parent = self.ensure_dir(path.parent().unwrap_or(Path::new("/")), Mode::from_raw_mode(0o755))?;
        let file = create(parent.as_fd(), name, mode)?;
        io::Write::write_all(&mut &file, text)?;
        // The umask may have taken bits of it.
        if Mode::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != mode {
            rustix::fs::fchmod(&file, mode)?;
        }
        Ok(())
    }
}

/// Creates an empty file for writing, with this mode under the umask. An existing file that is not a directory is removed, never
/// followed or written into.
///
/// # Errors
/// Errors of the file system.
pub fn create(parent: BorrowedFd<'_>, name: &OsStr, mode: Mode) -> io::Result<std::fs::File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let create = || rustix::fs::openat(parent, name, flags, mode);
    let created = match create() {
        Err(Errno::EXIST) => {
            remove(parent, name)?;
            create()
        }
        created => created,
    };
    Ok(created?.into())
}

/// Removes a name that is not a directory. Idempotent.
///
/// # Errors
/// Errors of the file system.
pub fn remove(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Returns whether the open file is of type `wanted`.
///
/// # Errors
/// Errors of the file system.
pub fn is(fd: &OwnedFd, wanted: FileType) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == wanted)
}

fn leaf(path: &Path) -> io::Result<&OsStr> {
    path.file_name().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn hostile() -> (tempfile::TempDir, Root) {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("root");
        std::fs::create_dir_all(inner.join("etc")).unwrap();
        std::fs::write(outer.path().join("secret"), "host").unwrap();
        symlink("/", inner.join("loop")).unwrap();
        symlink("../../../secret", inner.join("etc/hosts")).unwrap();
        symlink(outer.path(), inner.join("out")).unwrap();
        let root = Root::open(&inner).unwrap();
        (outer, root)
    }

    #[test]
    fn paths_never_leave_the_root() {
        let (outer, root) = hostile();
        for path in
            ["../secret", "/../secret", "etc/hosts", "out/secret", "loop/../secret", "/proc/self/root/secret"]
        {
            assert!(root.read(Path::new(path), 100).is_err(), "{path}");
        }
        assert!(root.read(Path::new("etc/hosts"), 100).is_err());
        root.replace(Path::new("/etc/hosts"), b"mine", Mode::from_raw_mode(0o644)).unwrap();
        assert_eq!(root.read(Path::new("loop/etc/hosts"), 100).unwrap(), b"mine");
        assert_eq!(std::fs::read(outer.path().join("secret")).unwrap(), b"host");
    }

    #[test]
    fn replaced_file_has_its_mode_under_any_umask() {
        let (outer, root) = hostile();
        for (mode, text) in [(0o444, "first"), (0o666, "second"), (0o600, "third")] {
            root.replace(Path::new("/etc/id"), text.as_bytes(), Mode::from_raw_mode(mode)).unwrap();
            let path = outer.path().join("root/etc/id");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            let found = rustix::fs::stat(&path).unwrap().st_mode;
            assert_eq!(Mode::from_raw_mode(found), Mode::from_raw_mode(mode), "{mode:o}");
        }
    }

    #[test]
    fn directories_are_made_inside_the_root() {
        let (outer, root) = hostile();
        root.ensure_dir(Path::new("/a/b/c"), Mode::from_raw_mode(0o755)).unwrap();
        root.ensure_dir(Path::new("/a/b/c"), Mode::from_raw_mode(0o755)).unwrap();
        assert!(outer.path().join("root/a/b/c").is_dir());
        assert!(root.ensure_dir(Path::new("/a/../../x/y"), Mode::from_raw_mode(0o755)).is_err());
    }

    #[test]
    fn reads_are_bounded_and_refuse_a_fifo() {
        let (outer, root) = hostile();
        std::fs::write(outer.path().join("root/big"), vec![b'x'; 101]).unwrap();
        assert_eq!(root.read(Path::new("big"), 100).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(root.read(Path::new("big"), 101).unwrap().len(), 101);
        rustix::fs::mknodat(
            CWD,
            outer.path().join("root/fifo"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(root.read(Path::new("fifo"), 100).is_err(), "must not block on a fifo");
    }
}
