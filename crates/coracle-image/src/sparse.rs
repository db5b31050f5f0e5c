//! Sparse writes: blocks of zeros become holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Smallest hole: the block size of common file systems.
const BLOCK: usize = 4096;

/// Writes the blocks that are not zero, adjacent ones in one call. The ranges of the other blocks must be holes in the file.
///
/// # Errors
/// Errors of the writes.
pub fn write_data(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let (zeros, rest) = bytes.split_at(run(bytes, true));
        let (data, behind) = rest.split_at(run(rest, false));
        at += zeros.len() as u64;
        if !data.is_empty() {
            file.write_all_at(data, at)?;
        }
        at += data.len() as u64;
        bytes = behind;
    }
    Ok(())
}

/// Length of the leading run of blocks that are all zeros, or with `zero` unset, that are not.
fn run(bytes: &[u8], zero: bool) -> usize {
    bytes.chunks(BLOCK).take_while(|block| is_zero(block) == zero).map(<[u8]>::len).sum()
}

/// True when all bytes are zero.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // Compares the bytes with themselves, shifted by one byte: memcmp is faster than a loop here.
    bytes.first().is_none_or(|first| *first == 0)
        && bytes.get(1..).is_none_or(|rest| rest == &bytes[..rest.len()])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn is_zero_table() {
        assert!(is_zero(&[]) && is_zero(&[0]) && !is_zero(&[1]) && !is_zero(&[0, 0, 1]));
    }

    #[test]
    fn sparse_write_preserves_data_and_holes() {
        let mut bytes = vec![0; 1 << 20];
        for at in [5, 100_000, 104_400, (1 << 20) - 1] {
            bytes[at] = 1;
        }
        let file = tempfile::tempfile().unwrap();
        write_data(&file, &bytes, 4096).unwrap();
        let mut back = vec![9; 1 << 20];
        file.read_exact_at(&mut back, 4096).unwrap();
        assert!(back == bytes);
        assert!(file.metadata().unwrap().blocks() * 512 <= 32 << 10);
        write_data(&file, &[], 0).unwrap();
    }
}
