//! A pod that ends: its VM is saved where the policy says so, and removed only then.

use coracle_types::VmState;

use super::Plan;
use crate::facts::{Belongs, Facts, Source, VmFacts, Wanted};
use crate::situation::Situation;
use crate::step::{Finish, Purpose, Step};

/// The next step towards nothing.
pub(super) fn plan(facts: &Facts, wanted: &Wanted) -> Plan {
    let Some(vm) = &facts.vm else { return without_vm(facts) };
    let is_own = wanted.is_managed && !matches!(wanted.source, Source::Static { .. });
    if !is_own {
        return Plan::step(Step::Finish(Finish::LeftAlone), Situation::Ends);
    }
    if let Belongs::Elsewhere(_) = vm.belongs {
        return without_vm(facts);
    }
    match (wanted.saves_on_delete, facts.memory.save_given_up) {
        (false, _) => remove(wanted),
        (true, true) => Plan::step(Step::Finish(Finish::Kept), Situation::Ends),
        (true, false) => save(facts, wanted, vm),
    }
}

/// There is none of its own, or none any more.
pub(super) fn without_vm(facts: &Facts) -> Plan {
    let how = if facts.memory.is_removed { Finish::Removed } else { Finish::NoVm };
    Plan::step(Step::Finish(how), Situation::Ends)
}

fn remove(wanted: &Wanted) -> Plan {
    Plan::step(Step::RemoveVm { keep_copy: wanted.keeps_local_copy }, Situation::Ends)
}

fn save(facts: &Facts, wanted: &Wanted, vm: &VmFacts) -> Plan {
    let memory = &facts.memory;
    let is_pushed = memory.pushed == Some(Purpose::Deletion);
    match vm.state {
        VmState::Running | VmState::Paused => Plan::step(Step::Hibernate, Situation::Ends),
        VmState::Hibernated if memory.copied != Some(Purpose::Deletion) => {
            Plan::step(Step::Copy(Purpose::Deletion), Situation::Ends)
        }
        VmState::Hibernated if facts.has_registry && !is_pushed && !memory.push_given_up => {
            Plan::step(Step::Push(Purpose::Deletion), Situation::Ends)
        }
        VmState::Hibernated => {
            let keep_copy = wanted.keeps_local_copy || !is_pushed;
            Plan::step(Step::RemoveVm { keep_copy }, Situation::Ends)
        }
        // A guest that is on its way is waited for; one that is off has no memory, and nothing to copy it with.
        VmState::Creating | VmState::Starting | VmState::Hibernating | VmState::Stopping => {
            Plan::wait(Situation::Ends)
        }
        VmState::Created | VmState::Stopped | VmState::Failed | VmState::Deleting => remove(wanted),
    }
}
