//! Messages of the FUSE protocol (linux/fuse.h, major 7), as far as this server supports it.
//!
//! Byte order and layout are the guest kernel's, which runs on the host's own architecture.

use std::ffi::CStr;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Supported protocol version, and the oldest supported minor version.
pub(super) const MAJOR: u32 = 7;
pub(super) const MINOR: u32 = 38;
pub(super) const MINOR_MIN: u32 = 31;

/// Node id of the shared directory itself.
pub(super) const ROOT: u64 = 1;
/// Maximum size of the data of one READ, WRITE, READDIR or extended attribute, bytes.
pub(super) const DATA_MAX: usize = 128 * 1024;
/// Maximum size of a request: a WRITE of [`DATA_MAX`] with its headers, rounded up generously.
pub(super) const REQUEST_MAX: usize = DATA_MAX + 4096;
/// Maximum length of a file name, bytes (NAME_MAX).
pub(super) const NAME_MAX: usize = 255;

/// INIT flags (`FUSE_*`): asynchronous reads, O_TRUNC in OPEN, writes larger than a page, page cache invalidation when times or
/// size changed, READDIRPLUS, parallel look-ups, and set-id bits that the server clears on request.
pub(super) const INIT_FLAGS: u32 =
    1 | 1 << 3 | 1 << 5 | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 18 | KILL_PRIVILEGE_V2;
const KILL_PRIVILEGE_V2: u32 = 1 << 28;

/// `FOPEN_NOFLUSH`: closing a file that was not open for writing sends no FLUSH.
pub(super) const OPEN_NO_FLUSH: u32 = 1 << 5;
/// `FUSE_OPEN_KILL_SUIDGID`, in [`OpenIn::open_flags`] and [`CreateIn::open_flags`].
pub(super) const OPEN_KILL_SET_ID: u32 = 1;
/// `FUSE_WRITE_KILL_SUIDGID`, in [`WriteIn::write_flags`].
pub(super) const WRITE_KILL_SET_ID: u32 = 1 << 2;
/// `FUSE_WRITE_CACHE`: write from the page cache, to be done regardless of the file's flags.
pub(super) const WRITE_CACHE: u32 = 1;
/// `FUSE_FSYNC_FDATASYNC`.
pub(super) const FSYNC_DATA: u32 = 1;

/// `FATTR_*`: fields of [`SetattrIn`] that are valid.
pub(super) mod set {
    pub(crate) const MODE: u32 = 1;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const KILL_SET_ID: u32 = 1 << 11;
}

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub(super) struct $name { $(pub(super) $field: $kind,)* }
    )* };
}

messages! {
    /// Header of every request.
    InHeader { len: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, pid: u32, ext_len: u16, pad: u16 }
    /// Header of every reply; `error` is zero or a negated errno.
    OutHeader { len: u32, error: i32, unique: u64 }
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, unused: [u32; 7],
    }
    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atime_nsec: u32, mtime_nsec: u32, ctime_nsec: u32, mode: u32, nlink: u32, uid: u32, gid: u32,
        rdev: u32, block_size: u32, flags: u32,
    }
    EntryOut {
        node: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr,
    }
    ForgetIn { count: u64 }
    BatchForgetIn { count: u32, pad: u32 }
    ForgetOne { node: u64, count: u64 }
    GetattrIn { flags: u32, pad: u32, fh: u64 }
    AttrOut { valid: u64, valid_nsec: u32, pad: u32, attr: Attr }
    SetattrIn {
        valid: u32, pad: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atime_nsec: u32, mtime_nsec: u32, ctime_nsec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    MknodIn { mode: u32, rdev: u32, umask: u32, pad: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { new_dir: u64 }
    Rename2In { new_dir: u64, flags: u32, pad: u32 }
    LinkIn { node: u64 }
    OpenIn { flags: u32, open_flags: u32 }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut { fh: u64, open_flags: u32, pad: u32 }
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    FlushIn { fh: u64, unused: u32, pad: u32, lock_owner: u64 }
    /// Arguments of READ, READDIR and READDIRPLUS.
    ReadIn { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, pad: u32 }
    WriteIn { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, pad: u32 }
    WriteOut { size: u32, pad: u32 }
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, pad: u32, spare: [u32; 6],
    }
    FsyncIn { fh: u64, flags: u32, pad: u32 }
    SetxattrIn { size: u32, flags: u32 }
    /// Arguments of GETXATTR and LISTXATTR.
    GetxattrIn { size: u32, pad: u32 }
    GetxattrOut { size: u32, pad: u32 }
    AccessIn { mask: u32, pad: u32 }
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, pad: u32 }
    LseekIn { fh: u64, offset: u64, whence: u32, pad: u32 }
    LseekOut { offset: u64 }
    CopyIn { fh_in: u64, offset_in: u64, node_out: u64, fh_out: u64, offset_out: u64, len: u64, flags: u64 }
    Dirent { ino: u64, offset: u64, name_len: u32, kind: u32 }
}

macro_rules! operations {
    ($($name:ident = $code:literal $effect:ident,)*) => {
        /// Operation of a request.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Op { $($name = $code,)* }

        impl Op {
            /// All supported operations.
            #[cfg(test)]
            pub(super) const ALL: &[Self] = &[$(Self::$name,)*];

            pub(super) fn of(code: u32) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }

            /// Whether a read-only directory refuses the operation regardless of its arguments.
            pub(super) fn changes(self) -> bool {
                match self { $(Self::$name => operations!(@ $effect),)* }
            }
        }
    };
    (@ reads) => { false };
    (@ changes) => { true };
}

operations! {
    Lookup = 1 reads, Forget = 2 reads, Getattr = 3 reads, Setattr = 4 changes, Readlink = 5 reads,
    Symlink = 6 changes, Mknod = 8 changes, Mkdir = 9 changes, Unlink = 10 changes, Rmdir = 11 changes,
    Rename = 12 changes, Link = 13 changes, Open = 14 reads, Read = 15 reads, Write = 16 changes,
    Statfs = 17 reads, Release = 18 reads, Fsync = 20 reads, Setxattr = 21 changes, Getxattr = 22 reads,
    Listxattr = 23 reads, Removexattr = 24 changes, Flush = 25 reads, Init = 26 reads, Opendir = 27 reads,
    Readdir = 28 reads, Releasedir = 29 reads, Fsyncdir = 30 reads, Access = 34 reads, Create = 35 changes,
    Interrupt = 36 reads, Destroy = 38 reads, Ioctl = 39 reads, NotifyReply = 41 reads, BatchForget = 42 reads,
    Fallocate = 43 changes, Readdirplus = 44 reads, Rename2 = 45 changes, Lseek = 46 reads,
    CopyFileRange = 47 changes,
}

impl Op {
    /// Whether the operation names a file that was opened for writing.
    pub(super) fn uses_handle(self) -> bool {
        matches!(self, Self::Write | Self::Fallocate | Self::CopyFileRange)
    }
}

/// Arguments of a request, consumed from the front. EINVAL if bytes are missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments<'a>(pub(super) &'a [u8]);

impl<'a> Arguments<'a> {
    pub(super) fn take<T: FromBytes>(&mut self) -> Result<T, Errno> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = rest;
        Ok(value)
    }

    /// Takes a string up to its NUL.
    pub(super) fn text(&mut self) -> Result<&'a CStr, Errno> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = self.0.get(text.count_bytes() + 1..).unwrap_or_default();
        Ok(text)
    }

    /// Takes the name of a directory entry.
    pub(super) fn name(&mut self) -> Result<Name<'a>, Errno> {
        Name::new(self.text()?)
    }

    /// Checks that no bytes are left.
    pub(super) fn end(self) -> Result<(), Errno> {
        if self.0.is_empty() { Ok(()) } else { Err(Errno::INVAL) }
    }
}

/// Single path component: never empty, `.`, `..`, with a slash, or longer than [`NAME_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name<'a>(&'a CStr);

impl<'a> Name<'a> {
    /// # Errors
    /// ENAMETOOLONG; EINVAL unless the text is a single component.
    pub(super) fn new(text: &'a CStr) -> Result<Self, Errno> {
        match text.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            bytes if bytes.len() > NAME_MAX => Err(Errno::NAMETOOLONG),
            _ => Ok(Self(text)),
        }
    }

    pub(super) fn as_c_str(self) -> &'a CStr {
        self.0
    }

    pub(super) fn as_bytes(self) -> &'a [u8] {
        self.0.to_bytes()
    }
}

/// Body of a reply, with space in front for the header that [`Body::seal`] writes.
#[derive(Debug)]
pub(super) struct Body(Vec<u8>);

impl Body {
    pub(super) fn empty() -> Self {
        Self(vec![0; size_of::<OutHeader>()])
    }

    pub(super) fn of(value: &(impl IntoBytes + Immutable)) -> Self {
        let mut body = Self::empty();
        body.push(value.as_bytes());
        body
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Length so far without the header, bytes.
    pub(super) fn len(&self) -> usize {
        self.0.len() - size_of::<OutHeader>()
    }

    /// Appends `len` zero bytes, for a system call to fill. [`Body::truncate`] removes the unused part.
    pub(super) fn room(&mut self, len: usize) -> &mut [u8] {
        let from = self.0.len();
        self.0.resize(from + len, 0);
        &mut self.0[from..]
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.0.truncate(size_of::<OutHeader>() + len);
    }

    /// Completes the reply to request `unique`.
    pub(super) fn seal(result: Result<Self, Errno>, unique: u64) -> Vec<u8> {
        let (Self(mut bytes), error) = match result {
            Ok(body) => (body, 0),
            Err(errno) => (Self::empty(), -errno.raw_os_error()),
        };
        let len = u32::try_from(bytes.len()).expect("no body is longer than DATA_MAX and a header");
        let header = OutHeader { len, error, unique };
        bytes[..size_of::<OutHeader>()].copy_from_slice(header.as_bytes());
        bytes
    }
}
