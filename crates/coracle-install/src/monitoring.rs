//! Objects for the Prometheus operator: the Pods to scrape, and the alerts of `deploy/alerts`.

use coracle_api::keys::SYSTEM_NAMESPACE;
use serde_json::{Value, json};

use crate::base::{labels, meta, selector};
use crate::options::Component;

/// Rule files by name.
const RULES: [(&str, &str); 5] = [
    ("node", include_str!("../../../deploy/alerts/node.yaml")),
    ("vms", include_str!("../../../deploy/alerts/vms.yaml")),
    ("operator", include_str!("../../../deploy/alerts/operator.yaml")),
    ("registry", include_str!("../../../deploy/alerts/registry.yaml")),
    ("bidnode", include_str!("../../../deploy/alerts/bidnode.yaml")),
];
/// Components whose Pods have a port `admin`.
const SCRAPED: [&str; 5] = ["node", "operator", "registry", "market", "bidnode"];
const API: &str = "monitoring.coreos.com/v1";

/// Returns the option with scrapes and alerts.
pub(crate) fn monitoring() -> Component {
    let mut objects: Vec<_> = SCRAPED.iter().map(|component| pod_monitor(component)).collect();
    objects.extend(RULES.iter().map(|(name, text)| rule(name, text)));
    Component {
        name: "monitoring",
        key: "monitoring",
        description: "PodMonitors and PrometheusRules, for a cluster with the Prometheus operator",
        parts: vec![("monitoring.yaml", objects)],
        shared: None,
        additions: vec![],
    }
}

/// Returns the PodMonitor of a component. The job is `NAMESPACE/coracle-COMPONENT`.
fn pod_monitor(component: &str) -> Value {
    json!({
        "apiVersion": API, "kind": "PodMonitor", "metadata": meta(&format!("coracle-{component}"), component),
        "spec": {
            "namespaceSelector": {"matchNames": [SYSTEM_NAMESPACE]},
            "selector": {"matchLabels": selector(component)},
            "podMetricsEndpoints": [{"port": "admin"}],
        },
    })
}

fn rule(name: &str, text: &str) -> Value {
    let rules: Value = serde_saphyr::from_str(text).unwrap_or_default();
    let mut metadata = meta(&format!("coracle-{name}"), "alerts");
    metadata["labels"] = labels("alerts");
    json!({"apiVersion": API, "kind": "PrometheusRule", "metadata": metadata, "spec": rules})
}
