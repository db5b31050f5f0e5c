//! Files as a tar stream. Folders are walked by handle, so nothing that the
//! guest renames meanwhile can lead the walk astray.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use tar::{Builder, EntryType, Header};

use crate::error::Error;
use crate::root::{PATH_MAX, Root};

/// Deepest folder that is walked: one open handle a level.
const DEPTH_MAX: usize = 128;

/// What is to be sent: the folder it lies in and its name there.
pub(super) struct Top {
    parent: OwnedFd,
    name: OsString,
    /// What the top entry is called.
    shown: PathBuf,
}

/// Finds `path`; its last component is not followed.
pub(super) fn open(root: &Root, path: &Path) -> Result<Top, Error> {
    let missing = || Error::io(format!("open {}", path.display()));
    let Some(name) = path.file_name() else {
        let parent = root.dir(path).map_err(missing())?;
        return Ok(Top { parent, name: ".".into(), shown: ".".into() });
    };
    let (parent, _) = root.parent(path).map_err(missing())?;
    rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(io::Error::from)
        .map_err(missing())?;
    Ok(Top { parent, name: name.to_owned(), shown: name.into() })
}

/// Writes the whole stream.
pub(super) fn pack(top: &Top, sink: &mut dyn Write) -> io::Result<()> {
    let mut builder = Builder::new(sink);
    let stat = rustix::fs::statat(&top.parent, &top.name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mut walk = Walk { builder: &mut builder, device: stat.st_dev };
    walk.entry(&top.parent, &top.name, &top.shown, 0)?;
    builder.finish()
}

struct Walk<'a, 'b> {
    builder: &'a mut Builder<&'b mut dyn Write>,
    /// Folders on another file system are not entered.
    device: u64,
}

impl Walk<'_, '_> {
    fn entry(&mut self, parent: &OwnedFd, name: &OsStr, shown: &Path, depth: usize) -> io::Result<()> {
        if depth > DEPTH_MAX || shown.as_os_str().len() > PATH_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} lies too deep", shown.display()),
            ));
        }
        let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => return Ok(()), // removed since it was listed
            other => other?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.folder(parent, name, shown, depth, &stat),
            FileType::RegularFile => self.file(parent, name, shown),
            FileType::Symlink => {
                let to = rustix::fs::readlinkat(parent, name, Vec::new())?;
                self.builder.append_link(
                    &mut header(&stat, EntryType::Symlink),
                    shown,
                    OsStr::from_bytes(to.as_bytes()),
                )
            }
            FileType::Fifo => self.special(shown, &stat, EntryType::Fifo),
            FileType::CharacterDevice => self.special(shown, &stat, EntryType::Char),
            FileType::BlockDevice => self.special(shown, &stat, EntryType::Block),
            FileType::Socket | FileType::Unknown => Ok(()), // tar has none
        }
    }

    fn folder(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        shown: &Path,
        depth: usize,
        stat: &Stat,
    ) -> io::Result<()> {
        self.builder.append_data(&mut header(stat, EntryType::Directory), shown, io::empty())?;
        if stat.st_dev != self.device {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(parent, name, flags, Mode::empty())?;
        for child in Dir::read_from(&dir)? {
            let child = child?;
            let child = OsStr::from_bytes(child.file_name().to_bytes());
            if child != "." && child != ".." {
                self.entry(&dir, child, &shown.join(child), depth.saturating_add(1))?;
            }
        }
        Ok(())
    }

    fn file(&mut self, parent: &OwnedFd, name: &OsStr, shown: &Path) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(parent, name, flags, Mode::empty())?);
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(()); // became something else
        }
        let header = &mut header(&stat, EntryType::Regular);
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        header.set_size(size);
        self.builder.append_data(header, shown, Exactly { file, left: size })
    }

    fn special(&mut self, shown: &Path, stat: &Stat, kind: EntryType) -> io::Result<()> {
        let mut header = header(stat, kind);
        header.set_device_major(rustix::fs::major(stat.st_rdev))?;
        header.set_device_minor(rustix::fs::minor(stat.st_rdev))?;
        self.builder.append_data(&mut header, shown, io::empty())
    }
}

fn header(stat: &Stat, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}

/// Exactly as many bytes as the header has announced, however the file changes meanwhile.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let Some(buffer) = buffer.get_mut(..most) else { return Ok(0) };
        let mut n = self.file.read(buffer)?;
        if n == 0 {
            buffer.fill(0); // it has shrunk
            n = most;
        }
        self.left = self.left.saturating_sub(u64::try_from(n).unwrap_or(u64::MAX));
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(root: &Root, path: &str) -> Vec<String> {
        let mut bytes = Vec::new();
        pack(&open(root, Path::new(path)).unwrap(), &mut bytes).unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut names: Vec<_> =
            archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_top_entry_is_the_base_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::open(dir.path()).unwrap();
        let long = "n".repeat(200);
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/b").join(&long), "x").unwrap();
        std::os::unix::fs::symlink("a/b", dir.path().join("l")).unwrap();
        std::os::unix::net::UnixListener::bind(dir.path().join("a/sock")).unwrap();
        assert_eq!(names(&root, "/a/"), ["a".to_owned(), "a/b".into(), format!("a/b/{long}")]);
        assert_eq!(names(&root, "/l"), ["l"], "a link is sent as a link");
        assert_eq!(names(&root, "/l/"), ["l"]);
        assert_eq!(names(&root, "/").len(), 5);
        assert!(matches!(open(&root, Path::new("/nope")), Err(Error::Io { .. })));
        assert!(open(&root, Path::new("/a/..")).is_ok());
    }

    #[test]
    fn a_file_that_shrinks_is_padded() {
        let file = tempfile::tempfile().unwrap();
        let mut text = Vec::new();
        Exactly { file, left: 10_000 }.read_to_end(&mut text).unwrap();
        assert_eq!(text, vec![0; 10_000]);
    }
}
