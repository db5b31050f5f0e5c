//! Commands and journals of guests: by the guest agent, and without it as `coracle_vm_pod::fallback` decides.

use std::net::IpAddr;

use async_trait::async_trait;
use axum::body::Body;
use bytes::Bytes;
use coracle_host::Access;
use coracle_pod::streams::ExecSession;
use coracle_streaming::{RunSession, Session, SessionOutcome, Streams};
use coracle_vm_pod::fallback::{self, Fallback, Journal};
use coracle_vm_pod::ssh::{self, Password};
use futures_util::stream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use super::context::Context;
use super::http_failure::HttpFailure;
use super::query::LogOptions;
use super::target::ContainerTarget;
use crate::table::PodEntry;

/// Buffer for a journal whose client is slow, in bytes.
const BUFFER: usize = 64 << 10;
/// Exit code of a command that was not run.
const NOT_RUN: i32 = 1;

/// Returns a session for a command in a container, over the guest agent or its fallback.
///
/// # Errors
/// 404: unknown container; 400: the container does not run.
pub(super) fn exec(
    context: &Context,
    target: &ContainerTarget,
    command: Vec<String>,
    streams: Streams,
) -> Result<Box<dyn RunSession>, HttpFailure> {
    let entry = target.find_pod(&context.pods)?;
    match (fallback(context, &entry), &context.ssh) {
        (Some(Fallback::Help(text)), _) => Ok(Box::new(Help(text))),
        (Some(Fallback::Ssh(address)), Some(password)) => Ok(Box::new(SshExec {
            address,
            password: password.clone(),
            line: ssh::line_of(&command),
            streams,
        })),
        _ => {
            let found = target.find(&context.pods)?;
            let host = context.host.clone();
            let session = ExecSession::new(host, &found.vm, &found.container.id, command, streams);
            Ok(Box::new(session.map_err(|error| HttpFailure::of_host(&error))?))
        }
    }
}

/// Returns the access without an agent, if the pod is a running VM whose agent is not connected.
pub(super) fn fallback(context: &Context, entry: &PodEntry) -> Option<Fallback> {
    if !entry.is_vm {
        return None;
    }
    // A VM that the pod brought from another node is unknown here.
    if let Some(vm) = &entry.vm {
        let view = context.host.find(vm, Access::Read).ok()?;
        if view.guest.is_some() || !view.record.state.has_vmm() {
            return None;
        }
    }
    fallback::of(&entry.pod, context.ssh.is_some())
}

/// Returns the journal of a guest, which is read over SSH while it is sent.
///
/// # Errors
/// 500: the journal cannot be read; 400: the journal contains only the current boot.
pub(super) async fn journal(
    context: &Context,
    address: IpAddr,
    options: &LogOptions,
) -> Result<Body, HttpFailure> {
    if options.previous {
        return Err(HttpFailure::bad_request("the journal over SSH has no previous container"));
    }
    let Some(password) = &context.ssh else { return Ok(Body::empty()) };
    let connection = ssh::connect(address, password).await.map_err(HttpFailure::internal)?;
    let wanted = Journal {
        lines: options.query.tail_lines,
        since: options.query.since,
        timestamps: options.query.timestamps,
        follow: options.follow,
    };
    let (near, far) = tokio::io::duplex(BUFFER);
    let (_none, resize) = mpsc::channel(1);
    let streams = Streams { stdout: true, ..Streams::default() };
    let session = Session { stdin: None, stdout: Some(Box::new(far)), stderr: None, resize };
    let stop = context.stop.clone();
    // The response body polls the session and drops it.
    let run = Box::pin(async move {
        let line = wanted.command();
        let run = connection.run(&line, streams, session);
        let _ended_or_stopped = stop.run_until_cancelled(run).await;
    });
    let left = options.query.limit_bytes.unwrap_or(u64::MAX);
    let output = stream::unfold((near.take(left), Some(run)), async |(mut near, mut run)| {
        let mut data = vec![0; BUFFER];
        loop {
            let read = tokio::select! {
                read = near.read(&mut data) => read,
                () = async { match &mut run { Some(run) => run.await, None => std::future::pending().await } } => {
                    run = None;
                    continue;
                }
            };
            let read = read.ok().filter(|read| *read > 0)?;
            data.truncate(read);
            return Some((Ok::<_, std::io::Error>(Bytes::from(data)), (near, run)));
        }
    });
    Ok(Body::from_stream(output))
}

/// Session of a command over SSH, in a guest without an agent.
struct SshExec {
    address: IpAddr,
    password: Password,
    line: String,
    streams: Streams,
}

#[async_trait]
impl RunSession for SshExec {
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome {
        match ssh::connect(self.address, &self.password).await {
            Ok(connection) => connection.run(&self.line, self.streams, session).await,
            Err(why) => SessionOutcome::Failed(why),
        }
    }
}

/// Session that prints how to connect to a guest in which commands cannot be run.
struct Help(String);

#[async_trait]
impl RunSession for Help {
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome {
        if let Some(mut output) = session.stdout.or(session.stderr) {
            let _client_gone = output.write_all(self.0.as_bytes()).await;
        }
        SessionOutcome::Exited(NOT_RUN)
    }
}
