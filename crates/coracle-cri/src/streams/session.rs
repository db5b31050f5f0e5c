//! Exec and attach: streams of a client on one side, a stream of the guest agent on the other.

use std::time::Duration;

use async_trait::async_trait;
use coracle_guest_client::GuestClient;
use coracle_host::{ContainerId, Host};
use coracle_proto::guest::{
    self, ExecResponse, Resize, attach_request, exec_request, exec_response::Message,
};
use coracle_streaming::{Outcome, RunSession, Session, TerminalSize, Writer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Bytes of input in one message.
const CHUNK: usize = 32 * 1024;
/// Messages that wait for the guest.
const QUEUED: usize = 4;
/// For the guest to begin.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A command in a container. When the client goes, it gets SIGHUP.
pub(super) struct Executed {
    pub(super) host: Host,
    pub(super) sandbox: String,
    pub(super) process: guest::Process,
}

/// The streams of a container that runs. When the client goes, it continues.
pub(super) struct Attached {
    pub(super) host: Host,
    pub(super) sandbox: String,
    pub(super) container: ContainerId,
    pub(super) wants_input: bool,
}

/// Messages to the guest.
trait Words: Send + Sized + 'static {
    fn stdin(data: Vec<u8>) -> Self;
    fn close() -> Self;
    fn resize(size: TerminalSize) -> Self;
}

impl Words for guest::ExecRequest {
    fn stdin(data: Vec<u8>) -> Self {
        Self { message: Some(exec_request::Message::Stdin(data)) }
    }

    fn close() -> Self {
        Self { message: Some(exec_request::Message::CloseStdin(true)) }
    }

    fn resize(size: TerminalSize) -> Self {
        Self { message: Some(exec_request::Message::Resize(dimensions(size))) }
    }
}

impl Words for guest::AttachRequest {
    fn stdin(data: Vec<u8>) -> Self {
        Self { message: Some(attach_request::Message::Stdin(data)) }
    }

    fn close() -> Self {
        Self { message: Some(attach_request::Message::CloseStdin(true)) }
    }

    fn resize(size: TerminalSize) -> Self {
        Self { message: Some(attach_request::Message::Resize(dimensions(size))) }
    }
}

fn dimensions(size: TerminalSize) -> Resize {
    Resize { rows: size.rows.into(), cols: size.columns.into() }
}

#[async_trait]
impl RunSession for Executed {
    async fn run(self: Box<Self>, session: Session) -> Outcome {
        let guest = match self.host.guest(&self.sandbox).await {
            Ok(guest) => guest,
            Err(error) => return Outcome::Failed(error.chain()),
        };
        let start = guest::ExecRequest { message: Some(exec_request::Message::Start(self.process)) };
        let (to_guest, requests) = mpsc::channel(QUEUED);
        let call = async {
            let _room_for_one = to_guest.send(start).await;
            Ok(guest.rpc().exec(ReceiverStream::new(requests)).await?.into_inner())
        };
        run(&guest, session, to_guest.clone(), call).await
    }
}

#[async_trait]
impl RunSession for Attached {
    async fn run(self: Box<Self>, session: Session) -> Outcome {
        let guest = match self.host.guest(&self.sandbox).await {
            Ok(guest) => guest,
            Err(error) => return Outcome::Failed(error.chain()),
        };
        let has_input = self
            .host
            .get(&self.sandbox)
            .is_ok_and(|view| view.containers.get(&self.container).is_some_and(|record| record.spec.stdin));
        let container = self.container.to_string();
        let start = guest::AttachStart { container, stdin: self.wants_input && has_input };
        let start = guest::AttachRequest { message: Some(attach_request::Message::Start(start)) };
        let (to_guest, requests) = mpsc::channel(QUEUED);
        let call = async {
            let _room_for_one = to_guest.send(start).await;
            Ok(guest.rpc().attach(ReceiverStream::new(requests)).await?.into_inner())
        };
        run(&guest, session, to_guest.clone(), call).await
    }
}

/// Copies between client and guest until the process ends. `guest` keeps its session open meanwhile.
async fn run<M: Words>(
    _guest: &GuestClient,
    session: Session,
    to_guest: mpsc::Sender<M>,
    call: impl Future<Output = Result<Streaming<ExecResponse>, Status>>,
) -> Outcome {
    let replies = match tokio::time::timeout(START_LIMIT, call).await {
        Ok(Ok(replies)) => replies,
        Ok(Err(status)) => return Outcome::Failed(status.message().to_owned()),
        Err(_) => return Outcome::Failed("the guest does not answer".to_owned()),
    };
    let Session { stdin, stdout, stderr, mut resize } = session;
    let typing = async {
        if let Some(mut stdin) = stdin {
            let mut buffer = vec![0; CHUNK];
            loop {
                let read = stdin.read(&mut buffer).await.unwrap_or(0);
                let message = match buffer.get(..read) {
                    Some(data) if read > 0 => M::stdin(data.to_vec()),
                    _ => M::close(),
                };
                if to_guest.send(message).await.is_err() || read == 0 {
                    break;
                }
            }
        }
    };
    let resizing = async {
        while let Some(size) = resize.recv().await {
            if to_guest.send(M::resize(size)).await.is_err() {
                break;
            }
        }
    };
    let input = async {
        tokio::join!(typing, resizing);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        outcome = print(replies, stdout, stderr) => outcome,
        () = input => Outcome::Failed("the input ended".to_owned()),
    }
}

/// Passes output on to the end. A client that does not read its output makes the process wait.
async fn print(
    mut replies: Streaming<ExecResponse>,
    mut stdout: Option<Writer>,
    mut stderr: Option<Writer>,
) -> Outcome {
    loop {
        let (writer, data) = match replies.message().await {
            Ok(Some(reply)) => match reply.message {
                Some(Message::Stdout(data)) => (&mut stdout, data),
                Some(Message::Stderr(data)) => (&mut stderr, data),
                Some(Message::Exit(exit)) if !exit.error.is_empty() => return Outcome::Failed(exit.error),
                Some(Message::Exit(exit)) => {
                    for writer in [stdout, stderr].iter_mut().flatten() {
                        let _client_gone = writer.shutdown().await;
                    }
                    return Outcome::Exited(exit.code);
                }
                Some(Message::Started(_)) | None => continue,
            },
            Ok(None) => return Outcome::Failed("the guest ended the session".to_owned()),
            Err(status) => return Outcome::Failed(status.message().to_owned()),
        };
        if let Some(open) = writer
            && open.write_all(&data).await.is_err()
        {
            *writer = None; // reset by the client; the rest of it is discarded
        }
    }
}
