//! Files with holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Holes are kept down to this size: a block of usual file systems.
const BLOCK: usize = 4096;

/// Writes the blocks that are not all zero, neighbours together. Where the others go the file has to have a hole.
pub(crate) fn write_data(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
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

/// Bytes of the blocks at the beginning that are all zero, or all not.
fn run(bytes: &[u8], zero: bool) -> usize {
    bytes.chunks(BLOCK).take_while(|block| is_zero(block) == zero).map(<[u8]>::len).sum()
}

pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Against itself, one byte on: the compiler's memcmp is faster than any loop here.
    bytes.first().is_none_or(|first| *first == 0)
        && bytes.get(1..).is_none_or(|rest| rest == &bytes[..rest.len()])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn zero_is_seen() {
        assert!(is_zero(&[]) && is_zero(&[0]) && !is_zero(&[1]) && !is_zero(&[0, 0, 1]));
    }

    #[test]
    fn what_is_not_zero_is_in_its_place_and_the_rest_a_hole() {
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
