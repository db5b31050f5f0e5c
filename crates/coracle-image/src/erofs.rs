//! Writer of uncompressed EROFS images (Linux 5.4 and later). Equal content gives equal bytes.
//!
//! Layout: block 0 holds the superblock, and the root directory if it fits. Then follow the file data in the order of the
//! archives, the inodes (small files, links and small directories are stored behind their inode), and the large directories.
//! Format: Linux `Documentation/filesystems/erofs.rst` and `fs/erofs/erofs_fs.h`; extended 64-byte inodes, flat layouts only.

mod data;
mod dir;
mod layout;
mod superblock;
mod xattr;

pub(crate) use data::{CopyError, DataWriter};
pub(crate) use layout::write;
pub(crate) use superblock::identity;
pub(crate) use xattr::encode as encode_xattrs;

/// Bytes of a block, as a length and as an offset.
pub(crate) const BLOCK_LEN: usize = 4096;
pub(crate) const BLOCK: u64 = BLOCK_LEN as u64;

/// Largest content that is stored behind its inode instead of in blocks, bytes.
pub(crate) const INLINE_MAX: usize = 2048;

/// File type bits of `st_mode`.
pub(crate) mod mode {
    pub(crate) const FIFO: u16 = 0o010_000;
    pub(crate) const CHAR: u16 = 0o020_000;
    pub(crate) const DIR: u16 = 0o040_000;
    pub(crate) const BLOCK: u16 = 0o060_000;
    pub(crate) const FILE: u16 = 0o100_000;
    pub(crate) const SYMLINK: u16 = 0o120_000;
    pub(crate) const KIND: u16 = 0o170_000;
}

/// Metadata of every inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Type and permission bits.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    /// Extended attributes, encoded by [`encode_xattrs`].
    pub(crate) xattrs: Vec<u8>,
}

/// Inode to write. Other inodes refer to it by its index in the list. The first one is the root directory.
pub(crate) struct Object<'t> {
    pub(crate) meta: &'t Meta,
    pub(crate) links: u32,
    pub(crate) body: Body<'t>,
}

/// Content of an inode.
pub(crate) enum Body<'t> {
    /// Directory. Children are sorted by name, without `.` and `..`.
    Dir { parent: u32, children: Vec<(&'t [u8], u32)> },
    /// Small file, or target of a symbolic link.
    Bytes(&'t [u8]),
    /// File whose data [`DataWriter`] wrote.
    Blocks { block: u32, size: u64 },
    /// Device node.
    Device { major: u32, minor: u32 },
    /// Named pipe.
    Empty,
}
