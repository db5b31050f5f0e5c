//! Exec or attach session over SPDY: collects its streams, runs it, and reports its outcome.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use super::connection::Incoming;
use super::frame::Reset;
use super::stream::Stream;
use crate::activity::Activity;
use crate::limits;
use crate::outbox::Outbox;
use crate::run::{self, Ends};
use crate::session::{RunSession, SessionOutcome, Streams};
use crate::status::{self, Form};

/// Version of the remote command protocol over SPDY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    V1,
    V2,
    V3,
    V4,
}

impl Version {
    fn form(self) -> Form {
        if self == Self::V4 { Form::Json } else { Form::Text }
    }
}

/// Purpose of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Error,
    Stdin,
    Stdout,
    Stderr,
    Resize,
}

const KINDS: [(&str, Kind); 5] = [
    ("error", Kind::Error),
    ("stdin", Kind::Stdin),
    ("stdout", Kind::Stdout),
    ("stderr", Kind::Stderr),
    ("resize", Kind::Resize),
];

/// Returns whether the client must open a stream of `kind`. Pure.
fn is_wanted(kind: Kind, streams: Streams, version: Version) -> bool {
    match kind {
        Kind::Error => true,
        Kind::Stdin => streams.stdin,
        Kind::Stdout => streams.stdout,
        Kind::Stderr => streams.stderr && !streams.tty,
        Kind::Resize => streams.tty && version >= Version::V3,
    }
}

/// Collected streams of a session, by kind.
#[derive(Debug, Default)]
struct Collected([Option<Stream>; KINDS.len()]);

impl Collected {
    fn slot(&mut self, kind: Kind) -> &mut Option<Stream> {
        let [error, stdin, stdout, stderr, resize] = &mut self.0;
        match kind {
            Kind::Error => error,
            Kind::Stdin => stdin,
            Kind::Stdout => stdout,
            Kind::Stderr => stderr,
            Kind::Resize => resize,
        }
    }

    fn missing(&mut self, streams: Streams, version: Version) -> Vec<&'static str> {
        let wanted = KINDS.iter().filter(|(_, kind)| is_wanted(*kind, streams, version));
        wanted.filter(|(_, kind)| self.slot(*kind).is_none()).map(|(name, _)| *name).collect()
    }
}

/// Parameters of a session.
pub(crate) struct Request {
    pub(crate) streams: Streams,
    pub(crate) version: Version,
    pub(crate) process: Box<dyn RunSession>,
    /// Time for the client to open the streams.
    pub(crate) time: Duration,
}

/// Runs the session of a connection. Dropping the future drops the session.
pub(crate) async fn serve(
    request: Request,
    mut incoming: Incoming,
    outbox: Outbox<Bytes>,
    activity: Activity,
) {
    let Request { streams, version, process, time } = request;
    let mut all = Collected::default();
    let end = limits::end(Instant::now(), time);
    let outcome = tokio::select! {
        collected = collect(&mut all, &mut incoming, streams, version, end) => collected,
        interruption = activity.wait_for_interruption() => Err(interruption.to_string()),
    };
    let outcome = match outcome {
        Ok(()) => {
            let mut split = |kind| all.slot(kind).take().map(|s| (s.input, s.output)).unzip();
            // The output halves of input streams end with the session: the client waits for the end of each stream.
            let [(stdin, _stdin_end), (resize, _resize_end)] = [Kind::Stdin, Kind::Resize].map(&mut split);
            let [(_, stdout), (_, stderr)] = [Kind::Stdout, Kind::Stderr].map(&mut split);
            tokio::select! {
                outcome = run::run(process, Ends { stdin, stdout, stderr, resize }, &activity) => outcome,
                never = refuse_all(&mut incoming) => match never {},
            }
        }
        Err(reason) => SessionOutcome::Failed(reason),
    };
    // An error stream that ends without data means success to the client, so the status is always sent first.
    if let Some(Stream { output, .. }) = all.slot(Kind::Error).take() {
        output.finish(&status::content(&outcome, version.form()));
    }
    run::flush_outbox(&outbox, &activity).await;
}

/// Waits for the streams that the session needs.
///
/// # Errors
/// When streams are missing at `end`, or the client opens no more.
async fn collect(
    all: &mut Collected,
    incoming: &mut Incoming,
    streams: Streams,
    version: Version,
    end: Instant,
) -> Result<(), String> {
    loop {
        let missing = all.missing(streams, version);
        if missing.is_empty() {
            return Ok(());
        }
        let Ok(Some(pending)) = timeout_at(end, incoming.recv()).await else {
            return Err(format!("cannot run session: streams not opened: {}", missing.join(", ")));
        };
        let name = pending.headers.get("streamtype");
        let kind = KINDS.iter().find(|(known, _)| Some(*known) == name).map(|(_, kind)| *kind);
        match kind.filter(|kind| is_wanted(*kind, streams, version)).map(|kind| all.slot(kind)) {
            Some(slot @ None) => *slot = pending.accept(),
            _ => pending.refuse(Reset::Protocol),
        }
    }
}

/// Refuses streams that the client opens during a session. Never returns.
async fn refuse_all(incoming: &mut Incoming) -> Infallible {
    while let Some(pending) = incoming.recv().await {
        pending.refuse(Reset::Protocol);
    }
    std::future::pending().await
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
