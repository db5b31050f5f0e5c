//! Plans for a pod that ends: its VM is saved if the policy asks for it, and only then removed.

use coracle_types::VmState;

use super::Plan;
use crate::facts::{Facts, Source, VmFacts, VmOwner, Wanted};
use crate::step::{Finish, Purpose, Step};
use crate::vm_pod_state::VmPodState;

/// Returns the next step towards the end of the pod.
pub(super) fn plan(facts: &Facts, wanted: &Wanted) -> Plan {
    let Some(vm) = &facts.vm else { return without_vm(facts) };
    let is_own = wanted.is_managed && !matches!(wanted.source, Source::Static { .. });
    if !is_own {
        return Plan::step(Step::Finish(Finish::LeftAlone), VmPodState::Ending);
    }
    if let VmOwner::Other(_) = vm.owner {
        return without_vm(facts);
    }
    match (wanted.saves_on_delete, facts.memory.save_given_up) {
        (false, _) => remove(wanted),
        (true, true) => Plan::step(Step::Finish(Finish::Kept), VmPodState::Ending),
        (true, false) => save(facts, wanted, vm),
    }
}

/// Finishes a pod that never had an own VM, or whose VM is removed.
pub(super) fn without_vm(facts: &Facts) -> Plan {
    let how = if facts.memory.is_removed { Finish::Removed } else { Finish::NoVm };
    Plan::step(Step::Finish(how), VmPodState::Ending)
}

fn remove(wanted: &Wanted) -> Plan {
    Plan::step(Step::RemoveVm { keep_copy: wanted.keeps_local_copy }, VmPodState::Ending)
}

fn save(facts: &Facts, wanted: &Wanted, vm: &VmFacts) -> Plan {
    let memory = &facts.memory;
    let is_pushed = memory.pushed == Some(Purpose::Deletion);
    match vm.state {
        VmState::Running | VmState::Paused => Plan::step(Step::Hibernate, VmPodState::Ending),
        VmState::Hibernated if memory.copied != Some(Purpose::Deletion) => {
            Plan::step(Step::Copy(Purpose::Deletion), VmPodState::Ending)
        }
        VmState::Hibernated if facts.has_registry && !is_pushed && !memory.push_given_up => {
            Plan::step(Step::Push(Purpose::Deletion), VmPodState::Ending)
        }
        VmState::Hibernated => {
            let keep_copy = wanted.keeps_local_copy || !is_pushed;
            Plan::step(Step::RemoveVm { keep_copy }, VmPodState::Ending)
        }
        // Wait for a guest that is changing its state. A guest that is off has no memory to save.
        VmState::Creating | VmState::Starting | VmState::Hibernating | VmState::Stopping => {
            Plan::wait(VmPodState::Ending)
        }
        VmState::Created | VmState::Stopped | VmState::Failed | VmState::Deleting => remove(wanted),
    }
}
