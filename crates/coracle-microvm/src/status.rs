//! Derives the status. Pure: a finding comes in, the whole status comes out, with the times of its conditions.

mod parts;

use coracle_api::{
    Migration, MigrationPhase, MikromVM, MikromVMStatus, Phase, PowerState, condition, event, keys, reason,
};
use coracle_reconcile::{Desired, Event, Kind, find, is_true, merge};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use self::parts::parts;
use crate::{
    agent::{AgentError, State, VmInfo},
    observed::AppliedSteps,
    step::NodeBinding,
};

/// Result of a reconcile, from which the status is derived.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// The VM is bound and is being created.
    Creating,
    /// No node accepts the VM; contains the reason.
    Unschedulable(String),
    /// The agent in the spec neither belongs to the cluster nor is allowed.
    NotAllowed(String),
    /// The agent reports this VM.
    Vm(VmInfo),
    /// The agent reports this VM, which is down because its node is cordoned.
    Drained(VmInfo),
    /// The agent reports this VM, which should move and cannot; contains the reason.
    DrainBlocked(VmInfo, String),
    /// A move of the VM failed, and is tried again.
    MoveFailed(AgentError),
    /// The agent does not know the VM, which existed before.
    Vanished,
    /// The agent refused a call; a retry without a change would fail again.
    Refused(AgentError),
    /// A VM of another object has the id; contains the UID of that object, if it has one.
    Conflict(Option<String>),
    /// Several calls in a row got no response.
    Unreachable(AgentError),
    /// Several creations in a row failed with INTERNAL.
    Internal(AgentError),
    /// The agent explains a failure that may be temporary; the call is repeated.
    Waiting(AgentError),
    /// The VM did not reach the power state of the spec; contains the reason.
    PowerFailed(String),
    /// The node is lost; contains the reason why the VM was not moved.
    NodeLost(String),
    /// An object that the spec refers to is missing or cannot be used.
    ConfigError(String),
}

/// A finding in the terms of the status.
struct Summary {
    /// Phase of the VM; `None`: the phase is unchanged.
    phase: Option<Phase>,
    /// Status of the conditions Available and Ready: True, False, or Unknown (`None`).
    up: Option<bool>,
    reason: &'static str,
    message: String,
}

fn summarize(vm: &MikromVM, finding: &Finding, bound_to: &NodeBinding) -> Summary {
    let down =
        |phase, reason, message: String| Summary { phase: Some(phase), up: Some(false), reason, message };
    match finding {
        Finding::Creating => {
            down(Phase::Creating, reason::CREATING, format!("being created by agent {}", bound_to.address))
        }
        Finding::Unschedulable(why) => down(Phase::Pending, reason::UNSCHEDULABLE, why.clone()),
        Finding::NotAllowed(address) => {
            let message = format!(
                "no node announces agent {address}: correct spec.agentAddress, or start the operator with \
                 --agent-allow={address}"
            );
            down(Phase::Pending, reason::AGENT_NOT_ALLOWED, message)
        }
        Finding::Vm(info) => summary_of_vm(info, vm.spec.power_state.unwrap_or_default()),
        Finding::Drained(_) => {
            let message =
                format!("node {} is cordoned: the VM continues when it is uncordoned", bound_to.node);
            down(Phase::Stopped, reason::DRAINED, message)
        }
        Finding::DrainBlocked(info, why) => Summary {
            reason: reason::DRAIN_BLOCKED,
            message: format!("node {} is cordoned and the VM cannot move: {why}", bound_to.node),
            ..summary_of_vm(info, vm.spec.power_state.unwrap_or_default())
        },
        Finding::MoveFailed(error) => down(Phase::Stopped, reason::MOVE_FAILED, error.to_string()),
        Finding::Vanished => {
            let message = format!("agent {} no longer knows VM {}", bound_to.address, vm.vm_id());
            down(Phase::Failed, reason::VM_VANISHED, message)
        }
        Finding::Refused(error) => down(Phase::Failed, refusal(error), error.to_string()),
        Finding::Conflict(uid) => {
            down(Phase::Failed, reason::VM_ID_CONFLICT, conflict(vm, uid.as_deref(), &bound_to.address))
        }
        Finding::Unreachable(error) => Summary {
            phase: vm.metadata.deletion_timestamp.is_some().then_some(Phase::Deleting),
            up: if vm.is_provisioned() { None } else { Some(false) },
            reason: reason::AGENT_UNREACHABLE,
            // The error of the transport would expose the operator's network to the user; it is in the log.
            message: format!("agent {} does not answer", error.address),
        },
        Finding::Internal(error) => Summary {
            phase: None,
            up: Some(false),
            reason: reason::AGENT_INTERNAL_ERROR,
            message: error.to_string(),
        },
        Finding::Waiting(error) => Summary {
            phase: None,
            up: Some(false),
            reason: match error.code {
                tonic::Code::ResourceExhausted => reason::NO_SPACE,
                _ if error.is_of_image() => reason::IMAGE_PULL_FAILED,
                _ => reason::BOOT_FAILED,
            },
            message: error.to_string(),
        },
        Finding::PowerFailed(why) => Summary {
            phase: None,
            up: Some(is_up(vm)),
            reason: reason::POWER_STATE_FAILED,
            message: why.clone(),
        },
        Finding::ConfigError(why) => down(Phase::Pending, reason::CONFIG_ERROR, why.clone()),
        Finding::NodeLost(why) => {
            let node = if bound_to.node.is_empty() { &bound_to.address } else { &bound_to.node };
            down(
                Phase::Failed,
                reason::NODE_LOST,
                format!("node {node} is gone and the VM was not moved: {why}"),
            )
        }
    }
}

/// Returns a message that names the owner of the VM with the id of `vm`, and the remedy.
fn conflict(vm: &MikromVM, uid: Option<&str>, agent: &str) -> String {
    let id = vm.vm_id();
    match uid {
        Some(uid) => {
            format!("VM {id} at agent {agent} belongs to the object with uid {uid}: rename this one")
        }
        None => format!(
            "VM {id} at agent {agent} was made for no object: rename this one, or have the VM made with metadata \
             {}={}",
            keys::vm::ADOPT,
            vm.object_name()
        ),
    }
}

fn refusal(error: &AgentError) -> &'static str {
    if error.is_of_image() { reason::IMAGE_PULL_FAILED } else { reason::AGENT_ERROR }
}

/// Returns the summary for each state of a VM (docs/reference/agent-service.md).
fn summary_of_vm(info: &VmInfo, wanted: PowerState) -> Summary {
    let (phase, up, reason, message) = match info.state {
        State::Running if info.power == Some(PowerState::Paused) => {
            (Phase::Running, false, reason::PAUSED, "the VM is paused")
        }
        State::Stopped if info.power == Some(PowerState::Hibernated) => {
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
    Summary { phase: Some(phase), up: Some(up), reason, message: message.into() }
}

/// Derives the whole status.
#[must_use]
pub fn derive(
    vm: &MikromVM,
    finding: &Finding,
    bound_to: &NodeBinding,
    progress: AppliedSteps,
    now: Timestamp,
) -> MikromVMStatus {
    let mut status = vm.status.clone().unwrap_or_default();
    let summary = summarize(vm, finding, bound_to);
    if matches!(
        finding,
        Finding::Unreachable(_)
            | Finding::Waiting(_)
            | Finding::PowerFailed(_)
            | Finding::MoveFailed(_)
            | Finding::DrainBlocked(..)
    ) && is_known(&status, &summary, vm.metadata.generation)
    {
        return status; // the text of the error may vary, and each variant would be a write
    }
    status.phase = summary.phase.or(status.phase);
    status.observed_generation = vm.metadata.generation;
    status.conditions = conditions(&status, &summary, vm.metadata.generation, now);
    status.conditions = merge(&status.conditions, &parts(finding, bound_to), vm.metadata.generation, now);
    match finding {
        Finding::Vm(info) | Finding::Drained(info) | Finding::DrainBlocked(info, _) => {
            status.vm_id = vm.vm_id();
            status.ip_address.clone_from(&info.ip);
            status.node_name.clone_from(&bound_to.node);
            status.agent_address.clone_from(&bound_to.address);
            status.power_state = info.power;
            status.powered_off = is_off_by_spec(vm, info, progress) || is_drained_off(finding);
            status.image_digest.clone_from(&info.image_digest);
            status.created_at = status.created_at.or_else(|| Some(created_at(info, now)));
            status.restarts = status.restarts.saturating_add(i32::from(progress.restarted));
        }
        Finding::Vanished | Finding::NodeLost(_) | Finding::Conflict(_) => status.ip_address.clear(),
        Finding::Creating
        | Finding::Unschedulable(_)
        | Finding::NotAllowed(_)
        | Finding::Refused(_)
        | Finding::Unreachable(_)
        | Finding::Waiting(_)
        | Finding::PowerFailed(_)
        | Finding::MoveFailed(_)
        | Finding::ConfigError(_)
        | Finding::Internal(_) => {}
    }
    status
}

/// True for a VM that was powered off because its node is cordoned.
fn is_drained_off(finding: &Finding) -> bool {
    matches!(finding, Finding::Drained(info) if info.power == Some(PowerState::Stopped))
}

/// True while the status shows that the VM is down because its node is cordoned.
#[must_use]
pub fn is_drained(vm: &MikromVM) -> bool {
    vm.status.as_ref().is_some_and(|s| has_reason(s, reason::DRAINED))
}

/// Returns the status of an object with a move in that phase; `None`: the move is over. From `Restoring` on the object is bound
/// to the target.
#[must_use]
pub fn migration_status(vm: &MikromVM, migration: Option<&Migration>, now: Timestamp) -> MikromVMStatus {
    let mut status = vm.status.clone().unwrap_or_default();
    if let Some(Migration { phase: MigrationPhase::Restoring, target, .. }) = migration {
        status.node_name.clone_from(&target.node_name);
        status.agent_address.clone_from(&target.agent_address);
        status.ip_address.clear();
    }
    if let Some(Migration { source, target, phase, .. }) = migration
        && *phase != MigrationPhase::Cleaning
    {
        let summary = Summary {
            phase: Some(Phase::Stopping),
            up: Some(false),
            reason: reason::MOVING,
            message: format!("the VM moves from node {} to node {}", source.node_name, target.node_name),
        };
        status.phase = summary.phase;
        status.conditions = conditions(&status, &summary, vm.metadata.generation, now);
    }
    status.migration = migration.cloned();
    status
}

/// Returns the status of an object that is newly bound to `binding`; the findings about another node are dropped.
#[must_use]
pub fn bound_status(vm: &MikromVM, binding: &NodeBinding, now: Timestamp) -> MikromVMStatus {
    let old = vm.status.clone().unwrap_or_default();
    let summary = summarize(vm, &Finding::Creating, binding);
    MikromVMStatus {
        phase: summary.phase,
        node_name: binding.node.clone(),
        agent_address: binding.address.clone(),
        created_at: old.created_at.clone(),
        restarts: old.restarts.saturating_add(i32::from(!old.vm_id.is_empty())),
        // A move that was interrupted by the loss of the source may have left a snapshot at the target.
        migration: old.migration.clone().map(|m| Migration { phase: MigrationPhase::Cleaning, ..m }),
        observed_generation: vm.metadata.generation,
        conditions: merge(
            &conditions(&old, &summary, vm.metadata.generation, now),
            &parts(&Finding::Creating, binding),
            vm.metadata.generation,
            now,
        ),
        ..MikromVMStatus::default()
    }
}

fn conditions(
    status: &MikromVMStatus,
    summary: &Summary,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    let one =
        |kind| Desired { kind, status: summary.up, reason: summary.reason, message: summary.message.clone() };
    merge(&status.conditions, &[one(condition::AVAILABLE), one(condition::READY)], generation, now)
}

fn created_at(info: &VmInfo, now: Timestamp) -> Time {
    let seconds = if info.created_at > 0 { info.created_at } else { now.as_second() };
    Time(Timestamp::from_second(seconds).unwrap_or(now))
}

/// True when the VM was powered off by spec.powerState, until it runs again. A VM that is down right after its start has ended
/// by itself.
fn is_off_by_spec(vm: &MikromVM, info: &VmInfo, progress: AppliedSteps) -> bool {
    match info.state {
        State::Stopped | State::Error => {
            let started = progress.powered == Some(PowerState::Running);
            vm.spec.power_state == Some(PowerState::Stopped) || (is_powered_off(vm) && !started)
        }
        State::Unspecified | State::Creating | State::Stopping | State::Deleting => is_powered_off(vm),
        State::Running => false,
    }
}

/// True while the VM is down because its power state was Stopped.
#[must_use]
pub fn is_powered_off(vm: &MikromVM) -> bool {
    // Older operators, which did not have the field, recorded it only in the reason.
    vm.status.as_ref().is_some_and(|s| s.powered_off || has_reason(s, reason::POWERED_OFF))
}

/// True when the status reports the same failure of the same generation, perhaps with different text.
fn is_known(status: &MikromVMStatus, summary: &Summary, generation: Option<i64>) -> bool {
    find(&status.conditions, condition::READY).is_some_and(|c| {
        c.reason == summary.reason
            && c.observed_generation == generation
            && failure_code(&c.message) == failure_code(&summary.message)
    })
}

/// Returns the stable error code (`COR-IMG-004`) in a message of a coracle agent.
fn failure_code(message: &str) -> Option<&str> {
    let from = message.find("(COR-")? + 1;
    message.get(from..)?.split([')', ';']).next()
}

fn has_reason(status: &MikromVMStatus, reason: &str) -> bool {
    find(&status.conditions, condition::READY).is_some_and(|c| c.reason == reason)
}

/// True when the condition Ready is True.
fn is_up(vm: &MikromVM) -> bool {
    vm.status.as_ref().is_some_and(|status| is_true(&status.conditions, condition::READY))
}

/// Returns the time since which the condition Ready is True.
#[must_use]
pub fn ready_since(vm: &MikromVM) -> Option<Timestamp> {
    let ready = find(&vm.status.as_ref()?.conditions, condition::READY)?;
    (ready.status == "True").then_some(ready.last_transition_time.0)
}

/// Returns the Events for a status that changes from `old` to `new`.
#[must_use]
pub fn events(old: Option<&MikromVMStatus>, new: &MikromVMStatus, progress: AppliedSteps) -> Vec<Event> {
    let none = MikromVMStatus::default();
    let old = old.unwrap_or(&none);
    let Some(ready) = find(&new.conditions, condition::READY) else { return vec![] };
    let before = find(&old.conditions, condition::READY);
    if before.is_some_and(|c| (&c.status, &c.reason) == (&ready.status, &ready.reason)) {
        return vec![];
    }
    let node = if new.node_name.is_empty() { &new.agent_address } else { &new.node_name };
    let normal = |reason, action, note| Event { kind: Kind::Normal, reason, action, note };
    let warning =
        |reason| Event { kind: Kind::Warning, reason, action: "Reconcile", note: ready.message.clone() };
    match ready.reason.as_str() {
        reason::CREATING if old.agent_address != new.agent_address => {
            let note = if old.vm_id.is_empty() {
                format!("bound to {node}")
            } else {
                format!("moved to {node}: its node is gone")
            };
            vec![normal(event::SCHEDULED, "Bind", note)]
        }
        reason::VM_RUNNING if progress.restarted => {
            vec![normal(
                event::RESTARTED,
                "Start",
                format!("started again on {node}, for the {}. time", new.restarts),
            )]
        }
        reason::VM_RUNNING if old.vm_id.is_empty() => {
            vec![normal(event::STARTED, "Create", format!("VM {} was created and runs on {node}", new.vm_id))]
        }
        reason::VM_RUNNING if is_true(&new.conditions, condition::READY) => {
            vec![normal(event::STARTED, "Start", format!("VM {} runs on {node}", new.vm_id))]
        }
        reason::PAUSED => vec![normal(reason::PAUSED, "Power", ready.message.clone())],
        reason::HIBERNATED => vec![normal(reason::HIBERNATED, "Power", ready.message.clone())],
        reason::POWERED_OFF => vec![normal(reason::POWERED_OFF, "Power", ready.message.clone())],
        reason::DRAINED => vec![normal(reason::DRAINED, "Drain", ready.message.clone())],
        reason::MOVING => vec![normal(reason::MOVING, "Drain", ready.message.clone())],
        reason::DRAIN_BLOCKED => vec![warning(reason::DRAIN_BLOCKED)],
        reason::MOVE_FAILED => vec![warning(reason::MOVE_FAILED)],
        reason::POWER_STATE_FAILED => vec![warning(reason::POWER_STATE_FAILED)],
        reason::AGENT_ERROR => vec![warning(event::FAILED)],
        reason::IMAGE_PULL_FAILED => vec![warning(reason::IMAGE_PULL_FAILED)],
        reason::NO_SPACE => vec![warning(reason::NO_SPACE)],
        reason::BOOT_FAILED => vec![warning(reason::BOOT_FAILED)],
        reason::UNSCHEDULABLE => vec![warning(reason::UNSCHEDULABLE)],
        reason::CONFIG_ERROR => vec![warning(reason::CONFIG_ERROR)],
        reason::AGENT_NOT_ALLOWED => vec![warning(reason::AGENT_NOT_ALLOWED)],
        reason::VM_STOPPED => vec![warning(reason::VM_STOPPED)],
        reason::VM_FAILED => vec![warning(reason::VM_FAILED)],
        reason::VM_VANISHED => vec![warning(reason::VM_VANISHED)],
        reason::VM_ID_CONFLICT => vec![warning(reason::VM_ID_CONFLICT)],
        reason::AGENT_UNREACHABLE => vec![warning(reason::AGENT_UNREACHABLE)],
        reason::AGENT_INTERNAL_ERROR => vec![warning(reason::AGENT_INTERNAL_ERROR)],
        reason::NODE_LOST => vec![warning(reason::NODE_LOST)],
        _ => vec![], // transitional state
    }
}

#[cfg(test)]
mod tests {
    use coracle_api::MikromVMSpec;

    use super::*;
    use crate::agent::Origin;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn object() -> MikromVM {
        let mut vm = MikromVM::new("web", MikromVMSpec::default());
        vm.metadata.namespace = Some("default".into());
        vm.metadata.generation = Some(3);
        vm
    }

    fn binding() -> NodeBinding {
        NodeBinding { node: "n1".into(), address: "a:1".into() }
    }

    fn vm_in(state: State) -> Finding {
        Finding::Vm(VmInfo {
            state,
            ip: "10.0.0.2".into(),
            image_digest: "sha256:x".into(),
            ..VmInfo::default()
        })
    }

    fn error() -> AgentError {
        AgentError {
            operation: "CreateVM",
            address: "a:1".into(),
            code: tonic::Code::InvalidArgument,
            message: "no".into(),
            failure: String::new(),
            origin: Origin::Agent,
        }
    }

    fn image_error() -> AgentError {
        AgentError { failure: "COR-IMG-004".into(), ..error() }
    }

    fn disk_full_error() -> AgentError {
        AgentError { failure: "COR-IMG-010".into(), code: tonic::Code::ResourceExhausted, ..error() }
    }

    #[test]
    fn status_table() {
        let live = derive(&object(), &vm_in(State::Running), &binding(), AppliedSteps::default(), at(10));
        let (new, mut running) = (object(), object());
        running.status = Some(live);
        for (why, vm, report, want) in [
            ("the contract's table", &new, vm_in(State::Unspecified), ("Pending", "False", "InTransition")),
            ("the contract's table", &new, vm_in(State::Creating), ("Creating", "False", "InTransition")),
            ("the contract's table", &new, vm_in(State::Running), ("Running", "True", "VMRunning")),
            ("the contract's table", &new, vm_in(State::Stopping), ("Stopping", "False", "InTransition")),
            ("the contract's table", &new, vm_in(State::Stopped), ("Stopped", "False", "VMStopped")),
            ("the contract's table", &new, vm_in(State::Deleting), ("Deleting", "False", "InTransition")),
            ("the contract's table", &new, vm_in(State::Error), ("Failed", "False", "VMFailed")),
            ("refused", &new, Finding::Refused(error()), ("Failed", "False", "AgentError")),
            ("no such image", &new, Finding::Refused(image_error()), ("Failed", "False", "ImagePullFailed")),
            (
                "the registry is away",
                &running,
                Finding::Waiting(image_error()),
                ("Running", "False", "ImagePullFailed"),
            ),
            (
                "the disk is full",
                &running,
                Finding::Waiting(disk_full_error()),
                ("Running", "False", "NoSpace"),
            ),
            ("no boot", &running, Finding::Waiting(error()), ("Running", "False", "BootFailed")),
            (
                "INTERNAL keeps the phase",
                &running,
                Finding::Internal(error()),
                ("Running", "False", "AgentInternalError"),
            ),
            (
                "silence keeps the phase: unknown",
                &running,
                Finding::Unreachable(error()),
                ("Running", "Unknown", "AgentUnreachable"),
            ),
            ("vanished", &running, Finding::Vanished, ("Failed", "False", "VMVanished")),
            ("taken", &new, Finding::Conflict(None), ("Failed", "False", "VMIDConflict")),
            (
                "not an agent of ours",
                &new,
                Finding::NotAllowed("b:1".into()),
                ("Pending", "False", "AgentNotAllowed"),
            ),
            ("no room", &new, Finding::Unschedulable("why".into()), ("Pending", "False", "Unschedulable")),
            ("lost", &running, Finding::NodeLost("why".into()), ("Failed", "False", "NodeLost")),
        ] {
            let status = derive(vm, &report, &binding(), AppliedSteps::default(), at(20));
            for kind in [condition::AVAILABLE, condition::READY] {
                let c = find(&status.conditions, kind).unwrap();
                let got = (format!("{:?}", status.phase.unwrap()), c.status.as_str(), c.reason.as_str());
                assert_eq!(got, (want.0.to_owned(), want.1, want.2), "{why} {kind}");
                assert_eq!(c.observed_generation, Some(3));
            }
        }
    }

    #[test]
    fn powered_off_mark_stays_until_the_vm_runs() {
        let calm = AppliedSteps::default();
        let started = AppliedSteps { powered: Some(PowerState::Running), ..calm };
        let mut off = object();
        off.spec.power_state = Some(PowerState::Stopped);
        off.status = Some(derive(&off, &vm_in(State::Stopped), &binding(), calm, at(1)));
        off.spec.power_state = None;
        for (why, report, progress, want) in [
            ("down as it was", vm_in(State::Stopped), calm, true),
            ("no answer", Finding::Unreachable(error()), calm, true),
            ("the node cannot start it now", Finding::PowerFailed("full".into()), calm, true),
            ("it runs", vm_in(State::Running), started, false),
            ("it was started and ended at once", vm_in(State::Stopped), started, false),
        ] {
            assert_eq!(derive(&off, &report, &binding(), progress, at(2)).powered_off, want, "{why}");
        }
        let mut ended = object();
        ended.status = Some(derive(&ended, &vm_in(State::Stopped), &binding(), calm, at(1)));
        assert!(!is_powered_off(&ended), "ended by itself");
    }

    #[test]
    fn equal_findings_give_equal_statuses() {
        let mut vm = object();
        let first = derive(&vm, &vm_in(State::Running), &binding(), AppliedSteps::default(), at(10));
        vm.status = Some(first.clone());
        let second = derive(&vm, &vm_in(State::Running), &binding(), AppliedSteps::default(), at(99));
        assert_eq!(first, second);
        assert_eq!(second.created_at.unwrap().0, at(10));
        let stored: MikromVMStatus = serde_json::from_value(serde_json::to_value(&first).unwrap()).unwrap();
        assert_eq!(stored, first, "equal after a round trip, or each reconcile would write it");
    }

    #[test]
    fn transport_error_stays_out_of_the_status() {
        let refused = AgentError { message: "tcp connect error: Connection refused".into(), ..error() };
        let status =
            derive(&object(), &Finding::Unreachable(refused), &binding(), AppliedSteps::default(), at(1));
        let ready = find(&status.conditions, condition::READY).unwrap();
        assert_eq!(ready.message, "agent a:1 does not answer");
    }

    #[test]
    fn unreachable_agent_status_is_written_once() {
        let mut vm = object();
        vm.status = Some(derive(&vm, &vm_in(State::Running), &binding(), AppliedSteps::default(), at(10)));
        vm.status =
            Some(derive(&vm, &Finding::Unreachable(error()), &binding(), AppliedSteps::default(), at(20)));
        let other = AgentError { message: "in other words".into(), ..error() };
        let again = derive(&vm, &Finding::Unreachable(other), &binding(), AppliedSteps::default(), at(30));
        assert_eq!(Some(&again), vm.status.as_ref());
    }

    #[test]
    fn condition_follows_an_edit_and_another_failure() {
        let failed = |failure: &str, words: &str| {
            let message = format!("{words} ({failure}; ask the registry)");
            Finding::Waiting(AgentError { message, failure: failure.into(), ..image_error() })
        };
        let mut vm = object();
        let first =
            derive(&vm, &failed("COR-IMG-004", "image a"), &binding(), AppliedSteps::default(), at(10));
        vm.status = Some(first.clone());
        let again = |vm: &MikromVM, report| derive(vm, &report, &binding(), AppliedSteps::default(), at(20));
        let message = |status: &MikromVMStatus| {
            find(&status.conditions, condition::READY).map(|c| c.message.clone()).unwrap_or_default()
        };
        assert_eq!(again(&vm, failed("COR-IMG-004", "other words")), first, "nothing is new");
        assert!(message(&again(&vm, failed("COR-IMG-005", "unauthorised"))).contains("unauthorised"));
        vm.metadata.generation = Some(4);
        let edited = again(&vm, failed("COR-IMG-004", "image b"));
        assert!(message(&edited).contains("image b"), "{edited:?}");
        assert_eq!(edited.observed_generation, Some(4));
    }

    #[test]
    fn events_report_changes_only() {
        let mut vm = object();
        let reasons = |vm: &MikromVM, new: &MikromVMStatus, progress| {
            events(vm.status.as_ref(), new, progress).iter().map(|e| e.reason).collect::<Vec<_>>()
        };
        let calm = AppliedSteps::default();
        let bound = bound_status(&vm, &binding(), at(1));
        assert_eq!(reasons(&vm, &bound, calm), ["Scheduled"]);
        vm.status = Some(bound);
        let running = derive(&vm, &vm_in(State::Running), &binding(), calm, at(2));
        assert_eq!(reasons(&vm, &running, calm), ["Started"]);
        vm.status = Some(running.clone());
        assert_eq!(reasons(&vm, &running, calm), [] as [&str; 0]);
        let stopped = derive(&vm, &vm_in(State::Stopped), &binding(), calm, at(3));
        assert_eq!(reasons(&vm, &stopped, calm), ["VMStopped"]);
        vm.status = Some(stopped);
        let again = AppliedSteps { restarted: true, ..calm };
        let restarted = derive(&vm, &vm_in(State::Running), &binding(), again, at(4));
        assert_eq!((reasons(&vm, &restarted, again), restarted.restarts), (vec!["Restarted"], 1));
        let failed = derive(&vm, &Finding::Refused(error()), &binding(), calm, at(5));
        assert_eq!(reasons(&vm, &failed, calm), ["Failed"]);
    }
}
