//! Where windows begin and end. Pure.

use std::ops::Range;

/// Most windows of one disk: a manifest stays below a thousand layers and a mebibyte.
const WINDOWS_MAX: u64 = 999;

/// A window that nobody chose: a small disk has small ones, so that a small change is a small push.
const USUAL: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;
/// Windows that a disk has at least, unless they would be smaller than usual.
const WINDOWS_MIN: u64 = 512;

/// The window for a disk: the one asked for, doubled until there are few enough; 64 MiB, or less for a disk below 32 GiB,
/// when none is.
pub(super) fn choose(disk_bytes: u64, asked_bytes: Option<u64>) -> u64 {
    let usual = || (disk_bytes / WINDOWS_MIN).clamp(*USUAL.start(), *USUAL.end());
    let mut window = asked_bytes.unwrap_or_else(usual).next_power_of_two().max(1 << 20);
    while disk_bytes.div_ceil(window) > WINDOWS_MAX {
        window *= 2;
    }
    window
}

/// All windows of a disk, in order; the last one may be shorter.
pub(super) fn all(disk_bytes: u64, window_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..disk_bytes.div_ceil(window_bytes))
        .map(move |n| n * window_bytes..((n + 1) * window_bytes).min(disk_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_table() {
        const MIB: u64 = 1 << 20;
        for (why, disk, asked, want) in [
            ("small", 10 * MIB, Some(64 * MIB), 64 * MIB),
            ("999 of them", 999 * 64 * MIB, Some(64 * MIB), 64 * MIB),
            ("one byte more", 999 * 64 * MIB + 1, Some(64 * MIB), 128 * MIB),
            ("a terabyte", 1 << 40, Some(64 * MIB), 2048 * MIB),
            ("layers of the old size", 50 << 30, Some(1 << 30), 1 << 30),
            ("no power of two", MIB, Some(3 * MIB), 4 * MIB),
            ("too small", MIB, Some(1), MIB),
            ("nobody chose, tiny", 10 * MIB, None, MIB),
            ("nobody chose, a gigabyte", 1 << 30, None, 2 * MIB),
            ("nobody chose, an odd size", (1 << 30) + 1, None, 2 * MIB),
            ("nobody chose, usual", 40 << 30, None, 64 * MIB),
            ("nobody chose, huge", 1 << 40, None, 2048 * MIB),
        ] {
            assert_eq!(choose(disk, asked), want, "{why}");
        }
        let parts: Vec<_> = all(10, 4).collect();
        assert_eq!(parts, [0..4, 4..8, 8..10]);
        assert_eq!(all(0, 4).count(), 0);
    }
}
