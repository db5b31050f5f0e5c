//! Directory content: blocks of 12-byte entries followed by their names, sorted by name over all blocks.

use super::{BLOCK, BLOCK_LEN, mode};

const ENTRY: usize = 12;

/// Size of a directory with these names, bytes. The last block is not padded.
pub(super) fn size<'n>(names: impl Iterator<Item = &'n [u8]>) -> u64 {
    let (mut full, mut used) = (0u64, 0usize);
    for name in names {
        let need = ENTRY + name.len();
        if used + need > BLOCK_LEN {
            full += 1;
            used = 0;
        }
        used += need;
    }
    full * BLOCK + used as u64
}

/// Encodes a directory. `children` are sorted by name and consist of name, node id and mode.
pub(super) fn encode(children: &[(&[u8], u64, u16)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = children;
    while !rest.is_empty() {
        let count = fitting_count(rest);
        let (block, after) = rest.split_at(count);
        encode_block(block, &mut out);
        if !after.is_empty() {
            out.resize(out.len().next_multiple_of(BLOCK_LEN), 0);
        }
        rest = after;
    }
    out
}

fn fitting_count(children: &[(&[u8], u64, u16)]) -> usize {
    let mut used = 0;
    let fits = |(name, _, _): &&(&[u8], u64, u16)| {
        used += ENTRY + name.len();
        used <= BLOCK_LEN
    };
    children.iter().take_while(fits).count()
}

fn encode_block(children: &[(&[u8], u64, u16)], out: &mut Vec<u8>) {
    let mut name_at = children.len() * ENTRY;
    for (name, nid, kind) in children {
        out.extend(nid.to_le_bytes());
        // Always below 4096: the offset is within the block.
        out.extend(u16::try_from(name_at).unwrap_or(u16::MAX).to_le_bytes());
        out.extend([file_type(*kind), 0]);
        name_at += name.len();
    }
    for (name, _, _) in children {
        out.extend(*name);
    }
}

fn file_type(kind: u16) -> u8 {
    match kind & mode::KIND {
        mode::FILE => 1,
        mode::DIR => 2,
        mode::CHAR => 3,
        mode::BLOCK => 4,
        mode::FIFO => 5,
        mode::SYMLINK => 7,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_matches_the_encoding() {
        for count in [2, 3, 100, 340, 341, 342, 5000] {
            let names: Vec<String> =
                (0..count).map(|n| format!("{:0>width$}", n, width = 6 + n % 200)).collect();
            let children: Vec<_> = names.iter().map(|n| (n.as_bytes(), 7, mode::FILE)).collect();
            assert_eq!(encode(&children).len() as u64, size(names.iter().map(String::as_bytes)), "{count}");
        }
    }
}
