//! Damages valid archives as random numbers of a property test select.

const BLOCK: usize = 512;
/// Sizes that valid headers of the tests do not have.
const SIZES: [u64; 6] = [0, 1, 513, 4096, 1 << 30, (1 << 33) - 1];
const KINDS: &[u8] = b"0123456xgLKSQ\0";
/// Names that leave the root, have a special meaning, or are empty.
const NAMES: [&str; 7] =
    ["../outside", "/outside", "a/../../outside", "manifest.json", "snapshot.json", ".wh.f", ""];

/// Damages a tar archive: each of `draws` selects kind, place and value of one change. A changed header gets a valid checksum,
/// so that it is parsed.
pub fn spoil(tar: &mut Vec<u8>, draws: &[(u8, usize, u64)]) {
    for (what, place, value) in draws {
        if tar.len() < BLOCK {
            return;
        }
        let block = place % (tar.len() / BLOCK) * BLOCK;
        let pick = |n: usize| usize::try_from(*value % n as u64).unwrap_or(0);
        match what % 8 {
            0 | 1 => {
                let at = place % tar.len();
                tar[at] = value.to_le_bytes()[0];
            }
            2 | 3 => {
                let size = format!("{:011o}\0", SIZES[pick(SIZES.len())]);
                tar[block + 124..block + 136].copy_from_slice(size.as_bytes());
            }
            4 => tar[block + 156] = KINDS[pick(KINDS.len())],
            5 => {
                let name = NAMES[pick(NAMES.len())];
                tar[block..block + 100].fill(0);
                tar[block..block + name.len()].copy_from_slice(name.as_bytes());
            }
            6 => tar.truncate(place % tar.len()),
            _ => tar.extend_from_within(block..),
        }
        if let Some(header) = tar.get_mut(block..block + BLOCK)
            && header[257..262] == *b"ustar"
        {
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
}
