//! Extraction of a tar stream to disk. Every name is resolved inside a root that is not trusted. Long names are read here, with
//! a limit, because the tar library accepts any size.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use tar::{Entry, EntryType};

use crate::{PATH_MAX, Root, create, remove};

/// Maximum size of a long-name or PAX record, bytes.
const NAME_MAX: u64 = 64 * 1024;
/// Maximum number of directories whose time is set after they are filled, one per level.
const DEPTH_MAX: usize = 256;
const COPY_BUFFER: usize = 64 * 1024;

/// Amount that was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Number of entries in the stream.
    pub entries: u64,
    /// Total size of files, bytes.
    pub bytes: u64,
}

/// Failure that ended an extraction, possibly after some entries.
#[derive(Debug)]
pub struct UnpackError {
    /// Operation and its object.
    pub what: String,
    /// Error of the kernel, or `InvalidData` for an invalid stream.
    pub source: io::Error,
}

impl fmt::Display for UnpackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for UnpackError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl UnpackError {
    fn of(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { what: what.into(), source }
    }
}

/// Unpacks all entries of `source` below the directory `base`, which is created where missing. Entries keep mode, owner and
/// modification time; an existing file is replaced, an existing directory is kept. Blocking.
///
/// # Errors
/// [`UnpackError`]; entries that were already unpacked stay.
pub fn unpack(root: &Root, base: &Path, source: &mut dyn Read) -> Result<Unpacked, UnpackError> {
    root.ensure_dir(base, Mode::from_raw_mode(0o755))
        .map_err(UnpackError::of(format!("open directory {}", base.display())))?;
    let broken = |e| UnpackError::of("read the tar stream")(as_invalid(e));
    let mut archive = tar::Archive::new(source);
    let mut work =
        Unpacker { root, base, open: Vec::new(), buffer: vec![0; COPY_BUFFER], done: Unpacked::default() };
    let mut names = Names::default();
    for entry in archive.entries().map_err(broken)?.raw(true) {
        let mut entry = entry.map_err(broken)?;
        if names.take(&mut entry).map_err(broken)? {
            continue;
        }
        let (path, link) = std::mem::take(&mut names).of(&entry);
        work.entry(&mut entry, &path, link.as_deref())
            .map_err(UnpackError::of(format!("unpack {}", path.display())))?;
    }
    work.leave(None);
    Ok(work.done)
}

/// Converts errors of the stream to `InvalidData`, because the client caused them.
fn as_invalid(e: io::Error) -> io::Error {
    if e.kind() == io::ErrorKind::ConnectionAborted {
        e
    } else {
        io::Error::new(io::ErrorKind::InvalidData, e.to_string())
    }
}

/// Names from the records before an entry: GNU long names and PAX.
#[derive(Default)]
struct Names {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl Names {
    /// Reads `entry` if it only describes the next one; returns whether it did.
    fn take(&mut self, entry: &mut Entry<'_, &mut dyn Read>) -> io::Result<bool> {
        let kind = entry.header().entry_type();
        if !matches!(
            kind,
            EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader | EntryType::XGlobalHeader
        ) {
            return Ok(false);
        }
        if entry.size() > NAME_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut text = Vec::new();
        entry.read_to_end(&mut text)?;
        match kind {
            EntryType::GNULongName => self.path = Some(truncate_at_nul(text)),
            EntryType::GNULongLink => self.link = Some(truncate_at_nul(text)),
            EntryType::XHeader => {
                for record in tar::PaxExtensions::new(&text) {
                    let record = record?;
                    match record.key_bytes() {
                        b"path" => self.path = Some(record.value_bytes().to_vec()),
                        b"linkpath" => self.link = Some(record.value_bytes().to_vec()),
                        b"size" => return Err(io::Error::other("an entry of 8 GiB or more")),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Ok(true)
    }

    fn of(self, entry: &Entry<'_, &mut dyn Read>) -> (PathBuf, Option<PathBuf>) {
        let path = self.path.unwrap_or_else(|| entry.header().path_bytes().into_owned());
        let link = self.link.or_else(|| entry.header().link_name_bytes().map(std::borrow::Cow::into_owned));
        (OsString::from_vec(path).into(), link.map(|l| OsString::from_vec(l).into()))
    }
}

fn truncate_at_nul(mut text: Vec<u8>) -> Vec<u8> {
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    text.truncate(end);
    text
}

struct Unpacker<'a> {
    root: &'a Root,
    base: &'a Path,
    /// Directories that may still get entries; their times are set when they are left.
    open: Vec<(PathBuf, OwnedFd, Timestamps)>,
    buffer: Vec<u8>,
    done: Unpacked,
}

impl Unpacker<'_> {
    fn entry(
        &mut self,
        entry: &mut Entry<'_, &mut dyn Read>,
        name: &Path,
        link: Option<&Path>,
    ) -> io::Result<()> {
        let relative = relative_name(name)?;
        self.leave(Some(&relative));
        self.done.entries = self.done.entries.saturating_add(1);
        let kind = entry.header().entry_type();
        let Some(leaf) = relative.file_name() else {
            return if kind.is_dir() { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }; // the top itself, "./"
        };
        let above = self.base.join(relative.parent().unwrap_or(Path::new("")));
        let parent = self.root.ensure_dir(&above, Mode::from_raw_mode(0o755))?;
        let attributes = Attributes::of(entry.header());
        match kind {
            EntryType::Directory => self.folder(&parent, leaf, &relative, &attributes),
            EntryType::Regular | EntryType::Continuous => self.file(entry, &parent, leaf, &attributes),
            EntryType::Symlink => {
                let to =
                    link.filter(|l| l.as_os_str().len() <= PATH_MAX).ok_or(io::ErrorKind::InvalidInput)?;
                remove(parent.as_fd(), leaf)?;
                rustix::fs::symlinkat(to, &parent, leaf)?;
                attributes.apply_to_link(parent.as_fd(), leaf)
            }
            EntryType::Link => {
                let to = relative_name(link.ok_or(io::ErrorKind::InvalidInput)?)?;
                let to = self.root.resolve(&self.base.join(to), OFlags::PATH | OFlags::NOFOLLOW)?;
                remove(parent.as_fd(), leaf)?;
                Ok(rustix::fs::linkat(&to, "", &parent, leaf, AtFlags::EMPTY_PATH)?)
            }
            EntryType::Fifo => special(entry.header(), FileType::Fifo, parent.as_fd(), leaf, &attributes),
            EntryType::Char => {
                special(entry.header(), FileType::CharacterDevice, parent.as_fd(), leaf, &attributes)
            }
            EntryType::Block => {
                special(entry.header(), FileType::BlockDevice, parent.as_fd(), leaf, &attributes)
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "a kind of entry that is not supported")),
        }
    }

    fn folder(
        &mut self,
        parent: &OwnedFd,
        leaf: &OsStr,
        relative: &Path,
        attributes: &Attributes,
    ) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = match rustix::fs::mkdirat(parent, leaf, Mode::from_raw_mode(0o700)) {
            Ok(()) => rustix::fs::openat(parent, leaf, flags | OFlags::NOFOLLOW, Mode::empty())?,
            // A link to a directory is used as the directory, as in an image that has /bin → /usr/bin.
            Err(Errno::EXIST) => self.root.resolve(&self.base.join(relative), flags)?,
            Err(e) => return Err(e.into()),
        };
        attributes.apply_to_fd(dir.as_fd())?;
        if self.open.len() < DEPTH_MAX {
            self.open.push((relative.to_owned(), dir, attributes.times()));
        }
        Ok(())
    }

    fn file(
        &mut self,
        entry: &mut Entry<'_, &mut dyn Read>,
        parent: &OwnedFd,
        leaf: &OsStr,
        attributes: &Attributes,
    ) -> io::Result<()> {
        let file = create(parent.as_fd(), leaf, Mode::from_raw_mode(0o600))?;
        let mut left = entry.size();
        while left > 0 {
            let n = entry.read(&mut self.buffer)?;
            if n == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the tar stream ends inside a file"));
            }
            io::Write::write_all(&mut &file, self.buffer.get(..n).unwrap_or_default())?;
            let n = u64::try_from(n).unwrap_or(u64::MAX);
            left = left.saturating_sub(n);
            self.done.bytes = self.done.bytes.saturating_add(n);
        }
        attributes.apply_to_fd(file.as_fd())?;
        Ok(rustix::fs::futimens(&file, &attributes.times())?)
    }

    /// Sets the times of the directories that do not contain `next`.
    fn leave(&mut self, next: Option<&Path>) {
        while let Some((path, dir, times)) = self.open.pop() {
            if next.is_some_and(|next| next.starts_with(&path)) {
                self.open.push((path, dir, times));
                return;
            }
            let _ = rustix::fs::futimens(&dir, &times);
        }
    }
}

fn special(
    header: &tar::Header,
    kind: FileType,
    parent: BorrowedFd<'_>,
    leaf: &OsStr,
    attributes: &Attributes,
) -> io::Result<()> {
    let part = |n: io::Result<Option<u32>>| {
        if kind == FileType::Fifo { Ok(0) } else { n.map(Option::unwrap_or_default) }
    };
    let device = rustix::fs::makedev(part(header.device_major())?, part(header.device_minor())?);
    remove(parent, leaf)?;
    rustix::fs::mknodat(parent, leaf, kind, attributes.mode, device)?;
    rustix::fs::chmodat(parent, leaf, attributes.mode, AtFlags::empty())?;
    attributes.apply_to_link(parent, leaf)
}

/// Returns `name` without leading slashes and dots. A name with `..` is refused.
fn relative_name(name: &Path) -> io::Result<PathBuf> {
    if name.as_os_str().len() > PATH_MAX || name.as_os_str().as_bytes().contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut path = PathBuf::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => path.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(io::ErrorKind::InvalidInput.into()),
        }
    }
    Ok(path)
}

/// Owner, mode and time of an entry.
struct Attributes {
    uid: Uid,
    gid: Gid,
    mode: Mode,
    mtime: i64,
}

impl Attributes {
    /// Reads the fields of a header; fields that some writers leave empty get the values that tar assumes.
    fn of(header: &tar::Header) -> Self {
        let id = |n: io::Result<u64>| {
            n.ok().and_then(|n| u32::try_from(n).ok()).filter(|n| *n != u32::MAX).unwrap_or(0)
        };
        Self {
            uid: Uid::from_raw(id(header.uid())),
            gid: Gid::from_raw(id(header.gid())),
            mode: Mode::from_raw_mode(header.mode().unwrap_or(0o644) & 0o7777),
            mtime: header.mtime().ok().and_then(|t| i64::try_from(t).ok()).unwrap_or(0),
        }
    }

    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.mtime, tv_nsec: 0 };
        Timestamps { last_access: time, last_modification: time }
    }

    /// Sets the owner first, because changing it clears the set-uid bit.
    fn apply_to_fd(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        rustix::fs::fchown(fd, Some(self.uid), Some(self.gid))?;
        Ok(rustix::fs::fchmod(fd, self.mode)?)
    }

    fn apply_to_link(&self, parent: BorrowedFd<'_>, leaf: &OsStr) -> io::Result<()> {
        rustix::fs::chownat(parent, leaf, Some(self.uid), Some(self.gid), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(rustix::fs::utimensat(parent, leaf, &self.times(), AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    fn tar(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, data) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(if kind.is_dir() { 0o750 } else { 0o640 });
            header.set_uid(7);
            header.set_gid(8);
            header.set_mtime(1_000_000_000);
            // Written directly, because the library would refuse hostile names.
            let bytes = header.as_mut_bytes();
            bytes[..name.len()].copy_from_slice(name.as_bytes());
            if matches!(kind, EntryType::Symlink | EntryType::Link) {
                bytes[157..157 + data.len()].copy_from_slice(data.as_bytes());
                header.set_size(0);
                header.set_cksum();
                builder.append(&header, io::empty()).unwrap();
            } else {
                header.set_size(data.len() as u64);
                header.set_cksum();
                builder.append(&header, data.as_bytes()).unwrap();
            }
        }
        builder.into_inner().unwrap()
    }

    fn folder() -> (tempfile::TempDir, PathBuf, Root) {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("root");
        std::fs::create_dir(&inner).unwrap();
        let root = Root::open(&inner).unwrap();
        (outer, inner, root)
    }

    fn put(root: &Root, base: &str, bytes: &[u8]) -> Result<Unpacked, UnpackError> {
        unpack(root, Path::new(base), &mut &*bytes)
    }

    #[test]
    fn attributes_are_kept() {
        use EntryType::{Directory, Fifo, Link, Regular, Symlink};
        let (_outer, inner, root) = folder();
        let bytes = tar(&[
            ("./", Directory, ""),
            ("d/", Directory, ""),
            ("d/f", Regular, "hello"),
            ("d/e/f", Regular, "deep"),
            ("l", Symlink, "d/f"),
            ("h", Link, "d/f"),
            ("p", Fifo, ""),
        ]);
        for _ in 0..2 {
            let done = put(&root, "/srv/in", &bytes).unwrap();
            assert_eq!((done.entries, done.bytes), (7, 9));
        }
        let meta = |p: &str| std::fs::symlink_metadata(inner.join("srv/in").join(p)).unwrap();
        for p in ["d", "d/f", "l", "p"] {
            assert_eq!((meta(p).uid(), meta(p).gid(), meta(p).mtime()), (7, 8, 1_000_000_000), "{p}");
        }
        assert_eq!((meta("d").mode() & 0o7777, meta("d/f").mode() & 0o7777), (0o750, 0o640));
        assert_eq!(meta("h").ino(), meta("d/f").ino());
        assert_eq!(std::fs::read_to_string(inner.join("srv/in/h")).unwrap(), "hello");
    }

    #[test]
    fn unpack_never_writes_outside_the_root() {
        use EntryType::{Link, Regular, Symlink};
        let (outer, inner, root) = folder();
        std::fs::write(outer.path().join("secret"), "host").unwrap();
        symlink("../..", inner.join("up")).unwrap();
        symlink(outer.path(), inner.join("abs")).unwrap();
        for (why, entries) in [
            ("climbs", vec![("../secret", Regular, "bad")]),
            ("climbs later", vec![("a/../../secret", Regular, "bad")]),
            ("absolute", vec![("/../secret", Regular, "bad")]),
            ("by a link in the image", vec![("up/secret", Regular, "bad")]),
            ("by an absolute link in the image", vec![("abs/secret", Regular, "bad")]),
            ("by a link of its own", vec![("x", Symlink, "../.."), ("x/secret", Regular, "bad")]),
            ("hard link outwards", vec![("y", Link, "../secret"), ("y", Regular, "bad")]),
            ("hard link by a link", vec![("z", Link, "up/secret")]),
        ] {
            let _ = put(&root, "/", &tar(&entries));
            assert_eq!(std::fs::read_to_string(outer.path().join("secret")).unwrap(), "host", "{why}");
            let outside: Vec<_> =
                std::fs::read_dir(outer.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(outside.len(), 2, "{why}: {outside:?}");
        }
    }

    #[test]
    fn link_is_replaced_and_not_written_through() {
        let (_outer, inner, root) = folder();
        std::fs::write(inner.join("real"), "old").unwrap();
        symlink("real", inner.join("alias")).unwrap();
        put(&root, "/", &tar(&[("alias", EntryType::Regular, "new")])).unwrap();
        assert_eq!(std::fs::read_to_string(inner.join("real")).unwrap(), "old");
        assert_eq!(std::fs::read_to_string(inner.join("alias")).unwrap(), "new");
    }

    #[test]
    fn long_gnu_and_pax_names_are_read_and_bounded() {
        let (_outer, inner, root) = folder();
        let long = format!("{}/{}", "a".repeat(120), "b".repeat(130));
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        builder.append_data(&mut header.clone(), &long, &b"g"[..]).unwrap();
        builder.append_pax_extensions([("path", format!("{long}-pax").as_bytes())]).unwrap();
        header.set_path("short").unwrap();
        header.set_cksum();
        builder.append(&header, &b"p"[..]).unwrap();
        put(&root, "/", &builder.into_inner().unwrap()).unwrap();
        assert_eq!(std::fs::read_to_string(inner.join(&long)).unwrap(), "g");
        assert_eq!(std::fs::read_to_string(inner.join(format!("{long}-pax"))).unwrap(), "p");

        let huge = tar(&[("././@LongLink", EntryType::GNULongName, &"x".repeat(70_000))]);
        assert!(put(&root, "/", &huge).is_err());
    }

    #[test]
    fn garbage_and_truncated_archives_are_refused() {
        let (_outer, _inner, root) = folder();
        let whole = tar(&[("f", EntryType::Regular, &"x".repeat(5000))]);
        assert!(matches!(put(&root, "/", &vec![7; 4096]), Err(UnpackError { .. })));
        for cut in [100, 512, 600, 2000, 5511] {
            assert!(put(&root, "/", &whole[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(put(&root, "/", &[]).unwrap().entries, 0);
    }
}
