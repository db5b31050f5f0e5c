//! Events for a kubelet that subscribes instead of polling: the differences between two states of the table. Pure, except for
//! the stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_proto::cri::{
    ContainerEventResponse, ContainerEventType, ContainerState, PodSandboxState, PodSandboxStatus,
};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tonic::Status;

use crate::sandboxes::container_statuses;
use crate::server::CriServer;
use crate::status::{nanoseconds, pod_sandbox_status};
use crate::table::Pod;

/// Events that are queued for a slow subscriber. Beyond them, it is disconnected and must subscribe again.
const QUEUED: usize = 1024;

/// Event stream of one subscriber.
pub(crate) type Events = mpsc::Receiver<Result<ContainerEventResponse, Status>>;

/// State that a subscriber knows: sandbox and phase, by id of a sandbox or container.
type Seen = BTreeMap<String, (String, Phase)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Created,
    Running,
    Ended,
}

impl CriServer {
    /// Subscribes to changes from now on.
    pub(crate) fn container_events(&self) -> Events {
        let (events, stream) = mpsc::channel(QUEUED);
        let mut changes = self.0.host.events();
        let mut logs = self.0.table.changes();
        let mut seen = seen(&self.0.table.pods(&self.0.host));
        let (server, stopping) = (self.clone(), self.0.stopping.clone());
        self.0.tasks.spawn(async move {
            loop {
                let changed = tokio::select! {
                    changed = changes.recv() => changed.map(drop),
                    _server_gone = logs.changed() => Ok(()),
                    () = events.closed() => return,
                    () = stopping.cancelled() => return,
                };
                if matches!(changed, Err(RecvError::Closed)) {
                    return;
                }
                let pods = server.0.table.pods(&server.0.host);
                let now = self::seen(&pods);
                let time = nanoseconds(server.0.host.clock().now());
                for (id, sandbox, kind) in difference(&seen, &now) {
                    let event = event(&pods, (id, sandbox, kind), time);
                    if events.try_send(Ok(event)).is_err() {
                        let slow = Status::resource_exhausted("the subscriber does not read its events");
                        let _it_reads_this_or_nothing = events.try_send(Err(slow));
                        return;
                    }
                }
                seen = now;
            }
        });
        stream
    }
}

fn seen(pods: &[Arc<Pod>]) -> Seen {
    let mut seen = Seen::new();
    for pod in pods {
        let ready = pod.entry.state == i32::from(PodSandboxState::SandboxReady);
        let phase = if ready { Phase::Running } else { Phase::Ended };
        seen.insert(pod.id().to_owned(), (pod.id().to_owned(), phase));
        for container in pod.containers.iter() {
            let phase = match ContainerState::try_from(container.entry.state) {
                Ok(ContainerState::ContainerRunning) => Phase::Running,
                Ok(ContainerState::ContainerExited) => Phase::Ended,
                _ => Phase::Created,
            };
            seen.insert(container.entry.id.clone(), (pod.id().to_owned(), phase));
        }
    }
    seen
}

/// Returns the events between two states, including those of states that were passed in between. Pure.
fn difference(before: &Seen, now: &Seen) -> Vec<(String, String, ContainerEventType)> {
    use ContainerEventType::{
        ContainerCreatedEvent, ContainerDeletedEvent, ContainerStartedEvent, ContainerStoppedEvent,
    };
    let mut events = Vec::new();
    for (id, (sandbox, phase)) in now {
        let old = before.get(id).map(|(_, phase)| *phase);
        for (reached, kind) in [
            (Phase::Created, ContainerCreatedEvent),
            (Phase::Running, ContainerStartedEvent),
            (Phase::Ended, ContainerStoppedEvent),
        ] {
            if reached <= *phase && old.is_none_or(|old| old < reached) {
                events.push((id.clone(), sandbox.clone(), kind));
            }
        }
    }
    let gone = before.iter().filter(|(id, _)| !now.contains_key(*id));
    events.extend(gone.map(|(id, (sandbox, _))| (id.clone(), sandbox.clone(), ContainerDeletedEvent)));
    events
}

fn event(
    pods: &[Arc<Pod>],
    (container_id, sandbox, kind): (String, String, ContainerEventType),
    time: i64,
) -> ContainerEventResponse {
    let pod = pods.iter().find(|pod| pod.id() == sandbox);
    let gone =
        || PodSandboxStatus { id: sandbox.clone(), metadata: Some(Default::default()), ..Default::default() };
    let status = pod.map(|pod| pod_sandbox_status(pod.record(), &pod.facts));
    ContainerEventResponse {
        container_id,
        container_event_type: kind.into(),
        created_at: time,
        pod_sandbox_status: Some(status.unwrap_or_else(gone)),
        containers_statuses: pod.map(|pod| container_statuses(pod)).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(entries: &[(&str, &str, Phase)]) -> Seen {
        entries
            .iter()
            .map(|(id, sandbox, phase)| ((*id).to_owned(), ((*sandbox).to_owned(), *phase)))
            .collect()
    }

    #[test]
    fn differences_table() {
        use ContainerEventType as Kind;
        let (created, running, ended) =
            (("c", "s", Phase::Created), ("c", "s", Phase::Running), ("c", "s", Phase::Ended));
        for (why, before, now, want) in [
            ("nothing new", vec![running], vec![running], vec![]),
            ("made", vec![], vec![created], vec![Kind::ContainerCreatedEvent]),
            ("started", vec![created], vec![running], vec![Kind::ContainerStartedEvent]),
            ("ended", vec![running], vec![ended], vec![Kind::ContainerStoppedEvent]),
            (
                "made and started",
                vec![],
                vec![running],
                vec![Kind::ContainerCreatedEvent, Kind::ContainerStartedEvent],
            ),
            (
                "started and ended",
                vec![created],
                vec![ended],
                vec![Kind::ContainerStartedEvent, Kind::ContainerStoppedEvent],
            ),
            ("removed", vec![ended], vec![], vec![Kind::ContainerDeletedEvent]),
        ] {
            let got: Vec<_> =
                difference(&seen(&before), &seen(&now)).into_iter().map(|(_, _, kind)| kind).collect();
            assert_eq!(got, want, "{why}");
        }
    }
}
