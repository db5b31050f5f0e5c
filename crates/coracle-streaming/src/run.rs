//! Runs the process of a session on its streams, for all protocols.

use std::convert::Infallible;

use tokio::io::DuplexStream;
use tokio::sync::mpsc;

use crate::activity::Activity;
use crate::outbox::{Encode, Ender, Outbox, Output};
use crate::resize;
use crate::session::{RunSession, Session, SessionOutcome};

/// Capacity of the queue of terminal sizes.
const SIZES: usize = 4;

/// Server ends of the streams of a session.
#[derive(Debug)]
pub(crate) struct Ends<E: Encode> {
    pub(crate) stdin: Option<DuplexStream>,
    pub(crate) stdout: Option<Output<E>>,
    pub(crate) stderr: Option<Output<E>>,
    pub(crate) resize: Option<DuplexStream>,
}

/// Runs the process. Returns when it has ended or the connection is interrupted. Dropping the future drops the session.
pub(crate) async fn run<E: Encode>(
    run: Box<dyn RunSession>,
    ends: Ends<E>,
    activity: &Activity,
) -> SessionOutcome {
    let Ends { stdin, stdout, stderr, resize } = ends;
    let enders: Vec<_> = [&stdout, &stderr].into_iter().flatten().map(Output::end_handle).collect();
    let (sender, sizes) = mpsc::channel(SIZES);
    let session = Session {
        stdin: stdin.map(|input| Box::new(input) as _),
        stdout: stdout.map(|output| Box::new(output) as _),
        stderr: stderr.map(|output| Box::new(output) as _),
        resize: sizes,
    };
    let resizing = async {
        match resize {
            Some(input) => resize::pump(input, sender).await,
            None => drop(sender),
        }
        std::future::pending::<Infallible>().await
    };
    let outcome = tokio::select! {
        outcome = run.run(session) => outcome,
        never = resizing => match never {},
        interruption = activity.wait_for_interruption() => SessionOutcome::Failed(interruption.to_string()),
    };
    // A writer that outlives the session must not write after the end of its stream.
    enders.iter().for_each(Ender::end);
    outcome
}

/// Returns when all queued messages are sent, even to a slow client, or when the connection is interrupted.
pub(crate) async fn flush_outbox<T>(outbox: &Outbox<T>, activity: &Activity) {
    tokio::select! {
        () = outbox.wait_until_written() => {}
        _interruption = activity.wait_for_interruption() => {}
    }
}
