//! Resource usage, from the text files of `/proc` (proc(5)). The parsers are pure; a missing field is 0, never an error.

use std::fs::{self, File};
use std::io::Read as _;

/// Maximum that is read of a `/proc` file, bytes.
const FILE_MAX: u64 = 256 * 1024;
/// Nanoseconds per clock tick (USER_HZ is 100 on every supported architecture).
const TICK_NS: u64 = 10_000_000;

/// Total and available memory of `/proc/meminfo`, bytes.
#[must_use]
pub fn memory(text: &str) -> (u64, u64) {
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|l| l.split_whitespace().next())
            .and_then(|n| n.parse::<u64>().ok())
            .unwrap_or(0)
            .saturating_mul(1024)
    };
    (field("MemTotal:"), field("MemAvailable:"))
}

/// CPU time of all processors, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// In user mode.
    pub user: u64,
    /// In the kernel, with interrupts.
    pub system: u64,
    /// Taken by the hypervisor.
    pub steal: u64,
}

/// CPU times in the first line of `/proc/stat`: user nice system idle iowait irq softirq steal guest guest_nice.
#[must_use]
pub fn cpu(text: &str) -> Cpu {
    let line = text.lines().find_map(|l| l.strip_prefix("cpu ")).unwrap_or("");
    let ticks: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap_or(0)).collect();
    let sum = |at: &[usize]| {
        at.iter()
            .filter_map(|i| ticks.get(*i))
            .fold(0u64, |a, b| a.saturating_add(*b))
            .saturating_mul(TICK_NS)
    };
    Cpu { user: sum(&[0, 1]), system: sum(&[2, 5, 6]), steal: sum(&[7]) }
}

/// Sums of the sixteen counters in `/proc/net/dev` of all links except loopback: bytes, packets, errors, dropped and four more
/// of received packets, then the same of sent ones.
#[must_use]
pub fn network(text: &str) -> [u64; 16] {
    let links = text.lines().filter_map(|l| l.split_once(':')).filter(|(name, _)| name.trim() != "lo");
    links.fold([0; 16], |mut sums, (_, counters)| {
        let fields = counters.split_whitespace().map(|n| n.parse::<u64>().unwrap_or(0));
        sums.iter_mut().zip(fields).for_each(|(sum, field)| *sum = sum.saturating_add(field));
        sums
    })
}

/// Resident pages, the second field of `/proc/self/statm`.
#[must_use]
pub fn resident_pages(text: &str) -> u64 {
    text.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Text of a file of `/proc`; empty if it cannot be read. Blocking, short.
#[must_use]
pub fn read(path: &str) -> String {
    let mut text = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(FILE_MAX).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Number of processes.
#[must_use]
pub fn processes() -> u32 {
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    let numbers =
        entries.flatten().filter(|e| e.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    u32::try_from(numbers.count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsers_read_procfs_formats() {
        assert_eq!(
            memory("MemTotal:  24105 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n"),
            (24_683_520, 524_288)
        );
        let stat = "cpu  100 5 30 900 7 2 3 11 0 0\ncpu0 1 1 1 1\n";
        assert_eq!(cpu(stat), Cpu { user: 1_050_000_000, system: 350_000_000, steal: 110_000_000 });
        let dev = "Inter-|   Receive\n face |bytes packets\n    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n  eth0:700 3 0 0 0 0 0 0 800 4 0 0 0 0 0 0\n";
        assert_eq!((network(dev)[0], network(dev)[8], network(dev)[9]), (700, 800, 4));
        assert_eq!(resident_pages("500 123 90 1 0 2 0\n"), 123);
    }

    #[test]
    fn malformed_procfs_text_reads_as_zero() {
        for text in ["", "cpu ", "MemTotal:", "eth0:", "a:b:c\ncpu x y z\nMemTotal: -1", "\u{fffd}"] {
            assert_eq!(
                (memory(text), cpu(text), network(text), resident_pages(text)),
                ((0, 0), Cpu::default(), [0; 16], 0),
                "{text:?}"
            );
        }
        assert_eq!(memory(&format!("MemTotal: {} kB", u64::MAX)).0, u64::MAX);
    }
}
