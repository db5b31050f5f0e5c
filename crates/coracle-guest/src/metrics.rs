//! Resource usage of the guest, from the text files of `/proc`; a missing field is 0, never an error.

use std::path::Path;

use coracle_procfs::usage::{cpu, memory, network, processes, read, resident_pages};
use coracle_proto::guest::MetricsResponse;

/// Collects all metrics; `overlay` is a directory on the writable disk.
pub(crate) fn collect(overlay: &Path) -> MetricsResponse {
    let (memory_total_bytes, memory_available_bytes) = memory(&read("/proc/meminfo"));
    let cpu = cpu(&read("/proc/stat"));
    let net = network(&read("/proc/net/dev"));
    let disk = rustix::fs::statvfs(overlay).ok();
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    MetricsResponse {
        memory_total_bytes,
        memory_available_bytes,
        cpu_user_ns: cpu.user,
        cpu_system_ns: cpu.system,
        cpu_steal_ns: cpu.steal,
        net_receive_bytes: net[0],
        net_receive_packets: net[1],
        net_receive_errors: net[2],
        net_receive_dropped: net[3],
        net_transmit_bytes: net[8],
        net_transmit_packets: net[9],
        net_transmit_errors: net[10],
        net_transmit_dropped: net[11],
        overlay_inodes: disk.as_ref().map_or(0, |d| d.f_files),
        overlay_inodes_free: disk.as_ref().map_or(0, |d| d.f_ffree),
        overlay_total_bytes: disk.as_ref().map_or(0, |d| d.f_blocks.saturating_mul(d.f_frsize)),
        overlay_available_bytes: disk.as_ref().map_or(0, |d| d.f_bavail.saturating_mul(d.f_frsize)),
        processes: processes(),
        agent_rss_bytes: resident_pages(&read("/proc/self/statm")).saturating_mul(page),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collected_host_metrics_are_nonzero() {
        let m = collect(Path::new("/"));
        assert!(
            m.memory_total_bytes > m.memory_available_bytes
                && m.cpu_user_ns > 0
                && m.processes > 1
                && m.agent_rss_bytes > 0,
            "{m:?}"
        );
        assert!(m.overlay_total_bytes >= m.overlay_available_bytes);
    }
}
