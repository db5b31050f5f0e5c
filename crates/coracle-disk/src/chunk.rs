//! Sizes and ranges of chunks. Pure.

use std::ops::Range;

/// Limit of chunks in a pushed disk, so that its manifest stays below a thousand layers and 1 MiB. A disk with chunks of the
/// largest size may have more.
const CHUNKS_MAX: u64 = 999;
/// Limit of chunks in a pulled disk, and in a pushed disk with chunks of the largest size.
const CHUNKS_READ_MAX: u64 = 4096;
/// Smallest chunk of a disk that has more than one, bytes.
const CHUNK_MIN: u64 = 1 << 20;
/// Largest chunk, bytes, as in epoch.
const CHUNK_MAX: u64 = 4 << 30;

/// Range of default sizes: a small disk has small chunks, so that a small change is a small push.
const USUAL: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;
/// Smallest number of chunks, unless the chunks would be smaller than the default sizes.
const CHUNKS_MIN: u64 = 512;

/// Chunk size of a disk: `asked_bytes`, doubled until the number of chunks is within the limit. Default: 64 MiB, less for a
/// disk below 32 GiB.
pub(super) fn choose(disk_bytes: u64, asked_bytes: Option<u64>) -> u64 {
    let usual = || (disk_bytes / CHUNKS_MIN).clamp(*USUAL.start(), *USUAL.end());
    let asked = asked_bytes.unwrap_or_else(usual).checked_next_power_of_two().unwrap_or(CHUNK_MAX);
    let mut chunk = asked.clamp(CHUNK_MIN, CHUNK_MAX);
    while disk_bytes.div_ceil(chunk) > CHUNKS_MAX && chunk < CHUNK_MAX {
        chunk *= 2;
    }
    chunk
}

/// True when the number and the size of the chunks are supported.
pub(super) fn is_read(disk_bytes: u64, chunk_bytes: u64) -> bool {
    let is_large_enough = chunk_bytes >= CHUNK_MIN || chunk_bytes >= disk_bytes.max(1);
    is_large_enough && chunk_bytes <= CHUNK_MAX && disk_bytes.div_ceil(chunk_bytes) <= CHUNKS_READ_MAX
}

/// Ranges of all chunks in order. The last one may be shorter.
pub(super) fn all(disk_bytes: u64, chunk_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..disk_bytes.div_ceil(chunk_bytes))
        .map(move |n| n * chunk_bytes..((n + 1) * chunk_bytes).min(disk_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_size_table() {
        const MIB: u64 = 1 << 20;
        for (why, disk, asked, want) in [
            ("small", 10 * MIB, Some(64 * MIB), 64 * MIB),
            ("999 of them", 999 * 64 * MIB, Some(64 * MIB), 64 * MIB),
            ("one byte more", 999 * 64 * MIB + 1, Some(64 * MIB), 128 * MIB),
            ("a terabyte", 1 << 40, Some(64 * MIB), 2048 * MIB),
            ("layers of the old size", 50 << 30, Some(1 << 30), 1 << 30),
            ("no power of two", MIB, Some(3 * MIB), 4 * MIB),
            ("too small", MIB, Some(1), MIB),
            ("default, tiny", 10 * MIB, None, MIB),
            ("default, a gigabyte", 1 << 30, None, 2 * MIB),
            ("default, an odd size", (1 << 30) + 1, None, 2 * MIB),
            ("default, usual", 40 << 30, None, 64 * MIB),
            ("default, huge", 1 << 40, None, 2048 * MIB),
            ("more than 999 of the largest", 16 << 40, None, 4096 * MIB),
            ("larger than the largest", 1 << 40, Some(u64::MAX), 4096 * MIB),
        ] {
            assert_eq!(choose(disk, asked), want, "{why}");
            assert!(is_read(disk, want), "{why}: a pushed disk can be pulled");
        }
        assert!(!is_read((16 << 40) + 1, choose((16 << 40) + 1, None)), "nor is it written");
        let parts: Vec<_> = all(10, 4).collect();
        assert_eq!(parts, [0..4, 4..8, 8..10]);
        assert_eq!(all(0, 4).count(), 0);
    }
}
