//! `/metrics` and `/metrics/probes`: metrics of a kubelet itself. Pure.

use super::sample::PodSample;
use super::text::Text;

/// Returns the numbers of running pods and containers.
pub(crate) fn node_metrics(node: &str, pods: &[PodSample]) -> String {
    let mut text = Text::default();
    text.family("kubelet_node_name", "gauge", "The node's name; the count is always 1");
    text.sample("kubelet_node_name", &[("node", node)], 1.0, None);
    text.family("kubelet_running_pods", "gauge", "Pods that have a VM");
    text.sample("kubelet_running_pods", &[], pods.len() as f64, None);
    text.family("kubelet_running_containers", "gauge", "Containers by state");
    let running: usize = pods.iter().map(|pod| pod.containers.len()).sum();
    let labels = [("container_state", "running")];
    text.sample("kubelet_running_containers", &labels, running as f64, None);
    text.finish()
}

/// Returns the results of probes.
pub(crate) fn probe_metrics(pods: &[PodSample]) -> String {
    let mut text = Text::default();
    let help = "Cumulative number of probes for a container by result";
    text.family("prober_probe_total", "counter", help);
    for pod in pods {
        for ((container, kind, result), count) in &pod.probes {
            let labels = [
                ("probe_type", *kind),
                ("result", *result),
                ("container", container),
                ("pod", &pod.name),
                ("namespace", &pod.namespace),
                ("pod_uid", &pod.uid),
            ];
            text.sample("prober_probe_total", &labels, *count as f64, None);
        }
    }
    text.finish()
}
