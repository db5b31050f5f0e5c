//! Directories to which only the daemon's user has access.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::HostError;

/// Mode that only the owner can read, write and enter.
const PRIVATE: u32 = 0o700;

/// Creates a state directory with mode 0700, or restricts the mode of an existing one. A symbolic link to it is followed,
/// because administrators put state on other disks.
///
/// # Errors
/// [`HostError::Directory`] for a directory of another user, or one that cannot be created.
pub fn ensure_state_dir(dir: &Path) -> Result<(), HostError> {
    ensure_private(dir, OFlags::empty()).map_err(|why| directory_error(dir, why))
}

/// Like [`ensure_state_dir`] for a directory of sockets, and for its parent if that is a directory of this program. Symbolic
/// links are refused: below a temporary directory any user may have created them.
///
/// # Errors
/// Same as [`ensure_state_dir`].
pub fn ensure_run_dir(dir: &Path) -> Result<(), HostError> {
    let ours =
        |dir: &&Path| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("coracle"));
    for dir in dir.parent().filter(ours).into_iter().chain([dir]) {
        ensure_private(dir, OFlags::NOFOLLOW).map_err(|why| directory_error(dir, why))?;
    }
    Ok(())
}

fn directory_error(dir: &Path, why: io::Error) -> HostError {
    HostError::Directory { dir: dir.to_owned(), source: why }
}

/// Opens the directory, so that the checked directory is the one whose mode is restricted.
fn ensure_private(dir: &Path, flags: OFlags) -> io::Result<()> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(PRIVATE).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let flags = (flags | OFlags::DIRECTORY).bits().cast_signed();
    let own = rustix::process::geteuid().as_raw();
    let opened = match File::options().read(true).custom_flags(flags).open(dir) {
        Ok(opened) => opened,
        // A directory that cannot be opened belongs to another user; that is the better message.
        Err(error) => {
            return fs::symlink_metadata(dir).and_then(|found| check_owner(&found, own)).and(Err(error));
        }
    };
    let found = opened.metadata()?;
    check_owner(&found, own)?;
    match found.mode() & 0o7777 {
        PRIVATE => Ok(()),
        mode => {
            tracing::warn!(dir = %dir.display(), mode = format!("{mode:o}"), "directory mode narrowed to 700");
            opened.set_permissions(fs::Permissions::from_mode(PRIVATE))
        }
    }
}

fn check_owner(found: &Metadata, own: u32) -> io::Result<()> {
    if found.uid() == own {
        return Ok(());
    }
    let why = format!("it belongs to uid {}, and this process runs as uid {own}", found.uid());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(dir: &Path) -> u32 {
        fs::metadata(dir).unwrap().mode() & 0o7777
    }

    #[test]
    fn own_directory_with_wider_mode_is_narrowed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("coracle/12345678");
        fs::create_dir_all(&dir).unwrap();
        for wide in [dir.parent().unwrap(), &dir] {
            fs::set_permissions(wide, fs::Permissions::from_mode(0o777)).unwrap();
        }
        ensure_run_dir(&dir).unwrap();
        assert_eq!((mode(dir.parent().unwrap()), mode(&dir)), (PRIVATE, PRIVATE));
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        ensure_state_dir(&dir).unwrap();
        assert_eq!(mode(&dir), PRIVATE);
    }

    #[test]
    fn directory_of_another_user_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        check_owner(&fs::metadata(root.path()).unwrap(), own).unwrap();
        let error = check_owner(&fs::metadata(root.path()).unwrap(), own + 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("it belongs to uid {own}, and this process runs as uid {}", own + 1)
        );
    }

    #[test]
    fn foreign_parent_of_a_run_directory_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return; // only root may give a directory away
        }
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("coracle-1000/12345678");
        fs::create_dir_all(&dir).unwrap();
        std::os::unix::fs::chown(dir.parent().unwrap(), Some(12345), None).unwrap();
        let error = ensure_run_dir(&dir).unwrap_err();
        let parent = dir.parent().unwrap().display();
        let want =
            format!("cannot use directory {parent}: it belongs to uid 12345, and this process runs as uid 0");
        assert_eq!(error.chain(), want);
        assert!(error.help().unwrap().contains("chown"));
    }

    #[test]
    fn linked_run_directory_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let (target, link) = (root.path().join("target"), root.path().join("link"));
        fs::create_dir(&target).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        ensure_run_dir(&link).unwrap_err();
        ensure_state_dir(&link).unwrap();
    }
}
