//! Files as a tar stream. Directories are walked by handle, so that a concurrent rename by the guest cannot mislead the walk.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use tar::{Builder, EntryType, Header};

use crate::{PATH_MAX, Root};

/// Maximum depth of a walk, with one open handle per level.
const DEPTH_MAX: usize = 128;
/// Maximum size of all names of a file's extended attributes, and of one value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const XATTR_MAX: usize = 64 << 10;

/// Entry to send: its parent directory and its name there.
#[derive(Debug)]
pub struct Top {
    parent: OwnedFd,
    name: OsString,
    /// Name of the top entry in the stream.
    shown: PathBuf,
}

/// Finds `path`; the last component is not followed.
///
/// # Errors
/// When `path` does not exist, or cannot be reached inside the root.
pub fn open(root: &Root, path: &Path) -> io::Result<Top> {
    let Some(name) = path.file_name() else {
        let parent = root.dir(path)?;
        return Ok(Top { parent, name: ".".into(), shown: ".".into() });
    };
    let (parent, _) = root.parent(path)?;
    rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(Top { parent, name: name.to_owned(), shown: name.into() })
}

/// Writes the whole stream. Blocking.
///
/// # Errors
/// When a file cannot be read or `sink` fails; the stream is then incomplete.
pub fn pack(top: &Top, sink: &mut dyn Write) -> io::Result<()> {
    let mut builder = Builder::new(sink);
    let stat = rustix::fs::statat(&top.parent, &top.name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mut walk = Walk { builder: &mut builder, device: stat.st_dev, links: None };
    walk.entry(&top.parent, &top.name, &top.shown, 0)?;
    builder.finish()
}

/// Writes the whole stream of an overlay's upper directory: hard links stay links, and extended attributes are PAX records. Tar
/// has no sockets: a socket is sent as an overlay whiteout, so that the image has no file in its place. Blocking.
///
/// # Errors
/// Same as [`pack`].
pub fn pack_changes(upper: &Root, sink: &mut dyn Write) -> io::Result<()> {
    let mut builder = Builder::new(sink);
    let parent = upper.dir(Path::new("/"))?;
    let stat = rustix::fs::statat(&parent, ".", AtFlags::SYMLINK_NOFOLLOW)?;
    let mut walk = Walk { builder: &mut builder, device: stat.st_dev, links: Some(BTreeMap::new()) };
    walk.entry(&parent, OsStr::new("."), Path::new("."), 0)?;
    builder.finish()
}

struct Walk<'a, 'b> {
    builder: &'a mut Builder<&'b mut dyn Write>,
    /// Directories on another file system are not entered.
    device: u64,
    /// First name of each file with several names, by inode. `None`: attributes are not sent, and links are sent as files.
    links: Option<BTreeMap<u64, PathBuf>>,
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
        if self.links.is_some() {
            if let Some(first) = self.first_name(&stat, shown) {
                return self.builder.append_link(&mut header(&stat, EntryType::Link), shown, first);
            }
            let dir = PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd()));
            self.attributes(&dir.join(name))?;
        }
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
            FileType::Socket if self.links.is_some() => {
                let mut whiteout = stat;
                whiteout.st_rdev = 0;
                self.special(shown, &whiteout, EntryType::Char)
            }
            FileType::Socket | FileType::Unknown => Ok(()), // tar has none
        }
    }

    /// Returns the name under which a file was sent before; records this name if it was not sent.
    fn first_name(&mut self, stat: &Stat, shown: &Path) -> Option<PathBuf> {
        let links = self.links.as_mut()?;
        if stat.st_nlink < 2 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        match links.get(&stat.st_ino) {
            Some(first) => Some(first.clone()),
            None => {
                links.insert(stat.st_ino, shown.to_owned());
                None
            }
        }
    }

    /// Writes extended attributes as an extended header of the next member. Attributes that were removed meanwhile are left
    /// out.
    fn attributes(&mut self, path: &Path) -> io::Result<()> {
        let mut names = vec![0; XATTR_MAX];
        let length = match rustix::fs::llistxattr(path, &mut names[..]) {
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::OPNOTSUPP) => return Ok(()),
            other => other?,
        };
        names.truncate(length);
        let (mut records, mut value) = (Vec::new(), vec![0; XATTR_MAX]);
        for name in names.split(|b| *b == 0).filter_map(|name| std::str::from_utf8(name).ok()) {
            if name.is_empty() {
                continue;
            }
            match rustix::fs::lgetxattr(path, name, &mut value[..]) {
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODATA) => {}
                length => {
                    let value = value.get(..length?).unwrap_or_default();
                    records.push((format!("SCHILY.xattr.{name}"), value.to_vec()));
                }
            }
        }
        if records.is_empty() {
            return Ok(());
        }
        self.builder
            .append_pax_extensions(records.iter().map(|(key, value)| (key.as_str(), value.as_slice())))
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

/// Reader of exactly as many bytes as the header has announced, even if the file changes meanwhile.
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
    fn top_entry_is_the_base_name() {
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
        assert_eq!(open(&root, Path::new("/nope")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(open(&root, Path::new("/a/..")).is_ok());
    }

    #[test]
    fn changes_have_links_attributes_and_whiteouts() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        std::fs::write(at("d/one"), "text").unwrap();
        std::fs::hard_link(at("d/one"), at("d/two")).unwrap();
        std::os::unix::net::UnixListener::bind(at("sock")).unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        match rustix::fs::lsetxattr(at("d"), "user.binary", b"1\n\0=\xff", flags) {
            Err(rustix::io::Errno::OPNOTSUPP) => return eprintln!("skipped: no extended attributes here"),
            set => set.unwrap(),
        }
        let mut bytes = Vec::new();
        pack_changes(&Root::open(dir.path()).unwrap(), &mut bytes).unwrap();
        let record = b"SCHILY.xattr.user.binary=1\n\0=\xff\n";
        assert!(bytes.windows(record.len()).any(|part| part == record));
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut seen: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|e| {
                let e = e.unwrap();
                let link = e.link_name().unwrap().map(|to| to.display().to_string());
                (e.path().unwrap().display().to_string(), e.header().entry_type(), link)
            })
            .filter(|(path, ..)| !path.ends_with("one") && !path.ends_with("two"))
            .collect();
        seen.sort_by(|a, b| a.0.cmp(&b.0));
        let want = [(".", EntryType::Directory), ("d", EntryType::Directory), ("sock", EntryType::Char)];
        assert_eq!(seen.iter().map(|(path, kind, _)| (path.as_str(), *kind)).collect::<Vec<_>>(), want);
        let mut archive = tar::Archive::new(&bytes[..]);
        let links = archive
            .entries()
            .unwrap()
            .filter(|e| e.as_ref().unwrap().header().entry_type() == EntryType::Link);
        assert_eq!(links.count(), 1, "the second name is a link to the first");
    }

    /// Overlay in a tmpfs, if this process may mount.
    struct Overlay(tempfile::TempDir);

    impl Overlay {
        fn new(fill: impl FnOnce(&Path)) -> Option<Self> {
            use rustix::mount::{MountFlags, mount};
            let dir = tempfile::tempdir().unwrap();
            if mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), c"").is_err() {
                eprintln!("skipped: cannot mount here");
                return None;
            }
            let overlay = Self(dir);
            let at = |name: &str| overlay.0.path().join(name);
            for name in ["lower", "upper", "work", "root"] {
                std::fs::create_dir(at(name)).unwrap();
            }
            fill(&at("lower"));
            let [lower, upper, work] = ["lower", "upper", "work"].map(|name| at(name).display().to_string());
            let layers = format!(
                "lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off,metacopy=off,index=off"
            );
            let layers = std::ffi::CString::new(layers).unwrap();
            if mount("overlay", at("root"), "overlay", MountFlags::empty(), &*layers).is_err() {
                eprintln!("skipped: no overlay here");
                return None;
            }
            Some(overlay)
        }
    }

    impl Drop for Overlay {
        fn drop(&mut self) {
            for place in [self.0.path().join("root"), self.0.path().to_owned()] {
                let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
            }
        }
    }

    #[test]
    fn changes_of_a_real_overlay_are_all_in_the_stream() {
        const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let fill = |lower: &Path| {
            std::fs::create_dir(lower.join("d")).unwrap();
            for name in ["d/old", "same", "gone", "tool", "untouched"] {
                std::fs::write(lower.join(name), "before").unwrap();
            }
        };
        let Some(overlay) = Overlay::new(fill) else { return };
        let root = overlay.0.path().join("root");
        let modified = std::fs::metadata(root.join("same")).unwrap().modified().unwrap();
        std::fs::write(root.join("same"), "after!").unwrap();
        File::options().write(true).open(root.join("same")).unwrap().set_modified(modified).unwrap();
        std::fs::remove_file(root.join("gone")).unwrap();
        std::fs::remove_dir_all(root.join("d")).unwrap();
        std::fs::create_dir(root.join("d")).unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(root.join("tool"), "security.capability", CAPABILITY, flags).unwrap();
        let mut bytes = Vec::new();
        pack_changes(&Root::open(&overlay.0.path().join("upper")).unwrap(), &mut bytes).unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut seen = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            seen.insert(name, (entry.header().entry_type(), text));
        }
        let want = [
            (".", EntryType::Directory, ""),
            ("d", EntryType::Directory, ""),
            ("gone", EntryType::Char, ""),
            ("same", EntryType::Regular, "after!"),
            ("tool", EntryType::Regular, "before"),
        ];
        let want = want.map(|(name, kind, text)| (name.to_owned(), (kind, text.to_owned())));
        assert_eq!(seen, BTreeMap::from(want));
        let has = |record: &[u8]| bytes.windows(record.len()).any(|part| part == record);
        assert!(has(b"SCHILY.xattr.trusted.overlay.opaque=y\n"), "the directory is another");
        assert!(has(&[b"SCHILY.xattr.security.capability=", CAPABILITY, b"\n"].concat()));
    }

    #[test]
    fn shrinking_file_is_padded() {
        let file = tempfile::tempfile().unwrap();
        let mut text = Vec::new();
        Exactly { file, left: 10_000 }.read_to_end(&mut text).unwrap();
        assert_eq!(text, vec![0; 10_000]);
    }
}
