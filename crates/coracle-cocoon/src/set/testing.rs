//! Objects for tests.

use coracle_api::CocoonSet;
use coracle_api::cocoon::keys;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::pods;

/// Returns a set of one agent, with its finalizer.
pub(crate) fn set() -> CocoonSet {
    set_with(json!({"agent": {"image": "ubuntu:24.04"}}))
}

/// Returns a set `prod/demo` with that spec, with its finalizer.
pub(crate) fn set_with(spec: Value) -> CocoonSet {
    let metadata = json!({"name": "demo", "namespace": "prod", "uid": "set-uid", "generation": 1,
        "finalizers": [keys::SET_FINALIZER]});
    serde_json::from_value(json!({
        "apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "metadata": metadata, "spec": spec,
    }))
    .expect("a set of a test")
}

/// Puts a pod into a state: `new`, `ready`, `hibernated` (annotated and reported), `hibernating`, `failed`, `lost` (lifecycle
/// failed), `ending`.
pub(crate) fn pod_in(mut pod: Pod, state: &str) -> Pod {
    pod.metadata.uid = Some(format!("uid-{}", pod.metadata.name.clone().unwrap_or_default()));
    let mut value = serde_json::to_value(&pod).expect("a pod");
    let annotations = &mut value["metadata"]["annotations"];
    let running = json!([{"name": "agent", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {}}}]);
    let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": running});
    let waiting = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]});
    let set = |annotations: &mut Value, all: &[(&str, &str)]| {
        all.iter().for_each(|(key, text)| annotations[*key] = json!(text));
    };
    let status = match state {
        "ready" | "ending" => {
            set(
                annotations,
                &[(keys::VM_ID, "vm-1"), (keys::VM_IP, "10.0.0.2"), (keys::LIFECYCLE_STATE, "ready")],
            );
            ready
        }
        "hibernating" => {
            set(annotations, &[(keys::HIBERNATE, "true"), (keys::LIFECYCLE_STATE, "hibernating")]);
            waiting
        }
        "hibernated" => {
            let observed = annotations[keys::GENERATION].clone();
            annotations[keys::LIFECYCLE_OBSERVED_GENERATION] = observed;
            set(annotations, &[(keys::HIBERNATE, "true"), (keys::LIFECYCLE_STATE, "hibernated")]);
            waiting
        }
        "failed" => json!({"phase": "Failed"}),
        "lost" => {
            set(
                annotations,
                &[(keys::LIFECYCLE_STATE, "failed"), (keys::LIFECYCLE_STATE_MESSAGE, "no image")],
            );
            json!({"phase": "Pending"})
        }
        _ => json!({"phase": "Pending"}),
    };
    value["status"] = status;
    value["spec"]["nodeName"] = json!("n1");
    if state == "ending" {
        value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    serde_json::from_value(value).expect("a pod of a test")
}

/// Returns pods of `set`: `0=ready 1=new db=hibernated`.
pub(crate) fn pods_of(set: &CocoonSet, states: &str) -> Vec<Pod> {
    let one = |text: &str| {
        let (name, state) = text.split_once('=').expect("name=state");
        let made = match (name.parse::<u32>(), set.spec.toolboxes.iter().find(|t| t.name == name)) {
            (Ok(0), _) => pods::main_pod(set, None),
            (Ok(slot), _) => {
                let source = pods::ForkSource { vm: "vk-prod-demo-0".into(), node: Some("n1".into()) };
                pods::sub_agent_pod(set, slot, &source)
            }
            (Err(_), Some(toolbox)) => pods::toolbox_pod(set, toolbox),
            (Err(_), None) => {
                let toolbox = json!({"name": name, "image": "tool:1"});
                pods::toolbox_pod(set, &serde_json::from_value(toolbox).expect("a toolbox"))
            }
        };
        pod_in(made.expect("a pod of a test"), state)
    };
    states.split_whitespace().map(one).collect()
}
