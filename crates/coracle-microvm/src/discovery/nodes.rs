//! Relevant fields of Kubernetes Nodes. Pure.

use coracle_api::keys;
use coracle_vm_inputs::constraints::Labels;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Taint};

use super::Comparable;

/// Fields of a Kubernetes Node that placement uses.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeReady {
    pub(super) ready: bool,
    pub(super) cordoned: bool,
    pub(super) since: Timestamp,
    /// Addresses where an agent on the node would listen.
    pub(super) agents: Vec<String>,
    /// Labels of the node.
    pub(super) labels: Labels,
    /// Taints of the node.
    pub(super) taints: Vec<Taint>,
}

impl Comparable for NodeReady {
    fn same(&self, other: &Self) -> bool {
        let placement = |node: &Self| (node.ready, node.cordoned);
        placement(self) == placement(other)
            && self.agents == other.agents
            && self.labels == other.labels
            && self.taints == other.taints
    }
}

/// Returns an address with the default port of the agent.
pub(super) fn at_port(ip: &str) -> String {
    let ip = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
    format!("{ip}:{}", keys::node::AGENT_PORT)
}

/// Reads a Node; `None` before its kubelet has reported the Ready condition.
pub(super) fn node(node: &Node) -> Option<NodeReady> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|c| c.type_ == "Ready")?;
    let since = ready.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |t| t.0);
    let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
    let addresses = node.status.iter().flat_map(|s| s.addresses.iter().flatten());
    let internal = addresses.filter(|a| a.type_ == "InternalIP").map(|a| at_port(&a.address));
    Some(NodeReady {
        ready: ready.status == "True",
        cordoned,
        since,
        agents: internal.collect(),
        labels: node.metadata.labels.clone().unwrap_or_default(),
        taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(change: impl FnOnce(&mut serde_json::Value)) -> Option<NodeReady> {
        let mut object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {},
            "status": {
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"}],
                "addresses": [
                    {"type": "InternalIP", "address": "10.0.0.5"}, {"type": "InternalIP", "address": "2001:db8::5"},
                    {"type": "ExternalIP", "address": "192.0.2.5"}, {"type": "Hostname", "address": "n1"},
                ],
            },
        });
        change(&mut object);
        node(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn node_object_yields_cordon_readiness_and_addresses() {
        let plain = read(|_| ()).unwrap();
        assert!(plain.ready && !plain.cordoned);
        assert_eq!(plain.agents, ["10.0.0.5:50051", "[2001:db8::5]:50051"], "no external address, no name");
        let cordoned = read(|node| node["spec"]["unschedulable"] = json!(true)).unwrap();
        assert!(cordoned.cordoned && !cordoned.same(&plain), "placement is tried again when it changes");
        let labelled = read(|node| node["metadata"]["labels"] = json!({"zone": "a"})).unwrap();
        assert!(labelled.labels["zone"] == "a" && !labelled.same(&plain));
        let taints = json!([{"key": "gpu", "effect": "NoSchedule"}]);
        let tainted = read(|node| node["spec"]["taints"] = taints).unwrap();
        assert!(tainted.taints[0].key == "gpu" && !tainted.same(&plain));
        let lost = read(|node| node["status"]["conditions"][0]["status"] = json!("Unknown")).unwrap();
        assert!(!lost.ready && !lost.same(&plain));
        assert_eq!(read(|node| node["status"]["conditions"] = json!([])), None);
    }
}
