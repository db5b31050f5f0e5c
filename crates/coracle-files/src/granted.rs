//! Files and directories of the node that a caller may name: volumes, and disk images to import.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// User behind a call over the node's own socket (unix(7), `SO_PEERCRED`); `None` for calls over the network.
pub type LocalUser = Option<u32>;

/// Returns the path with its links resolved, if `user` may name it: it is inside one of `directories`, or belongs to a local
/// caller. Everything belongs to local root.
///
/// # Errors
/// When the path cannot be accessed, or [`io::ErrorKind::PermissionDenied`] with a remedy.
pub fn granted(path: &Path, directories: &[PathBuf], user: LocalUser) -> io::Result<PathBuf> {
    let directories: Vec<_> = directories.iter().filter_map(|dir| dir.canonicalize().ok()).collect();
    let lies_in_one = |path: &Path| directories.iter().any(|dir| path.starts_with(dir));
    let real = match path.canonicalize() {
        // Over the network the reply does not reveal which other files the node has.
        Err(_) if user.is_none() && !lies_in_one(path) => return Err(denied(path)),
        real => real?,
    };
    if lies_in_one(&real) {
        return Ok(real);
    }
    let owner = real.metadata()?.uid();
    match user {
        Some(uid) if uid == 0 || uid == owner => Ok(real),
        _ => Err(denied(&real)),
    }
}

fn denied(path: &Path) -> io::Error {
    let why = format!(
        "{} is not under an allowed directory: start the node with --volume-dir, or name a path of your own over the \
         node's socket",
        path.display()
    );
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granted_table() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (allowed, outside) = (root.join("allowed"), root.join("outside"));
        std::fs::create_dir(&allowed).unwrap();
        std::fs::write(allowed.join("disk"), "").unwrap();
        std::fs::write(&outside, "").unwrap();
        std::os::unix::fs::symlink(&outside, allowed.join("link")).unwrap();
        let own = std::fs::metadata(&outside).unwrap().uid();
        let other = own + 1;
        for (why, path, user, want) in [
            ("an allowed directory", "allowed/disk", None, true),
            ("its own path, over the network", "outside", None, false),
            ("a local caller's own", "outside", Some(own), true),
            ("another user's", "outside", Some(other), false),
            ("a link out of an allowed directory", "allowed/link", None, false),
            ("a link to another user's", "allowed/link", Some(other), false),
            ("root on this machine", "outside", Some(0), true),
        ] {
            let given = granted(&root.join(path), std::slice::from_ref(&allowed), user);
            assert_eq!(given.is_ok(), want, "{why}: {given:?}");
        }
        let absent = |user| granted(&root.join("absent"), &[], user).unwrap_err().kind();
        assert_eq!(absent(Some(0)), io::ErrorKind::NotFound);
        assert_eq!(
            absent(None),
            io::ErrorKind::PermissionDenied,
            "the reply does not reveal whether it exists"
        );
    }
}
