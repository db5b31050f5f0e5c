//! `/metrics` and `/metrics/probes`: what a kubelet says of itself. Pure.

use super::sample::PodSample;
use super::text::Text;

/// Numbers of pods and containers that run.
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

/// Results of probes. The tasks of pods do not count them yet, so the family has no samples.
pub(crate) fn probe_metrics() -> String {
    let mut text = Text::default();
    let help = "Cumulative number of probes for a container by result";
    text.family("prober_probe_total", "counter", help);
    text.finish()
}
