//! Exec or attach session over WebSocket: one channel for each stream, all of which exist from the start.

use tokio::io::{AsyncRead, AsyncWrite, duplex};
use tokio_tungstenite::tungstenite::protocol::Message;
use tokio_util::sync::CancellationToken;

use super::channel::{Channel, Coding, Variant};
use super::connection::{self, Inputs};
use crate::activity::Activity;
use crate::limits::Limits;
use crate::outbox::{Encode as _, Ender, Outbox, Output};
use crate::run::{self, Ends};
use crate::session::{RunSession, Streams};
use crate::status;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;

/// Serves a session on a connection after its handshake.
pub(crate) async fn serve<C: AsyncRead + AsyncWrite + Unpin>(
    connection: C,
    variant: Variant,
    streams: Streams,
    process: Box<dyn RunSession>,
    limits: &Limits,
    stop: CancellationToken,
) {
    let (mut open, [mut stdin, mut resize]) = (Vec::new(), [None, None]);
    for (channel, wanted, input) in [(STDIN, streams.stdin, &mut stdin), (RESIZE, streams.tty, &mut resize)] {
        if wanted {
            let (near, far) = duplex(limits.input_max);
            open.push((channel, near));
            *input = Some(far);
        }
    }
    let Variant { coding, form, half_close } = variant;
    let inputs = Inputs { coding, half_close, open };
    let session = async |outbox: Outbox<Message>, activity: Activity| {
        let [stdout, stderr] = [(STDOUT, streams.stdout), (STDERR, streams.stderr && !streams.tty)]
            .map(|(channel, wanted)| wanted.then(|| output(coding, channel, &outbox)));
        let first = ready_channel(streams);
        outbox.control(Channel { coding, number: first }.data(b""));
        let outcome = run::run(process, Ends { stdin, stdout, stderr, resize }, &activity).await;
        let content = status::content(&outcome, form);
        output(coding, ERROR, &outbox).finish(&content);
        run::flush_outbox(&outbox, &activity).await;
    };
    connection::serve(connection, inputs, limits, stop, session).await;
}

/// Returns the channel on which an empty message tells the client that it may begin: the first one with output. Pure.
fn ready_channel(streams: Streams) -> u8 {
    match streams {
        Streams { stdout: true, .. } => STDOUT,
        Streams { stderr: true, tty: false, .. } => STDERR,
        _ => ERROR,
    }
}

/// Returns the output of a channel.
pub(super) fn output(coding: Coding, number: u8, outbox: &Outbox<Message>) -> Output<Channel> {
    Output::new(Ender::new(Channel { coding, number }, outbox.clone(), CancellationToken::new()))
}
