//! Decides the steps for one VMRestore, and its status. Pure.

use coracle_api::{
    Migration, MigrationNode, MigrationPhase, MikromVM, MikromVMSpec, RestoreIdentity, RestorePhase,
    SnapshotPhase, VMRestore, VMRestoreStatus, VMSnapshot, condition, keys, snapshot_reason as reason,
};
use coracle_reconcile::{Desired, is_true, merge};
use jiff::Timestamp;
use kube::ResourceExt as _;

use crate::{nodes::NodeError, snapshot::node_name_of};

/// One VMRestore and its surroundings at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) object: &'a VMRestore,
    pub(crate) snapshot: Option<&'a VMSnapshot>,
    pub(crate) vm: Option<&'a MikromVM>,
    /// True when the node has the copy that the VM is restored from. False when the node was not asked.
    pub(crate) is_copied: bool,
    pub(crate) now: Timestamp,
}

/// One effect with everything that it needs. Each step is safe to repeat.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    CreateVm(Box<MikromVM>),
    /// Copies the snapshot on the node. The VM's own controller consumes the copy.
    CopySaved {
        node: String,
        name: String,
        copy: String,
    },
    /// Stores the final phases of a move of the VM to its own node, with the copy as the snapshot of the move.
    RestoreInPlace {
        name: String,
        uid: String,
        version: Option<String>,
        migration: Migration,
    },
}

impl Step {
    /// Returns the name for tables and logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::CreateVm(_) => "create-vm",
            Self::CopySaved { .. } => "copy-saved",
            Self::RestoreInPlace { .. } => "restore-in-place",
        }
    }
}

/// Steps to carry out, and the status to write.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    pub(crate) status: Option<VMRestoreStatus>,
}

/// True when the restore has ended.
pub(crate) fn is_final(object: &VMRestore) -> bool {
    object.status.as_ref().is_some_and(is_final_status)
}

/// Like [`is_final`], for a status.
pub(crate) fn is_final_status(status: &VMRestoreStatus) -> bool {
    matches!(status.phase, Some(RestorePhase::Restored | RestorePhase::Failed))
}

/// Returns the node that must be asked for the copy.
pub(crate) fn copy_node<'a>(o: &Observed<'a>) -> Option<&'a str> {
    let status = ready_snapshot(o).ok()?.status.as_ref()?;
    (o.object.spec.identity == RestoreIdentity::Same).then_some(status.node_name.as_str())
}

/// Plans the next steps.
pub(crate) fn plan(o: &Observed<'_>) -> Plan {
    if is_final(o.object) {
        return Plan::default();
    }
    match o.object.spec.identity {
        RestoreIdentity::New => plan_new_vm(o),
        RestoreIdentity::Same => restore_in_place(o),
    }
}

fn plan_new_vm(o: &Observed<'_>) -> Plan {
    if let Some(vm) = o.vm {
        let ours = vm.annotations().get(keys::RESTORED_BY) == o.object.metadata.uid.as_ref();
        let is_up = vm.status.as_ref().is_some_and(|status| is_true(&status.conditions, condition::READY));
        return match (ours, is_up) {
            (false, _) => {
                let message = format!("MikromVM {:?} exists already: choose another name", vm.name_any());
                report(status(o, RestorePhase::Failed, reason::VM_EXISTS, message))
            }
            (true, true) => report(restored_status(o, vm)),
            (true, false) => report(restoring_status(o, "the VM is being made")),
        };
    }
    match ready_snapshot(o) {
        Err(message) => report(status(o, RestorePhase::Pending, reason::SNAPSHOT_NOT_READY, message)),
        Ok(snapshot) => {
            let steps = vec![Step::CreateVm(Box::new(new_vm(o.object, snapshot)))];
            Plan { steps, status: Some(restoring_status(o, "the VM is being made")) }
        }
    }
}

/// Returns the snapshot, if it can be restored.
fn ready_snapshot<'a>(o: &Observed<'a>) -> Result<&'a VMSnapshot, String> {
    let name = &o.object.spec.snapshot_name;
    let found = o.snapshot.filter(|found| found.metadata.deletion_timestamp.is_none());
    let found = found.ok_or_else(|| format!("VMSnapshot {name:?} not found"))?;
    let is_ready = found.status.as_ref().is_some_and(|status| status.phase == Some(SnapshotPhase::Ready));
    if is_ready { Ok(found) } else { Err(format!("VMSnapshot {name:?} is not Ready")) }
}

/// Returns a VM of the snapshot's size, on the node that has the snapshot.
fn new_vm(object: &VMRestore, snapshot: &VMSnapshot) -> MikromVM {
    let saved = snapshot.status.clone().unwrap_or_default();
    let spec = MikromVMSpec {
        clone_from: saved.snapshot_name,
        node_name: saved.node_name,
        vcpu_count: saved.vcpu_count.unwrap_or(1),
        memory_mib: saved.memory_mib.unwrap_or(128),
        ..MikromVMSpec::default()
    };
    let mut vm = MikromVM::new(&object.spec.vm_name, spec);
    vm.metadata.namespace = object.namespace();
    vm.annotations_mut().insert(keys::RESTORED_BY.to_owned(), object.uid().unwrap_or_default());
    vm
}

/// Restores the VM in place. The VM's own controller deletes the VM on the node and creates it again from the copy, as at the
/// end of a move.
fn restore_in_place(o: &Observed<'_>) -> Plan {
    let snapshot = match ready_snapshot(o) {
        Ok(snapshot) => snapshot,
        Err(message) => return report(status(o, RestorePhase::Pending, reason::SNAPSHOT_NOT_READY, message)),
    };
    let saved = snapshot.status.clone().unwrap_or_default();
    let copy = copy_name(o.object);
    let Some(vm) = o.vm.filter(|vm| {
        vm.uid().as_ref() == Some(&saved.vm_uid)
            && vm.name_any() == snapshot.spec.vm_name
            && vm.status.as_ref().is_some_and(|status| status.node_name == saved.node_name)
    }) else {
        let message = format!(
            "MikromVM {:?} is not the one that the snapshot was taken of, or not on node {}: restore it as a new VM",
            o.object.spec.vm_name, saved.node_name
        );
        return report(status(o, RestorePhase::Failed, reason::VM_DIFFERS, message));
    };
    let begun = o.object.status.as_ref().is_some_and(|status| status.vm_uid == saved.vm_uid);
    let moving = vm.status.as_ref().and_then(|status| status.migration.as_ref());
    let is_up = vm.status.as_ref().is_some_and(|status| is_true(&status.conditions, condition::READY));
    // The VM's controller removes the copy at the end of the move, before it removes the move from the status.
    match (begun, moving, o.is_copied) {
        (_, Some(migration), _) if migration.snapshot == copy => report(begun_status(o, vm)),
        (_, Some(_), _) => report(restoring_status(o, "the VM is being moved")),
        (false, None, false) => {
            let node = saved.node_name.clone();
            let steps = vec![Step::CopySaved { node, name: node_name_of(snapshot), copy }];
            Plan { steps, status: Some(restoring_status(o, "the snapshot is being copied")) }
        }
        (false, None, true) => report(begun_status(o, vm)),
        (true, None, true) => {
            Plan { steps: vec![move_to_itself(vm, copy)], status: Some(begun_status(o, vm)) }
        }
        (true, None, false) => report(if is_up { restored_status(o, vm) } else { begun_status(o, vm) }),
    }
}

/// Returns the step that stores the end of a move of the VM from its node to the same node.
fn move_to_itself(vm: &MikromVM, copy: String) -> Step {
    let status = vm.status.clone().unwrap_or_default();
    let node = MigrationNode { node_name: status.node_name, agent_address: status.agent_address };
    let migration =
        Migration { phase: MigrationPhase::Leaving, source: node.clone(), target: node, snapshot: copy };
    Step::RestoreInPlace {
        name: vm.name_any(),
        uid: vm.uid().unwrap_or_default(),
        version: vm.resource_version(),
        migration,
    }
}

/// Returns the name of the copy, which is the same in every attempt.
pub(super) fn copy_name(object: &VMRestore) -> String {
    format!("vmrest-{}", object.uid().unwrap_or_default())
}

fn report(status: VMRestoreStatus) -> Plan {
    Plan { steps: vec![], status: Some(status) }
}

fn status(o: &Observed<'_>, phase: RestorePhase, reason: &'static str, message: String) -> VMRestoreStatus {
    let old = o.object.status.clone().unwrap_or_default();
    let is_up = Some(phase == RestorePhase::Restored);
    let ready = Desired { kind: condition::READY, status: is_up, reason, message };
    let conditions = merge(&old.conditions, &[ready], o.object.metadata.generation, o.now);
    VMRestoreStatus { phase: Some(phase), conditions, ..old }
}

fn restoring_status(o: &Observed<'_>, message: &str) -> VMRestoreStatus {
    status(o, RestorePhase::Restoring, reason::RESTORING, message.to_owned())
}

/// Returns the status of a restore that has begun: from now on, a VM that is Ready and does not move is the restored VM.
fn begun_status(o: &Observed<'_>, vm: &MikromVM) -> VMRestoreStatus {
    VMRestoreStatus {
        vm_uid: vm.uid().unwrap_or_default(),
        ..restoring_status(o, "the VM goes back to the snapshot")
    }
}

fn restored_status(o: &Observed<'_>, vm: &MikromVM) -> VMRestoreStatus {
    let message = "the VM runs from the snapshot".to_owned();
    VMRestoreStatus {
        vm_uid: vm.uid().unwrap_or_default(),
        ..status(o, RestorePhase::Restored, reason::RESTORED, message)
    }
}

/// Returns the status after a failed step, which is retried.
pub(crate) fn failed_status(o: &Observed<'_>, error: &NodeError) -> VMRestoreStatus {
    let reason = if error.is_silence { reason::NODE_UNREACHABLE } else { reason::RESTORE_FAILED };
    status(o, RestorePhase::Restoring, reason, error.message.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn restore(identity: &str, status: &Value) -> VMRestore {
        serde_json::from_value(json!({
            "apiVersion": "coracle.dev/v1alpha1", "kind": "VMRestore",
            "metadata": {"name": "back", "namespace": "team", "uid": "r1"},
            "spec": {"snapshotName": "snap", "vmName": "web", "identity": identity}, "status": status,
        }))
        .unwrap()
    }

    fn snapshot(phase: &str) -> VMSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "coracle.dev/v1alpha1", "kind": "VMSnapshot",
            "metadata": {"name": "snap", "namespace": "team", "uid": "s1"}, "spec": {"vmName": "web"},
            "status": {"phase": phase, "nodeName": "n1", "snapshotName": "vmsnap-s1", "vmUID": "vm-1", "vcpuCount": 2,
                "memoryMB": 256},
        }))
        .unwrap()
    }

    fn vm(uid: &str, node: &str, ready: &str, moving: Option<&str>) -> MikromVM {
        let end = json!({"nodeName": "n1", "agentAddress": "a:1"});
        let migration =
            moving.map(|name| json!({"phase": "Leaving", "source": end, "target": end, "snapshot": name}));
        let condition = json!({"type": "Ready", "status": ready, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z"});
        serde_json::from_value(json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
            "metadata": {"name": "web", "namespace": "team", "uid": uid},
            "spec": {"image": "i", "vcpuCount": 1, "memoryMB": 128},
            "status": {"vmID": "team-web", "nodeName": node, "conditions": [condition], "migration": migration},
        }))
        .unwrap()
    }

    fn plan_text(plan: &Plan) -> String {
        let steps = plan.steps.iter().map(Step::name).collect::<Vec<_>>().join(" ");
        let reason = plan.status.as_ref().map_or("-", |status| status.conditions[0].reason.as_str());
        format!("{steps} {reason}").trim().to_owned()
    }

    #[test]
    fn plan_table() {
        let (new, same) = (restore("New", &json!({})), restore("Same", &json!({})));
        let begun = restore("Same", &json!({"vmUID": "vm-1", "phase": "Restoring"}));
        let done = restore("New", &json!({"phase": "Restored"}));
        let (ready, saving) = (snapshot("Ready"), snapshot("Saving"));
        let mut ours = vm("vm-2", "n1", "False", None);
        ours.annotations_mut().insert(keys::RESTORED_BY.into(), "r1".into());
        let mut ours_up = vm("vm-2", "n1", "True", None);
        ours_up.annotations_mut().insert(keys::RESTORED_BY.into(), "r1".into());
        let (up, moving) = (vm("vm-1", "n1", "True", None), vm("vm-1", "n1", "False", Some("vmrest-r1")));
        let (elsewhere, another) = (vm("vm-1", "n2", "True", None), vm("vm-9", "n1", "True", None));
        let down = vm("vm-1", "n1", "False", None);
        let drained = vm("vm-1", "n1", "False", Some("move-1"));
        for (why, object, snapshot, vm, is_copied, want) in [
            ("no snapshot", &new, None, None, false, "SnapshotNotReady"),
            ("a snapshot that is being taken", &new, Some(&saving), None, false, "SnapshotNotReady"),
            ("a new VM", &new, Some(&ready), None, false, "create-vm Restoring"),
            ("its VM is being made", &new, Some(&ready), Some(&ours), false, "Restoring"),
            ("its VM runs", &new, None, Some(&ours_up), false, "Restored"),
            ("the name is taken", &new, Some(&ready), Some(&up), false, "VMExists"),
            ("final", &done, Some(&ready), None, false, "-"),
            ("the VM itself: a copy first", &same, Some(&ready), Some(&up), false, "copy-saved Restoring"),
            ("the copy is there: this is stored", &same, Some(&ready), Some(&up), true, "Restoring"),
            (
                "then the VM is restored in place",
                &begun,
                Some(&ready),
                Some(&up),
                true,
                "restore-in-place Restoring",
            ),
            ("the VM goes back", &begun, Some(&ready), Some(&moving), true, "Restoring"),
            ("its copy is removed", &begun, Some(&ready), Some(&moving), false, "Restoring"),
            ("the VM is drained meanwhile", &same, Some(&ready), Some(&drained), false, "Restoring"),
            ("the VM is back", &begun, Some(&ready), Some(&up), false, "Restored"),
            ("the VM is back, and not Ready yet", &begun, Some(&ready), Some(&down), false, "Restoring"),
            ("another VM of the name", &same, Some(&ready), Some(&another), false, "VMDiffers"),
            ("the VM is on another node", &same, Some(&ready), Some(&elsewhere), false, "VMDiffers"),
            ("the VM is gone", &same, Some(&ready), None, false, "VMDiffers"),
        ] {
            let now = Timestamp::from_second(100).unwrap();
            assert_eq!(plan_text(&plan(&Observed { object, snapshot, vm, is_copied, now })), want, "{why}");
        }
    }

    #[test]
    fn new_vm_is_a_clone_on_the_node_of_the_snapshot() {
        let made = new_vm(&restore("New", &json!({})), &snapshot("Ready"));
        assert_eq!((made.spec.clone_from.as_str(), made.spec.node_name.as_str()), ("vmsnap-s1", "n1"));
        assert_eq!((made.spec.vcpu_count, made.spec.memory_mib), (2, 256));
        assert_eq!(made.annotations()[keys::RESTORED_BY], "r1");
    }
}
