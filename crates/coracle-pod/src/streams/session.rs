//! Exec and attach sessions: a command in a container, and the streams of a running container.

use async_trait::async_trait;
use coracle_host::{Access, ContainerId, Host, HostError};
use coracle_proto::guest as pb;
use coracle_proto::guest::{attach_request, exec_request};
use coracle_streaming::{RunSession, Session, SessionOutcome, Streams};
use futures_util::TryStreamExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::copy::{QUEUED, copy, truncate_text};

/// Session of a command in a container.
#[derive(Debug)]
pub struct ExecSession {
    host: Host,
    vm: String,
    process: pb::Process,
}

impl ExecSession {
    /// Returns a session for the command `argv` in a running container, with the container's user, environment and working
    /// directory. `streams` decide on a terminal and an input. The guest runs the command when the session begins.
    ///
    /// # Errors
    /// Errors of [`Host::container_process`].
    pub fn new(
        host: Host,
        vm: &str,
        container: &ContainerId,
        argv: Vec<String>,
        streams: Streams,
    ) -> Result<Self, HostError> {
        let process = host.container_process(vm, container, argv)?;
        let process = pb::Process { tty: streams.tty, stdin: streams.stdin, ..process };
        Ok(Self { host, vm: vm.to_owned(), process })
    }
}

#[async_trait]
impl RunSession for ExecSession {
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome {
        let guest = match self.host.guest(&self.vm).await {
            Ok(guest) => guest,
            Err(error) => return SessionOutcome::Failed(error.chain()),
        };
        let start = pb::ExecRequest { message: Some(exec_request::Message::Start(self.process)) };
        let (to_guest, requests) = mpsc::channel(QUEUED);
        let first = to_guest.clone();
        let call = async {
            let _room_for_one = first.send(start).await;
            let replies = guest.rpc().exec(ReceiverStream::new(requests)).await;
            let replies = replies.map_err(|status| truncate_text(status.message()))?.into_inner();
            Ok(replies.map_err(|status| truncate_text(status.message())))
        };
        copy(&guest, session, to_guest, call).await
    }
}

/// Session of the streams of a running container.
#[derive(Debug)]
pub struct AttachSession {
    host: Host,
    vm: String,
    /// Id of the container; empty for the command of the VM itself.
    container: String,
    stdin: bool,
}

impl AttachSession {
    /// Returns a session for the streams of `container`. Input is passed on if `streams` ask for it and the container was
    /// created with an input. For a VM without containers, the streams are the output of its command.
    ///
    /// # Errors
    /// [`HostError::NotFound`], [`HostError::NoContainer`].
    pub fn new(host: Host, vm: &str, container: &ContainerId, streams: Streams) -> Result<Self, HostError> {
        let view = host.find(vm, Access::Read)?;
        if view.record.sandbox.is_none() {
            return Ok(Self { host, vm: vm.to_owned(), container: String::new(), stdin: false });
        }
        let missing = || HostError::NoContainer { vm: vm.to_owned(), id: container.to_string() };
        let record = view.containers.get(container).ok_or_else(missing)?;
        let stdin = streams.stdin && record.spec.stdin;
        Ok(Self { host, vm: vm.to_owned(), container: container.to_string(), stdin })
    }
}

#[async_trait]
impl RunSession for AttachSession {
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome {
        let guest = match self.host.guest(&self.vm).await {
            Ok(guest) => guest,
            Err(error) => return SessionOutcome::Failed(error.chain()),
        };
        let start = pb::AttachStart { container: self.container, stdin: self.stdin };
        let start = pb::AttachRequest { message: Some(attach_request::Message::Start(start)) };
        let (to_guest, requests) = mpsc::channel(QUEUED);
        let first = to_guest.clone();
        let call = async {
            let _room_for_one = first.send(start).await;
            let replies = guest.rpc().attach(ReceiverStream::new(requests)).await;
            let replies = replies.map_err(|status| truncate_text(status.message()))?.into_inner();
            Ok(replies.map_err(|status| truncate_text(status.message())))
        };
        copy(&guest, session, to_guest, call).await
    }
}
