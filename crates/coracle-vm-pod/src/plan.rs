//! Decides the next step of a pod. Pure: the same facts give the same plan.
//!
//! ```text
//!              no VM ── create · clone · fork · wake ──▶ VM runs ──▶ noted as ready
//!                ▲                                         │ hibernate
//!                └── noted as hibernated ◀── removed ◀── pushed ◀── copied ◀── memory saved, guest at rest
//! ```
//! Two rules protect states from being lost. A VM is removed only after its state was saved in a snapshot that was
//! acknowledged. A pod whose state is, or may be, in the registry is never created from its image.

mod create;
mod delete;
mod hibernate;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

use coracle_api::cocoon::LifecycleState;
use coracle_types::VmState;

use crate::facts::{Facts, Restart, Saved, Source, VmFacts, VmOwner, Wanted};
use crate::step::{Note, Step};
use crate::vm_pod_state::{VmPodState, WaitReason};

/// Shortest time between two starts of a VM whose guest ended.
const RESTART_AFTER: Duration = Duration::from_secs(30);
/// Annotation for a VM that the pod does not own, so that later observations do not treat it as an owned one.
pub(crate) const ADOPTED: &str = "adopted";

/// Next step and situation of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Next step; `None`: wait for a change.
    pub step: Option<Step>,
    /// Situation of the pod.
    pub vm_pod_state: VmPodState,
    /// Time after which the pod is observed again without a change.
    pub again: Option<Duration>,
}

impl Plan {
    pub(crate) fn wait(vm_pod_state: VmPodState) -> Self {
        Self { step: None, vm_pod_state, again: None }
    }

    pub(crate) fn step(step: Step, vm_pod_state: VmPodState) -> Self {
        Self { step: Some(step), vm_pod_state, again: None }
    }
}

/// Returns the plan for a pod. A step that failed is delayed, and the plan contains the remaining delay.
#[must_use]
pub fn plan(facts: &Facts) -> Plan {
    let mut plan = decide(facts);
    let failure = facts.memory.failure.as_ref();
    let Some(failure) = failure.filter(|failure| plan.step.as_ref() == Some(&failure.step)) else {
        return plan;
    };
    plan.vm_pod_state.explain(failure);
    if !failure.rest.is_zero() {
        plan.again = Some(failure.rest);
        plan.step = None;
    }
    plan
}

fn decide(facts: &Facts) -> Plan {
    let pod = &facts.pod;
    let wanted = match &pod.wanted {
        Ok(wanted) => wanted,
        Err(_) if pod.ending => return delete::without_vm(facts),
        Err(why) => return Plan::wait(VmPodState::Invalid(why.clone())),
    };
    if pod.ending {
        return delete::plan(facts, wanted);
    }
    if pod.ended {
        return Plan::wait(VmPodState::Ended);
    }
    if let Some((reason, message)) = &pod.refused {
        return Plan::wait(VmPodState::Refused(reason.clone(), message.clone()));
    }
    if let Source::Static { id, ip } = &wanted.source {
        return adopt(facts, id, vec![*ip]);
    }
    match &facts.vm {
        Some(VmFacts { owner: VmOwner::Other(whose), .. }) => {
            let message = format!("VM {} is {whose}", wanted.vm);
            Plan::wait(VmPodState::Waiting(WaitReason::new("VMNameTaken", message)))
        }
        Some(vm) if !wanted.is_managed => adopt(facts, vm.id.as_str(), vm.ips.clone()),
        Some(vm) if wanted.hibernate => hibernate::with_vm(facts, wanted, vm),
        Some(vm) => run(facts, vm),
        None if wanted.hibernate => hibernate::without_vm(facts, wanted),
        None => create::plan(facts, wanted),
    }
}

/// Returns the address for the pod's annotation.
fn noted_ip(ips: &[IpAddr]) -> Option<String> {
    ips.first().map(IpAddr::to_string)
}

/// Plans for an existing VM that is adopted and left unchanged.
fn adopt(facts: &Facts, id: &str, ips: Vec<IpAddr>) -> Plan {
    let vm = (id.to_owned(), noted_ip(&ips));
    let vm_pod_state = VmPodState::Running {
        is_ready: facts.is_answering,
        since: facts.vm.as_ref().and_then(|vm| vm.started_at),
        ips,
    };
    match note_of(facts, LifecycleState::Ready, Some(vm), ADOPTED) {
        Some(note) => Plan::step(Step::Note(note), vm_pod_state),
        None => Plan::wait(vm_pod_state),
    }
}

/// Plans for a managed VM that is to run.
fn run(facts: &Facts, vm: &VmFacts) -> Plan {
    let starting = || VmPodState::Waiting(WaitReason::new("ContainerCreating", vm.message.clone()));
    match vm.state {
        VmState::Created => Plan::step(Step::Start, starting()),
        VmState::Hibernated => Plan::step(Step::Resume, starting()),
        VmState::Creating | VmState::Starting | VmState::Hibernating | VmState::Stopping => {
            Plan::wait(starting())
        }
        VmState::Deleting => Plan::wait(starting()),
        VmState::Running | VmState::Paused => plan_running(facts, vm),
        VmState::Stopped | VmState::Failed => plan_stopped(facts, vm),
    }
}

fn plan_running(facts: &Facts, vm: &VmFacts) -> Plan {
    let is_ready = vm.state == VmState::Running && facts.is_answering;
    let vm_pod_state = VmPodState::Running { is_ready, since: vm.started_at, ips: vm.ips.clone() };
    let note = note_of(facts, LifecycleState::Ready, Some((vm.id.to_string(), noted_ip(&vm.ips))), "");
    let Some(note) = note else { return Plan::wait(vm_pod_state) };
    if !may_have_saved_state(facts, vm) {
        return Plan::step(Step::Note(note), vm_pod_state);
    }
    // The saved state is used up once the guest runs, and not before.
    match facts.saved {
        Saved::Unknown => Plan::step(Step::FindSaved, vm_pod_state),
        Saved::Own { .. } => Plan::step(Step::DropSaved, vm_pod_state),
        Saved::Absent | Saved::Foreign(_) => Plan::step(Step::Note(note), vm_pod_state),
    }
}

/// Returns whether the registry may contain a used state: the VM was woken from it, or its hibernation was cancelled.
fn may_have_saved_state(facts: &Facts, vm: &VmFacts) -> bool {
    let was_going =
        matches!(facts.pod.noted.state, Some(LifecycleState::Hibernating | LifecycleState::Hibernated));
    facts.has_registry && (vm.is_woken || was_going)
}

/// Plans for a VM whose guest ended.
fn plan_stopped(facts: &Facts, vm: &VmFacts) -> Plan {
    let succeeded = vm.exit.as_ref().is_some_and(|exit| exit.code == 0 && exit.error.is_empty());
    let again = match facts.pod.restart {
        Restart::Always => true,
        Restart::OnFailure => !succeeded,
        Restart::Never => false,
    };
    if !again {
        return Plan::wait(VmPodState::Exited {
            succeeded,
            exit: vm.exit.clone(),
            oom_killed: vm.oom_killed,
            since: vm.started_at,
            ended: vm.finished_at,
            message: vm.message.clone(),
        });
    }
    let waits = VmPodState::Waiting(WaitReason::new("CrashLoopBackOff", vm.message.clone()));
    let rested = vm
        .started_at
        .map_or(u64::MAX, |began| u64::try_from(facts.now.0.saturating_sub(began.0)).unwrap_or(0));
    match RESTART_AFTER.checked_sub(Duration::from_millis(rested)).filter(|rest| !rest.is_zero()) {
        Some(rest) => Plan { again: Some(rest), ..Plan::wait(waits) },
        None => Plan::step(Step::Start, waits),
    }
}

/// Returns the annotations that must be written, if any.
pub(crate) fn note_of(
    facts: &Facts,
    state: LifecycleState,
    vm: Option<(String, Option<String>)>,
    message: &str,
) -> Option<Note> {
    let noted = &facts.pod.noted;
    let generation = facts.pod.wanted.as_ref().ok().and_then(|wanted| wanted.generation);
    let same_vm = match &vm {
        Some((id, ip)) => noted.id.as_ref() == Some(id) && (ip.is_none() || noted.ip == *ip),
        None => noted.id.is_none() && noted.ip.is_none(),
    };
    let same = same_vm
        && noted.state == Some(state)
        && noted.generation == generation
        && noted.message.as_deref().unwrap_or_default() == message;
    (!same).then(|| Note { state, vm, message: message.to_owned() })
}

/// Writes missing annotations, and then waits.
pub(crate) fn note_or_wait(
    facts: &Facts,
    state: LifecycleState,
    message: &str,
    vm_pod_state: VmPodState,
) -> Plan {
    match note_of(facts, state, None, message) {
        Some(note) => Plan::step(Step::Note(note), vm_pod_state),
        None => Plan::wait(vm_pod_state),
    }
}

/// Marks a pod as failed, because its saved state is lost.
pub(crate) fn mark_lost(facts: &Facts, wanted: &Wanted, message: String) -> Plan {
    let vm_pod_state = VmPodState::Lost(format!("VM {}: {message}", wanted.vm));
    note_or_wait(facts, LifecycleState::Failed, &message, vm_pod_state)
}
