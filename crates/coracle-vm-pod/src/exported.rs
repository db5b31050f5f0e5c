//! Snapshots in directories of this node, as `coracle snapshot export` writes them.
//!
//! A user of the cluster names the directory. Therefore only directories below those that the node's administrator configured
//! are allowed, and no symbolic link is followed (openat2(2), `RESOLVE_BENEATH`).

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_host::SnapshotName;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// Name of the archive in such a directory.
pub const FILE: &str = "snapshot.tar.zst";

/// Directories below which pods may name exported snapshots.
#[derive(Clone, Debug, Default)]
pub struct ExportedSnapshots(Arc<[PathBuf]>);

/// Opened archive.
#[derive(Debug)]
pub(crate) struct Archive {
    pub(crate) file: File,
    /// Name of the snapshot on this node. Another archive in the same directory gets another name.
    pub(crate) name: SnapshotName,
}

impl ExportedSnapshots {
    /// Returns the exported snapshots below `parents`. Without `parents`, pods may name no directory.
    #[must_use]
    pub fn below(parents: Vec<PathBuf>) -> Self {
        Self(parents.into())
    }

    /// Opens the archive in `dir`. Blocking.
    ///
    /// # Errors
    /// One line for the pod's status.
    pub(crate) fn open(&self, dir: &Path) -> Result<Archive, String> {
        let shown = dir.display();
        let within = |parent: &PathBuf| Some((parent.clone(), dir.strip_prefix(parent).ok()?.join(FILE)));
        let (parent, path) = self.0.iter().find_map(within).ok_or_else(|| {
            format!("{shown} is not below a directory that this node has for exported snapshots")
        })?;
        let failed =
            |source: rustix::io::Errno| format!("open {FILE} in {shown}: {}", std::io::Error::from(source));
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(&parent, directory, Mode::empty()).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC; // a FIFO does not block the thread
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = File::from(openat2(parent, &path, flags, Mode::empty(), resolve).map_err(failed)?);
        let of = |source: std::io::Error| format!("read {FILE} in {shown}: {source}");
        let found = file.metadata().map_err(of)?;
        if !found.is_file() {
            return Err(format!("{FILE} in {shown} is not a file"));
        }
        let (seconds, nanoseconds) = (found.mtime(), found.mtime_nsec());
        let name = format!("dir-{:x}-{:x}-{seconds:x}-{nanoseconds:x}", found.dev(), found.ino());
        let name = name.parse().map_err(|error| format!("{shown}: {error}"))?;
        Ok(Archive { file, name })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn directories_below_the_named_ones_table() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for dir in ["open/base", "open/empty", "open/odd/snapshot.tar.zst", "secret"] {
            fs::create_dir_all(path(dir)).unwrap();
        }
        fs::write(path("open/base/snapshot.tar.zst"), b"archive").unwrap();
        fs::write(path("secret/snapshot.tar.zst"), b"of another").unwrap();
        symlink(path("secret"), path("open/link")).unwrap();
        fs::create_dir(path("open/file-link")).unwrap();
        symlink(path("secret/snapshot.tar.zst"), path("open/file-link/snapshot.tar.zst")).unwrap();
        let exported = ExportedSnapshots::below(vec![path("none"), path("open")]);
        for (why, dir, want) in [
            ("below", "open/base", Ok(())),
            ("nothing in it", "open/empty", Err("No such file")),
            ("elsewhere", "secret", Err("is not below a directory")),
            ("a name that only begins like one", "open-too", Err("is not below a directory")),
            ("by way of its parent", "open/../secret", Err("cross-device link")),
            ("by a link", "open/link", Err("symbolic links")),
            ("a link as the archive", "open/file-link", Err("symbolic links")),
            ("not a file", "open/odd", Err("is not a file")),
        ] {
            let found = exported.open(&path(dir)).map(drop);
            match want {
                Ok(()) => assert_eq!(found, Ok(()), "{why}"),
                Err(part) => {
                    let error = found.expect_err(why);
                    assert!(error.to_lowercase().contains(&part.to_lowercase()), "{why}: {error}");
                }
            }
        }
        let none = ExportedSnapshots::default().open(&path("open/base")).map(drop);
        assert!(none.is_err(), "without a directory of the administrator there is none");
    }

    #[test]
    fn changed_archive_gets_another_snapshot_name() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(FILE);
        fs::write(&file, b"first").unwrap();
        let exported = ExportedSnapshots::below(vec![root.path().to_owned()]);
        let name = || exported.open(root.path()).unwrap().name;
        let first = name();
        assert_eq!(name(), first);
        let times = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
        File::options().write(true).open(&file).unwrap().set_times(times).unwrap();
        assert_ne!(name(), first);
    }
}
