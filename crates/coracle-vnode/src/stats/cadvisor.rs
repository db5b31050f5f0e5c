//! `/metrics/cadvisor`: metrics of containers under the names of cadvisor, limited to those that guests report. Pure.

use coracle_proto::guest::{ContainerStatistics, MetricsResponse};

use super::resource::containers;
use super::sample::{ContainerSample, PodSample};
use super::text::{Text, seconds};

/// Metric of a container: name, type, help, additional labels, value.
type Row = (
    &'static str,
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
    fn(&ContainerStatistics) -> f64,
);
/// Metric of a pod's network.
type NetworkRow = (&'static str, &'static str, fn(&MetricsResponse) -> u64);

/// Name of the network interface in guests.
pub(super) const INTERFACE: &str = "eth0";

const CONTAINER: [Row; 22] = [
    ("container_cpu_usage_seconds_total", "counter", "CPU time", &[("cpu", "total")], |s| {
        seconds(s.cpu_usage_ns)
    }),
    ("container_cpu_user_seconds_total", "counter", "CPU time in programs", &[], |s| seconds(s.cpu_user_ns)),
    ("container_cpu_system_seconds_total", "counter", "CPU time in the kernel", &[], |s| {
        seconds(s.cpu_system_ns)
    }),
    ("container_cpu_cfs_periods_total", "counter", "Periods in which a CPU quota was enforced", &[], |s| {
        s.cpu_periods as f64
    }),
    ("container_cpu_cfs_throttled_periods_total", "counter", "Periods with throttling", &[], |s| {
        s.cpu_throttled_periods as f64
    }),
    ("container_cpu_cfs_throttled_seconds_total", "counter", "Time of throttling", &[], |s| {
        seconds(s.cpu_throttled_ns)
    }),
    ("container_memory_usage_bytes", "gauge", "Memory, with all caches", &[], |s| {
        s.memory_usage_bytes as f64
    }),
    ("container_memory_working_set_bytes", "gauge", "Memory that cannot be reclaimed", &[], |s| {
        s.memory_working_set_bytes as f64
    }),
    ("container_memory_rss", "gauge", "Anonymous memory", &[], |s| s.memory_rss_bytes as f64),
    ("container_memory_cache", "gauge", "Memory of the page cache", &[], |s| s.memory_cache_bytes as f64),
    ("container_memory_swap", "gauge", "Swap", &[], |s| s.memory_swap_bytes as f64),
    ("container_memory_max_usage_bytes", "gauge", "Most memory that was used", &[], |s| {
        s.memory_peak_bytes as f64
    }),
    ("container_memory_kernel_usage", "gauge", "Memory of the kernel", &[], |s| s.memory_kernel_bytes as f64),
    ("container_memory_mapped_file", "gauge", "Memory of mapped files", &[], |s| {
        s.memory_mapped_file_bytes as f64
    }),
    ("container_memory_failcnt", "counter", "How often the memory limit was reached", &[], |s| {
        s.memory_limit_hits as f64
    }),
    (
        "container_memory_failures_total",
        "counter",
        "Page faults",
        &[("failure_type", "pgfault"), ("scope", "container")],
        |s| s.page_faults as f64,
    ),
    ("container_oom_events_total", "counter", "Processes killed for want of memory", &[], |s| {
        s.oom_kills as f64
    }),
    ("container_fs_usage_bytes", "gauge", "Bytes written to the root", &[("device", "overlay")], |s| {
        s.filesystem_used_bytes as f64
    }),
    ("container_processes", "gauge", "Processes", &[], |s| s.processes as f64),
    ("container_threads", "gauge", "Threads", &[], |s| s.threads as f64),
    ("container_file_descriptors", "gauge", "Open file descriptors", &[], |s| s.file_descriptors as f64),
    ("container_sockets", "gauge", "Open sockets", &[], |s| s.sockets as f64),
];

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

/// Returns the metrics of containers that their guests have reported, and of the network of pods.
pub(crate) fn container_metrics(pods: &[PodSample]) -> String {
    let mut text = Text::default();
    for (name, kind, help, own, value) in CONTAINER {
        text.family(name, kind, help);
        for (pod, container) in containers(pods) {
            let Some(statistics) = &container.statistics else { continue };
            let labels = [&labels(pod, container)[..], own].concat();
            text.sample(name, &labels, value(statistics), Some(pod.time_ms));
        }
    }
    let name = "container_spec_memory_limit_bytes";
    text.family(name, "gauge", "Memory limit; 0: none");
    for (pod, container) in containers(pods) {
        let limit = container.memory_limit_bytes.unwrap_or(0);
        text.sample(name, &labels(pod, container), limit as f64, Some(pod.time_ms));
    }
    for (name, help, value) in NETWORK {
        text.family(name, "counter", help);
        for pod in pods {
            let Some(guest) = &pod.guest else { continue };
            let labels = [&pod_labels(pod)[..], &[("interface", INTERFACE)]].concat();
            text.sample(name, &labels, value(guest) as f64, Some(pod.time_ms));
        }
    }
    text.finish()
}

fn labels<'a>(pod: &'a PodSample, container: &'a ContainerSample) -> [(&'a str, &'a str); 6] {
    [
        ("container", &container.name),
        ("pod", &pod.name),
        ("namespace", &pod.namespace),
        ("id", &container.id),
        ("image", &container.image),
        ("name", &container.id),
    ]
}

fn pod_labels(pod: &PodSample) -> [(&str, &str); 6] {
    [
        ("container", ""),
        ("pod", &pod.name),
        ("namespace", &pod.namespace),
        ("id", &pod.uid),
        ("image", ""),
        ("name", ""),
    ]
}
