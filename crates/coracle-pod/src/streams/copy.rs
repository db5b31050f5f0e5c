//! Copies between the streams of a client and a call of the guest agent.

use std::time::Duration;

use coracle_host::GuestClient;
use coracle_proto::guest as pb;
use coracle_proto::guest::{ExecResponse, attach_request, exec_request, exec_response::Message};
use coracle_streaming::{Reader, Session, SessionOutcome, TerminalSize, Writer};
use futures_util::{Stream, TryStreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

/// Bytes of input in one message.
const CHUNK: usize = 32 << 10;
/// Capacity of the queue of messages to the guest.
pub(super) const QUEUED: usize = 4;
/// Limit for the first reply of the guest.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Most characters of a guest's text that reach a client.
const TEXT_MAX: usize = 1024;

/// Message of a session to the guest.
pub(super) trait ToGuest: Send + Sized + 'static {
    fn stdin(data: Vec<u8>) -> Self;
    fn close_stdin() -> Self;
    fn resize(size: TerminalSize) -> Self;
}

impl ToGuest for pb::ExecRequest {
    fn stdin(data: Vec<u8>) -> Self {
        Self { message: Some(exec_request::Message::Stdin(data)) }
    }

    fn close_stdin() -> Self {
        Self { message: Some(exec_request::Message::CloseStdin(true)) }
    }

    fn resize(size: TerminalSize) -> Self {
        Self { message: Some(exec_request::Message::Resize(dimensions(size))) }
    }
}

impl ToGuest for pb::AttachRequest {
    fn stdin(data: Vec<u8>) -> Self {
        Self { message: Some(attach_request::Message::Stdin(data)) }
    }

    fn close_stdin() -> Self {
        Self { message: Some(attach_request::Message::CloseStdin(true)) }
    }

    fn resize(size: TerminalSize) -> Self {
        Self { message: Some(attach_request::Message::Resize(dimensions(size))) }
    }
}

fn dimensions(size: TerminalSize) -> pb::Resize {
    pb::Resize { rows: size.rows.into(), cols: size.columns.into() }
}

/// Copies between client and guest until the process ends. `guest` keeps its session open meanwhile. The errors of `call` and
/// of its replies are texts for the client.
pub(super) async fn copy<M: ToGuest, R>(
    _guest: &GuestClient,
    session: Session,
    to_guest: mpsc::Sender<M>,
    call: impl Future<Output = Result<R, String>>,
) -> SessionOutcome
where
    R: Stream<Item = Result<ExecResponse, String>> + Unpin,
{
    let replies = match tokio::time::timeout(START_LIMIT, call).await {
        Ok(Ok(replies)) => replies,
        Ok(Err(why)) => return SessionOutcome::Failed(why),
        Err(_) => return SessionOutcome::Failed("the guest does not answer".to_owned()),
    };
    let Session { stdin, stdout, stderr, mut resize } = session;
    let resizing = async {
        while let Some(size) = resize.recv().await {
            if to_guest.send(M::resize(size)).await.is_err() {
                break;
            }
        }
    };
    let input = async {
        tokio::join!(send_input(stdin, &to_guest), resizing);
        // The call stays open: the process may still write output.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        outcome = receive_output(replies, stdout, stderr) => outcome,
        () = input => SessionOutcome::Failed("the input ended".to_owned()),
    }
}

/// Copies input until its end. A client that disconnects ends the input.
async fn send_input<M: ToGuest>(stdin: Option<Reader>, to_guest: &mpsc::Sender<M>) {
    let Some(mut stdin) = stdin else { return };
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = stdin.read(&mut buffer).await.unwrap_or(0);
        let message = match buffer.get(..read) {
            Some(data) if read > 0 => M::stdin(data.to_vec()),
            _ => M::close_stdin(),
        };
        if to_guest.send(message).await.is_err() || read == 0 {
            return;
        }
    }
}

/// Copies output until its end. A client that does not read its output blocks the process.
async fn receive_output(
    mut replies: impl Stream<Item = Result<ExecResponse, String>> + Unpin,
    mut stdout: Option<Writer>,
    mut stderr: Option<Writer>,
) -> SessionOutcome {
    loop {
        let (writer, data) = match replies.try_next().await {
            Ok(Some(reply)) => match reply.message {
                Some(Message::Stdout(data)) => (&mut stdout, data),
                Some(Message::Stderr(data)) => (&mut stderr, data),
                Some(Message::Exit(exit)) if !exit.error.is_empty() => {
                    return SessionOutcome::Failed(truncate_text(&exit.error));
                }
                Some(Message::Exit(exit)) => {
                    for writer in [stdout, stderr].iter_mut().flatten() {
                        let _client_gone = writer.shutdown().await;
                    }
                    return SessionOutcome::Exited(exit.code);
                }
                Some(Message::Started(_)) | None => continue,
            },
            Ok(None) => return SessionOutcome::Failed("the guest ended the session".to_owned()),
            Err(why) => return SessionOutcome::Failed(why),
        };
        if let Some(open) = writer
            && open.write_all(&data).await.is_err()
        {
            *writer = None; // reset by the client; the rest of the output is discarded
        }
    }
}

/// Truncates a text of the guest.
pub(super) fn truncate_text(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}
