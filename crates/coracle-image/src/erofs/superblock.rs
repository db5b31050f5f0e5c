//! Superblock: 128 bytes at offset 1024.

use std::{fs::File, io, os::unix::fs::FileExt};

use coracle_types::RootfsLayout;

use super::{BLOCK, BLOCK_LEN};

const OFFSET: u64 = 1024;
/// Bytes that the checksum covers: block 0 from the superblock on.
const COVERED: usize = BLOCK_LEN - 1024;
const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;

/// Volume name. It contains the version of the writer, so that files of an older version are rebuilt. Linux refuses a name that
/// fills all 16 bytes (`erofs_read_superblock`: "bad volume name without NIL terminator").
fn writer(layout: RootfsLayout) -> [u8; 16] {
    match layout {
        RootfsLayout::RootLast => *b"coracle-rootfs1\0",
        RootfsLayout::RootFirst => *b"coracle-rootfs2\0",
    }
}

pub(super) struct Superblock {
    pub(super) root_nid: u16,
    pub(super) inodes: u64,
    pub(super) blocks: u32,
    pub(super) meta_block: u32,
    pub(super) uuid: [u8; 16],
    pub(super) layout: RootfsLayout,
}

impl Superblock {
    pub(super) fn write(&self, file: &File) -> io::Result<()> {
        let mut bytes = vec![0; COVERED];
        // The root directory may be behind the superblock.
        file.read_exact_at(&mut bytes, OFFSET)?;
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC.to_le_bytes());
        put(8, &(COMPAT_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        put(12, &[12]); // block size as a power of two
        put(14, &self.root_nid.to_le_bytes());
        put(16, &self.inodes.to_le_bytes());
        put(36, &self.blocks.to_le_bytes());
        put(40, &self.meta_block.to_le_bytes());
        put(48, &self.uuid);
        put(64, &writer(self.layout));
        let sum = crc32c(&bytes);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        file.write_all_at(&bytes, OFFSET)
    }
}

/// True when the file is a complete image of this writer with this uuid and layout. Reads one block.
pub(crate) fn identity(file: &File, uuid: &[u8; 16], layout: RootfsLayout) -> io::Result<bool> {
    let mut bytes = vec![0; COVERED];
    match file.read_exact_at(&mut bytes, OFFSET) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        other => other?,
    }
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (sum, blocks) = (word(4), word(36));
    let ours = word(0) == MAGIC && &bytes[48..64] == uuid && bytes[64..80] == writer(layout);
    bytes[4..8].fill(0);
    Ok(ours && crc32c(&bytes) == sum && file.metadata()?.len() == u64::from(blocks) * BLOCK)
}

/// CRC-32C as the kernel computes it for EROFS: starts with all ones, not inverted at the end.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
    bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_the_published_check_value() {
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }
}
