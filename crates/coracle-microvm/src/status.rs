//! What the status says. Pure: it takes what was seen and gives the whole status, times of conditions included.

use coracle_api::{MikromVM, MikromVMStatus, Phase, PowerState, condition, event, reason};
use coracle_reconcile::{Desired, Event, Kind, find, is_true, merge};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::{
    agent::{AgentError, Machine, State},
    plan::{Place, Progress},
};

/// What there is to say about a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// Bound, being created.
    Creating,
    /// No node; why.
    Unschedulable(String),
    /// The agent knows this machine.
    Machine(Machine),
    /// The agent knows none, and there was one.
    Vanished,
    /// The agent refused, for good until something changes.
    Refused(AgentError),
    /// The id is taken by a VM of the object with this UID.
    Conflict(Option<String>),
    /// Nobody has answered for a while.
    Unreachable(AgentError),
    /// INTERNAL again and again.
    Internal(AgentError),
    /// The agent says what is wrong; it is tried again.
    Waiting(AgentError),
    /// It is not in the power state that it shall be in; why.
    PowerFailed(String),
    /// The node is gone for good; why the VM does not move.
    NodeLost(String),
}

/// What one report means for the parts of the status.
struct Words {
    /// `None`: the phase stays.
    phase: Option<Phase>,
    /// Available and Ready: True, False, or Unknown (`None`).
    up: Option<bool>,
    reason: &'static str,
    message: String,
}

fn words(vm: &MikromVM, report: &Report, at: &Place) -> Words {
    let down =
        |phase, reason, message: String| Words { phase: Some(phase), up: Some(false), reason, message };
    match report {
        Report::Creating => {
            down(Phase::Creating, reason::CREATING, format!("being created by agent {}", at.address))
        }
        Report::Unschedulable(why) => down(Phase::Pending, reason::UNSCHEDULABLE, why.clone()),
        Report::Machine(machine) => machine_words(machine, vm.spec.power_state.unwrap_or_default()),
        Report::Vanished => {
            let message = format!("agent {} no longer knows VM {}", at.address, vm.vm_id());
            down(Phase::Failed, reason::VM_VANISHED, message)
        }
        Report::Refused(error) => down(Phase::Failed, refusal(error), error.to_string()),
        Report::Conflict(uid) => {
            let (id, uid) = (vm.vm_id(), uid.as_deref().unwrap_or("unknown"));
            let message = format!(
                "VM {id} at agent {} belongs to the object with uid {uid}: rename this one",
                at.address
            );
            down(Phase::Failed, reason::VM_ID_CONFLICT, message)
        }
        Report::Unreachable(error) => Words {
            phase: vm.meta_deleted().then_some(Phase::Deleting),
            up: if vm.is_provisioned() { None } else { Some(false) },
            reason: reason::AGENT_UNREACHABLE,
            message: error.to_string(),
        },
        Report::Internal(error) => Words {
            phase: None,
            up: Some(false),
            reason: reason::AGENT_INTERNAL_ERROR,
            message: error.to_string(),
        },
        Report::Waiting(error) => Words {
            phase: None,
            up: Some(false),
            reason: match error.code {
                tonic::Code::ResourceExhausted => reason::NO_SPACE,
                _ if error.failure.starts_with(IMAGE_CODES) => reason::IMAGE_PULL_FAILED,
                _ => reason::BOOT_FAILED,
            },
            message: error.to_string(),
        },
        Report::PowerFailed(why) => Words {
            phase: None,
            up: Some(is_up(vm)),
            reason: reason::POWER_STATE_FAILED,
            message: why.clone(),
        },
        Report::NodeLost(why) => {
            let node = if at.node.is_empty() { &at.address } else { &at.node };
            down(
                Phase::Failed,
                reason::NODE_LOST,
                format!("node {node} is gone and the VM was not moved: {why}"),
            )
        }
    }
}

/// Begin of the codes of failures with images.
const IMAGE_CODES: &str = "COR-IMG-";

fn refusal(error: &AgentError) -> &'static str {
    if error.failure.starts_with(IMAGE_CODES) { reason::IMAGE_PULL_FAILED } else { reason::AGENT_ERROR }
}

/// The contract's table of states (`microvm.md` §2.1).
fn machine_words(machine: &Machine, wanted: PowerState) -> Words {
    let (phase, up, reason, message) = match machine.state {
        State::Running if machine.power == Some(PowerState::Paused) => {
            (Phase::Running, false, reason::PAUSED, "the VM is paused")
        }
        State::Stopped if machine.power == Some(PowerState::Hibernated) => {
            (Phase::Stopped, false, reason::HIBERNATED, "the memory of the VM is on the node's disk")
        }
        State::Stopped if wanted == PowerState::Stopped => {
            (Phase::Stopped, false, reason::POWERED_OFF, "the VM is powered off, as asked")
        }
        State::Unspecified => {
            (Phase::Pending, false, reason::IN_TRANSITION, "the agent does not say its state")
        }
        State::Creating => (Phase::Creating, false, reason::IN_TRANSITION, "the VM is being created"),
        State::Running => (Phase::Running, true, reason::VM_RUNNING, "the VM runs"),
        State::Stopping => (Phase::Stopping, false, reason::IN_TRANSITION, "the VM is stopping"),
        State::Stopped => (Phase::Stopped, false, reason::VM_STOPPED, "the VM has ended"),
        State::Deleting => (Phase::Deleting, false, reason::IN_TRANSITION, "the VM is being deleted"),
        State::Error => (Phase::Failed, false, reason::VM_FAILED, "the VM has failed"),
    };
    Words { phase: Some(phase), up: Some(up), reason, message: message.into() }
}

/// The whole status.
#[must_use]
pub fn derive(
    vm: &MikromVM,
    report: &Report,
    at: &Place,
    progress: Progress,
    now: Timestamp,
) -> MikromVMStatus {
    let mut status = vm.status.clone().unwrap_or_default();
    let said = words(vm, report, at);
    if matches!(report, Report::Unreachable(_) | Report::Waiting(_) | Report::PowerFailed(_))
        && has_reason(&status, said.reason)
    {
        return status; // said already; the error's wording may vary, and would be written again and again
    }
    status.phase = said.phase.or(status.phase);
    status.observed_generation = vm.metadata.generation;
    status.conditions = conditions(&status, &said, vm.metadata.generation, now);
    match report {
        Report::Machine(machine) => {
            status.vm_id = vm.vm_id();
            status.ip_address.clone_from(&machine.ip);
            status.node_name.clone_from(&at.node);
            status.agent_address.clone_from(&at.address);
            status.power_state = machine.power;
            status.image_digest.clone_from(&machine.image_digest);
            status.created_at = status.created_at.or_else(|| Some(created_at(machine, now)));
            status.restarts = status.restarts.saturating_add(i32::from(progress.restarted));
        }
        Report::Vanished | Report::NodeLost(_) | Report::Conflict(_) => status.ip_address.clear(),
        Report::Creating
        | Report::Unschedulable(_)
        | Report::Refused(_)
        | Report::Unreachable(_)
        | Report::Waiting(_)
        | Report::PowerFailed(_)
        | Report::Internal(_) => {}
    }
    status
}

/// The status of an object that is bound to `place` from now on: whatever was elsewhere is no longer it.
#[must_use]
pub fn bound(vm: &MikromVM, place: &Place, now: Timestamp) -> MikromVMStatus {
    let old = vm.status.clone().unwrap_or_default();
    let said = words(vm, &Report::Creating, place);
    MikromVMStatus {
        phase: said.phase,
        node_name: place.node.clone(),
        agent_address: place.address.clone(),
        created_at: old.created_at.clone(),
        restarts: old.restarts.saturating_add(i32::from(!old.vm_id.is_empty())),
        observed_generation: vm.metadata.generation,
        conditions: conditions(&old, &said, vm.metadata.generation, now),
        ..MikromVMStatus::default()
    }
}

fn conditions(
    status: &MikromVMStatus,
    said: &Words,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    let one = |kind| Desired { kind, status: said.up, reason: said.reason, message: said.message.clone() };
    merge(&status.conditions, &[one(condition::AVAILABLE), one(condition::READY)], generation, now)
}

fn created_at(machine: &Machine, now: Timestamp) -> Time {
    let seconds = if machine.created_at > 0 { machine.created_at } else { now.as_second() };
    Time(Timestamp::from_second(seconds).unwrap_or(now))
}

fn has_reason(status: &MikromVMStatus, reason: &str) -> bool {
    find(&status.conditions, condition::READY).is_some_and(|c| c.reason == reason)
}

/// Is the VM Ready, by its status?
fn is_up(vm: &MikromVM) -> bool {
    vm.status.as_ref().is_some_and(|status| is_true(&status.conditions, condition::READY))
}

/// Since when the VM is Ready, by its status.
#[must_use]
pub fn ready_since(vm: &MikromVM) -> Option<Timestamp> {
    let ready = find(&vm.status.as_ref()?.conditions, condition::READY)?;
    (ready.status == "True").then_some(ready.last_transition_time.0)
}

/// What people are told when the status changes from `old` to `new`.
#[must_use]
pub fn events(old: Option<&MikromVMStatus>, new: &MikromVMStatus, progress: Progress) -> Vec<Event> {
    let none = MikromVMStatus::default();
    let old = old.unwrap_or(&none);
    let Some(ready) = find(&new.conditions, condition::READY) else { return vec![] };
    let before = find(&old.conditions, condition::READY);
    if before.is_some_and(|c| (&c.status, &c.reason) == (&ready.status, &ready.reason)) {
        return vec![];
    }
    let place = if new.node_name.is_empty() { &new.agent_address } else { &new.node_name };
    let normal = |reason, action, note| Event { kind: Kind::Normal, reason, action, note };
    let warning =
        |reason| Event { kind: Kind::Warning, reason, action: "Reconcile", note: ready.message.clone() };
    match ready.reason.as_str() {
        reason::CREATING if old.agent_address != new.agent_address => {
            let note = if old.vm_id.is_empty() {
                format!("bound to {place}")
            } else {
                format!("moved to {place}: its node is gone")
            };
            vec![normal(event::SCHEDULED, "Bind", note)]
        }
        reason::VM_RUNNING if progress.restarted => {
            vec![normal(
                event::RESTARTED,
                "Start",
                format!("started again on {place}, for the {}. time", new.restarts),
            )]
        }
        reason::VM_RUNNING if old.vm_id.is_empty() => vec![
            normal(event::CREATED, "Create", format!("VM {} created on {place}", new.vm_id)),
            normal(event::STARTED, "Start", format!("VM {} runs on {place}", new.vm_id)),
        ],
        reason::VM_RUNNING if is_true(&new.conditions, condition::READY) => {
            vec![normal(event::STARTED, "Start", format!("VM {} runs on {place}", new.vm_id))]
        }
        reason::PAUSED => vec![normal(reason::PAUSED, "Power", ready.message.clone())],
        reason::HIBERNATED => vec![normal(reason::HIBERNATED, "Power", ready.message.clone())],
        reason::POWERED_OFF => vec![normal(reason::POWERED_OFF, "Power", ready.message.clone())],
        reason::POWER_STATE_FAILED => vec![warning(reason::POWER_STATE_FAILED)],
        reason::AGENT_ERROR => vec![warning(event::FAILED)],
        reason::IMAGE_PULL_FAILED => vec![warning(reason::IMAGE_PULL_FAILED)],
        reason::NO_SPACE => vec![warning(reason::NO_SPACE)],
        reason::BOOT_FAILED => vec![warning(reason::BOOT_FAILED)],
        reason::UNSCHEDULABLE => vec![warning(reason::UNSCHEDULABLE)],
        reason::VM_STOPPED => vec![warning(reason::VM_STOPPED)],
        reason::VM_FAILED => vec![warning(reason::VM_FAILED)],
        reason::VM_VANISHED => vec![warning(reason::VM_VANISHED)],
        reason::VM_ID_CONFLICT => vec![warning(reason::VM_ID_CONFLICT)],
        reason::AGENT_UNREACHABLE => vec![warning(reason::AGENT_UNREACHABLE)],
        reason::AGENT_INTERNAL_ERROR => vec![warning(reason::AGENT_INTERNAL_ERROR)],
        reason::NODE_LOST => vec![warning(reason::NODE_LOST)],
        _ => vec![], // on the way to another state
    }
}

trait Deleted {
    fn meta_deleted(&self) -> bool;
}

impl Deleted for MikromVM {
    fn meta_deleted(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }
}

#[cfg(test)]
mod tests {
    use coracle_api::MikromVMSpec;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn object() -> MikromVM {
        let mut vm = MikromVM::new("web", MikromVMSpec::default());
        vm.metadata.namespace = Some("default".into());
        vm.metadata.generation = Some(3);
        vm
    }

    fn place() -> Place {
        Place { node: "n1".into(), address: "a:1".into() }
    }

    fn machine(state: State) -> Report {
        Report::Machine(Machine {
            state,
            ip: "10.0.0.2".into(),
            uid: None,
            image_digest: "sha256:x".into(),
            created_at: 0,
            power: None,
        })
    }

    fn error() -> AgentError {
        AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code: tonic::Code::InvalidArgument,
            message: "no".into(),
            failure: String::new(),
        }
    }

    fn image() -> AgentError {
        AgentError { failure: "COR-IMG-004".into(), ..error() }
    }

    fn full() -> AgentError {
        AgentError { failure: "COR-IMG-010".into(), code: tonic::Code::ResourceExhausted, ..error() }
    }

    #[test]
    fn status_table() {
        let live = derive(&object(), &machine(State::Running), &place(), Progress::default(), at(10));
        let (new, mut running) = (object(), object());
        running.status = Some(live);
        for (why, vm, report, want) in [
            ("the contract's table", &new, machine(State::Unspecified), ("Pending", "False", "InTransition")),
            ("the contract's table", &new, machine(State::Creating), ("Creating", "False", "InTransition")),
            ("the contract's table", &new, machine(State::Running), ("Running", "True", "VMRunning")),
            ("the contract's table", &new, machine(State::Stopping), ("Stopping", "False", "InTransition")),
            ("the contract's table", &new, machine(State::Stopped), ("Stopped", "False", "VMStopped")),
            ("the contract's table", &new, machine(State::Deleting), ("Deleting", "False", "InTransition")),
            ("the contract's table", &new, machine(State::Error), ("Failed", "False", "VMFailed")),
            ("refused", &new, Report::Refused(error()), ("Failed", "False", "AgentError")),
            ("no such image", &new, Report::Refused(image()), ("Failed", "False", "ImagePullFailed")),
            (
                "the registry is away",
                &running,
                Report::Waiting(image()),
                ("Running", "False", "ImagePullFailed"),
            ),
            ("the disk is full", &running, Report::Waiting(full()), ("Running", "False", "NoSpace")),
            ("no boot", &running, Report::Waiting(error()), ("Running", "False", "BootFailed")),
            (
                "INTERNAL keeps the phase",
                &running,
                Report::Internal(error()),
                ("Running", "False", "AgentInternalError"),
            ),
            (
                "silence keeps the phase: unknown",
                &running,
                Report::Unreachable(error()),
                ("Running", "Unknown", "AgentUnreachable"),
            ),
            ("vanished", &running, Report::Vanished, ("Failed", "False", "VMVanished")),
            ("taken", &new, Report::Conflict(None), ("Failed", "False", "VMIDConflict")),
            ("no room", &new, Report::Unschedulable("why".into()), ("Pending", "False", "Unschedulable")),
            ("lost", &running, Report::NodeLost("why".into()), ("Failed", "False", "NodeLost")),
        ] {
            let status = derive(vm, &report, &place(), Progress::default(), at(20));
            for kind in [condition::AVAILABLE, condition::READY] {
                let c = find(&status.conditions, kind).unwrap();
                let got = (format!("{:?}", status.phase.unwrap()), c.status.as_str(), c.reason.as_str());
                assert_eq!(got, (want.0.to_owned(), want.1, want.2), "{why} {kind}");
                assert_eq!(c.observed_generation, Some(3));
            }
        }
    }

    #[test]
    fn the_same_again_is_equal_and_created_at_stays() {
        let mut vm = object();
        let first = derive(&vm, &machine(State::Running), &place(), Progress::default(), at(10));
        vm.status = Some(first.clone());
        let second = derive(&vm, &machine(State::Running), &place(), Progress::default(), at(99));
        assert_eq!(first, second);
        assert_eq!(second.created_at.unwrap().0, at(10));
        let stored: MikromVMStatus = serde_json::from_value(serde_json::to_value(&first).unwrap()).unwrap();
        assert_eq!(stored, first, "equal after a round trip, or it would be written for ever");
    }

    #[test]
    fn silence_is_written_once() {
        let mut vm = object();
        vm.status = Some(derive(&vm, &machine(State::Running), &place(), Progress::default(), at(10)));
        vm.status = Some(derive(&vm, &Report::Unreachable(error()), &place(), Progress::default(), at(20)));
        let other = AgentError { message: "in other words".into(), ..error() };
        let again = derive(&vm, &Report::Unreachable(other), &place(), Progress::default(), at(30));
        assert_eq!(Some(&again), vm.status.as_ref());
    }

    #[test]
    fn people_are_told_of_changes_only() {
        let mut vm = object();
        let reasons = |vm: &MikromVM, new: &MikromVMStatus, progress| {
            events(vm.status.as_ref(), new, progress).iter().map(|e| e.reason).collect::<Vec<_>>()
        };
        let calm = Progress::default();
        let bound = bound(&vm, &place(), at(1));
        assert_eq!(reasons(&vm, &bound, calm), ["Scheduled"]);
        vm.status = Some(bound);
        let running = derive(&vm, &machine(State::Running), &place(), calm, at(2));
        assert_eq!(reasons(&vm, &running, calm), ["Created", "Started"]);
        vm.status = Some(running.clone());
        assert_eq!(reasons(&vm, &running, calm), [] as [&str; 0]);
        let stopped = derive(&vm, &machine(State::Stopped), &place(), calm, at(3));
        assert_eq!(reasons(&vm, &stopped, calm), ["VMStopped"]);
        vm.status = Some(stopped);
        let again = Progress { restarted: true, ..calm };
        let restarted = derive(&vm, &machine(State::Running), &place(), again, at(4));
        assert_eq!((reasons(&vm, &restarted, again), restarted.restarts), (vec!["Restarted"], 1));
        let failed = derive(&vm, &Report::Refused(error()), &place(), calm, at(5));
        assert_eq!(reasons(&vm, &failed, calm), ["Failed"]);
    }
}
