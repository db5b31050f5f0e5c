//! Parts of the Node object that this node writes, besides the status. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeSpec, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::options::VirtualNodeOptions;

/// Value of `node.kubernetes.io/instance-type`.
const INSTANCE_TYPE: &str = "coracle";

/// Returns the labels of every node and those of the options.
pub(super) fn labels(options: &VirtualNodeOptions) -> BTreeMap<String, String> {
    let hostname = options.hostname.as_ref().unwrap_or(&options.name);
    let own = [
        ("kubernetes.io/hostname", hostname.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", architecture()),
        ("node.kubernetes.io/instance-type", INSTANCE_TYPE),
    ];
    let own = own.map(|(key, value)| (key.to_owned(), value.to_owned()));
    own.into_iter().chain(options.labels.clone()).collect()
}

/// Returns the architecture in the spelling of the API.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Returns the object of a node that is not registered yet.
pub(super) fn new_node(options: &VirtualNodeOptions) -> Node {
    let taints: Vec<_> = options.taints.iter().map(crate::options::NodeTaint::to_api).collect();
    Node {
        metadata: ObjectMeta {
            name: Some(options.name.clone()),
            labels: Some(labels(options)),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            taints: Some(taints).filter(|all| !all.is_empty()),
            provider_id: options.provider_id.clone(),
            ..NodeSpec::default()
        }),
        status: None,
    }
}

/// Returns the patch for a node that is registered already.
pub(super) fn labels_patch(options: &VirtualNodeOptions) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": options.name, "labels": labels(options)},
    })
}

/// Returns a patch of the whole taint list, if taints of the options are missing. A taint whose key exists stays unchanged. The
/// patch is a merge patch, bound to the resource version that it was made from.
pub(super) fn taints_patch(options: &VirtualNodeOptions, node: &Node) -> Option<Value> {
    let present: Vec<Taint> = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let missing: Vec<Taint> = options
        .taints
        .iter()
        .filter(|taint| !present.iter().any(|one| one.key == taint.key))
        .map(crate::options::NodeTaint::to_api)
        .collect();
    if missing.is_empty() {
        return None;
    }
    let all: Vec<_> = present.into_iter().chain(missing).collect();
    let version = &node.metadata.resource_version;
    Some(json!({"metadata": {"resourceVersion": version}, "spec": {"taints": all}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_node_has_labels_and_taint() {
        let mut options = VirtualNodeOptions::new("vm-1");
        options.labels.insert("zone".into(), "a".into());
        let node = serde_json::to_value(new_node(&options)).unwrap();
        assert_eq!(
            node["spec"]["taints"],
            json!([{"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"}])
        );
        let labels = &node["metadata"]["labels"];
        assert_eq!(labels["kubernetes.io/hostname"], "vm-1");
        assert_eq!(labels["kubernetes.io/os"], "linux");
        assert_eq!(labels["zone"], "a");
        options.taints.clear();
        assert_eq!(new_node(&options).spec.unwrap().taints, None);
    }

    #[test]
    fn taints_of_others_stay() {
        let options = VirtualNodeOptions::new("vm-1");
        let ours = json!({"key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule"});
        let theirs = json!({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"});
        let other_value =
            json!({"key": "virtual-kubelet.io/provider", "value": "other", "effect": "NoExecute"});
        for (why, present, want) in [
            ("none: ours", json!([]), Some(json!([ours]))),
            ("another: both", json!([theirs]), Some(json!([theirs, ours]))),
            ("ours: nothing", json!([ours]), None),
            ("our key with another value: nothing", json!([other_value]), None),
        ] {
            let node = json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": present}});
            let patch = taints_patch(&options, &serde_json::from_value(node).unwrap());
            let version = patch.as_ref().map(|patch| patch["metadata"]["resourceVersion"].clone());
            assert_eq!(version, want.as_ref().map(|_| json!("7")), "{why}");
            assert_eq!(patch.map(|patch| patch["spec"]["taints"].clone()), want, "{why}");
        }
    }
}
