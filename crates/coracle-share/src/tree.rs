//! System calls on the host's directory. Every path of this server is resolved beneath the root.
//!
//! No call follows a symbolic link. A file is opened for its content only after a check, on the same descriptor, that it is a
//! plain file or a directory.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Statx, StatxFlags, StatxTimestamp, Uid, chmod,
    chownat, open, openat2, statx,
};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags, mount_change, open_tree};

use super::nodes::Ident;
use super::wire::{Attr, Name};

/// Maximum length of a path in one call, bytes (below PATH_MAX).
const PATH_PART_MAX: usize = 4000;
const SET_ID: u32 = 0o6000;
const PERMISSIONS: u32 = 0o7777;
const FORMAT: u32 = 0o170_000;

fn beneath_flags() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS
}

/// Opens the root of a directory. This path alone is trusted: symbolic links in it are followed. A plain file may be a root,
/// too, with nothing beneath it. `private`: mounts that the host makes below the root later are not visible.
pub(super) fn open_root(path: &Path, private: bool) -> Result<OwnedFd, Errno> {
    let root = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    match kind(&stat(&root)?) {
        FileType::Directory | FileType::RegularFile => {}
        _ => return Err(Errno::NOTDIR),
    }
    if !private {
        return Ok(root);
    }
    match private_copy(&root) {
        // Not permitted, or the mount is of another mount namespace.
        Err(error @ (Errno::PERM | Errno::INVAL | Errno::NOSYS)) => {
            tracing::debug!(path = %path.display(), %error, "copy of mounts refused, later ones are seen");
            Ok(root)
        }
        copied => copied,
    }
}

/// Opens a detached copy of the mounts from the root on, which belongs to no mount namespace.
fn private_copy(root: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    let copy = open_tree(root, c"", flags)?;
    mount_change(proc_path(&copy), MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(copy)
}

/// Opens a handle (O_PATH) of this name in `dir`; a symbolic link is not followed.
pub(super) fn child(dir: impl AsFd, name: Name<'_>) -> Result<OwnedFd, Errno> {
    openat2(
        dir,
        name.as_c_str(),
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        beneath_flags(),
    )
}

/// Opens a handle (O_PATH) of a path beneath `root`.
pub(super) fn walk(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let mut at: Option<OwnedFd> = None;
    let mut rest = path;
    loop {
        let (part, after) = split(rest);
        let from = at.as_ref().map_or(root, AsFd::as_fd);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = openat2(from, part, flags, Mode::empty(), beneath_flags())?;
        if after.is_empty() {
            return Ok(next);
        }
        (at, rest) = (Some(next), after);
    }
}

/// Splits a path into the leading names that fit into one call, and the rest.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let Some(head) = path.get(..PATH_PART_MAX) else { return (path, &[]) };
    match head.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (path, &[]), // a name of over 4000 bytes, which the call refuses
    }
}

/// Makes a plain file, open for `access`. [`adopt`] sets its owner and mode: until then no other user may read it.
pub(super) fn make_file(dir: impl AsFd, name: Name<'_>, access: OFlags) -> Result<OwnedFd, Errno> {
    let flags = access | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(dir, name.as_c_str(), flags, Mode::RUSR | Mode::WUSR, beneath_flags())
}

/// Opens the content of a handle.
///
/// # Errors
/// EISDIR or ENOTDIR for the wrong type, ELOOP for a symbolic link, EPERM for devices, sockets and FIFOs.
pub(super) fn reopen(handle: impl AsFd, flags: OFlags, directory: bool) -> Result<OwnedFd, Errno> {
    match (kind(&stat(&handle)?), directory) {
        (FileType::RegularFile, false) | (FileType::Directory, true) => {}
        (FileType::Directory, false) => return Err(Errno::ISDIR),
        (FileType::RegularFile, true) => return Err(Errno::NOTDIR),
        (FileType::Symlink, _) => return Err(Errno::LOOP),
        _ => return Err(Errno::PERM),
    }
    // Opening must not block, as it would for plain files of some file systems (a kernel's log) and for files with a lease.
    let fixed = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    open(proc_path(&handle), flags | fixed, Mode::empty())
}

/// Path of a handle, for the calls that take no O_PATH descriptor.
pub(super) fn proc_path(handle: impl AsFd) -> String {
    format!("/proc/self/fd/{}", handle.as_fd().as_raw_fd())
}

pub(super) fn stat(handle: impl AsFd) -> Result<Statx, Errno> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    statx(handle, c"", AtFlags::EMPTY_PATH, wanted)
}

/// Mount id of a file, if the kernel reports it.
pub(super) fn mount_id(of: &Statx) -> Option<u64> {
    (of.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(of.stx_mnt_id)
}

pub(super) fn kind(of: &Statx) -> FileType {
    FileType::from_raw_mode(of.stx_mode.into())
}

pub(super) fn ident(of: &Statx) -> Ident {
    let born = (of.stx_mask & StatxFlags::BTIME.bits() != 0).then_some(of.stx_btime);
    let nanoseconds =
        |at: StatxTimestamp| at.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000) + u64::from(at.tv_nsec);
    Ident { device: device(of), inode: of.stx_ino, born: born.map_or(0, nanoseconds) }
}

pub(super) fn device(of: &Statx) -> u64 {
    u64::from(of.stx_dev_major) << 32 | u64::from(of.stx_dev_minor)
}

/// File attributes as the guest sees them. Inode numbers on other file systems than the root's are hashed with the device, so
/// that two files do not look like one.
pub(super) fn attributes(of: &Statx, root_device: u64) -> Attr {
    let foreign = device(of) ^ root_device;
    let rdev = of.stx_rdev_minor & 0xff | of.stx_rdev_major << 8 | (of.stx_rdev_minor & !0xff) << 12;
    Attr {
        ino: of.stx_ino ^ foreign.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        size: of.stx_size,
        blocks: of.stx_blocks,
        atime: of.stx_atime.tv_sec.cast_unsigned(),
        mtime: of.stx_mtime.tv_sec.cast_unsigned(),
        ctime: of.stx_ctime.tv_sec.cast_unsigned(),
        atime_nsec: of.stx_atime.tv_nsec,
        mtime_nsec: of.stx_mtime.tv_nsec,
        ctime_nsec: of.stx_ctime.tv_nsec,
        mode: of.stx_mode.into(),
        nlink: of.stx_nlink,
        uid: of.stx_uid,
        gid: of.stx_gid,
        rdev,
        block_size: of.stx_blksize,
        flags: 0,
    }
}

/// User that makes a file, and the requested mode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maker {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
}

/// Sets owner (if `owned`: the daemon may) and mode of a file that was just made in `dir`. As on a local disk, a set-group-id
/// directory passes its group on.
pub(super) fn adopt(made: impl AsFd, dir: impl AsFd, maker: Maker, owned: bool) -> Result<(), Errno> {
    let (made_stat, dir_stat) = (stat(&made)?, stat(dir)?);
    let inherits = u32::from(dir_stat.stx_mode) & Mode::SGID.bits() != 0;
    if owned {
        let group = if inherits { dir_stat.stx_gid } else { maker.gid };
        set_owner(&made, Some(maker.uid), Some(group))?;
    }
    let passes_on = inherits && kind(&made_stat) == FileType::Directory;
    let mode = if passes_on { maker.mode | Mode::SGID.bits() } else { maker.mode };
    if kind(&made_stat) == FileType::Symlink { Ok(()) } else { set_mode(made, mode) }
}

/// Sets the permissions. A plain file gets no set-id bits: the guest controls its content, and users of the host might run it.
pub(super) fn set_mode(handle: impl AsFd, mode: u32) -> Result<(), Errno> {
    let bits = match kind(&stat(&handle)?) {
        FileType::Directory => mode & PERMISSIONS,
        FileType::Symlink => return Err(Errno::OPNOTSUPP),
        FileType::RegularFile | FileType::Fifo | FileType::Socket => mode & PERMISSIONS & !SET_ID,
        _ => return Err(Errno::PERM),
    };
    chmod(proc_path(handle), Mode::from_raw_mode(bits))
}

/// Removes the set-id bits of a plain file whose content changes.
pub(super) fn drop_set_id(handle: impl AsFd) -> Result<(), Errno> {
    let now = stat(&handle)?;
    let has = kind(&now) == FileType::RegularFile && u32::from(now.stx_mode) & SET_ID != 0;
    if has { set_mode(handle, u32::from(now.stx_mode) & !FORMAT) } else { Ok(()) }
}

/// Sets owner and group, if given. EINVAL for the number that means "unchanged" to the kernel.
pub(super) fn set_owner(handle: impl AsFd, uid: Option<u32>, gid: Option<u32>) -> Result<(), Errno> {
    if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
        return Err(Errno::INVAL);
    }
    chownat(handle, c"", uid.map(Uid::from_raw), gid.map(Gid::from_raw), AtFlags::EMPTY_PATH)
}
