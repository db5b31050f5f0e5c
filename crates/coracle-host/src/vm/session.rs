//! Session with a guest that has containers: output goes to the logs, starts and ends to the VM's task.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_guest_client::Budget;
use coracle_proto::guest as pb;
use coracle_proto::guest::guest_frame::Message;
use coracle_types::Clock;
use tokio::sync::watch;

use super::container_table::ContainerLogs;
use super::reports::Reports;
use super::text::sanitise_text;
use crate::{Exit, GuestClient};
use coracle_lifecycle::{ContainerEnd, RunEvent};
use coracle_record::TERMINATION_MESSAGE_MAX;

/// Follows the containers of one session until it breaks, no faster than the guest's budget permits. An end is reported when
/// all output is in the log.
pub(super) async fn follow(
    client: &GuestClient,
    logs: &ContainerLogs,
    statistics: &watch::Sender<Option<Arc<pb::Statistics>>>,
    clock: &Clock,
    reports: &Reports,
    budget: &mut Budget,
) {
    // Dropped with this future, which ends the guest's stream.
    let mut receipts = Receipts::default();
    // Boxed, so that waiting for frames needs no memory for the call that opened the stream.
    let opened = Box::pin(client.session(logs.next_offsets(), receipts.kept.subscribe())).await;
    let Ok(mut frames) = opened else { return };
    while let Ok(Some(frame)) = frames.message().await {
        match &frame.message {
            Some(Message::Output(output)) => budget.output(output.data.len()).await,
            Some(_) | None => budget.event().await,
        }
        match frame.message {
            Some(Message::Output(output)) => {
                if let Some(kept) = logs.append(&output) {
                    receipts.output(output.container, kept, output.data.len());
                }
            }
            Some(Message::Started(started)) => {
                if let Ok(id) = started.container.parse() {
                    reports.send(RunEvent::ContainerStarted(id)).await;
                }
            }
            Some(Message::Exited(exited)) => {
                receipts.forget(&exited.container);
                if let Some(end) = end(&exited) {
                    logs.finish(&end.id, exited.time_unix_ns);
                    reports.send(RunEvent::ContainerExited(end)).await;
                }
            }
            Some(Message::Statistics(mut new)) => {
                // The clock of a guest is not trusted.
                new.time_unix_ns = clock.now().0.saturating_mul(1_000_000);
                drop(statistics.send_replace(Some(Arc::new(new))));
            }
            None => {}
        }
    }
}

/// Acknowledges stored output to the guest, after an amount that is far less than the guest's buffer.
#[derive(Debug, Default)]
struct Receipts {
    /// Offset before which all output is stored, by container. The guest gets it with each update.
    kept: watch::Sender<BTreeMap<String, u64>>,
    /// Bytes and messages since the last update.
    bytes: usize,
    messages: usize,
}

impl Receipts {
    const BYTES: usize = 32 * 1024;
    const MESSAGES: usize = 256;

    /// Records that a message with output of a container was stored.
    fn output(&mut self, container: String, kept: u64, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.messages = self.messages.saturating_add(1);
        let is_due = self.bytes >= Self::BYTES || self.messages >= Self::MESSAGES;
        if is_due {
            (self.bytes, self.messages) = (0, 0);
        }
        self.kept.send_if_modified(|all| {
            all.insert(container, kept);
            is_due
        });
    }

    /// Removes a container that has ended.
    fn forget(&mut self, container: &str) {
        self.kept.send_if_modified(|all| {
            all.remove(container);
            false
        });
    }
}

fn end(exited: &pb::ContainerExited) -> Option<ContainerEnd> {
    let pb::ExitStatus { code, signal, error } = exited.exit.clone().unwrap_or_default();
    let exit = Exit { code, signal, error: sanitise_text(error) };
    let message = exited.termination_message.get(..TERMINATION_MESSAGE_MAX);
    let message = message.unwrap_or(&exited.termination_message);
    Some(ContainerEnd {
        id: exited.container.parse().ok()?,
        exit,
        oom_killed: exited.oom_killed,
        termination_message: String::from_utf8_lossy(message).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn termination_message_is_bounded_and_valid_utf8() {
        let said = |message: Vec<u8>| {
            let termination_message = message;
            let exited = pb::ContainerExited {
                container: "main".to_owned(),
                termination_message,
                ..pb::ContainerExited::default()
            };
            end(&exited).unwrap().termination_message
        };
        assert_eq!(said(b"bye".to_vec()), "bye");
        assert_eq!(said(vec![b'x'; 1 << 20]), "x".repeat(TERMINATION_MESSAGE_MAX));
        assert_eq!(said(vec![b'a', 0xff]), "a\u{fffd}");
    }

    #[test]
    fn receipts_are_sent_by_bytes_and_by_messages() {
        for (messages, bytes, want) in [
            (1, Receipts::BYTES - 1, None),
            (1, Receipts::BYTES, Some(1)),
            (3, Receipts::BYTES / 2, Some(2)),
            (Receipts::MESSAGES - 1, 1, None),
            (Receipts::MESSAGES + 1, 0, Some(Receipts::MESSAGES as u64)),
        ] {
            let mut receipts = Receipts::default();
            let (mut guest, mut got) = (receipts.kept.subscribe(), None);
            for n in 1..=messages {
                receipts.output("main".to_owned(), n as u64, bytes);
                if guest.has_changed().unwrap() {
                    got = guest.borrow_and_update().get("main").copied();
                }
            }
            assert_eq!(got, want, "{messages} of {bytes} bytes");
        }
    }

    #[test]
    fn containers_that_ended_are_forgotten() {
        let mut receipts = Receipts::default();
        receipts.output("init".to_owned(), 5, Receipts::BYTES);
        receipts.forget("init");
        receipts.output("main".to_owned(), 7, Receipts::BYTES);
        assert_eq!(*receipts.kept.borrow(), BTreeMap::from([("main".to_owned(), 7)]));
    }
}
