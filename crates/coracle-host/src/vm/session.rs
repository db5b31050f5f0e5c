//! The session with a guest that has containers: their output goes to their logs, their starts and ends to the VM's task.

use std::sync::Arc;

use coracle_guest_client::Budget;
use coracle_proto::guest as pb;
use coracle_proto::guest::guest_frame::Message;
use coracle_types::Clock;
use tokio::sync::{oneshot, watch};

use super::container_table::ContainerLogs;
use super::reports::Reports;
use super::text::bounded;
use crate::{Exit, GuestClient};
use coracle_lifecycle::{ContainerEnd, RunEvent};

/// Follows the containers of one session until it breaks, as fast as the guest's budget allows. An end is reported when all
/// output is in the log.
pub(super) async fn follow(
    client: &GuestClient,
    logs: &ContainerLogs,
    statistics: &watch::Sender<Option<Arc<pb::Statistics>>>,
    clock: &Clock,
    reports: &Reports,
    budget: &mut Budget,
) {
    // Dropped with this future, which ends the guest's stream.
    let (_open, closed) = oneshot::channel::<()>();
    let open = async { drop(closed.await) };
    // Boxed: while frames are waited for, the call that opened their stream has no room.
    let opened = Box::pin(client.session(logs.next_offsets(), open)).await;
    let Ok(mut frames) = opened else { return };
    while let Ok(Some(frame)) = frames.message().await {
        match &frame.message {
            Some(Message::Output(output)) => budget.output(output.data.len()).await,
            Some(_) | None => budget.event().await,
        }
        match frame.message {
            Some(Message::Output(output)) => logs.append(&output),
            Some(Message::Started(started)) => {
                if let Ok(id) = started.container.parse() {
                    reports.send(RunEvent::ContainerStarted(id)).await;
                }
            }
            Some(Message::Exited(exited)) => {
                if let Some(end) = end(&exited) {
                    logs.finish(&end.id, exited.time_unix_ns);
                    reports.send(RunEvent::ContainerExited(end)).await;
                }
            }
            Some(Message::Statistics(mut new)) => {
                // A guest's clock proves nothing.
                new.time_unix_ns = clock.now().0.saturating_mul(1_000_000);
                drop(statistics.send_replace(Some(Arc::new(new))));
            }
            None => {}
        }
    }
}

fn end(exited: &pb::ContainerExited) -> Option<ContainerEnd> {
    let pb::ExitStatus { code, signal, error } = exited.exit.clone().unwrap_or_default();
    let exit = Exit { code, signal, error: bounded(error) };
    Some(ContainerEnd { id: exited.container.parse().ok()?, exit, oom_killed: exited.oom_killed })
}
