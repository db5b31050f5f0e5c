//! Converts records of the host core into the input of plans. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_host::{ContainerState, Record};
use coracle_record::{ContainerId, ContainerRecord};
use coracle_types::{UnixMillis, VmState};
use jiff::Timestamp;

use crate::container_spec::key;
use crate::observed::{ContainerPhase, ContainerView, Exited, RuntimeState, SandboxPhase, SandboxState};

/// Returns the observed state of a pod.
pub(super) fn runtime_state(
    record: &Record,
    containers: &[Arc<ContainerRecord>],
    messages: &BTreeMap<ContainerId, String>,
) -> RuntimeState {
    let sandbox = SandboxState {
        phase: phase(record.state),
        addresses: record.reachable_addresses(),
        started_at: record.started_at.map(timestamp),
        message: record.message.clone(),
    };
    let views = containers.iter().filter_map(|one| view(one, messages.get(&one.id).map(String::as_str)));
    RuntimeState { sandbox: Some(sandbox), containers: views.collect() }
}

fn phase(state: VmState) -> SandboxPhase {
    match state {
        VmState::Creating | VmState::Created => SandboxPhase::Created,
        VmState::Starting => SandboxPhase::Starting,
        VmState::Running => SandboxPhase::Ready,
        VmState::Paused | VmState::Hibernating | VmState::Hibernated => SandboxPhase::Suspended,
        VmState::Stopping | VmState::Deleting => SandboxPhase::Stopping,
        VmState::Stopped | VmState::Failed => SandboxPhase::Down,
    }
}

pub(super) fn timestamp(at: UnixMillis) -> Timestamp {
    Timestamp::from_millisecond(at.0).unwrap_or_default()
}

/// Converts the record of a container; `None` for one that does not belong to a pod.
fn view(record: &ContainerRecord, message: Option<&str>) -> Option<ContainerView> {
    let metadata = &record.spec.metadata;
    let exit = record.exit.clone().unwrap_or_default();
    let phase = match record.state {
        ContainerState::Created => ContainerPhase::Created,
        ContainerState::Running => ContainerPhase::Running,
        ContainerState::Exited => ContainerPhase::Exited(Exited {
            at: timestamp(record.finished_at.unwrap_or(record.created_at)),
            code: exit.code,
            signal: exit.signal,
            oom_killed: record.oom_killed,
            error: exit.error,
            message: message.unwrap_or(&record.termination_message).to_owned(),
        }),
    };
    Some(ContainerView {
        id: record.id.clone(),
        name: metadata.get(key::NAME)?.clone(),
        attempt: record.spec.attempt,
        streak: metadata.get(key::STREAK).and_then(|text| text.parse().ok()).unwrap_or(0),
        phase,
        created_at: timestamp(record.created_at),
        started_at: record.started_at.map(timestamp),
        image: record.spec.image.clone(),
        image_id: record.image_digest.clone(),
        user: record.user.clone(),
    })
}

#[cfg(test)]
mod tests {
    use coracle_host::{ContainerSpec, Exit};

    use super::*;

    #[test]
    fn record_of_a_container_becomes_a_view() {
        let metadata =
            [(key::NAME, "web"), (key::STREAK, "3")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        let spec = ContainerSpec {
            attempt: 4,
            image: "web:1".into(),
            metadata: metadata.into(),
            ..ContainerSpec::default()
        };
        let id: ContainerId = "a".parse().unwrap();
        let mut record = ContainerRecord::new(id.clone(), spec, "sha256:0".into(), UnixMillis(1000));
        let made = view(&record, None).unwrap();
        assert_eq!((made.name.as_str(), made.attempt, made.streak), ("web", 4, 3));
        assert_eq!((made.phase, made.image_id.as_str()), (ContainerPhase::Created, "sha256:0"));
        record.state = ContainerState::Exited;
        record.exit = Some(Exit { code: 137, signal: 9, error: String::new() });
        (record.oom_killed, record.finished_at) = (true, Some(UnixMillis(2000)));
        let exited = view(&record, Some("bye")).unwrap().exited().cloned().unwrap();
        assert_eq!(
            (exited.code, exited.signal, exited.oom_killed, exited.message.as_str()),
            (137, 9, true, "bye")
        );
        assert_eq!(exited.at.as_second(), 2);
        record.spec.metadata.clear();
        assert_eq!(view(&record, None), None, "it is not a pod's");
    }

    #[test]
    fn vm_state_to_sandbox_phase_table() {
        for (state, want) in [
            (VmState::Creating, SandboxPhase::Created),
            (VmState::Starting, SandboxPhase::Starting),
            (VmState::Running, SandboxPhase::Ready),
            (VmState::Hibernated, SandboxPhase::Suspended),
            (VmState::Deleting, SandboxPhase::Stopping),
            (VmState::Failed, SandboxPhase::Down),
        ] {
            assert_eq!(phase(state), want, "{state}");
        }
    }
}
