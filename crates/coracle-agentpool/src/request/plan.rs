//! Plan for a VsphereAgent. Pure. Steps that call vCenter repeat small plans of their own: `vm::next`, `vm::undo` and
//! [`super::eject::next`].

use std::time::Duration;

use coracle_api::agentpool::{CleanupPolicy, OwnedVm, VsphereAgent, VsphereAgentPool, names};
use coracle_vsphere::VmConfigSpec;
use jiff::Timestamp;
use kube::ResourceExt as _;

use super::FenceTarget;
use crate::{identity::vm_name, status::seconds, vm::vm_spec, watches::pool_of};

/// Annotation of a pool with answers to questions that vCenter asks when a VM starts.
pub(crate) const ANSWERS: &str = "coracle.dev/answers";

/// Everything that the plan of a VsphereAgent depends on.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    /// VsphereAgent object.
    pub request: &'a VsphereAgent,
    /// Pool of the VsphereAgent.
    pub pool: Option<&'a VsphereAgentPool>,
    /// Whether another live VsphereAgent manages the same VM.
    pub is_shared: bool,
    /// Current time.
    pub now: Timestamp,
    /// Time for which a new reason must last before it is copied from the pool's row.
    pub steady: Duration,
}

/// One effect with all its data: the executor does not read the specification.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Adds the finalizer.
    AddFinalizer,
    /// Reports that the pool does not exist; the VM of a deleted object stays.
    ReportPoolMissing { note: String, is_deleted: bool },
    /// Removes the finalizer.
    RemoveFinalizer,
    /// Completes an ejection that was started, before the VM is destroyed: an open question of vCenter would block that.
    FinishEjection(EjectSpec),
    /// Fences the VM and destroys it with its Agents.
    DestroyVm(Box<FenceTarget>),
    /// Records a VM that is older than its VsphereAgent.
    AdoptVm,
    /// Creates the VM.
    CreateVm(Box<CreateVm>),
    /// Compares the recorded VM with vSphere and reports it.
    CheckVm { vm: Box<OwnedVm>, adopted: bool },
    /// Ejects the ISO from the drive of an installed VM.
    EjectIso(EjectSpec),
}

/// VM to be created. The path of its image is known once the image is on the datastore.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CreateVm {
    pub(crate) spec: VmConfigSpec,
    pub(crate) tags: Vec<String>,
    /// Answers to questions of vCenter, from the pool's annotation.
    pub(crate) answers: String,
}

/// Ejection as the pool specifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EjectSpec {
    pub(crate) is_wanted: bool,
    pub(crate) datacenter: String,
}

/// Plans one reconcile.
#[must_use]
pub(crate) fn plan(s: &Snapshot<'_>) -> Vec<Step> {
    let request = s.request;
    let is_deleted = request.metadata.deletion_timestamp.is_some();
    let Some(pool) = s.pool else {
        let note = format!("no VsphereAgentPool {}", pool_of(request));
        let report = Step::ReportPoolMissing { note, is_deleted };
        return if is_deleted { vec![report, Step::RemoveFinalizer] } else { vec![report] };
    };
    if is_deleted {
        return deletion(s, pool);
    }
    let has_finalizer = request.finalizers().iter().any(|f| f == names::AGENT_FINALIZER);
    let mut steps: Vec<_> = (!has_finalizer).then_some(Step::AddFinalizer).into_iter().collect();
    let adopted = request.labels().get(names::CREATED_FOR).is_some_and(|v| v == names::FOR_ADOPTED);
    match request.vm() {
        Some(vm) => {
            let vm = Box::new(refresh_recorded(s, pool, vm));
            steps.extend([Step::CheckVm { vm, adopted }, Step::EjectIso(eject_spec(pool))]);
        }
        None if adopted => steps.push(Step::AdoptVm),
        None => {
            let (spec, tags) = (vm_spec(pool, request, ""), pool.spec.vsphere.vm_tags.clone());
            let answers = pool.annotations().get(ANSWERS).cloned().unwrap_or_default();
            steps.push(Step::CreateVm(Box::new(CreateVm { spec, tags, answers })));
        }
    }
    steps
}

fn deletion(s: &Snapshot<'_>, pool: &VsphereAgentPool) -> Vec<Step> {
    let request = s.request;
    let mut steps = Vec::new();
    if request.status.as_ref().is_some_and(|status| status.iso_ejection.is_some()) {
        steps.push(Step::FinishEjection(eject_spec(pool)));
    }
    if !request.finalizers().iter().any(|f| f == names::AGENT_FINALIZER) {
        return steps;
    }
    if pool.spec.cleanup_policy != CleanupPolicy::Retain && !s.is_shared {
        steps.push(Step::DestroyVm(Box::new(FenceTarget {
            namespace: pool.namespace().unwrap_or_default(),
            machines_namespace: pool.spec.control_plane_namespace.clone(),
            row: fenced_row(request, pool),
        })));
    }
    steps.push(Step::RemoveFinalizer);
    steps
}

fn eject_spec(pool: &VsphereAgentPool) -> EjectSpec {
    EjectSpec {
        is_wanted: pool.spec.iso.as_ref().is_some_and(|iso| iso.eject_after_install),
        datacenter: pool.spec.vsphere.datacenter.clone(),
    }
}

/// Row for the fence: the references of the pool's row, and the identity that vSphere reported.
fn fenced_row(request: &VsphereAgent, pool: &VsphereAgentPool) -> OwnedVm {
    let mut row =
        request.vm().cloned().unwrap_or_else(|| OwnedVm { name: vm_name(request), ..OwnedVm::default() });
    let uid = request.uid().unwrap_or_default();
    if let Some(known) = row_of(pool, &row, &uid) {
        row.machine_ref = known.machine_ref.clone().or(row.machine_ref);
        row.agent_ref = known.agent_ref.clone().or(row.agent_ref);
    }
    row
}

/// Recorded VM with the phase that the pool determined.
fn refresh_recorded(s: &Snapshot<'_>, pool: &VsphereAgentPool, vm: &OwnedVm) -> OwnedVm {
    let mut vm = vm.clone();
    let Some(row) = row_of(pool, &vm, &s.request.uid().unwrap_or_default()).cloned() else { return vm };
    (vm.agent_ref, vm.machine_ref) = (row.agent_ref.clone(), row.machine_ref.clone());
    // A row from before the creation is older than the record. Copying it would repeat for ever, because the row is derived
    // from the record.
    if row.reason != names::phase_reason::VM_CREATE_PENDING && needs_write(s, &row, &vm) {
        (vm.phase, vm.reason, vm.last_transition_time) = (row.phase, row.reason, row.last_transition_time);
    } else if vm.reason == names::phase_reason::VM_CREATE_PENDING {
        vm.reason = names::phase_reason::CREATE_REQUESTED.into();
        vm.last_transition_time = Some(seconds(s.now));
    }
    vm
}

/// Row of the pool's status for this VM.
fn row_of<'a>(pool: &'a VsphereAgentPool, vm: &OwnedVm, uid: &str) -> Option<&'a OwnedVm> {
    let rows = pool.status.as_ref().map(|s| s.owned_vms.as_slice()).unwrap_or_default();
    let fits = |r: &&OwnedVm| r.name == vm.name && (r.owner_uid.is_empty() || r.owner_uid == uid);
    rows.iter().find(fits)
}

/// Whether a new phase or reason must be written. The reason changes several times before a VM becomes a node, so a new reason
/// alone is copied only after it has lasted; a new phase is copied at once.
fn needs_write(s: &Snapshot<'_>, row: &OwnedVm, vm: &OwnedVm) -> bool {
    let under_way = matches!(row.phase.as_str(), names::phase::PROVISIONING | names::phase::AVAILABLE);
    let since = row.last_transition_time.as_ref().map(|t| s.now.duration_since(t.0));
    let lasts = since.is_none_or(|since| since.try_into().is_ok_and(|since: Duration| since >= s.steady));
    !under_way || row.phase != vm.phase || lasts
}

#[cfg(test)]
mod tests;
