//! Plans for a pod whose VM does not exist yet.

use std::time::Duration;

use coracle_api::cocoon::LifecycleState;
use coracle_types::VmState;

use super::{Plan, mark_lost, note_of};
use crate::facts::{Facts, ForkSource, Saved, Source, Wanted};
use crate::step::Step;
use crate::vm_pod_state::{VmPodState, WaitReason};

/// Interval at which the source VM of a fork is observed: changes of another pod's VM are not signalled.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// Returns the next step towards a VM.
pub(super) fn plan(facts: &Facts, wanted: &Wanted) -> Plan {
    match may_be_saved(facts, wanted) {
        true => wake(facts, wanted),
        false => make(facts, wanted),
    }
}

/// Returns whether the state of this pod is, or may be, in the registry. A pod that this node never accepted and that does not
/// ask to be restored has none.
fn may_be_saved(facts: &Facts, wanted: &Wanted) -> bool {
    let was_here = facts.pod.begun || facts.pod.noted.state.is_some();
    facts.has_registry && (wanted.restore || was_here && !facts.memory.is_new)
}

/// Wakes the VM from its saved state, if there is one.
fn wake(facts: &Facts, wanted: &Wanted) -> Plan {
    let waking = VmPodState::Waking;
    let was_asleep =
        matches!(facts.pod.noted.state, Some(LifecycleState::Hibernated | LifecycleState::Hibernating));
    match &facts.saved {
        Saved::Unknown => Plan::step(Step::FindSaved, waking),
        Saved::Own { same_pod } if *same_pod || was_asleep || wanted.restore => {
            match note_of(facts, LifecycleState::Creating, None, "waking from the saved state") {
                Some(note) => Plan::step(Step::Note(note), waking),
                None if !facts.memory.is_imported => Plan::step(Step::Import, waking),
                None => Plan::step(Step::Wake, waking),
            }
        }
        Saved::Absent if was_asleep => mark_lost(
            facts,
            wanted,
            "it was hibernated, and its saved state is not in the registry".to_owned(),
        ),
        Saved::Foreign(why) if was_asleep || wanted.restore => {
            mark_lost(facts, wanted, format!("its saved state cannot be used: {why}"))
        }
        // The VM was removed without being saved, or was never created.
        Saved::Absent | Saved::Own { .. } | Saved::Foreign(_) => make(facts, wanted),
    }
}

/// Creates the VM from the source that the pod names.
fn make(facts: &Facts, wanted: &Wanted) -> Plan {
    let creating = VmPodState::Waiting(WaitReason::new("ContainerCreating", String::new()));
    if let Some(note) = note_of(facts, LifecycleState::Creating, None, "") {
        return Plan::step(Step::Note(note), creating);
    }
    match &wanted.source {
        Source::Run { .. } if facts.memory.has_image => Plan::step(Step::Run, creating),
        Source::Run { .. } => Plan::step(Step::PullImage, creating),
        Source::Clone { .. } | Source::Exported { .. } if facts.has_clone_source => {
            Plan::step(Step::Clone, creating)
        }
        Source::Clone { .. } => Plan::step(Step::PullSnapshot, creating),
        Source::Exported { .. } => Plan::step(Step::ImportExported, creating),
        Source::Fork { from } => fork(facts, from.as_str(), creating),
        Source::Static { .. } => Plan::wait(creating),
    }
}

fn fork(facts: &Facts, from: &str, creating: VmPodState) -> Plan {
    let waits = |message| {
        let vm_pod_state = VmPodState::Waiting(WaitReason::new("ForkSourceMissing", message));
        Plan { again: Some(LOOK_AGAIN), ..Plan::wait(vm_pod_state) }
    };
    match &facts.fork {
        ForkSource::Saved => Plan::step(Step::Fork, creating),
        ForkSource::Live => Plan::step(Step::SaveForkSource, creating),
        ForkSource::Waiting(state) => {
            let state: &VmState = state;
            waits(format!(
                "VM {from} is {}, and a copy is made of one that runs",
                state.to_string().to_lowercase()
            ))
        }
        ForkSource::Foreign => waits(format!("VM {from} belongs to another namespace")),
        ForkSource::Absent | ForkSource::None => waits(format!("no VM {from} on this node")),
    }
}
