//! Records the result of a step in the memory of a pod's task. Pure.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::events::{self, PodEvent};
use crate::observed::{Failure, Memory, RuntimeState, VolumeUsage};
use crate::probe::{self, ProbeOutcome, ProbeTiming};
use crate::reason;
use crate::runtime::{ErrorKind, RuntimeError};
use crate::step::{HookKind, Step};
use crate::volume::Token;

/// Result of a successful step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Effect {
    /// Success without a value.
    Done,
    /// Issued token.
    Token(Token),
    /// Result of a probe's check.
    Checked(ProbeOutcome),
    /// Disk usage of volumes, in bytes.
    Measured(BTreeMap<String, u64>),
}

/// Records the result of a step in the memory; returns an event for it, if there is one. `timing` is that of the probe that the
/// step belongs to.
pub(crate) fn record_result(
    memory: &mut Memory,
    step: &Step,
    result: Result<Effect, RuntimeError>,
    timing: Option<ProbeTiming>,
    now: Timestamp,
) -> Option<PodEvent> {
    let target = step.target();
    memory.busy.remove(&target);
    if memory.busy.is_empty() {
        // An emptied map keeps room for eleven entries, and a running pod has no step under way.
        memory.busy = BTreeMap::new();
    }
    let gone = |error: &RuntimeError| error.kind == ErrorKind::NotFound && tolerates_absence(step);
    let error = match result {
        Ok(effect) => {
            memory.failures.remove(&target);
            return record_success(memory, step, effect, timing, now);
        }
        Err(error) if gone(&error) => {
            memory.failures.remove(&target);
            return record_success(memory, step, Effect::Done, timing, now);
        }
        Err(error) => error,
    };
    if let Step::RunHook { id, kind, .. } = step {
        memory.hooks.insert((id.clone(), *kind));
        if *kind == HookKind::PostStart {
            memory.hook_failures.insert(id.clone(), (now, error.message.clone()));
        }
        return Some(events::failure_event(step, &error.message));
    }
    let count = memory.failures.get(&target).map_or(0, |failure| failure.count).saturating_add(1);
    let failure =
        Failure { reason: waiting_reason(step, error.kind, count), message: error.message, count, at: now };
    let event = events::failure_event(step, &failure.message);
    memory.failures.insert(target, failure);
    Some(event)
}

/// Returns whether the step removes or stops something that may be gone already.
fn tolerates_absence(step: &Step) -> bool {
    matches!(
        step,
        Step::StopSandbox { .. }
            | Step::RemoveSandbox
            | Step::StopContainer { .. }
            | Step::RemoveContainer { .. }
    )
}

fn record_success(
    memory: &mut Memory,
    step: &Step,
    effect: Effect,
    timing: Option<ProbeTiming>,
    now: Timestamp,
) -> Option<PodEvent> {
    match step {
        Step::PullImage { id, .. } => drop(memory.images.insert(id.clone())),
        Step::WriteVolume(content) => drop(memory.volumes.insert(content.name.clone(), content.digest())),
        Step::RemoveSandbox => memory.removed = true,
        Step::RunHook { id, kind, .. } => drop(memory.hooks.insert((id.clone(), *kind))),
        Step::RequestToken(request) => {
            if let Effect::Token(token) = effect {
                memory.tokens.insert((request.volume.clone(), request.path.clone()), token);
            }
        }
        Step::Probe { id, name, kind, .. } => {
            let (Effect::Checked(outcome), Some(timing)) = (effect, timing) else { return None };
            let key = (id.clone(), *kind);
            let state = probe::after(&timing, memory.probes.get(&key), &outcome, now);
            memory.probes.insert(key, state);
            let kind = kind.name();
            return match outcome {
                ProbeOutcome::Success => None,
                ProbeOutcome::Warning(text) => {
                    let message = format!("{kind} probe warning: {text}");
                    Some(PodEvent::warning(reason::PROBE_WARNING, Some(name), message))
                }
                ProbeOutcome::Failure(text) => {
                    let message = format!("{kind} probe failed: {text}");
                    Some(PodEvent::warning(reason::UNHEALTHY, Some(name), message))
                }
                ProbeOutcome::Unknown(text) => {
                    let message = format!("{kind} probe errored: {text}");
                    Some(PodEvent::warning(reason::UNHEALTHY, Some(name), message))
                }
            };
        }
        Step::MeasureVolumes { .. } => {
            if let Effect::Measured(bytes) = effect {
                memory.usage = Some(VolumeUsage { bytes, at: now });
            }
        }
        Step::StartSandbox(_)
        | Step::StopSandbox { .. }
        | Step::CreateContainer { .. }
        | Step::StartContainer { .. }
        | Step::StopContainer { .. }
        | Step::RemoveContainer { .. }
        | Step::Cancel(_) => {}
    }
    events::success_event(step)
}

/// Returns the reason why a container waits after a step for it failed.
fn waiting_reason(step: &Step, kind: ErrorKind, count: u32) -> &'static str {
    match (step, kind) {
        (Step::PullImage { .. }, ErrorKind::InvalidImageName) => "InvalidImageName",
        (Step::PullImage { .. }, ErrorKind::ImageNeverPull) => "ErrImageNeverPull",
        (Step::PullImage { .. }, _) if count == 1 => "ErrImagePull",
        (Step::PullImage { .. }, _) => "ImagePullBackOff",
        (Step::StartContainer { .. }, _) => "RunContainerError",
        _ => "CreateContainerError",
    }
}

/// Forgets containers that no longer exist, so that the memory does not grow with restarts.
pub(crate) fn forget_removed_containers(memory: &mut Memory, runtime: &RuntimeState) {
    let ids: BTreeSet<_> = runtime.containers.iter().map(|view| &view.id).collect();
    // The image of a container is needed until the container exists.
    memory.images.retain(|id| !ids.contains(id));
    memory.hooks.retain(|(id, _)| ids.contains(id));
    memory.hook_failures.retain(|id, _| ids.contains(id));
    memory.probes.retain(|(id, _), _| ids.contains(id));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use coracle_host::PullPolicy;

    use super::*;
    use crate::container_spec::container_id;
    use crate::probe::{ProbeCheck, ProbeKind, ProbeVerdict};
    use crate::step::{HookAction, Target};

    fn pull() -> Step {
        let id = container_id("u", "web", 0);
        Step::PullImage {
            id,
            name: "web".into(),
            image: "web:1".into(),
            policy: PullPolicy::Always,
            credentials: vec![],
        }
    }

    fn error(kind: ErrorKind) -> RuntimeError {
        RuntimeError { message: "no".into(), kind }
    }

    #[test]
    fn failures_count_up_and_name_their_reason() {
        let start = Step::StartContainer { id: container_id("u", "web", 0), name: "web".into() };
        for (step, kind, want) in [
            (pull(), ErrorKind::Other, ["ErrImagePull", "ImagePullBackOff"]),
            (pull(), ErrorKind::InvalidImageName, ["InvalidImageName"; 2]),
            (pull(), ErrorKind::ImageNeverPull, ["ErrImageNeverPull"; 2]),
            (pull(), ErrorKind::DiskImage, ["ErrImagePull", "ImagePullBackOff"]),
            (start, ErrorKind::Other, ["RunContainerError"; 2]),
        ] {
            let mut memory = Memory::default();
            for (count, want) in (1..).zip(want) {
                memory.busy.insert(step.target(), Arc::new(step.clone()));
                let event = record_result(&mut memory, &step, Err(error(kind)), None, Timestamp::UNIX_EPOCH);
                let failure = &memory.failures[&Target::Container("web".into())];
                assert_eq!((failure.reason, failure.count, event.is_some()), (want, count, true));
                assert!(memory.busy.is_empty());
            }
            record_result(&mut memory, &step, Ok(Effect::Done), None, Timestamp::UNIX_EPOCH);
            assert!(memory.failures.is_empty(), "success ends the streak");
        }
    }

    #[test]
    fn stop_of_a_container_that_is_gone_is_a_success() {
        let mut memory = Memory::default();
        let (id, name) = (container_id("u", "web", 0), "web".to_owned());
        let remove = Step::RemoveContainer { id, name };
        record_result(&mut memory, &remove, Err(error(ErrorKind::NotFound)), None, Timestamp::UNIX_EPOCH);
        record_result(
            &mut memory,
            &Step::RemoveSandbox,
            Err(error(ErrorKind::NotFound)),
            None,
            Timestamp::UNIX_EPOCH,
        );
        assert!(memory.failures.is_empty() && memory.removed);
    }

    #[test]
    fn failed_hook_counts_as_finished() {
        let mut memory = Memory::default();
        let id = container_id("u", "web", 0);
        for kind in [HookKind::PostStart, HookKind::PreStop] {
            let (id, name, action) = (id.clone(), "web".to_owned(), HookAction::Exec(vec![]));
            let deadline = Timestamp::MAX;
            let step = Step::RunHook { id, name, kind, action, deadline };
            record_result(&mut memory, &step, Err(error(ErrorKind::Other)), None, Timestamp::UNIX_EPOCH);
        }
        assert_eq!(
            (memory.hooks.len(), memory.hook_failures.len()),
            (2, 1),
            "postStart alone ends the container"
        );
        forget_removed_containers(&mut memory, &RuntimeState::default());
        assert_eq!(memory, Memory::default());
    }

    #[test]
    fn probe_result_updates_verdict_and_event() {
        let mut memory = Memory::default();
        let id = container_id("u", "web", 0);
        let (check, limit) = (ProbeCheck::Exec(vec![]), Duration::from_secs(1));
        let step =
            Step::Probe { id: id.clone(), name: "web".into(), kind: ProbeKind::Liveness, check, limit };
        let timing = probe::timing(&k8s_openapi::api::core::v1::Probe {
            failure_threshold: Some(1),
            ..Default::default()
        });
        for (outcome, verdict, event) in [
            (ProbeOutcome::Success, ProbeVerdict::Passed, None),
            (ProbeOutcome::Warning("w".into()), ProbeVerdict::Passed, Some("Liveness probe warning: w")),
            (ProbeOutcome::Unknown("u".into()), ProbeVerdict::Passed, Some("Liveness probe errored: u")),
            (ProbeOutcome::Failure("f".into()), ProbeVerdict::Failed, Some("Liveness probe failed: f")),
        ] {
            let result = Ok(Effect::Checked(outcome));
            let got = record_result(&mut memory, &step, result, Some(timing), Timestamp::UNIX_EPOCH);
            assert_eq!(got.map(|event| event.message).as_deref(), event);
            assert_eq!(memory.probes[&(id.clone(), ProbeKind::Liveness)].verdict, verdict);
        }
    }
}
