//! Files in directories that guests write. A guest may put a link anywhere; none is followed here.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

use super::is_plain_path;

/// Mode of directories that containers write: their users are not known to the node.
const DIRECTORY: u32 = 0o777;

/// Makes a directory below `root` with its parents. Idempotent. Blocking.
///
/// # Errors
/// Of the file system; [`io::ErrorKind::InvalidInput`] for a path that leads out; a link in the path.
pub fn make_directory(root: &Path, path: &str) -> io::Result<()> {
    let dir = descend(root, path)?;
    Ok(rustix::fs::fchmod(&dir, Mode::from_bits_truncate(DIRECTORY))?)
}

/// Writes a file below `root` in place; its inode stays. Blocking.
///
/// # Errors
/// As [`make_directory`]; [`io::ErrorKind::InvalidInput`] when another kind of file is there.
pub fn write_in_place(root: &Path, path: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (dir, name) = parent(root, path)?;
    let mode = Mode::from_bits_truncate(mode);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&dir, name, flags, mode)?;
    check_regular(&file)?;
    rustix::fs::fchmod(&file, mode)?;
    rustix::fs::ftruncate(&file, 0)?;
    File::from(file).write_all(bytes)
}

/// The first `limit` bytes of a file below `root`; nothing when it does not exist. Blocking.
///
/// # Errors
/// As [`write_in_place`].
pub fn read_at_most(root: &Path, path: &str, limit: u64) -> io::Result<Vec<u8>> {
    let opened = parent(root, path).and_then(|(dir, name)| {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&dir, name, flags, Mode::empty())?)
    });
    let file = match opened {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        opened => opened?,
    };
    check_regular(&file)?;
    let mut bytes = Vec::new();
    File::from(file).take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Removes a file below `root`. Idempotent. Blocking.
///
/// # Errors
/// As [`make_directory`].
pub fn remove(root: &Path, path: &str) -> io::Result<()> {
    let removed = parent(root, path)
        .and_then(|(dir, name)| Ok(rustix::fs::unlinkat(&dir, name, rustix::fs::AtFlags::empty())?));
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn check_regular(file: &OwnedFd) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    match kind {
        FileType::RegularFile => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

fn parent<'a>(root: &Path, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
    match path.rsplit_once('/') {
        Some((dir, name)) => Ok((descend(root, dir)?, check(name)?)),
        None => Ok((open_root(root)?, check(path)?)),
    }
}

fn check(path: &str) -> io::Result<&str> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, format!("invalid path {path:?}"));
    if is_plain_path(path) { Ok(path) } else { Err(invalid()) }
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(root, flags, Mode::empty())?)
}

/// One part at a time, so that a link in any part is an error.
fn descend(root: &Path, path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = open_root(root)?;
    for part in check(path)?.split('/') {
        match rustix::fs::mkdirat(&dir, part, Mode::from_bits_truncate(0o755)) {
            Err(rustix::io::Errno::EXIST) | Ok(()) => {}
            Err(e) => return Err(e.into()),
        }
        dir = rustix::fs::openat(&dir, part, flags, Mode::empty())?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn links_of_a_guest_are_not_followed() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let secret = outside.path().join("secret");
        std::fs::write(&secret, "old").unwrap();
        symlink(&secret, root.path().join("file")).unwrap();
        symlink(outside.path(), root.path().join("dir")).unwrap();
        assert!(write_in_place(root.path(), "file", b"new", 0o644).is_err());
        assert!(write_in_place(root.path(), "dir/secret", b"new", 0o644).is_err());
        assert!(write_in_place(root.path(), "../x", b"new", 0o644).is_err());
        assert!(read_at_most(root.path(), "file", 100).is_err());
        assert!(read_at_most(root.path(), "dir/secret", 100).is_err());
        assert!(make_directory(root.path(), "dir/new").is_err());
        assert!(make_directory(root.path(), "/etc").is_err());
        assert_eq!(std::fs::read(&secret).unwrap(), b"old");
    }

    #[test]
    fn file_is_written_in_place_and_read_up_to_a_limit() {
        let root = tempfile::tempdir().unwrap();
        write_in_place(root.path(), "a/b", b"first, longer", 0o600).unwrap();
        let inode = std::os::unix::fs::MetadataExt::ino(&root.path().join("a/b").metadata().unwrap());
        write_in_place(root.path(), "a/b", b"second", 0o644).unwrap();
        let metadata = root.path().join("a/b").metadata().unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::ino(&metadata), inode);
        assert_eq!(metadata.permissions().mode() & 0o777, 0o644);
        assert_eq!(read_at_most(root.path(), "a/b", 3).unwrap(), b"sec");
        assert_eq!(read_at_most(root.path(), "a/none", 3).unwrap(), b"");
        assert_eq!(read_at_most(root.path(), "none/b", 3).unwrap(), b"");
        make_directory(root.path(), "volumes/x").unwrap();
        assert!(read_at_most(root.path(), "volumes/x", 3).is_err(), "a directory has no bytes");
    }
}
