//! Start request, which a host may send before HTTP/2: Configure and StartWorkload in one. What a clone does for the first time is
//! slow on an emulated CPU, and so HTTP/2 begins when the host makes a call.

use std::io;

use coracle_proto::guest::mount_request::Source;
use coracle_proto::guest::start_response::Result as StepResult;
use coracle_proto::guest::{
    MountRequest, START_MAGIC, StartRequest, StartResponse, StepError, frame, unframe,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tonic::Status;

use crate::agent::Agent;
use crate::early;
use crate::error::Error;
use crate::net;
use crate::session::MESSAGE_MAX;
use coracle_spawn::Thread;

/// Bytes that a session begins with: [`START_MAGIC`], or the beginning of HTTP/2.
pub(crate) type FirstBytes = [u8; START_MAGIC.len()];

/// Serves start requests, with which the session may begin. Returns the bytes that were read of what follows.
///
/// # Errors
/// When the session ends, or the request is too long.
pub(crate) async fn serve(
    io: &mut (impl AsyncRead + AsyncWrite + Unpin),
    agent: &Agent,
) -> io::Result<FirstBytes> {
    let mut first = FirstBytes::default();
    loop {
        io.read_exact(&mut first).await?;
        if first != START_MAGIC {
            return Ok(first);
        }
        let length = usize::try_from(io.read_u32().await?).unwrap_or(usize::MAX);
        if length > MESSAGE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "start request is too long"));
        }
        let mut request = vec![0; length];
        io.read_exact(&mut request).await?;
        match unframe(&request) {
            Ok(request) => start(io, agent, request).await?,
            Err(e) => respond(io, Err(Error::invalid(e.to_string()))).await?,
        }
    }
}

/// Configures the guest and starts the workload, with a response after each step. Then reports, until the host asks for HTTP/2.
async fn start(
    io: &mut (impl AsyncRead + AsyncWrite + Unpin),
    agent: &Agent,
    StartRequest { configure, process }: StartRequest,
) -> io::Result<()> {
    let (Some(configure), Some(process)) = (configure, process) else {
        return respond(io, Err(Error::invalid("no configuration or no process"))).await;
    };
    // Only a shared directory needs the runtime, which serves nothing else in this session.
    let is_shared = |mount: &MountRequest| matches!(mount.source, Some(Source::SharedDir(_)));
    let is_shared = configure.mounts.iter().any(is_shared);
    let thread = if is_shared { Thread::OfFiles } else { Thread::OfRuntime };
    let configured = agent.configure(configure, thread).await;
    let mut has_failed = configured.is_err();
    respond(io, configured.map(StepResult::Configured)).await?;
    if !has_failed {
        let started = agent.start_workload(process, thread).await;
        has_failed = started.is_err();
        respond(io, started.map(StepResult::Started)).await?;
        net::announce();
    }
    if has_failed { Ok(()) } else { early::serve(io, agent).await }
}

async fn respond(io: &mut (impl AsyncWrite + Unpin), result: Result<StepResult, Error>) -> io::Result<()> {
    let result = result.unwrap_or_else(|error| {
        let status = Status::from(error);
        StepResult::Error(StepError { code: status.code().into(), message: status.message().to_owned() })
    });
    io.write_all(&frame(&StartResponse { result: Some(result) })).await
}
