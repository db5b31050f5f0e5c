//! Behaviour of a guest that an attacker has taken over, chosen by the command `hostile WORD` of a container.

use std::sync::atomic::{AtomicU64, Ordering};

use coracle_proto::guest as pb;
use coracle_proto::guest::guest_frame::Message;

use super::containers::{Frames, send};

/// Size of one message of a flood, bytes.
const FLOOD_BYTES: usize = 64 << 10;
/// Size above the limit of a host for one message, bytes.
const OVERSIZED_BYTES: usize = 2 << 20;

/// Kind of attack on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hostility {
    /// Endless output.
    Output,
    /// Endless output messages without bytes.
    Empty,
    /// Endless starts, exits and reports, of containers that exist and of others.
    Events,
    /// Offsets before and after the actual ones, exits of other containers, duplicates of all messages.
    Lies,
    /// Oversized messages.
    Oversized,
    /// Sessions that end at once.
    Sessions,
    /// No answer to any call.
    Freeze,
}

/// Traffic of the attack that reached the host, or its end of the stream.
#[derive(Debug, Default)]
pub(super) struct AttackTraffic {
    /// Number of bytes of output.
    pub(super) bytes: AtomicU64,
    /// Number of messages.
    pub(super) messages: AtomicU64,
    /// Number of opened sessions.
    pub(super) sessions: AtomicU64,
}

impl Hostility {
    pub(super) fn of(word: &str) -> Option<Self> {
        Some(match word {
            "output" => Self::Output,
            "empty" => Self::Empty,
            "events" => Self::Events,
            "lies" => Self::Lies,
            "oversized" => Self::Oversized,
            "sessions" => Self::Sessions,
            "freeze" => Self::Freeze,
            _ => return None,
        })
    }

    /// Attacks; returns when the session is to end.
    pub(super) async fn attack(self, container: &str, frames: &Frames, attack_traffic: &AttackTraffic) {
        let mut turn = 0_u64;
        loop {
            let messages = match self {
                Self::Sessions => return,
                Self::Freeze => return std::future::pending().await,
                Self::Output => vec![output(container, turn * FLOOD_BYTES as u64, FLOOD_BYTES)],
                Self::Empty => vec![output(container, turn, 0)],
                Self::Oversized => vec![output(container, 0, OVERSIZED_BYTES)],
                Self::Events => events(container, turn),
                Self::Lies if turn == 0 => false_reports(container),
                Self::Lies => return std::future::pending().await,
            };
            for message in messages {
                let bytes = if let Message::Output(output) = &message { output.data.len() as u64 } else { 0 };
                if send(frames, message).await.is_err() {
                    return;
                }
                attack_traffic.bytes.fetch_add(bytes, Ordering::Relaxed);
                attack_traffic.messages.fetch_add(1, Ordering::Relaxed);
            }
            turn += 1;
        }
    }
}

fn output(container: &str, offset: u64, bytes: usize) -> Message {
    let mut data = vec![b'x'; bytes];
    if let Some(last) = data.last_mut() {
        *last = b'\n';
    }
    let stream = pb::Stream::Stdout.into();
    Message::Output(pb::ContainerOutput {
        container: container.to_owned(),
        offset,
        stream,
        time_unix_ns: 1,
        data,
    })
}

fn exited_message(container: &str, end_offset: u64) -> Message {
    let exit = Some(pb::ExitStatus { code: 7, error: "x".repeat(4096), ..Default::default() });
    let container = container.to_owned();
    Message::Exited(pb::ContainerExited {
        container,
        exit,
        oom_killed: true,
        end_offset,
        time_unix_ns: i64::MIN,
        termination_message: vec![0xff; 64 << 10],
    })
}

fn events(container: &str, turn: u64) -> Vec<Message> {
    let other = format!("c{turn}");
    vec![
        Message::Started(pb::ContainerStarted { container: container.to_owned(), pid: u32::MAX }),
        Message::Started(pb::ContainerStarted { container: other.clone(), pid: 0 }),
        exited_message(&other, turn),
        Message::Statistics(pb::Statistics::default()),
    ]
}

/// Returns false statements about this container and about others. The container keeps running.
fn false_reports(container: &str) -> Vec<Message> {
    let mut messages = Vec::new();
    for other in ["other", "../../../etc/passwd", "", "c0", container] {
        let is_own = other == container;
        for offset in [u64::MAX, u64::MAX - 100, 1 << 40, 0] {
            messages.extend((!is_own || offset == u64::MAX).then(|| output(other, offset, 100)));
            messages.extend((!is_own).then(|| exited_message(other, offset)));
        }
        messages.push(Message::Started(pb::ContainerStarted { container: other.to_owned(), pid: 1 }));
    }
    messages.extend([output(container, 0, 10), output(container, 0, 10), output(container, 5, 10)]);
    messages
}
