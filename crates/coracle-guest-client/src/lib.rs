//! Sessions with the guest agent, over the only byte stream of a VM.
//!
//! A session begins with the agent's [hello](read_hello); the host sends nothing before it has read the hello. A connection is
//! used for one session and ends by `shutdown(2)`, which the guest notices at once.

mod budget;
mod connection;
mod early;
mod error;
mod hello;
mod new_session;
mod shared_stream;
mod start;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coracle_hypervisor::{Driver, VmmConfig};
use coracle_proto::guest as pb;
use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt};
use http::Uri;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::{Code, Streaming};

pub use self::budget::Budget;
pub use self::connection::{Connection, ResponseBody};
pub use self::error::{GuestError, GuestErrorKind};
pub use self::hello::read_hello;
pub use self::new_session::{GuestSession, NewSession};
use self::shared_stream::Hangup;
pub use self::start::{StartFailure, Started};

/// Byte stream from a guest, in blocks.
pub type Bytestream = BoxStream<'static, Result<Bytes, GuestError>>;

/// Time limit for the hello of a running agent. After it, a new connection is more likely to succeed.
const HELLO_LIMIT: Duration = Duration::from_millis(300);

/// Pause between two sessions: the guest notices that the host has disconnected only after a moment.
pub const GAP: Duration = Duration::from_millis(50);

/// Maximum pause between two tries with a guest that sends data without a hello.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Maximum size of a message from a guest, bytes.
const MESSAGE_MAX: usize = 1 << 20;

/// Time limit of calls that mount file systems.
const CONTAINER_LIMIT: Duration = Duration::from_secs(30);

/// Time limit of calls that the agent answers at once.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// Session with a guest agent. Clones share it; the session is closed when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct GuestClient(Arc<Session>);

#[derive(Debug)]
struct Session {
    client: pb::guest_client::GuestClient<Connection>,
    connection: Connection,
    hangup: Hangup,
}

impl GuestClient {
    fn of(connection: Connection, hangup: Hangup) -> Self {
        let origin = Uri::from_static(connection::ORIGIN);
        let client = pb::guest_client::GuestClient::with_origin(connection.clone(), origin);
        let client = client.max_decoding_message_size(MESSAGE_MAX);
        Self(Arc::new(Session { client, connection, hangup }))
    }

    /// Returns the next report of an agent that has not begun HTTP/2; `None` once it has, or a call waits for it. Cancel-safe.
    ///
    /// # Errors
    /// [`GuestError`], when the session ends.
    pub async fn early_report(&self) -> Result<Option<pb::early_report::Report>, GuestError> {
        let Some(early) = self.0.connection.before_http2() else { return Ok(None) };
        early.report().await.map_err(|e| GuestError::unavailable(e.to_string()))
    }

    /// Asks an agent that has not begun HTTP/2 whether it is alive; a report answers. Does nothing once HTTP/2 has begun.
    ///
    /// # Errors
    /// [`GuestError`], when the session ends.
    pub async fn ask_alive(&self) -> Result<(), GuestError> {
        let Some(early) = self.0.connection.before_http2() else { return Ok(()) };
        early.ask_alive().await.map_err(|e| GuestError::unavailable(e.to_string()))
    }

    /// Ends the session for all clones; the guest notices at once.
    pub fn close(&self) {
        self.0.hangup.hang_up();
    }

    /// Whether both are handles of the same session.
    pub fn is_same_session(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// gRPC stub, for callers that pass streams through. The caller sets a deadline for each call.
    #[must_use]
    pub fn rpc(&self) -> pb::guest_client::GuestClient<Connection> {
        self.0.client.clone()
    }

    /// Returns the state of the agent, within 10 s.
    ///
    /// # Errors
    /// [`GuestError`], as for every call.
    pub async fn status(&self) -> Result<pb::StatusResponse, GuestError> {
        call_within(ASK_LIMIT, self.rpc().status(pb::StatusRequest {})).await
    }

    /// Sets identity, clock, network and mounts of the guest. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn configure(
        &self,
        request: pb::ConfigureRequest,
        limit: Duration,
    ) -> Result<pb::ConfigureResponse, GuestError> {
        call_within(limit, self.rpc().configure(request)).await
    }

    /// Makes a guest that is not configured mount its fresh disk. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn prepare(&self, request: pb::PrepareRequest, limit: Duration) -> Result<(), GuestError> {
        call_within(limit, self.rpc().prepare(request)).await.map(drop)
    }

    /// Makes a guest in which nothing runs undo all changes since `prepare`. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] while processes run in the guest.
    pub async fn reset(&self, limit: Duration) -> Result<(), GuestError> {
        call_within(limit, self.rpc().reset(pb::ResetRequest {})).await.map(drop)
    }

    /// Starts the workload, within 10 s. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn start_workload(&self, process: pb::Process) -> Result<(), GuestError> {
        let request = pb::StartWorkloadRequest { process: Some(process) };
        call_within(ASK_LIMIT, self.rpc().start_workload(request)).await.map(drop)
    }

    /// Waits without a deadline until the workload ends. `exit` is `None` if the session was closed first. Cancel-safe.
    ///
    /// # Errors
    /// [`GuestError`], when the session ends first.
    pub async fn wait_workload(&self) -> Result<pb::WaitWorkloadResponse, GuestError> {
        Ok(self.rpc().wait_workload(pb::WaitWorkloadRequest {}).await?.into_inner())
    }

    /// Streams the output of the workload from byte `from_offset` on. Ends after all output of an ended workload was read.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn logs(&self, from_offset: u64) -> Result<Streaming<pb::LogChunk>, GuestError> {
        Ok(self.rpc().logs(pb::LogsRequest { from_offset }).await?.into_inner())
    }

    /// Mounts a volume. Idempotent in one session.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn mount(&self, request: pb::MountRequest, limit: Duration) -> Result<(), GuestError> {
        call_within(limit, self.rpc().mount(request)).await.map(drop)
    }

    /// Unmounts the volume called `name`. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] while the volume is in use.
    pub async fn unmount(&self, name: &str, limit: Duration) -> Result<(), GuestError> {
        call_within(limit, self.rpc().unmount(pb::UnmountRequest { name: name.to_owned() })).await.map(drop)
    }

    /// Carries FUSE requests and replies of one shared directory.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn serve_folder(
        &self,
        replies: impl Stream<Item = pb::FuseReply> + Send + 'static,
    ) -> Result<Streaming<pb::FuseRequest>, GuestError> {
        Ok(self.rpc().serve_folder(replies).await?.into_inner())
    }

    /// Starts a process without input and streams its output, then its exit status. Dropping the stream sends SIGHUP to the
    /// process.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn exec(&self, process: pb::Process) -> Result<Streaming<pb::ExecResponse>, GuestError> {
        let start = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(process)) };
        Ok(self.rpc().exec(stream::iter([start])).await?.into_inner())
    }

    /// Like [`GuestClient::configure`], for a guest whose containers are created later. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn configure_sandbox(
        &self,
        request: pb::ConfigureSandboxRequest,
        limit: Duration,
    ) -> Result<pb::ConfigureResponse, GuestError> {
        call_within(limit, self.rpc().configure_sandbox(request)).await
    }

    /// Creates a container, within 30 s, and returns the user of its process, if the agent reports it. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn create_container(
        &self,
        request: pb::CreateContainerRequest,
    ) -> Result<Option<pb::ProcessUser>, GuestError> {
        call_within(CONTAINER_LIMIT, self.rpc().create_container(request)).await.map(|made| made.user)
    }

    /// Starts a container's process, within 10 s. Returns an exit status if the process could not run. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn start_container(&self, id: &str) -> Result<Option<pb::ExitStatus>, GuestError> {
        let request = pb::StartContainerRequest { id: id.to_owned() };
        call_within(ASK_LIMIT, self.rpc().start_container(request)).await.map(|started| started.exit)
    }

    /// Attaches to a running container: streams its output from now on, then its exit status. The first of `requests` starts
    /// the stream.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] if the container does not run or has no input.
    pub async fn attach(
        &self,
        requests: impl Stream<Item = pb::AttachRequest> + Send + 'static,
    ) -> Result<Streaming<pb::ExecResponse>, GuestError> {
        Ok(self.rpc().attach(requests).await?.into_inner())
    }

    /// Ends a container's processes, by SIGKILL after `grace`, and returns when they have ended. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), GuestError> {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        let request = pb::StopContainerRequest { id: id.to_owned(), grace_ms };
        call_within(grace + ASK_LIMIT, self.rpc().stop_container(request)).await.map(drop)
    }

    /// Sends a signal to a container's first process, within 10 s; SIGKILL goes to all its processes.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] if the container does not run.
    pub async fn kill_container(&self, id: &str, signal: i32) -> Result<(), GuestError> {
        let request = pb::KillContainerRequest { id: id.to_owned(), signal };
        call_within(ASK_LIMIT, self.rpc().kill_container(request)).await.map(drop)
    }

    /// Ends and removes a container, within 30 s. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn remove_container(&self, id: &str) -> Result<(), GuestError> {
        let request = pb::RemoveContainerRequest { id: id.to_owned() };
        call_within(CONTAINER_LIMIT, self.rpc().remove_container(request)).await.map(drop)
    }

    /// Changes limits of a container, within 10 s.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn update_container(&self, id: &str, limits: pb::CgroupLimits) -> Result<(), GuestError> {
        let request = pb::UpdateContainerRequest { id: id.to_owned(), cgroup: Some(limits) };
        call_within(ASK_LIMIT, self.rpc().update_container(request)).await.map(drop)
    }

    /// Lists all containers of the guest, within 10 s.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn list_containers(&self) -> Result<Vec<pb::ContainerStatus>, GuestError> {
        let listed = call_within(ASK_LIMIT, self.rpc().list_containers(pb::ListContainersRequest {})).await;
        listed.map(|listed| listed.containers)
    }

    /// Streams output, ends and statistics of containers, from these offsets of their output on. `received` holds, by
    /// container, the offset up to which output is stored; the guest gets each new value, and a container whose output is far
    /// ahead of its offset waits. The guest ends the stream when the sender is dropped.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn session(
        &self,
        from_offsets: BTreeMap<String, u64>,
        received: watch::Receiver<BTreeMap<String, u64>>,
    ) -> Result<Streaming<pb::GuestFrame>, GuestError> {
        let frame = |message| pb::HostFrame { message: Some(message) };
        let resume = pb::Resume { from_offsets, acknowledges: true };
        let first = stream::iter([frame(pb::host_frame::Message::Resume(resume))]);
        let rest = stream::unfold(received, move |mut received| async move {
            received.changed().await.ok()?;
            let offsets = received.borrow_and_update().clone();
            Some((frame(pb::host_frame::Message::Received(pb::Received { offsets })), received))
        });
        Ok(self.rpc().session(first.chain(rest)).await?.into_inner())
    }

    /// Asks the guest to power off after `grace`.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn shutdown(&self, grace: Duration, limit: Duration) -> Result<(), GuestError> {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        call_within(limit, self.rpc().shutdown(pb::ShutdownRequest { grace_ms })).await.map(drop)
    }

    /// Tar stream of `path` in the container's root. The session stays open until the stream is dropped.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn copy_out(&self, path: &str) -> Result<Bytestream, GuestError> {
        let request = pb::CopyOutRequest { path: path.to_owned(), ..Default::default() };
        let chunks = self.rpc().copy_out(request).await?.into_inner();
        let session = self.clone();
        Ok(Box::pin(chunks.map(move |chunk| {
            let _open = &session;
            chunk.map(|chunk| chunk.data.into()).map_err(GuestError::from)
        })))
    }

    /// Tar stream of the changes in the container's root since the image; `None` if the agent cannot determine them.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn changes(&self) -> Result<Option<Bytestream>, GuestError> {
        let chunks = match self.rpc().changes(pb::ChangesRequest {}).await {
            Err(status) if status.code() == Code::Unimplemented => return Ok(None),
            chunks => chunks?.into_inner(),
        };
        let session = self.clone();
        Ok(Some(Box::pin(chunks.map(move |chunk| {
            let _open = &session;
            chunk.map(|chunk| chunk.data.into()).map_err(GuestError::from)
        }))))
    }
}

/// Opens a channel and reads the agent's hello, within `limit`, with as many tries as needed. The first try uses `channel`, if
/// there is one. Cancel-safe.
async fn open_channel(
    driver: &dyn Driver,
    vmm_config: &VmmConfig,
    limit: Duration,
    mut channel: Option<UnixStream>,
) -> io::Result<UnixStream> {
    let deadline = Instant::now() + limit;
    // A guest that boots needs one long wait; a running guest answers at once or after a gap.
    let mut patience = HELLO_LIMIT;
    let mut backoff = Backoff::new();
    loop {
        let patience_left = patience.min(deadline.saturating_duration_since(Instant::now()));
        let attempt = async {
            let mut stream = match channel.take() {
                Some(stream) => stream,
                // Opening blocks while the guest does not listen yet.
                None => match timeout_at(deadline, driver.guest_channel(vmm_config)).await {
                    Ok(opened) => opened.map_err(io::Error::other)?,
                    Err(_) => return Err(io::ErrorKind::TimedOut.into()),
                },
            };
            let hello = timeout(patience_left, read_hello(&mut stream)).await;
            hello.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no hello from the guest agent"))??;
            Ok::<_, io::Error>(stream)
        };
        let why = match attempt.await {
            Ok(stream) => return Ok(stream),
            Err(why) => why,
        };
        // A guest that boots is silent. A guest that floods its port costs the host less with every try.
        let pause = if why.kind() == io::ErrorKind::InvalidData { backoff.pause() } else { GAP };
        if Instant::now() + pause >= deadline {
            return Err(why);
        }
        sleep(pause).await;
        patience = (patience * 2).min(Duration::from_secs(20));
    }
}

/// Runs a call with a deadline.
async fn call_within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, GuestError> {
    match timeout(limit, call).await {
        Ok(reply) => Ok(reply?.into_inner()),
        Err(_) => Err(GuestError::timed_out(limit)),
    }
}

/// Exponential backoff between failed tries, from 50 ms to 10 s.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

impl Backoff {
    /// Makes a backoff whose first pause is [`GAP`].
    #[must_use]
    pub fn new() -> Self {
        Self { next: GAP }
    }

    /// Returns the pause before the next try.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE_MAX);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_the_maximum() {
        let mut backoff = Backoff::new();
        let pauses: Vec<_> = (0..10).map(|_| backoff.pause().as_millis()).collect();
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }
}
