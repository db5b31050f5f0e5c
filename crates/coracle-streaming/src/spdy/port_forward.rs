//! Port-forward over SPDY: pairs the two streams of each forwarded connection, dials, and copies.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::connection::Incoming;
use super::frame::{Reset, StreamId};
use super::header_block::Headers;
use super::stream::{Pending, Stream};
use crate::activity::Activity;
use crate::forward::{self, Dial};
use crate::limits;

/// Purpose of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Error,
    Data,
}

/// Key that the two streams of a forwarded connection share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// Header `requestid`.
    Request(String),
    /// Id of the error stream, for old clients without that header. The data stream follows the error stream.
    Stream(u32),
}

/// Parsed purpose of a stream. Pure.
#[derive(Debug, PartialEq, Eq)]
struct Purpose {
    kind: Kind,
    port: u16,
    key: Key,
}

fn purpose(id: StreamId, headers: &Headers) -> Option<Purpose> {
    let kind = match headers.get("streamtype")? {
        "error" => Kind::Error,
        "data" => Kind::Data,
        _ => return None,
    };
    let port = headers.get("port")?.parse().ok().filter(|port| *port != 0)?;
    let key = match headers.get("requestid") {
        Some(request) if !request.is_empty() => Key::Request(request.to_owned()),
        _ => Key::Stream(if kind == Kind::Error { id.0 } else { id.0.checked_sub(2)? }),
    };
    Some(Purpose { kind, port, key })
}

/// First stream of a pair.
struct Waiting {
    stream: Stream,
    kind: Kind,
    port: u16,
    end: Instant,
}

/// First streams that wait for the second one of their pair.
struct Pairs {
    waiting: HashMap<Key, Waiting>,
    time: Duration,
}

/// Both streams of a forwarded connection.
struct Pair {
    error: Stream,
    data: Stream,
    port: u16,
}

impl Pairs {
    /// Accepts or refuses a stream. `Some` when its pair is complete.
    fn add(&mut self, pending: Pending) -> Option<Pair> {
        let Some(Purpose { kind, port, key }) = purpose(pending.id, &pending.headers) else {
            pending.refuse(Reset::Protocol);
            return None;
        };
        if self.waiting.get(&key).is_some_and(|first| first.kind == kind || first.port != port) {
            pending.refuse(Reset::Protocol);
            return None;
        }
        let stream = pending.accept()?;
        match (self.waiting.remove(&key), kind) {
            (Some(Waiting { stream: data, .. }), Kind::Error) => Some(Pair { error: stream, data, port }),
            (Some(Waiting { stream: error, .. }), Kind::Data) => Some(Pair { error, data: stream, port }),
            (None, _) => {
                let end = limits::end(Instant::now(), self.time);
                self.waiting.insert(key, Waiting { stream, kind, port, end });
                None
            }
        }
    }

    /// Resets streams whose second stream did not arrive in time.
    fn expire(&mut self) {
        let now = Instant::now();
        for (_, first) in self.waiting.extract_if(|_, first| first.end <= now) {
            first.stream.reset(Reset::Cancel);
        }
    }

    /// Returns when the time of a waiting stream is over. Cancel-safe.
    async fn wait_for_expiry(&self) {
        match self.waiting.values().map(|first| first.end).min() {
            Some(end) => sleep_until(end).await,
            None => std::future::pending().await,
        }
    }
}

/// Forwards connections until the client opens no more and the last one has ended.
pub(crate) async fn serve(dial: Arc<dyn Dial>, time: Duration, mut incoming: Incoming, activity: Activity) {
    let mut pairs = Pairs { waiting: HashMap::new(), time };
    // Dropping the set ends the connections with the session.
    let mut connections = JoinSet::new();
    let mut open = true;
    while open || !connections.is_empty() {
        tokio::select! {
            pending = incoming.recv(), if open => match pending {
                Some(pending) => {
                    if let Some(pair) = pairs.add(pending) {
                        connections.spawn(forward(pair, Arc::clone(&dial)));
                    }
                }
                None => open = false,
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = pairs.wait_for_expiry() => pairs.expire(),
            _interruption = activity.wait_for_interruption() => return,
        }
    }
}

/// Serves one forwarded connection. Errors of an open connection are not reported, because Go's client ends all its connections
/// when it reads text on an error stream.
async fn forward(pair: Pair, dial: Arc<dyn Dial>) {
    let Pair { error, data, port } = pair;
    let gone = data.reset_token();
    let Stream { output: error, .. } = error;
    let connection = tokio::select! {
        connection = dial.dial(port) => connection,
        () = gone.cancelled() => return,
    };
    let mut connection = match connection {
        Ok(connection) => connection,
        Err(reason) => {
            let text = format!("cannot forward port {port}: {reason}");
            error.finish(text.as_bytes());
            data.reset(Reset::Cancel);
            return;
        }
    };
    let Stream { id, input, output } = data;
    let mut client = tokio::io::join(input, output);
    let copied = tokio::select! {
        copied = forward::copy_both(&mut client, &mut connection) => copied.is_ok(),
        () = gone.cancelled() => true,
    };
    if !copied {
        let (input, output) = client.into_inner();
        Stream { id, input, output }.reset(Reset::Cancel);
    }
}

#[cfg(test)]
#[path = "port_forward_tests.rs"]
mod tests;
