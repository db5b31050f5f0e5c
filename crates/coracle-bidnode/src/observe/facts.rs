//! Nodes and Pods, reduced to the fields that plans depend on.

use std::collections::BTreeMap;

use coracle_api::{Amount, bidnode::names};
use k8s_openapi::{
    api::core::v1::{Node, NodeSelectorTerm, Pod, Toleration},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt as _;

use crate::{ids::AllocationName, settings::Taint};

/// Amounts by resource name, in thousandths of the resource's unit (CPUs are in millicores).
pub type Resources = BTreeMap<String, i128>;

/// A Node of a BidNode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// Name of the Node.
    pub name: String,
    /// Resource version. A patch that names it fails if the Node has changed since.
    pub version: String,
    /// Allocation of the Node at the market.
    pub allocation: AllocationName,
    /// Whether the condition Ready is true.
    pub ready: bool,
    /// Last transition of [`Self::ready`], in milliseconds since 1970.
    pub since_ms: i64,
    /// Creation time, in milliseconds since 1970.
    pub created_ms: i64,
    /// Whether the Node is cordoned.
    pub cordoned: bool,
    /// All labels.
    pub labels: BTreeMap<String, String>,
    /// All taints.
    pub taints: Vec<Taint>,
    /// Labels and taints that the specification gave the Node, as stored in its annotation.
    pub given: String,
    /// Start of its drain, in milliseconds since 1970.
    pub draining_ms: Option<i64>,
    /// Allocatable resources.
    pub allocatable: Resources,
    /// Whether the Node is being deleted.
    pub deleting: bool,
    /// Finalizers of the Node.
    pub finalizers: Vec<String>,
}

impl NodeFacts {
    /// Reads a Node.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let label = |key: &str| node.labels().get(key).cloned().unwrap_or_default();
        let spec = node.spec.as_ref();
        let status = node.status.as_ref();
        let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or_default();
        let ready = conditions.iter().find(|c| c.type_ == "Ready");
        let created = node.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_millisecond());
        let since = ready.and_then(|c| c.last_transition_time.as_ref());
        let taint = |t: &k8s_openapi::api::core::v1::Taint| Taint {
            key: t.key.clone(),
            value: t.value.clone().unwrap_or_default(),
            effect: t.effect.clone(),
        };
        let taints = spec.and_then(|s| s.taints.as_deref()).unwrap_or_default();
        Self {
            name: node.name_any(),
            version: node.resource_version().unwrap_or_default(),
            allocation: label(names::ALLOCATION).into(),
            ready: ready.is_some_and(|c| c.status == "True"),
            since_ms: since.map_or(created, |t| t.0.as_millisecond()),
            created_ms: created,
            cordoned: spec.and_then(|s| s.unschedulable).unwrap_or(false),
            labels: node.labels().clone(),
            taints: taints.iter().map(taint).collect(),
            given: node.annotations().get(names::GIVEN).cloned().unwrap_or_default(),
            draining_ms: node.annotations().get(names::DRAINING).and_then(|ms| ms.parse().ok()),
            allocatable: resources(status.and_then(|s| s.allocatable.as_ref())),
            deleting: node.metadata.deletion_timestamp.is_some(),
            finalizers: node.finalizers().to_vec(),
        }
    }

    /// BidNode of the Node, as `namespace/name`.
    #[must_use]
    pub fn owner(&self) -> String {
        let label = |key: &str| self.labels.get(key).map_or("", String::as_str);
        format!("{}/{}", label(names::NAMESPACE), label(names::BIDNODE))
    }

    /// Whether the Node has a taint with the key.
    #[must_use]
    pub fn is_tainted(&self, key: &str) -> bool {
        self.taints.iter().any(|t| t.key == key)
    }
}

/// Kind of a pod, as drains and packing distinguish it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodKind {
    /// Pod that needs a node.
    #[default]
    Workload,
    /// Pod of a DaemonSet.
    Daemon,
    /// Static or mirror pod, which belongs to its node.
    Static,
    /// Pod that has succeeded or failed.
    Finished,
}

/// Pod that waits for a node, or runs on a Node of this controller.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodFacts {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod.
    pub uid: String,
    /// Node of the pod.
    pub node: Option<String>,
    /// Kind of the pod.
    pub kind: PodKind,
    /// Whether the pod is being deleted.
    pub deleting: bool,
    /// Whether the scheduler reports that the pod fits on no node, and has not nominated a node for it.
    pub unschedulable: bool,
    /// Time since when the scheduler reports this, in milliseconds since 1970.
    pub refused_ms: i64,
    /// Resource requests.
    pub requests: Resources,
    /// Labels that the node must have.
    pub selector: BTreeMap<String, String>,
    /// Terms of the required node affinity, of which one must match; empty: any node.
    pub terms: Vec<NodeSelectorTerm>,
    /// Tolerations of the pod.
    pub tolerations: Vec<Toleration>,
    /// Whether an annotation forbids to disrupt the pod.
    pub keep: bool,
    /// Whether the pod's priority class is system-node-critical or system-cluster-critical.
    pub critical: bool,
    /// Termination grace period in seconds.
    pub grace_s: i64,
    /// Cost of disrupting the pod: 1, or more by annotation.
    pub cost: i64,
}

impl PodFacts {
    /// Reads a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let phase = status.and_then(|s| s.phase.as_deref()).unwrap_or_default();
        let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or_default();
        let refusal = conditions.iter().find(|c| {
            c.type_ == "PodScheduled" && c.status == "False" && c.reason.as_deref() == Some("Unschedulable")
        });
        let refused = refusal.is_some();
        let created = pod.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_millisecond());
        let since = refusal.and_then(|c| c.last_transition_time.as_ref());
        let nominated = status.and_then(|s| s.nominated_node_name.as_ref()).is_some();
        let node = spec.and_then(|s| s.node_name.clone()).filter(|n| !n.is_empty());
        let deleting = pod.metadata.deletion_timestamp.is_some();
        let kind = kind(pod, phase);
        let affinity = spec.and_then(|s| s.affinity.as_ref()?.node_affinity.as_ref());
        let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        let keeps = |(key, value): &(&str, &str)| pod.annotations().get(*key).is_some_and(|v| v == value);
        let class = spec.and_then(|s| s.priority_class_name.as_deref()).unwrap_or_default();
        let cost = pod.annotations().get("controller.kubernetes.io/pod-deletion-cost");
        Self {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            uid: pod.uid().unwrap_or_default(),
            unschedulable: phase == "Pending"
                && refused
                && !nominated
                && !deleting
                && node.is_none()
                && kind == PodKind::Workload,
            node,
            kind,
            deleting,
            refused_ms: since.map_or(created, |t| t.0.as_millisecond()),
            requests: requests(pod),
            selector: spec.and_then(|s| s.node_selector.clone()).unwrap_or_default(),
            terms: required.map(|r| r.node_selector_terms.clone()).unwrap_or_default(),
            tolerations: spec.and_then(|s| s.tolerations.clone()).unwrap_or_default(),
            keep: names::DO_NOT_DISRUPT.iter().any(keeps),
            critical: matches!(class, "system-node-critical" | "system-cluster-critical"),
            grace_s: spec.and_then(|s| s.termination_grace_period_seconds).unwrap_or(30),
            cost: 1 + cost.and_then(|c| c.parse::<i64>().ok()).unwrap_or(0).max(0),
        }
    }

    /// Whether the pod is workload, so that its node is not idle.
    #[must_use]
    pub fn is_workload(&self) -> bool {
        self.kind == PodKind::Workload
    }
}

fn kind(pod: &Pod, phase: &str) -> PodKind {
    let owners = pod.owner_references();
    if matches!(phase, "Succeeded" | "Failed") {
        PodKind::Finished
    } else if pod.annotations().contains_key("kubernetes.io/config.mirror")
        || owners.iter().any(|o| o.kind == "Node")
    {
        PodKind::Static
    } else if owners.iter().any(|o| o.kind == "DaemonSet") {
        PodKind::Daemon
    } else {
        PodKind::Workload
    }
}

/// Resource requests of a pod: for each resource the greater of two values. The first is the sum of containers and sidecars.
/// The second is the largest sum of another init container and the sidecars before it. The overhead of the runtime class and
/// one pod are added (Kubernetes documentation, "Sidecar Containers", "Pod Overhead").
fn requests(pod: &Pod) -> Resources {
    let Some(spec) = &pod.spec else { return Resources::new() };
    let of = |c: &k8s_openapi::api::core::v1::Container| {
        resources(c.resources.as_ref().and_then(|r| r.requests.as_ref()))
    };
    let add = |sum: &mut Resources, more: Resources| {
        for (name, amount) in more {
            *sum.entry(name).or_default() += amount;
        }
    };
    let (mut sidecars, mut most) = (Resources::new(), Resources::new());
    for first in spec.init_containers.as_deref().unwrap_or_default() {
        if first.restart_policy.as_deref() == Some("Always") {
            add(&mut sidecars, of(first));
            continue;
        }
        let mut now = sidecars.clone();
        add(&mut now, of(first));
        for (name, amount) in now {
            let known = most.entry(name).or_default();
            *known = amount.max(*known);
        }
    }
    let mut sum = sidecars;
    spec.containers.iter().for_each(|container| add(&mut sum, of(container)));
    for (name, amount) in most {
        let known = sum.entry(name).or_default();
        *known = amount.max(*known);
    }
    add(&mut sum, resources(spec.overhead.as_ref()));
    sum.insert("pods".into(), 1000);
    sum
}

fn resources(quantities: Option<&BTreeMap<String, Quantity>>) -> Resources {
    let all = quantities.into_iter().flatten();
    all.filter_map(|(name, q)| Some((name.clone(), thousandths(&q.0)?))).collect()
}

/// Parses a quantity to thousandths, rounded up (Kubernetes documentation, "Quantity").
#[must_use]
pub fn thousandths(text: &str) -> Option<i128> {
    Amount::parse(text).ok().map(|amount| amount.millis().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_sidecars_and_overhead() {
        let container = |cpu: &str| serde_json::json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let with = |cpu: &str, restart: Option<&str>| {
            let mut one = container(cpu);
            one["restartPolicy"] = restart.into();
            one
        };
        for (why, first, overhead, want) in [
            ("containers", vec![], None, 1000),
            ("a sidecar runs beside them", vec![with("2", Some("Always"))], None, 3000),
            ("an init container runs before", vec![with("2", None)], None, 2000),
            ("with the sidecars before it", vec![with("2", Some("Always")), with("2", None)], None, 4000),
            ("overhead comes on top", vec![], Some("500m"), 1500),
        ] {
            let overhead = overhead.map(|cpu| serde_json::json!({"cpu": cpu}));
            let pod = serde_json::json!({
                "spec": {"containers": [container("1")], "initContainers": first, "overhead": overhead},
            });
            let pod: Pod = serde_json::from_value(pod).unwrap();
            assert_eq!(requests(&pod)["cpu"], want, "{why}");
        }
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, want) in [
            ("1", Some(1000)),
            ("250m", Some(250)),
            ("0.5", Some(500)),
            ("1Ki", Some(1_024_000)),
            ("2Gi", Some(2 * 1024 * 1024 * 1024 * 1000)),
            ("1e3", Some(1_000_000)),
            ("100n", Some(1)),
            ("1k", Some(1_000_000)),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(thousandths(text), want, "{text}");
        }
    }
}
