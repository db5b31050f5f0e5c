//! Directories below directories that guests write. A guest may create a symbolic link anywhere; none is followed here.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::is_plain_path;

/// Mode of directories that containers write. The node does not know the users of the containers.
const DIRECTORY: u32 = 0o777;

/// Creates a directory below `root` with its parents. Idempotent. Blocking.
///
/// # Errors
/// Errors of the file system; [`io::ErrorKind::InvalidInput`] for a path that leaves `root`; a symbolic link in the path.
pub fn make_directory(root: &Path, path: &str) -> io::Result<()> {
    let dir = descend(root, path)?;
    Ok(rustix::fs::fchmod(&dir, Mode::from_bits_truncate(DIRECTORY))?)
}

fn check(path: &str) -> io::Result<&str> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidInput, format!("invalid path {path:?}"));
    if is_plain_path(path) { Ok(path) } else { Err(invalid()) }
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(root, flags, Mode::empty())?)
}

/// Opens one part after the other, so that a symbolic link in any part is an error.
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
        symlink(outside.path(), root.path().join("dir")).unwrap();
        for path in ["dir/new", "/etc", "../x"] {
            assert!(make_directory(root.path(), path).is_err(), "{path}");
        }
        assert_eq!(outside.path().read_dir().unwrap().count(), 0);
        make_directory(root.path(), "volumes/x").unwrap();
        make_directory(root.path(), "volumes/x").unwrap();
        let metadata = root.path().join("volumes/x").metadata().unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, DIRECTORY);
    }
}
