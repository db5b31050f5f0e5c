//! Statistics of the machine, from /proc (proc(5)) and statvfs(3).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::sample::{DiskSpace, Interface, NodeSample};

/// Nanoseconds in a tick of `/proc/stat`; USER_HZ is 100 on every architecture with a stable interface.
const TICK_NS: u64 = 10_000_000;

/// Reads the statistics of the machine; `dir` is on the disk of the node. Values that cannot be read stay unknown.
pub(crate) async fn read(dir: PathBuf, time_ms: i64) -> NodeSample {
    let read = coracle_files::blocking(move || Ok(read_now(&dir, time_ms)));
    read.await.unwrap_or_else(|_| NodeSample { time_ms, ..NodeSample::default() })
}

fn read_now(dir: &Path, time_ms: i64) -> NodeSample {
    let text = |name: &str| fs::read_to_string(Path::new("/proc").join(name)).unwrap_or_default();
    let mut sample = NodeSample { time_ms, disk: disk(dir).ok(), ..NodeSample::default() };
    read_stat(&text("stat"), &mut sample);
    read_meminfo(&text("meminfo"), &mut sample);
    sample.interfaces = interfaces(&text("net/dev"));
    sample.processes = processes(&text("loadavg"));
    sample.processes_max = text("sys/kernel/pid_max").trim().parse().ok();
    sample
}

/// Parses CPU time and boot time. Pure.
fn read_stat(text: &str, sample: &mut NodeSample) {
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("cpu") => {
                // The fields are user nice system idle iowait irq softirq steal; the time of guests is included in user.
                let ticks: Vec<u64> = words.take(8).filter_map(|word| word.parse().ok()).collect();
                let [user, nice, system, _idle, _iowait, irq, softirq, steal] = ticks[..] else { continue };
                let busy = [user, nice, system, irq, softirq, steal].into_iter().fold(0, u64::saturating_add);
                sample.cpu_ns = Some(busy.saturating_mul(TICK_NS));
            }
            Some("btime") => {
                let seconds = words.next().and_then(|word| word.parse::<i64>().ok());
                sample.boot_ms = seconds.map(|seconds| seconds.saturating_mul(1000));
            }
            _ => {}
        }
    }
}

/// Parses memory and swap. Pure.
fn read_meminfo(text: &str, sample: &mut NodeSample) {
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let kib = value.trim().trim_end_matches(" kB").parse::<u64>().ok();
        let bytes = kib.map(|kib| kib.saturating_mul(1024));
        match name {
            "MemTotal" => sample.memory_total_bytes = bytes,
            "MemAvailable" => sample.memory_available_bytes = bytes,
            "AnonPages" => sample.memory_rss_bytes = bytes,
            "SwapTotal" => sample.swap_total_bytes = bytes,
            "SwapFree" => sample.swap_free_bytes = bytes,
            _ => {}
        }
    }
}

/// Parses all interfaces except loopback. Pure.
fn interfaces(text: &str) -> Vec<Interface> {
    let interface = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let numbers: Vec<u64> =
            numbers.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
        let at = |index: usize| numbers.get(index).copied();
        Some(Interface {
            name: name.trim().to_owned(),
            receive_bytes: at(0)?,
            receive_errors: at(2)?,
            transmit_bytes: at(8)?,
            transmit_errors: at(10)?,
        })
    };
    text.lines().filter_map(interface).filter(|interface| interface.name != "lo").collect()
}

/// Parses the number of processes. Pure.
fn processes(loadavg: &str) -> Option<u64> {
    loadavg.split_ascii_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

fn disk(dir: &Path) -> io::Result<DiskSpace> {
    let stat = rustix::fs::statvfs(dir)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(DiskSpace {
        capacity_bytes: bytes(stat.f_blocks),
        available_bytes: bytes(stat.f_bavail),
        used_bytes: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn procfs_stats_are_parsed_and_garbage_is_ignored() {
        let mut sample = NodeSample::default();
        read_stat(
            "cpu  100 20 30 4000 5 6 7 8 9 0\ncpu0 1 2 3\nbtime 1700000000\nprocesses 5\n",
            &mut sample,
        );
        assert_eq!((sample.cpu_ns, sample.boot_ms), (Some(1_710_000_000), Some(1_700_000_000_000)));
        read_meminfo(
            "MemTotal:       16 kB\nMemAvailable:   8 kB\nAnonPages: 2 kB\nHugePages: 0\n",
            &mut sample,
        );
        let memory = (sample.memory_total_bytes, sample.memory_available_bytes, sample.memory_rss_bytes);
        assert_eq!(memory, (Some(16384), Some(8192), Some(2048)));
        assert_eq!(sample.swap_total_bytes, None, "it is not there");
        let dev = "Inter-|   Receive | Transmit\n face |bytes packets errs\n    lo: 1 2 3 4 5 6 7 8 9 10 11 12\n  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n";
        let want = Interface {
            name: "eth0".into(),
            receive_bytes: 1,
            receive_errors: 3,
            transmit_bytes: 9,
            transmit_errors: 11,
        };
        assert_eq!(interfaces(dev), [want]);
        assert_eq!(processes("0.1 0.2 0.3 2/345 6789"), Some(345));
        for garbage in ["", "cpu", "cpu x y", "a:b", ":", "1/2"] {
            let mut sample = NodeSample::default();
            read_stat(garbage, &mut sample);
            read_meminfo(garbage, &mut sample);
            assert_eq!(sample, NodeSample::default(), "{garbage}");
            assert_eq!((interfaces(garbage), processes(garbage)), (vec![], None), "{garbage}");
        }
    }

    #[tokio::test]
    async fn node_sample_is_read_from_the_host() {
        let sample = read("/".into(), 5).await;
        assert!(sample.cpu_ns > Some(0) && sample.memory_total_bytes > Some(0), "{sample:?}");
        assert!(sample.disk.is_some_and(|disk| disk.capacity_bytes > 0) && sample.time_ms == 5);
    }
}
