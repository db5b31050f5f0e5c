//! Operations on the metadata of files.

use std::ffi::CStr;
use std::os::fd::AsFd;

use rustix::fs::{
    AtFlags, FileType, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags, fstatvfs, ftruncate,
    getxattr, listxattr, readlinkat, removexattr, setxattr, utimensat,
};
use rustix::io::Errno;

use super::CACHED;
use super::files::data_len;
use super::nodes::Change;
use super::server::{FoundNode, Request, SharedDirServer};
use super::tree;
use super::wire::{
    AccessIn, AttrOut, Body, GetattrIn, GetxattrIn, GetxattrOut, NAME_MAX, SetattrIn, SetxattrIn, StatfsOut,
    set,
};

/// The only namespace of extended attributes that a guest may see and set: the others have a meaning for the host's kernel.
const XATTR_PREFIX: &[u8] = b"user.";
/// Maximum size of an extended attribute, and of a list of their names, bytes (XATTR_SIZE_MAX, XATTR_LIST_MAX).
const XATTR_MAX: usize = 64 * 1024;
/// Bit for writing in the mask of access(2).
const WRITABLE: u32 = 2;
const NANOSECONDS: u32 = 1_000_000_000;

impl SharedDirServer {
    pub(super) fn getattr(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let _: GetattrIn = args.take()?;
        args.end()?;
        self.describe(self.find(request.node)?)
    }

    pub(super) fn setattr(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let asked: SetattrIn = args.take()?;
        args.end()?;
        let file = self.find(request.node)?;
        if matches!(tree::kind(&tree::stat(&file)?), FileType::CharacterDevice | FileType::BlockDevice) {
            return Err(Errno::PERM); // devices belong to the host, even if named in the directory
        }
        let asks = |bits: u32| asked.valid & bits != 0;
        if asks(set::UID | set::GID) {
            let id = |bit: u32, id: u32| asks(bit).then(|| self.owner_id(id)).transpose();
            tree::set_owner(&file, id(set::UID, asked.uid)?, id(set::GID, asked.gid)?)?;
        }
        if asks(set::MODE) {
            tree::set_mode(&file, asked.mode)?;
        }
        if asks(set::SIZE) {
            self.resize(request.node, &file, &asked)?;
        }
        if asks(set::SIZE | set::KILL_SET_ID) {
            self.strip(&file)?;
        }
        if asks(set::ATIME | set::MTIME) {
            let accessed = time(asks(set::ATIME), asks(set::ATIME_NOW), asked.atime, asked.atime_nsec)?;
            let modified = time(asks(set::MTIME), asks(set::MTIME_NOW), asked.mtime, asked.mtime_nsec)?;
            let times = Timestamps { last_access: accessed, last_modification: modified };
            utimensat(&file, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        self.settle(request.node, &file)?;
        self.describe(file)
    }

    pub(super) fn readlink(&self, request: Request<'_>) -> Result<Body, Errno> {
        request.args.end()?;
        let link = self.find(request.node)?;
        if tree::kind(&tree::stat(&link)?) != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        let mut body = Body::empty();
        body.push(readlinkat(link, c"", Vec::new())?.as_bytes());
        Ok(body)
    }

    pub(super) fn statfs(&self, request: Request<'_>) -> Result<Body, Errno> {
        request.args.end()?;
        let of = fstatvfs(self.find(request.node)?)?;
        let small = |size: u64| u32::try_from(size).unwrap_or(u32::MAX);
        Ok(Body::of(&StatfsOut {
            blocks: of.f_blocks,
            bfree: of.f_bfree,
            bavail: of.f_bavail,
            files: of.f_files,
            ffree: of.f_ffree,
            bsize: small(of.f_bsize),
            namelen: small(of.f_namemax),
            frsize: small(of.f_frsize),
            ..StatfsOut::default()
        }))
    }

    /// Checks only that the file exists and may be changed. The guest's kernel checks permissions, because it mounts with
    /// `default_permissions`.
    pub(super) fn access(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let AccessIn { mask, .. } = args.take()?;
        args.end()?;
        self.find(request.node)?;
        if mask & WRITABLE != 0 {
            self.may_change(request.node)?;
        }
        Ok(Body::empty())
    }

    pub(super) fn getxattr(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (GetxattrIn { size, .. }, name) = (args.take()?, args.text()?);
        args.end()?;
        let (name, file) = (user_name(name)?, self.find_attributable(request.node)?);
        let mut value = vec![0; XATTR_MAX];
        let len = match file {
            Some(file) => getxattr(tree::proc_path(&file), name, value.as_mut_slice())?,
            None => return Err(Errno::NODATA),
        };
        sized_reply(&value[..len], size)
    }

    pub(super) fn listxattr(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let GetxattrIn { size, .. } = args.take()?;
        args.end()?;
        let mut names = vec![0; XATTR_MAX];
        let len = match self.find_attributable(request.node)? {
            Some(file) => match listxattr(tree::proc_path(&file), names.as_mut_slice()) {
                Err(Errno::OPNOTSUPP) => 0,
                result => result?,
            },
            None => 0,
        };
        let own =
            names[..len].split_inclusive(|byte| *byte == 0).filter(|name| name.starts_with(XATTR_PREFIX));
        sized_reply(&own.flatten().copied().collect::<Vec<u8>>(), size)
    }

    pub(super) fn setxattr(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let (SetxattrIn { size, flags }, name) = (args.take()?, args.text()?);
        let (name, value) = (user_name(name)?, args.0);
        if value.len() != data_len(size)? {
            return Err(Errno::INVAL);
        }
        if value.len() > XATTR_MAX {
            return Err(Errno::TOOBIG);
        }
        if !request.repeated {
            let file = self.find_attributable(request.node)?.ok_or(Errno::PERM)?;
            setxattr(tree::proc_path(&file), name, value, XattrFlags::from_bits_retain(flags))?;
            self.settle(request.node, file)?;
            self.table().commit(&[Change::Done { unique: request.unique }]);
        }
        Ok(Body::empty())
    }

    pub(super) fn removexattr(&self, request: Request<'_>) -> Result<Body, Errno> {
        let mut args = request.args;
        let name = args.text()?;
        args.end()?;
        let name = user_name(name)?;
        if !request.repeated {
            let file = self.find_attributable(request.node)?.ok_or(Errno::PERM)?;
            removexattr(tree::proc_path(&file), name)?;
            self.settle(request.node, file)?;
            self.table().commit(&[Change::Done { unique: request.unique }]);
        }
        Ok(Body::empty())
    }

    fn describe(&self, file: impl AsFd) -> Result<Body, Errno> {
        let attr = self.attributes(&tree::stat(file)?);
        Ok(Body::of(&AttrOut { valid: CACHED, attr, ..AttrOut::default() }))
    }

    /// Truncates by the handle in the request, if that is open for writing, or else by a new one.
    fn resize(&self, node: u64, file: &FoundNode<'_>, asked: &SetattrIn) -> Result<(), Errno> {
        if asked.valid & set::FH != 0 {
            let handle = self.handle(asked.fh, node)?;
            if handle.how.writes() {
                return ftruncate(&handle.file, asked.size);
            }
        }
        ftruncate(tree::reopen(file, OFlags::WRONLY, false)?, asked.size)
    }

    /// Returns the file if its type can have `user.*` attributes.
    fn find_attributable(&self, node: u64) -> Result<Option<FoundNode<'_>>, Errno> {
        let file = self.find(node)?;
        let kind = tree::kind(&tree::stat(&file)?);
        Ok(matches!(kind, FileType::RegularFile | FileType::Directory).then_some(file))
    }
}

fn user_name(name: &CStr) -> Result<&CStr, Errno> {
    match name.to_bytes() {
        bytes if bytes.len() > NAME_MAX => Err(Errno::RANGE),
        bytes if bytes.starts_with(XATTR_PREFIX) && bytes.len() > XATTR_PREFIX.len() => Ok(name),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Reply with a value of at most `size` bytes, or with its length if `size` is 0.
fn sized_reply(value: &[u8], size: u32) -> Result<Body, Errno> {
    let len = u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?;
    if size == 0 {
        return Ok(Body::of(&GetxattrOut { size: len, pad: 0 }));
    }
    if len > size {
        return Err(Errno::RANGE);
    }
    let mut body = Body::empty();
    body.push(value);
    Ok(body)
}

fn time(set: bool, now: bool, seconds: u64, nanoseconds: u32) -> Result<Timespec, Errno> {
    match (set, now) {
        (false, _) => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }),
        (true, true) => Ok(Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }),
        // `UTIME_NOW` and `UTIME_OMIT` are numbers beyond a second.
        (true, false) if nanoseconds >= NANOSECONDS => Err(Errno::INVAL),
        (true, false) => Ok(Timespec { tv_sec: seconds.cast_signed(), tv_nsec: nanoseconds.into() }),
    }
}
