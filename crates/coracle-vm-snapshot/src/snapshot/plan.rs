//! Decides the next step for one VMSnapshot, and its status. Pure.

use std::sync::Arc;

use coracle_api::{
    DeletionPolicy, MikromVM, PowerState, SnapshotPhase, VMSnapshot, VMSnapshotStatus, condition, keys,
    snapshot_reason as reason,
};
use coracle_microvm::agent::SavedSnapshot;
use coracle_reconcile::{Desired, merge};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use crate::nodes::NodeError;

/// One VMSnapshot and its surroundings at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) object: &'a VMSnapshot,
    pub(crate) vm: Option<&'a MikromVM>,
    pub(crate) saved: Saved,
    /// Other VMSnapshots of the namespace.
    pub(crate) siblings: &'a [Arc<VMSnapshot>],
    pub(crate) now: Timestamp,
}

/// Answer of the node about its snapshot.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Saved {
    NotAsked,
    Answered(Option<SavedSnapshot>),
    Failed(NodeError),
}

/// One effect with everything that it needs. Each step is safe to repeat.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    AddFinalizer,
    /// Stores the node, before anything exists there.
    Bind,
    Save(Box<MikromVM>),
    DeleteSaved(String),
    /// Deletes a VMSnapshot beyond the retention.
    DeleteObject {
        name: String,
        uid: String,
    },
    RemoveFinalizer,
}

impl Step {
    /// Returns the name for tables and logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AddFinalizer => "add-finalizer",
            Self::Bind => "bind",
            Self::Save(_) => "save",
            Self::DeleteSaved(_) => "delete-saved",
            Self::DeleteObject { .. } => "delete-object",
            Self::RemoveFinalizer => "remove-finalizer",
        }
    }
}

/// Step to carry out, and the status to write.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub(crate) step: Option<Step>,
    pub(crate) status: Option<VMSnapshotStatus>,
}

/// Objects that must be read before a plan.
pub(crate) struct Needs {
    pub(crate) vm: bool,
    pub(crate) saved: bool,
}

/// Returns the objects that must be read before a plan: a snapshot that is Ready needs neither VM nor node.
pub(crate) fn needs(object: &VMSnapshot) -> Needs {
    let is_deleted = object.metadata.deletion_timestamp.is_some();
    let open = !is_ready(object) && has_finalizer(object);
    let deletes = is_deleted && object.spec.deletion_policy == DeletionPolicy::Delete;
    Needs { vm: open && !is_deleted, saved: (open && !is_deleted) || deletes }
}

/// Returns the node that has the snapshot, or is saving it.
pub(crate) fn binding(object: &VMSnapshot) -> Option<&str> {
    let status = object.status.as_ref()?;
    Some(status.node_name.as_str()).filter(|node| !node.is_empty())
}

fn has_finalizer(object: &VMSnapshot) -> bool {
    object.finalizers().iter().any(|f| f == keys::SNAPSHOT_FINALIZER)
}

pub(crate) fn is_ready(object: &VMSnapshot) -> bool {
    object.status.as_ref().is_some_and(|status| status.phase == Some(SnapshotPhase::Ready))
}

/// Plans the next step.
pub(crate) fn plan(o: &Observed<'_>) -> Plan {
    match (o.object.metadata.deletion_timestamp.is_some(), has_finalizer(o.object)) {
        (true, false) => Plan::default(),
        (true, true) => remove(o),
        (false, false) => step(Step::AddFinalizer),
        (false, true) if is_ready(o.object) => retain(o),
        (false, true) => take(o),
    }
}

fn remove(o: &Observed<'_>) -> Plan {
    let Some(node) = binding(o.object) else { return step(Step::RemoveFinalizer) };
    match (&o.saved, o.object.spec.deletion_policy) {
        (_, DeletionPolicy::Retain) | (Saved::Answered(None), _) => step(Step::RemoveFinalizer),
        // The snapshots of a node that is gone are lost with it.
        (Saved::Failed(error), _) if error.is_unknown || is_abandoned(o.object) => {
            step(Step::RemoveFinalizer)
        }
        (Saved::NotAsked | Saved::Answered(Some(_)) | Saved::Failed(_), DeletionPolicy::Delete) => {
            step(Step::DeleteSaved(node.to_owned()))
        }
    }
}

fn is_abandoned(object: &VMSnapshot) -> bool {
    object.annotations().get(keys::ABANDON).is_some_and(|value| value == "true")
}

/// Saves the VM on the node where it runs now. An earlier node that has no snapshot is forgotten.
fn take(o: &Observed<'_>) -> Plan {
    if let Saved::Answered(Some(saved)) = &o.saved {
        return Plan { step: None, status: Some(ready_status(o, saved)) };
    }
    let vm = match running_vm(o) {
        Ok(vm) => vm,
        Err((reason, message)) => {
            return Plan { step: None, status: Some(waiting_status(o, reason, message)) };
        }
    };
    let node = vm.status.as_ref().map(|status| status.node_name.clone()).unwrap_or_default();
    match (&o.saved, binding(o.object)) {
        // It is unknown whether the earlier node has the snapshot.
        (Saved::Failed(error), Some(bound)) if bound == node || !error.is_unknown => {
            let message = error.message.clone();
            Plan { step: None, status: Some(waiting_status(o, reason::NODE_UNREACHABLE, message)) }
        }
        (_, bound) if bound != Some(node.as_str()) => {
            Plan { step: Some(Step::Bind), status: Some(bound_status(o, vm, &node)) }
        }
        _ => step(Step::Save(Box::new(vm.clone()))),
    }
}

/// Returns the VM, if it has memory that can be saved.
fn running_vm<'a>(o: &Observed<'a>) -> Result<&'a MikromVM, (&'static str, String)> {
    let name = &o.object.spec.vm_name;
    let Some(vm) = o.vm.filter(|vm| vm.metadata.deletion_timestamp.is_none()) else {
        return Err((reason::VM_NOT_FOUND, format!("MikromVM {name:?} not found")));
    };
    if vm.spec.has_volumes() {
        let message = format!("MikromVM {name:?} has volumes or SSH keys, of which a snapshot has no copy");
        return Err((reason::VM_HAS_VOLUMES, message));
    }
    let status = vm.status.clone().unwrap_or_default();
    let has_memory =
        matches!(status.power_state, Some(PowerState::Running | PowerState::Paused | PowerState::Hibernated));
    match vm.is_provisioned() && !status.node_name.is_empty() && has_memory {
        true => Ok(vm),
        false => Err((reason::VM_NOT_RUNNING, format!("MikromVM {name:?} has no memory to save: start it"))),
    }
}

/// Deletes the oldest of the VM's snapshots beyond the retention of the newest. The decision is the same for whichever snapshot
/// is reconciled: snapshots that were taken in the same second have an order, too, and the newer one need not be reconciled
/// again.
fn retain(o: &Observed<'_>) -> Plan {
    if o.object.spec.retain.is_none() {
        return Plan::default();
    }
    let age = |object: &VMSnapshot| {
        let taken = object.status.as_ref().and_then(|status| status.taken_at.clone());
        (
            taken.map(|time| time.0),
            object.metadata.creation_timestamp.clone().map(|time| time.0),
            object.uid(),
        )
    };
    let counted = o.siblings.iter().map(AsRef::as_ref).filter(|other| {
        other.spec.vm_name == o.object.spec.vm_name
            && other.spec.retain.is_some()
            && other.metadata.deletion_timestamp.is_none()
            && is_ready(other)
    });
    let mut all: Vec<&VMSnapshot> = counted.chain([o.object]).collect();
    all.sort_by_key(|object| age(object));
    let keep = all.last().and_then(|newest| usize::try_from(newest.spec.retain?).ok());
    match all.first().filter(|_| keep.is_some_and(|keep| all.len() > keep.max(1))) {
        Some(oldest) => {
            step(Step::DeleteObject { name: oldest.name_any(), uid: oldest.uid().unwrap_or_default() })
        }
        None => Plan::default(),
    }
}

fn step(step: Step) -> Plan {
    Plan { step: Some(step), status: None }
}

fn status(
    o: &Observed<'_>,
    phase: SnapshotPhase,
    is_up: bool,
    reason: &'static str,
    message: String,
) -> VMSnapshotStatus {
    let old = o.object.status.clone().unwrap_or_default();
    let generation = o.object.metadata.generation;
    let ready = Desired { kind: condition::READY, status: Some(is_up), reason, message };
    VMSnapshotStatus {
        phase: Some(phase),
        observed_generation: generation,
        conditions: merge(&old.conditions, &[ready], generation, o.now),
        ..old
    }
}

fn waiting_status(o: &Observed<'_>, reason: &'static str, message: String) -> VMSnapshotStatus {
    status(o, SnapshotPhase::Pending, false, reason, message)
}

fn bound_status(o: &Observed<'_>, vm: &MikromVM, node: &str) -> VMSnapshotStatus {
    let message = format!("node {node} saves the VM");
    VMSnapshotStatus {
        node_name: node.to_owned(),
        snapshot_name: super::node_name_of(o.object),
        vm_uid: vm.uid().unwrap_or_default(),
        ..status(o, SnapshotPhase::Saving, false, reason::SAVING, message)
    }
}

fn ready_status(o: &Observed<'_>, saved: &SavedSnapshot) -> VMSnapshotStatus {
    let bytes = |bytes: u64| Some(i64::try_from(bytes).unwrap_or(i64::MAX));
    VMSnapshotStatus {
        image_digest: saved.image_digest.clone(),
        vcpu_count: i32::try_from(saved.vcpus).ok(),
        memory_mib: i32::try_from(saved.memory_mib).ok(),
        memory_bytes: bytes(saved.memory_bytes),
        disk_bytes: bytes(saved.disk_bytes),
        taken_at: Timestamp::from_second(saved.taken_at_ms.div_euclid(1000)).ok().map(Time),
        ..status(o, SnapshotPhase::Ready, true, reason::SAVED, "it can be restored".to_owned())
    }
}

/// Returns the status after a failed step. `None`: the object is being deleted, or the status is unchanged.
pub(crate) fn failed_status(o: &Observed<'_>, error: &NodeError) -> Option<VMSnapshotStatus> {
    let reason = if error.is_silence { reason::NODE_UNREACHABLE } else { reason::SAVE_FAILED };
    let phase = if error.is_silence { SnapshotPhase::Saving } else { SnapshotPhase::Failed };
    Some(status(o, phase, false, reason, error.message.clone()))
        .filter(|_| o.object.metadata.deletion_timestamp.is_none())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn snapshot(name: &str, spec: &Value, status: &Value) -> VMSnapshot {
        let mut object = json!({
            "apiVersion": "coracle.dev/v1alpha1", "kind": "VMSnapshot",
            "metadata": {"name": name, "namespace": "team", "uid": format!("uid-{name}"),
                "creationTimestamp": "2026-01-02T03:04:05Z", "finalizers": [keys::SNAPSHOT_FINALIZER]},
            "spec": {"vmName": "web"}, "status": status,
        });
        for (key, value) in spec.as_object().unwrap() {
            object["spec"][key] = value.clone();
        }
        serde_json::from_value(object).unwrap()
    }

    fn vm(power: &str, node: &str) -> MikromVM {
        serde_json::from_value(json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
            "metadata": {"name": "web", "namespace": "team", "uid": "vm-1"},
            "spec": {"image": "i", "vcpuCount": 1, "memoryMB": 128},
            "status": {"vmID": "team-web", "nodeName": node, "powerState": power},
        }))
        .unwrap()
    }

    fn observed<'a>(object: &'a VMSnapshot, vm: Option<&'a MikromVM>, saved: Saved) -> Observed<'a> {
        Observed { object, vm, saved, siblings: &[], now: Timestamp::from_second(100).unwrap() }
    }

    fn plan_text(plan: &Plan) -> String {
        let step = plan.step.as_ref().map_or("-", Step::name);
        let reason = plan.status.as_ref().map_or("-", |status| status.conditions[0].reason.as_str());
        format!("{step} {reason}")
    }

    fn unreachable(is_unknown: bool) -> Saved {
        Saved::Failed(NodeError { message: "no".into(), is_silence: true, is_unknown })
    }

    #[test]
    fn plan_table() {
        let fresh = snapshot("a", &json!({}), &json!({}));
        let bound = snapshot("a", &json!({}), &json!({"nodeName": "n1", "phase": "Saving"}));
        let ready = snapshot("a", &json!({}), &json!({"nodeName": "n1", "phase": "Ready"}));
        let mut unheld = fresh.clone();
        unheld.metadata.finalizers = None;
        let deleted = |object: &VMSnapshot, policy: &str| {
            let mut object = object.clone();
            object.spec.deletion_policy = serde_json::from_value(json!(policy)).unwrap();
            object.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(9).unwrap()));
            object
        };
        let (kept, removed, unbound) =
            (deleted(&bound, "Retain"), deleted(&bound, "Delete"), deleted(&fresh, "Delete"));
        let (running, stopped, moved) = (vm("Running", "n1"), vm("Stopped", "n1"), vm("Running", "n2"));
        let mut keyed = running.clone();
        keyed.spec.ssh_authorized_keys = vec!["ssh-ed25519 AAAA".into()];
        let none = || Saved::Answered(None);
        let some = || Saved::Answered(Some(SavedSnapshot::default()));
        for (why, object, vm, saved, want) in [
            ("finalizer before any effect", &unheld, Some(&running), Saved::NotAsked, "add-finalizer -"),
            ("the node is stored first", &fresh, Some(&running), Saved::NotAsked, "bind Saving"),
            ("no VM", &fresh, None, Saved::NotAsked, "- VMNotFound"),
            ("a VM without memory", &fresh, Some(&stopped), Saved::NotAsked, "- VMNotRunning"),
            ("a VM with SSH keys", &fresh, Some(&keyed), Saved::NotAsked, "- VMHasVolumes"),
            ("bound: save", &bound, Some(&running), none(), "save -"),
            ("saved", &bound, Some(&running), some(), "- Saved"),
            ("saved, and the VM is gone since", &bound, None, some(), "- Saved"),
            ("the VM moved before it was saved", &bound, Some(&moved), none(), "bind Saving"),
            (
                "the VM moved, and its old node is silent",
                &bound,
                Some(&moved),
                unreachable(false),
                "- NodeUnreachable",
            ),
            (
                "the VM moved, and its old node is gone",
                &bound,
                Some(&moved),
                unreachable(true),
                "bind Saving",
            ),
            ("its node is silent", &bound, Some(&running), unreachable(false), "- NodeUnreachable"),
            ("steady state is silent", &ready, None, Saved::NotAsked, "- -"),
            ("deleted with its state", &removed, None, some(), "delete-saved -"),
            ("deleted, and its state is gone", &removed, None, none(), "remove-finalizer -"),
            ("deleted, its node is silent", &removed, None, unreachable(false), "delete-saved -"),
            ("deleted, its node is gone", &removed, None, unreachable(true), "remove-finalizer -"),
            ("deleted, its state stays", &kept, None, Saved::NotAsked, "remove-finalizer -"),
            ("deleted before it was bound", &unbound, None, Saved::NotAsked, "remove-finalizer -"),
        ] {
            assert_eq!(plan_text(&plan(&observed(object, vm, saved))), want, "{why}");
        }
    }

    #[test]
    fn retention_table() {
        let of = |name: &str, retain: Value, taken: &str| {
            let status = json!({"phase": "Ready", "nodeName": "n1", "takenAt": taken});
            let spec = if retain.is_null() { json!({}) } else { json!({"retain": retain}) };
            Arc::new(snapshot(name, &spec, &status))
        };
        let (one, two, three) = (
            of("one", json!(2), "2026-01-01T00:00:01Z"),
            of("two", json!(2), "2026-01-01T00:00:02Z"),
            of("three", json!(2), "2026-01-01T00:00:03Z"),
        );
        let (single, twin) =
            (of("single", json!(1), "2026-01-01T00:00:01Z"), of("twin", json!(1), "2026-01-01T00:00:01Z"));
        let manual = of("manual", Value::Null, "2026-01-01T00:00:00Z");
        let mut other = (*one).clone();
        other.spec.vm_name = "other".into();
        let mut open = (*one).clone();
        open.status.as_mut().unwrap().phase = Some(SnapshotPhase::Failed);
        for (why, object, siblings, want) in [
            ("as many as are kept", &two, vec![one.clone()], None),
            ("the oldest goes", &three, vec![two.clone(), one.clone()], Some("one")),
            ("whichever is looked at", &two, vec![three.clone(), one.clone()], Some("one")),
            ("the oldest itself", &one, vec![three.clone(), two.clone()], Some("one")),
            ("two of one second", &twin, vec![single.clone()], Some("single")),
            ("the same two", &single, vec![twin.clone()], Some("single")),
            ("those without retain do not count", &two, vec![one.clone(), manual.clone()], None),
            ("without retain it deletes none", &manual, vec![one.clone(), two.clone(), three.clone()], None),
            ("of other VMs", &two, vec![Arc::new(other), one.clone()], None),
            ("not Ready", &two, vec![Arc::new(open), one.clone()], None),
        ] {
            let world = Observed { siblings: &siblings, ..observed(object, None, Saved::NotAsked) };
            let found = match plan(&world).step {
                Some(Step::DeleteObject { name, .. }) => Some(name),
                Some(step) => panic!("{why}: {step:?}"),
                None => None,
            };
            assert_eq!(found.as_deref(), want, "{why}");
        }
    }

    #[test]
    fn snapshot_queries_the_node_only_while_open() {
        let asks = |object: &VMSnapshot| (needs(object).vm, needs(object).saved);
        let ready = snapshot("a", &json!({}), &json!({"nodeName": "n1", "phase": "Ready"}));
        assert_eq!(asks(&ready), (false, false));
        let mut deleted = ready.clone();
        deleted.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(9).unwrap()));
        assert_eq!(asks(&deleted), (false, true));
        assert_eq!(asks(&snapshot("a", &json!({}), &json!({}))), (true, true));
    }
}
