//! Writes volumes of a pod on the node. Blocking.
//!
//! ```text
//! <volume>/..2026_11_24_10_00_00.000000001/key    the version
//! <volume>/..data ─▶ that directory               replaced by one rename
//! <volume>/key    ─▶ ..data/key
//! ```
//! A reader sees all files of one version or all of another. Only the node writes here: the mounts of guests are read-only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use jiff::Timestamp;

use super::beneath::make_directory;
use super::{FileContent, Layout, VolumeContent, is_plain_path};

/// Link to the current version, and its temporary name before it replaces the previous link.
const DATA: &str = "..data";
const DATA_NEW: &str = "..data_tmp";

/// Brings a volume below `area` into its desired state. Idempotent. After a crash at any time, the next call repairs the
/// volume.
///
/// # Errors
/// Errors of the file system; [`io::ErrorKind::InvalidInput`] for a path that leaves the volume.
pub fn write(area: &Path, content: &VolumeContent, now: Timestamp) -> io::Result<()> {
    match &content.layout {
        Layout::Directory => make_directory(area, &content.path),
        Layout::Files(files) => write_version(area, &content.path, files, now),
    }
}

fn write_version(
    area: &Path,
    path: &str,
    files: &BTreeMap<String, FileContent>,
    now: Timestamp,
) -> io::Result<()> {
    let plain = files.keys().all(|path| is_plain_path(path) && !path.starts_with(".."));
    if !plain || !is_plain_path(path) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a path leads out of the volume"));
    }
    let dir = area.join(path);
    fs::create_dir_all(&dir)?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
    let current = fs::read_link(dir.join(DATA)).ok();
    let current = current.and_then(|link| Some(link.to_str()?.to_owned()));
    let version = match current {
        Some(version) if is_version(&version) && is_equal(&dir.join(&version), files) => version,
        _ => {
            let version = now.strftime("..%Y_%m_%d_%H_%M_%S.%9f").to_string();
            coracle_files::remove_tree(&dir.join(&version))?;
            for (path, file) in files {
                write_file(&dir.join(&version), path, file)?;
            }
            fs::create_dir_all(dir.join(&version))?;
            coracle_files::remove_file(&dir.join(DATA_NEW))?;
            symlink(&version, dir.join(DATA_NEW))?;
            fs::rename(dir.join(DATA_NEW), dir.join(DATA))?;
            version
        }
    };
    link_names(&dir, files)?;
    remove_rest(&dir, &version, files)
}

/// Returns whether a name is one of this writer's versions: a single path component, other than `..`.
fn is_version(name: &str) -> bool {
    name.starts_with("..") && name.len() > 2 && !name.contains('/')
}

fn write_file(version: &Path, path: &str, file: &FileContent) -> io::Result<()> {
    let target = version.join(path);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut options = fs::File::options();
    let mut written = options.write(true).create_new(true).mode(0o600).open(&target)?;
    io::Write::write_all(&mut written, &file.bytes)?;
    // The mode is set after the creation, so that the daemon's umask does not apply.
    written.set_permissions(fs::Permissions::from_mode(file.mode))
}

/// Returns whether a version has exactly these files.
fn is_equal(version: &Path, files: &BTreeMap<String, FileContent>) -> bool {
    let same = |(path, file): (&String, &FileContent)| {
        let found = version.join(path);
        let mode = found.metadata().map(|metadata| metadata.permissions().mode() & 0o777);
        mode.is_ok_and(|mode| mode == file.mode) && fs::read(&found).is_ok_and(|bytes| bytes == file.bytes)
    };
    files.iter().all(same) && count(version).is_ok_and(|found| found == files.len())
}

fn count(dir: &Path) -> io::Result<usize> {
    let mut files = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        files += if entry.file_type()?.is_dir() { count(&entry.path())? } else { 1 };
    }
    Ok(files)
}

/// Returns the first part of each path, which is the name of a link into the current version.
fn top_names(files: &BTreeMap<String, FileContent>) -> BTreeSet<&str> {
    files.keys().filter_map(|path| path.split('/').next()).collect()
}

fn link_names(dir: &Path, files: &BTreeMap<String, FileContent>) -> io::Result<()> {
    for name in top_names(files) {
        let (link, target) = (dir.join(name), Path::new(DATA).join(name));
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            continue;
        }
        coracle_files::remove_file(&link)?;
        symlink(target, link)?;
    }
    Ok(())
}

/// Removes earlier versions, and names that only they had.
fn remove_rest(dir: &Path, version: &str, files: &BTreeMap<String, FileContent>) -> io::Result<()> {
    let names = top_names(files);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let keep = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name == DATA || name == version || names.contains(name));
        if keep {
            continue;
        }
        if entry.file_type()?.is_dir() {
            coracle_files::remove_tree(&entry.path())?;
        } else {
            coracle_files::remove_file(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::Area;

    fn content(files: &[(&str, &str)]) -> VolumeContent {
        let file = |text: &str| FileContent { bytes: text.as_bytes().to_vec(), mode: 0o640 };
        VolumeContent {
            name: "v".into(),
            area: Area::Config,
            path: "volumes/v".into(),
            layout: Layout::Files(
                files.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect(),
            ),
        }
    }

    fn listing(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !is_version(name) || name == DATA)
            .collect();
        names.sort();
        names
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn versions_replace_each_other_as_a_whole() {
        let area = tempfile::tempdir().unwrap();
        let dir = area.path().join("volumes/v");
        write(area.path(), &content(&[("a", "1"), ("d/b", "2")]), at(1)).unwrap();
        assert_eq!(listing(&dir), ["..data", "a", "d"]);
        assert_eq!(fs::read_to_string(dir.join("d/b")).unwrap(), "2");
        assert_eq!(fs::metadata(dir.join("a")).unwrap().permissions().mode() & 0o777, 0o640);
        let open = fs::File::open(dir.join("a")).unwrap();
        write(area.path(), &content(&[("a", "3"), ("c", "4")]), at(2)).unwrap();
        assert_eq!(listing(&dir), ["..data", "a", "c"]);
        assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "3");
        assert_eq!(io::read_to_string(open).unwrap(), "1", "an open file keeps its version");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 4, "one version is left");
    }

    #[test]
    fn equal_content_is_not_written_again() {
        let area = tempfile::tempdir().unwrap();
        let link = || fs::read_link(area.path().join("volumes/v/..data")).unwrap();
        write(area.path(), &content(&[("a", "1")]), at(1)).unwrap();
        let before = link();
        write(area.path(), &content(&[("a", "1")]), at(2)).unwrap();
        assert_eq!(link(), before);
        write(area.path(), &content(&[]), at(3)).unwrap();
        assert_eq!(listing(&area.path().join("volumes/v")), ["..data"]);
    }

    #[test]
    fn leftovers_of_a_crash_are_replaced() {
        let area = tempfile::tempdir().unwrap();
        let dir = area.path().join("volumes/v");
        fs::create_dir_all(dir.join("..1970_01_01_00_00_01.000000000")).unwrap();
        fs::write(dir.join("..1970_01_01_00_00_01.000000000/a"), "torn").unwrap();
        symlink("..absent", dir.join(DATA_NEW)).unwrap();
        fs::write(dir.join("a"), "not a link").unwrap();
        write(area.path(), &content(&[("a", "whole")]), at(1)).unwrap();
        assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "whole");
        assert_eq!(listing(&dir), ["..data", "a"]);
    }

    #[test]
    fn hostile_names_stay_in_the_volume() {
        let outside = tempfile::tempdir().unwrap();
        let area = outside.path().join("area");
        for path in ["../x", "/etc/x", "a/../../x", "", "..data", "..data_tmp", "a//b", "a\0b", "."] {
            assert!(write(&area, &content(&[(path, "1")]), at(1)).is_err(), "{path:?}");
        }
        let long = "n".repeat(256);
        assert!(write(&area, &content(&[(long.as_str(), "1")]), at(1)).is_err());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
