//! Metrics under the names of cadvisor. One table contains descriptors and samples; metrics that guests do not report are not
//! announced. Pure, except for the table of pods.

use std::sync::Arc;

use coracle_host::ContainerRecord;
use coracle_proto::cri::{
    ContainerMetrics, Metric, MetricDescriptor, MetricType, PodSandboxMetrics, UInt64Value,
};
use coracle_proto::guest::{ContainerStatistics, MetricsResponse};

use crate::server::CriServer;
use crate::stats::{INTERFACE, Report};
use crate::table::{ContainerEntry, Pod};

/// Labels of every metric, before its additional ones.
const LABELS: [&str; 6] = ["id", "name", "image", "container", "pod", "namespace"];
const SECOND_NS: u64 = 1_000_000_000;

/// Source of a container's values.
struct Sample {
    container: ContainerStatistics,
    guest: MetricsResponse,
    record: Arc<ContainerRecord>,
    /// cgroup v1 CPU shares from the kubelet.
    cpu_shares: u64,
    cpu_period: u64,
    /// Time of the sample, in seconds since 1970.
    time: u64,
}

/// Metric of a container.
struct Row {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    /// Additional labels with their values.
    labels: &'static [(&'static str, &'static str)],
    /// Value of a sample; `None`: the metric is announced and never sampled.
    value: Option<fn(&Sample) -> u64>,
}

const fn counter(name: &'static str, help: &'static str, value: fn(&Sample) -> u64) -> Row {
    Row { name, help, kind: MetricType::Counter, labels: &[], value: Some(value) }
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&Sample) -> u64) -> Row {
    Row { name, help, kind: MetricType::Gauge, labels: &[], value: Some(value) }
}

const fn of_disk(row: Row) -> Row {
    Row { labels: &[("device", "overlay")], ..row }
}

const fn unsampled(name: &'static str, help: &'static str) -> Row {
    Row { name, help, kind: MetricType::Counter, labels: &[("device", "overlay")], value: None }
}

/// Metrics of each container.
const CONTAINER: [Row; 35] = [
    counter("container_cpu_cfs_periods_total", "Periods in which a CPU quota was enforced", |s| {
        s.container.cpu_periods
    }),
    counter(
        "container_cpu_cfs_throttled_periods_total",
        "Periods in which the container was throttled",
        |s| s.container.cpu_throttled_periods,
    ),
    counter("container_cpu_cfs_throttled_seconds_total", "Time that the container was throttled", |s| {
        s.container.cpu_throttled_ns / SECOND_NS
    }),
    counter("container_cpu_system_seconds_total", "CPU time in the kernel", |s| {
        s.container.cpu_system_ns / SECOND_NS
    }),
    Row {
        labels: &[("cpu", "total")],
        ..counter("container_cpu_usage_seconds_total", "CPU time", |s| s.container.cpu_usage_ns / SECOND_NS)
    },
    counter("container_cpu_user_seconds_total", "CPU time in programs", |s| {
        s.container.cpu_user_ns / SECOND_NS
    }),
    gauge("container_file_descriptors", "Open file descriptors", |s| s.container.file_descriptors),
    of_disk(gauge("container_fs_inodes_free", "Free inodes of the writable disk", |s| {
        s.guest.overlay_inodes_free
    })),
    of_disk(gauge("container_fs_inodes_total", "Inodes of the writable disk", |s| s.guest.overlay_inodes)),
    of_disk(gauge("container_fs_limit_bytes", "Size of the writable disk", |s| s.guest.overlay_total_bytes)),
    of_disk(gauge("container_fs_usage_bytes", "Bytes that the container has written", |s| {
        s.container.filesystem_used_bytes
    })),
    gauge("container_last_seen", "When the container was last seen, seconds since 1970", |s| s.time),
    gauge("container_memory_cache", "Memory of the page cache", |s| s.container.memory_cache_bytes),
    counter("container_memory_failcnt", "How often the memory limit was reached", |s| {
        s.container.memory_limit_hits
    }),
    Row {
        labels: &[("failure_type", "pgfault"), ("scope", "container")],
        ..counter("container_memory_failures_total", "Page faults", |s| s.container.page_faults)
    },
    gauge("container_memory_kernel_usage", "Memory of the kernel", |s| s.container.memory_kernel_bytes),
    gauge("container_memory_mapped_file", "Memory of mapped files", |s| s.container.memory_mapped_file_bytes),
    gauge("container_memory_max_usage_bytes", "Most memory that was used", |s| s.container.memory_peak_bytes),
    gauge("container_memory_rss", "Anonymous memory", |s| s.container.memory_rss_bytes),
    gauge("container_memory_swap", "Swap", |s| s.container.memory_swap_bytes),
    gauge("container_memory_usage_bytes", "Memory, with all caches", |s| s.container.memory_usage_bytes),
    gauge("container_memory_working_set_bytes", "Memory that cannot be reclaimed", |s| {
        s.container.memory_working_set_bytes
    }),
    counter("container_oom_events_total", "Processes killed for want of memory", |s| s.container.oom_kills),
    gauge("container_processes", "Processes", |s| s.container.processes),
    gauge("container_sockets", "Open sockets", |s| s.container.sockets),
    gauge("container_spec_cpu_period", "Period of the CPU quota, microseconds", |s| s.cpu_period),
    gauge("container_spec_cpu_shares", "CPU shares", |s| s.cpu_shares),
    gauge("container_spec_memory_limit_bytes", "Memory limit; 0: none", |s| {
        s.record.spec.resources.memory_max_bytes.unwrap_or(0)
    }),
    gauge("container_spec_memory_swap_limit_bytes", "Swap limit; 0: none", |_| 0),
    gauge("container_start_time_seconds", "When the container started, seconds since 1970", |s| {
        s.record.started_at.map_or(0, |time| u64::try_from(time.0 / 1000).unwrap_or(0))
    }),
    gauge("container_threads", "Threads", |s| s.container.threads),
    gauge("container_threads_max", "Most threads; 0: no limit", |s| {
        s.record.spec.resources.pids_max.unwrap_or(0)
    }),
    unsampled("container_blkio_device_usage_total", "Bytes of block devices"),
    unsampled("container_fs_reads_bytes_total", "Bytes that were read"),
    unsampled("container_fs_writes_bytes_total", "Bytes that were written"),
];
/// Further metrics that are announced and never sampled.
const UNSAMPLED: [Row; 2] = [
    unsampled("container_fs_reads_total", "Reads that were completed"),
    unsampled("container_fs_writes_total", "Writes that were completed"),
];

/// Metric of a pod's network.
type NetworkRow = (&'static str, &'static str, fn(&MetricsResponse) -> u64);

const NETWORK: [NetworkRow; 8] = [
    ("container_network_receive_bytes_total", "Bytes received", |m| m.net_receive_bytes),
    ("container_network_receive_errors_total", "Errors while receiving", |m| m.net_receive_errors),
    ("container_network_receive_packets_dropped_total", "Received packets that were dropped", |m| {
        m.net_receive_dropped
    }),
    ("container_network_receive_packets_total", "Packets received", |m| m.net_receive_packets),
    ("container_network_transmit_bytes_total", "Bytes sent", |m| m.net_transmit_bytes),
    ("container_network_transmit_errors_total", "Errors while sending", |m| m.net_transmit_errors),
    ("container_network_transmit_packets_dropped_total", "Packets that were not sent", |m| {
        m.net_transmit_dropped
    }),
    ("container_network_transmit_packets_total", "Packets sent", |m| m.net_transmit_packets),
];

fn keys(own: &[(&str, &str)]) -> Vec<String> {
    LABELS.iter().chain(own.iter().map(|(key, _)| key)).map(|key| (*key).to_owned()).collect()
}

/// Returns the descriptors of all announced metrics.
pub(crate) fn descriptors() -> Vec<MetricDescriptor> {
    let of_container = CONTAINER.iter().chain(&UNSAMPLED).map(|row| (row.name, row.help, keys(row.labels)));
    let of_network = NETWORK.iter().map(|(name, help, _)| (*name, *help, keys(&[("interface", "")])));
    let descriptor = |(name, help, label_keys): (&str, &str, Vec<String>)| {
        let (name, help) = (name.to_owned(), help.to_owned());
        MetricDescriptor { name, help, label_keys }
    };
    of_container.chain(of_network).map(descriptor).collect()
}

impl CriServer {
    /// Returns the samples of all running pods.
    pub(crate) fn pod_sandbox_metrics(&self) -> Vec<PodSandboxMetrics> {
        let pods = self.0.table.pods(&self.0.host);
        pods.iter().filter(|pod| pod.is_ready()).map(|pod| of_pod(pod, &self.report(pod))).collect()
    }
}

fn of_pod(pod: &Pod, report: &Report) -> PodSandboxMetrics {
    let guest = report.sandbox();
    let labels = labels(pod, None);
    let network = NETWORK.iter().map(|(name, _, value)| {
        let own = [INTERFACE.to_owned()];
        metric(name, MetricType::Counter, report.time, [&labels[..], &own].concat(), value(&guest))
    });
    let running = pod.containers.iter().filter(|container| container.is_running());
    PodSandboxMetrics {
        pod_sandbox_id: pod.id().to_owned(),
        metrics: network.collect(),
        container_metrics: running.map(|container| of_container(pod, container, report)).collect(),
    }
}

fn of_container(pod: &Pod, container: &ContainerEntry, report: &Report) -> ContainerMetrics {
    let limits = container.facts.config.linux.clone().unwrap_or_default().resources.unwrap_or_default();
    let limits = crate::translate::resources::effective(&limits);
    let sample = Sample {
        container: report.container(&container.entry.id),
        guest: report.sandbox(),
        record: container.record.clone(),
        cpu_shares: limits.cpu_shares.unsigned_abs(),
        cpu_period: limits.cpu_period.unsigned_abs(),
        time: u64::try_from(report.time).unwrap_or(0) / SECOND_NS,
    };
    let labels = labels(pod, Some(container));
    let metrics = CONTAINER.iter().filter_map(|row| {
        let own: Vec<_> = row.labels.iter().map(|(_, value)| (*value).to_owned()).collect();
        let values = [&labels[..], &own].concat();
        Some(metric(row.name, row.kind, report.time, values, (row.value?)(&sample)))
    });
    ContainerMetrics { container_id: container.entry.id.clone(), metrics: metrics.collect() }
}

/// Returns the values of the labels that every metric has.
fn labels(pod: &Pod, container: Option<&ContainerEntry>) -> Vec<String> {
    let metadata = pod.entry.metadata.clone().unwrap_or_default();
    let (id, name, image, of) = match container {
        Some(container) => (
            container.entry.id.clone(),
            container.entry.id.clone(),
            container.entry.image_ref.clone(),
            container.entry.metadata.clone().unwrap_or_default().name,
        ),
        None => (pod.id().to_owned(), pod.id().to_owned(), String::new(), "POD".to_owned()),
    };
    vec![id, name, image, of, metadata.name, metadata.namespace]
}

fn metric(name: &str, kind: MetricType, timestamp: i64, label_values: Vec<String>, value: u64) -> Metric {
    Metric {
        name: name.to_owned(),
        timestamp,
        metric_type: kind.into(),
        label_values,
        value: Some(UInt64Value { value }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn descriptors_are_unique_and_explained() {
        let all = descriptors();
        let names: BTreeSet<_> = all.iter().map(|descriptor| descriptor.name.as_str()).collect();
        assert_eq!((all.len(), names.len()), (45, 45), "40 with a sample, five without");
        for descriptor in &all {
            assert!(
                !descriptor.help.is_empty() && descriptor.label_keys.starts_with(&keys(&[])),
                "{descriptor:?}"
            );
        }
        let sampled = CONTAINER.iter().filter(|row| row.value.is_some()).count() + NETWORK.len();
        assert_eq!(sampled, 40);
    }
}
