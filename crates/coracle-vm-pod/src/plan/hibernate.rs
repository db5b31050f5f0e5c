//! Plans for a pod that is to be hibernated: the memory is saved, copied, pushed, and only then the VM is removed.

use coracle_api::cocoon::LifecycleState;
use coracle_types::VmState;

use super::{Plan, create, mark_lost, note_of, note_or_wait, noted_ip};
use crate::facts::{Facts, Saved, VmFacts, Wanted};
use crate::step::{Purpose, Step};
use crate::vm_pod_state::{VmPodState, WaitReason};

/// Plans for a VM that exists.
pub(super) fn with_vm(facts: &Facts, wanted: &Wanted, vm: &VmFacts) -> Plan {
    let still = || VmPodState::Running { is_ready: false, since: vm.started_at, ips: vm.ips.clone() };
    match vm.state {
        VmState::Running | VmState::Paused => {
            let id = (vm.id.to_string(), noted_ip(&vm.ips));
            match note_of(facts, LifecycleState::Hibernating, Some(id), "") {
                Some(note) => Plan::step(Step::Note(note), still()),
                None => Plan::step(Step::Hibernate, still()),
            }
        }
        VmState::Hibernated => plan_hibernated(facts, wanted, vm),
        // A guest that was not started, or that ended, has no memory to save.
        VmState::Created => Plan::step(Step::Start, still()),
        VmState::Stopped | VmState::Failed => Plan::step(Step::Start, still()),
        VmState::Creating
        | VmState::Starting
        | VmState::Hibernating
        | VmState::Stopping
        | VmState::Deleting => Plan::wait(still()),
    }
}

/// Plans for a hibernated VM, whose state is in files of this node.
fn plan_hibernated(facts: &Facts, wanted: &Wanted, vm: &VmFacts) -> Plan {
    if !facts.has_registry {
        // Without a registry, the VM stays on this node and is woken here.
        return note_or_wait(facts, LifecycleState::Hibernated, "", VmPodState::Hibernated);
    }
    match &facts.saved {
        Saved::Unknown => Plan::step(Step::FindSaved, VmPodState::Hibernated),
        Saved::Foreign(why) => {
            let message = format!("tag hibernate of {} is in use: {why}", wanted.vm);
            Plan::wait(VmPodState::Waiting(WaitReason::new("HibernateRefused", message)))
        }
        // The state belongs to an earlier pod. It is not replaced, unless this VM was woken from it.
        Saved::Own { same_pod: false } if !vm.is_woken && facts.memory.pushed.is_none() => {
            let message = format!(
                "tag hibernate of {} holds the state of an earlier pod: delete the tag, or wake it first",
                wanted.vm
            );
            Plan::wait(VmPodState::Waiting(WaitReason::new("HibernateRefused", message)))
        }
        Saved::Absent | Saved::Own { .. } => {
            let this = Some(Purpose::Hibernation);
            let step = match (facts.memory.copied == this, facts.memory.pushed == this) {
                (_, true) => Step::RemoveVm { keep_copy: false },
                (true, false) => Step::Push(Purpose::Hibernation),
                (false, false) => Step::Copy(Purpose::Hibernation),
            };
            Plan::step(step, VmPodState::Hibernated)
        }
    }
}

/// Plans for a VM that does not exist: it was saved, or was never created.
pub(super) fn without_vm(facts: &Facts, wanted: &Wanted) -> Plan {
    if !facts.has_registry {
        return create_first(facts, wanted);
    }
    match &facts.saved {
        Saved::Unknown => Plan::step(Step::FindSaved, VmPodState::Hibernated),
        Saved::Own { same_pod } if *same_pod || facts.pod.noted.state.is_some() || wanted.restore => {
            note_or_wait(facts, LifecycleState::Hibernated, "", VmPodState::Hibernated)
        }
        Saved::Absent if facts.pod.noted.state == Some(LifecycleState::Hibernated) => {
            note_or_wait(facts, LifecycleState::Hibernated, "", VmPodState::Hibernated)
        }
        _ => create_first(facts, wanted),
    }
}

/// Creates a VM that never ran before it is hibernated. A VM that ran, and neither exists nor is saved, is lost.
fn create_first(facts: &Facts, wanted: &Wanted) -> Plan {
    match facts.pod.noted.state {
        None | Some(LifecycleState::Creating | LifecycleState::Failed) => create::plan(facts, wanted),
        Some(_) => mark_lost(
            facts,
            wanted,
            "it was to be hibernated, and neither it nor its state is left".to_owned(),
        ),
    }
}
