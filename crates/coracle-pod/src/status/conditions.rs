//! Conditions of a pod.

use k8s_openapi::api::core::v1::PodCondition;

use super::time;
use crate::declared::ContainerKind;
use crate::members::{ContainerHistory, is_initialized};
use crate::observed::SandboxPhase;
use crate::plan_builder::{Intent, PlanBuilder};

const SCHEDULED: &str = "PodScheduled";
const READY_TO_START: &str = "PodReadyToStartContainers";
const INITIALIZED: &str = "Initialized";
const CONTAINERS_READY: &str = "ContainersReady";
const READY: &str = "Ready";
const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// Desired content of a condition.
struct Wanted {
    kind: &'static str,
    status: bool,
    reason: Option<&'static str>,
    message: Option<String>,
}

impl Wanted {
    fn condition_true(kind: &'static str) -> Self {
        Self { kind, status: true, reason: None, message: None }
    }

    fn condition_false(kind: &'static str, reason: &'static str, message: Option<String>) -> Self {
        Self { kind, status: false, reason: Some(reason), message }
    }
}

/// Returns all conditions: those of the node, then those of other components.
pub(super) fn derive(pass: &PlanBuilder<'_>, intent: &Intent, phase: &str) -> Vec<PodCondition> {
    let containers = containers_ready(pass, phase);
    let ready = ready_condition(pass, phase, &containers);
    let mut wanted = vec![ready_to_start(pass, intent), initialized(pass, phase), ready, containers];
    wanted.push(Wanted::condition_true(SCHEDULED));
    let failure = pass.failure().and_then(|failure| Some((failure.disruption?, failure.message)));
    if let Some((reason, message)) = failure {
        let message = Some(message);
        wanted.push(Wanted { kind: DISRUPTION_TARGET, status: true, reason: Some(reason), message });
    }
    let own: Vec<&str> = wanted.iter().map(|one| one.kind).collect();
    let foreign = pass.o.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let foreign = foreign.filter(|one| !own.contains(&one.type_.as_str())).cloned();
    wanted.iter().map(|one| condition(pass, one)).chain(foreign).collect()
}

/// Returns the condition, with the time of its last transition.
fn condition(pass: &PlanBuilder<'_>, wanted: &Wanted) -> PodCondition {
    let o = &pass.o;
    let status = if wanted.status { "True" } else { "False" };
    let before = o.reported.conditions.iter().flatten().find(|one| one.type_ == wanted.kind);
    let since = before.filter(|one| one.status == status).and_then(|one| one.last_transition_time.clone());
    PodCondition {
        type_: wanted.kind.to_owned(),
        status: status.to_owned(),
        reason: wanted.reason.map(str::to_owned),
        message: wanted.message.clone(),
        last_transition_time: Some(since.unwrap_or_else(|| time(o.now))),
        observed_generation: o.pod.metadata.generation,
        last_probe_time: None,
    }
}

fn ready_to_start(pass: &PlanBuilder<'_>, intent: &Intent) -> Wanted {
    let sandbox = pass.o.runtime.sandbox.as_ref();
    match sandbox.is_some_and(|sandbox| sandbox.phase == SandboxPhase::Ready) {
        true => Wanted::condition_true(READY_TO_START),
        false => {
            let why = sandbox.map(|sandbox| sandbox.message.clone()).filter(|text| !text.is_empty());
            let failure = pass.o.memory.failures.get(&crate::step::Target::Sandbox);
            let why = failure.map(|failure| failure.message.clone()).or(why);
            let why = why.filter(|_| *intent == Intent::Run);
            Wanted { kind: READY_TO_START, status: false, reason: None, message: why }
        }
    }
}

/// Returns names in the format of the kubelet: `[a b]`.
fn names<'m>(members: impl Iterator<Item = &'m ContainerHistory<'m>>) -> String {
    let names: Vec<_> = members.map(ContainerHistory::name).collect();
    format!("[{}]", names.join(" "))
}

fn initialized(pass: &PlanBuilder<'_>, phase: &str) -> Wanted {
    let is_init =
        |m: &&ContainerHistory<'_>| matches!(m.kind(), ContainerKind::Init | ContainerKind::Sidecar);
    if phase == "Succeeded" {
        return Wanted { reason: Some("PodCompleted"), ..Wanted::condition_true(INITIALIZED) };
    }
    if is_initialized(&pass.o, &pass.members)
        || !pass.members.iter().any(|m| is_init(&m))
        || was_initialized(pass, phase)
    {
        return Wanted::condition_true(INITIALIZED);
    }
    let open = pass.members.iter().filter(is_init).filter(|m| !m.is_done(&pass.o));
    let message = format!("containers with incomplete status: {}", names(open));
    Wanted::condition_false(INITIALIZED, "ContainersNotInitialized", Some(message))
}

/// Returns whether a failed pod was initialized, by its reported status.
fn was_initialized(pass: &PlanBuilder<'_>, phase: &str) -> bool {
    let mut before = pass.o.reported.conditions.iter().flatten();
    phase == "Failed" && before.any(|one| one.type_ == INITIALIZED && one.status == "True")
}

fn containers_ready(pass: &PlanBuilder<'_>, phase: &str) -> Wanted {
    match phase {
        "Succeeded" => return Wanted::condition_false(CONTAINERS_READY, "PodCompleted", None),
        "Failed" => return Wanted::condition_false(CONTAINERS_READY, "PodFailed", None),
        _ => {}
    }
    let counts = |m: &&ContainerHistory<'_>| matches!(m.kind(), ContainerKind::App | ContainerKind::Sidecar);
    let mut unready = pass.members.iter().filter(counts).filter(|m| !m.is_ready(&pass.o)).peekable();
    if unready.peek().is_none() {
        return Wanted::condition_true(CONTAINERS_READY);
    }
    let message = format!("containers with unready status: {}", names(unready));
    Wanted::condition_false(CONTAINERS_READY, "ContainersNotReady", Some(message))
}

fn ready_condition(pass: &PlanBuilder<'_>, phase: &str, containers: &Wanted) -> Wanted {
    if !containers.status {
        let (reason, message) =
            (containers.reason.unwrap_or("ContainersNotReady"), containers.message.clone());
        return Wanted::condition_false(READY, reason, message);
    }
    debug_assert!(!matches!(phase, "Succeeded" | "Failed"), "containers of an ended pod are not ready");
    let gates = pass.o.pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let conditions: Vec<_> =
        pass.o.pod.status.iter().flat_map(|status| status.conditions.iter().flatten()).collect();
    let closed: Vec<_> = gates
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match conditions.iter().find(|one| one.type_ == *name) {
                None => {
                    Some(format!("corresponding condition of pod readiness gate \"{name}\" does not exist."))
                }
                Some(one) if one.status != "True" => Some(format!(
                    "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                    one.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    match closed.is_empty() {
        true => Wanted::condition_true(READY),
        false => Wanted::condition_false(READY, "ReadinessGatesNotReady", Some(closed.join(", "))),
    }
}
