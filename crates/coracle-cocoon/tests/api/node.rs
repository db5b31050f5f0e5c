//! In-memory node that runs pods as VMs: it binds pods, writes their annotations and status, and saves states.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, Mutex},
};

use coracle_api::cocoon::{
    LifecycleState, VmRuntimeAnnotations, VmSpecAnnotations, is_cocoon_pod, keys, slot_of_pod,
};
use coracle_reconcile::{watch, watch_config};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::watcher,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::tags::Tags;

/// Name of the node.
pub(crate) const NODE: &str = "cocoon-pool";

/// Fake node. Clones share the state.
#[derive(Clone, Default)]
pub(crate) struct FakeNode(Arc<State>);

#[derive(Default)]
struct State {
    /// Names of VMs by UID of their pod.
    vms: Mutex<BTreeMap<String, String>>,
    /// Origins of VMs, in order: `name image`, `name fork`, `name restored`.
    begun: Mutex<Vec<String>>,
    faults: Mutex<Faults>,
}

/// Faults of the node.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Wakes stop when the container runs, before the VM exists.
    pub(crate) interrupts_wakes: bool,
    /// The saved state stays when the VM is awake: the operator must remove it.
    pub(crate) keeps_tag: bool,
    /// States of VMs are not reported, as by early releases.
    pub(crate) is_early: bool,
}

impl FakeNode {
    /// Serves the pods of a namespace until the set is dropped.
    pub(crate) fn serve(&self, client: Client, namespace: &str, tags: Tags, is_sim: bool) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let (node, pods) = (self.clone(), Api::<Pod>::namespaced(client, namespace));
        tasks.spawn(async move {
            let mut events = pin!(watch(pods.clone(), watch_config()));
            while let Some(event) = events.next().await {
                if let watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) = event
                    && is_cocoon_pod(&pod)
                {
                    node.serve_pod(&pods, &tags, &pod, is_sim).await;
                }
            }
        });
        tasks
    }

    pub(crate) fn set_faults(&self, faults: Faults) {
        *self.0.faults.lock().unwrap() = faults;
    }

    /// Returns the names of the running VMs.
    pub(crate) fn vms(&self) -> Vec<String> {
        let mut all: Vec<_> = self.0.vms.lock().unwrap().values().cloned().collect();
        all.sort();
        all
    }

    pub(crate) fn begun(&self) -> Vec<String> {
        self.0.begun.lock().unwrap().clone()
    }

    async fn serve_pod(&self, pods: &Api<Pod>, tags: &Tags, pod: &Pod, is_sim: bool) {
        let faults = *self.0.faults.lock().unwrap();
        let (spec, uid) = (VmSpecAnnotations::from_pod(pod), pod.uid().unwrap_or_default());
        let has_vm = self.0.vms.lock().unwrap().contains_key(&uid);
        if pod.metadata.deletion_timestamp.is_some() {
            if has_vm && spec.managed && spec.snapshot_policy.saves(slot_of_pod(pod)) {
                tags.push(&spec.vm_name, keys::TAG_LATEST);
            }
            self.0.vms.lock().unwrap().remove(&uid);
            let same = Preconditions { uid: Some(uid), resource_version: None };
            let now = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(same),
                ..Default::default()
            };
            let _gone = pods.delete(&pod.name_any(), &now).await;
            return;
        }
        if pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none()) {
            return bind(pods, pod, is_sim).await;
        }
        let runtime = VmRuntimeAnnotations::from_pod(pod);
        let was_hibernated = tags.contains(&spec.vm_name, keys::TAG_HIBERNATE);
        match (spec.hibernate, has_vm) {
            (true, true) => {
                tags.push(&spec.vm_name, keys::TAG_HIBERNATE);
                self.0.vms.lock().unwrap().remove(&uid);
                let state = (!faults.is_early).then_some(LifecycleState::Hibernated);
                let note = VmRuntimeAnnotations {
                    lifecycle_state: state,
                    lifecycle_observed_generation: spec.generation.filter(|_| state.is_some()),
                    ..VmRuntimeAnnotations::default()
                };
                write(pods, pod, &note, false).await;
            }
            (false, false) => {
                let restores = spec.restore_from_hibernate || (was_hibernated && spec.managed);
                if restores && faults.interrupts_wakes {
                    return write(pods, pod, &VmRuntimeAnnotations::default(), true).await;
                }
                let source = match (restores, spec.fork_from.is_empty(), spec.managed) {
                    (true, ..) => "restored",
                    (false, _, false) => "static",
                    (false, false, true) => "fork",
                    (false, true, true) => "image",
                };
                self.0.begun.lock().unwrap().push(format!("{} {source}", spec.vm_name));
                self.0.vms.lock().unwrap().insert(uid, spec.vm_name.clone());
                if restores && !faults.keeps_tag {
                    tags.remove(&spec.vm_name, keys::TAG_HIBERNATE);
                }
                let id = if spec.managed { format!("id-{}", spec.vm_name) } else { runtime.id };
                let state = (!faults.is_early).then_some(LifecycleState::Ready);
                let note = VmRuntimeAnnotations {
                    id,
                    ip: "10.88.0.2".into(),
                    vnc_port: runtime.vnc_port,
                    lifecycle_state: state,
                    lifecycle_observed_generation: spec.generation.filter(|_| state.is_some()),
                    ..VmRuntimeAnnotations::default()
                };
                write(pods, pod, &note, true).await;
            }
            (true, false) | (false, true) => {}
        }
    }
}

async fn bind(pods: &Api<Pod>, pod: &Pod, is_sim: bool) {
    let name = pod.name_any();
    if is_sim {
        let patch = json!({"spec": {"nodeName": NODE}});
        let _gone = pods.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
    } else {
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"kind": "Node", "name": NODE}});
        let done: kube::Result<Value> =
            pods.create_subresource("binding", &name, &PostParams::default(), &binding).await;
        let _gone = done;
    }
}

/// Writes the status first, so that the annotations are true when they appear.
async fn write(pods: &Api<Pod>, pod: &Pod, note: &VmRuntimeAnnotations, is_running: bool) {
    let (name, ready) = (pod.name_any(), if note.id.is_empty() { "False" } else { "True" });
    let state = match is_running {
        true => json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}}),
        false => json!({"waiting": {"reason": "Hibernated"}}),
    };
    let condition = json!({"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let container = json!({"name": "agent", "image": "vm", "imageID": "", "ready": is_running, "restartCount": 0,
        "state": state});
    let status =
        json!({"status": {"phase": "Running", "conditions": [condition], "containerStatuses": [container]}});
    let params = PatchParams::default();
    let _gone = pods.patch_status(&name, &params, &Patch::Merge(status)).await;
    let patch = json!({"metadata": {"uid": pod.uid(), "annotations": note.patch()}});
    let _gone = pods.patch_metadata(&name, &params, &Patch::Merge(patch)).await;
}
