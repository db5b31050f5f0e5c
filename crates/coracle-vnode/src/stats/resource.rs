//! `/metrics/resource`: metrics for metrics-server (kubelet, `pkg/kubelet/metrics/collectors/resource_metrics.go`). Pure.

use super::sample::{ContainerSample, NodeSample, PodSample};
use super::text::{Text, seconds};

/// Value of a container.
type OfContainer = fn(&PodSample, &ContainerSample) -> Option<f64>;
/// Value of a pod or of the node.
type Of<T> = fn(&T) -> Option<f64>;

const NODE: [(&str, &str, &str, Of<NodeSample>); 3] = [
    ("node_cpu_usage_seconds_total", "counter", "CPU time of the node", |n| n.cpu_ns.map(seconds)),
    ("node_memory_working_set_bytes", "gauge", "Memory of the node that is not available", |n| {
        Some(n.memory_total_bytes?.saturating_sub(n.memory_available_bytes?) as f64)
    }),
    ("node_swap_usage_bytes", "gauge", "Swap of the node that is used", |n| {
        Some(n.swap_total_bytes?.saturating_sub(n.swap_free_bytes?) as f64)
    }),
];

const CONTAINER: [(&str, &str, &str, OfContainer); 4] = [
    ("container_cpu_usage_seconds_total", "counter", "CPU time of the container", |_, c| {
        c.statistics.as_ref().map(|s| seconds(s.cpu_usage_ns))
    }),
    ("container_memory_working_set_bytes", "gauge", "Memory that cannot be reclaimed", |_, c| {
        c.statistics.as_ref().map(|s| s.memory_working_set_bytes as f64)
    }),
    ("container_swap_usage_bytes", "gauge", "Swap of the container", |_, c| {
        c.statistics.as_ref().map(|s| s.memory_swap_bytes as f64)
    }),
    ("container_swap_limit_bytes", "gauge", "Swap that the container may use; guests have none", |_, c| {
        c.statistics.as_ref().map(|_| 0.0)
    }),
];

const POD: [(&str, &str, &str, Of<PodSample>); 3] = [
    ("pod_cpu_usage_seconds_total", "counter", "CPU time of the pod", |p| p.cpu_ns().map(seconds)),
    ("pod_memory_working_set_bytes", "gauge", "Memory of the pod's guest that is not available", |p| {
        p.memory_bytes().map(|bytes| bytes as f64)
    }),
    ("pod_swap_usage_bytes", "gauge", "Swap of the pod", |p| {
        p.sum(|container| container.memory_swap_bytes).map(|bytes| bytes as f64)
    }),
];

/// Returns the metrics. Labels of containers begin with the container, those of pods with the namespace: readers expect the pod
/// at index 1.
pub(crate) fn resource_metrics(node: &NodeSample, pods: &[PodSample]) -> String {
    let mut text = Text::default();
    for (name, kind, help, value) in NODE {
        text.family(name, kind, help);
        value(node).into_iter().for_each(|value| text.sample(name, &[], value, Some(node.time_ms)));
    }
    for (name, kind, help, value) in CONTAINER {
        text.family(name, kind, help);
        for (pod, container) in containers(pods) {
            let samples = value(pod, container);
            samples
                .into_iter()
                .for_each(|v| text.sample(name, &labels(pod, container), v, Some(pod.time_ms)));
        }
    }
    let name = "container_start_time_seconds";
    text.family(name, "gauge", "When the container started, seconds since 1970");
    for (pod, container) in containers(pods) {
        let started = container.started_ms.map(|ms| ms as f64 / 1e3);
        started.into_iter().for_each(|value| text.sample(name, &labels(pod, container), value, None));
    }
    for (name, kind, help, value) in POD {
        text.family(name, kind, help);
        for pod in pods {
            let labels = [("namespace", pod.namespace.as_str()), ("pod", &pod.name)];
            value(pod).into_iter().for_each(|value| text.sample(name, &labels, value, Some(pod.time_ms)));
        }
    }
    text.family("resource_scrape_error", "gauge", "1 if there was an error while getting container metrics");
    text.sample("resource_scrape_error", &[], 0.0, None);
    text.finish()
}

pub(super) fn containers(pods: &[PodSample]) -> impl Iterator<Item = (&PodSample, &ContainerSample)> {
    pods.iter().flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
}

fn labels<'a>(pod: &'a PodSample, container: &'a ContainerSample) -> [(&'a str, &'a str); 3] {
    [("container", &container.name), ("pod", &pod.name), ("namespace", &pod.namespace)]
}
