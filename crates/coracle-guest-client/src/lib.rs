//! Sessions with the guest agent, over the one byte stream that a VM has.
//!
//! A session begins with the agent's [hello](read_hello), and the host sends nothing before it has read it. A connection
//! is used for one session; it ends by `shutdown(2)`, which the guest sees at once.

mod budget;
mod connection;
mod error;
mod hello;
mod shared_stream;

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
use self::shared_stream::{Hangup, share};

/// Bytes from a guest, in blocks.
pub type Bytestream = BoxStream<'static, Result<Bytes, GuestError>>;

/// Time in which a running agent sends its hello. After it, a new connection is more likely to succeed.
const HELLO_LIMIT: Duration = Duration::from_millis(300);

/// Pause between two sessions: the guest sees that the host is gone only when it stays away for a moment.
pub const GAP: Duration = Duration::from_millis(50);

/// Longest pause between two tries with a guest that sends data without a hello.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Largest message taken from a guest, bytes.
const MESSAGE_MAX: usize = 1 << 20;

/// Limit of calls that mount.
const CONTAINER_LIMIT: Duration = Duration::from_secs(30);

/// Limit of calls that take the agent no time.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// A session with a guest agent. Clones share it; the session is closed when the last one is dropped.
#[derive(Clone, Debug)]
pub struct GuestClient(Arc<Session>);

#[derive(Debug)]
struct Session {
    client: pb::guest_client::GuestClient<Connection>,
    hangup: Hangup,
}

impl GuestClient {
    /// Opens a session within `limit`, however often it must try: the guest may be
    /// booting, or an earlier session may be dying. The first try is on `channel` when
    /// there is one already. Cancel-safe.
    ///
    /// # Errors
    /// The last reason, when the limit is over.
    pub async fn open(
        driver: &dyn Driver,
        vmm_config: &VmmConfig,
        limit: Duration,
        mut channel: Option<UnixStream>,
    ) -> io::Result<Self> {
        let deadline = Instant::now() + limit;
        // A guest that boots needs one long wait; one that runs answers at once or after a gap.
        let mut patience = HELLO_LIMIT;
        let mut backoff = Backoff::new();
        loop {
            let patience_left = patience.min(deadline.saturating_duration_since(Instant::now()));
            let attempt = async {
                let stream = match channel.take() {
                    Some(stream) => stream,
                    // A guest that does not listen yet may keep it waiting.
                    None => match timeout_at(deadline, driver.guest_channel(vmm_config)).await {
                        Ok(opened) => opened.map_err(io::Error::other)?,
                        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
                    },
                };
                Self::over(stream, patience_left).await
            };
            let why = match attempt.await {
                Ok(client) => return Ok(client),
                Err(why) => why,
            };
            // A guest that boots is silent. One that floods its port costs the host less with every try.
            let pause = if why.kind() == io::ErrorKind::InvalidData { backoff.pause() } else { GAP };
            if Instant::now() + pause >= deadline {
                return Err(why);
            }
            sleep(pause).await;
            patience = (patience * 2).min(Duration::from_secs(20));
        }
    }

    /// A session over an open channel, if the agent says hello within `limit`.
    async fn over(mut stream: UnixStream, limit: Duration) -> io::Result<Self> {
        timeout(limit, read_hello(&mut stream))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no hello from the guest agent"))??;
        let (stream, hangup) = share(stream);
        let connection = Connection::over(stream).await.map_err(io::Error::other)?;
        let origin = Uri::from_static(connection::ORIGIN);
        let client = pb::guest_client::GuestClient::with_origin(connection, origin);
        let client = client.max_decoding_message_size(MESSAGE_MAX);
        Ok(Self(Arc::new(Session { client, hangup })))
    }

    /// Ends the session for all who share it; the guest sees that at once.
    pub fn close(&self) {
        self.0.hangup.hang_up();
    }

    /// Whether both are handles of one session.
    pub fn is_same_session(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The gRPC stub, for callers that pass streams through. Each call needs a deadline of the caller's.
    #[must_use]
    pub fn rpc(&self) -> pb::guest_client::GuestClient<Connection> {
        self.0.client.clone()
    }

    /// State of the agent, within 10 s.
    ///
    /// # Errors
    /// [`GuestError`], as of every call.
    pub async fn status(&self) -> Result<pb::StatusResponse, GuestError> {
        within(ASK_LIMIT, self.rpc().status(pb::StatusRequest {})).await
    }

    /// Gives the guest its identity, clock, network and mounts. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn configure(
        &self,
        request: pb::ConfigureRequest,
        limit: Duration,
    ) -> Result<pb::ConfigureResponse, GuestError> {
        within(limit, self.rpc().configure(request)).await
    }

    /// Has a guest that is not configured mount its fresh disk. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn prepare(&self, request: pb::PrepareRequest, limit: Duration) -> Result<(), GuestError> {
        within(limit, self.rpc().prepare(request)).await.map(drop)
    }

    /// Has a guest in which nothing runs undo what was done since it was prepared. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] while something runs in it.
    pub async fn reset(&self, limit: Duration) -> Result<(), GuestError> {
        within(limit, self.rpc().reset(pb::ResetRequest {})).await.map(drop)
    }

    /// Starts the workload, within 10 s. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn start_workload(&self, process: pb::Process) -> Result<(), GuestError> {
        let request = pb::StartWorkloadRequest { process: Some(process) };
        within(ASK_LIMIT, self.rpc().start_workload(request)).await.map(drop)
    }

    /// Waits without a deadline until the workload ends. `exit` is `None` when the session was closed first. Cancel-safe.
    ///
    /// # Errors
    /// [`GuestError`], when the session ends first.
    pub async fn wait_workload(&self) -> Result<pb::WaitWorkloadResponse, GuestError> {
        Ok(self.rpc().wait_workload(pb::WaitWorkloadRequest {}).await?.into_inner())
    }

    /// Output of the workload from byte `from_offset` on; ends when all of it was read after the workload ended.
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
        within(limit, self.rpc().mount(request)).await.map(drop)
    }

    /// Unmounts the volume called `name`. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] while it is in use.
    pub async fn unmount(&self, name: &str, limit: Duration) -> Result<(), GuestError> {
        within(limit, self.rpc().unmount(pb::UnmountRequest { name: name.to_owned() })).await.map(drop)
    }

    /// Carries FUSE requests and replies of one shared directory.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn serve_folder(
        &self,
        answers: impl Stream<Item = pb::FolderAnswer> + Send + 'static,
    ) -> Result<Streaming<pb::FolderQuestion>, GuestError> {
        Ok(self.rpc().serve_folder(answers).await?.into_inner())
    }

    /// Starts a process without input and streams what it prints, then how it ended. Dropped, the process gets SIGHUP.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn exec(&self, process: pb::Process) -> Result<Streaming<pb::ExecResponse>, GuestError> {
        let start = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(process)) };
        Ok(self.rpc().exec(stream::iter([start])).await?.into_inner())
    }

    /// As [`GuestClient::configure`], for a guest whose containers come later. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn configure_sandbox(
        &self,
        request: pb::ConfigureSandboxRequest,
        limit: Duration,
    ) -> Result<pb::ConfigureResponse, GuestError> {
        within(limit, self.rpc().configure_sandbox(request)).await
    }

    /// Makes a container, within 30 s, and gives who its process runs as, where the guest can tell. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn create_container(
        &self,
        request: pb::CreateContainerRequest,
    ) -> Result<Option<pb::ProcessUser>, GuestError> {
        within(CONTAINER_LIMIT, self.rpc().create_container(request)).await.map(|made| made.user)
    }

    /// Starts a container's process, within 10 s; gives why it could not run. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn start_container(&self, id: &str) -> Result<Option<pb::ExitStatus>, GuestError> {
        let request = pb::StartContainerRequest { id: id.to_owned() };
        within(ASK_LIMIT, self.rpc().start_container(request)).await.map(|started| started.exit)
    }

    /// Streams of a container that runs: its output from now on, then its exit. The first of `requests` starts it.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] when it does not run or has no input.
    pub async fn attach(
        &self,
        requests: impl Stream<Item = pb::AttachRequest> + Send + 'static,
    ) -> Result<Streaming<pb::ExecResponse>, GuestError> {
        Ok(self.rpc().attach(requests).await?.into_inner())
    }

    /// Ends a container's processes, after `grace` at the latest by SIGKILL, and returns when they have ended. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), GuestError> {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        let request = pb::StopContainerRequest { id: id.to_owned(), grace_ms };
        within(grace + ASK_LIMIT, self.rpc().stop_container(request)).await.map(drop)
    }

    /// Sends a signal to a container's first process, within 10 s; SIGKILL goes to all of them.
    ///
    /// # Errors
    /// [`GuestError`], with [`GuestErrorKind::Precondition`] when it does not run.
    pub async fn kill_container(&self, id: &str, signal: i32) -> Result<(), GuestError> {
        let request = pb::KillContainerRequest { id: id.to_owned(), signal };
        within(ASK_LIMIT, self.rpc().kill_container(request)).await.map(drop)
    }

    /// Ends and removes a container, within 30 s. Idempotent.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn remove_container(&self, id: &str) -> Result<(), GuestError> {
        let request = pb::RemoveContainerRequest { id: id.to_owned() };
        within(CONTAINER_LIMIT, self.rpc().remove_container(request)).await.map(drop)
    }

    /// Changes limits of a container, within 10 s.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn update_container(&self, id: &str, limits: pb::CgroupLimits) -> Result<(), GuestError> {
        let request = pb::UpdateContainerRequest { id: id.to_owned(), cgroup: Some(limits) };
        within(ASK_LIMIT, self.rpc().update_container(request)).await.map(drop)
    }

    /// All containers of the guest, within 10 s.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn list_containers(&self) -> Result<Vec<pb::ContainerStatus>, GuestError> {
        let listed = within(ASK_LIMIT, self.rpc().list_containers(pb::ListContainersRequest {})).await;
        listed.map(|listed| listed.containers)
    }

    /// Output, ends and statistics of containers, from these offsets of their output on. The guest gets each new value of
    /// `received`, the offsets before which output is kept, by container: one that is far ahead of its own waits. The guest
    /// ends the stream when the sender is dropped.
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
        within(limit, self.rpc().shutdown(pb::ShutdownRequest { grace_ms })).await.map(drop)
    }

    /// Tar stream of `path` in the container's root. The session stays open while the stream lives.
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

    /// Tar stream of what was changed in the container's root since the image; `None` when the agent cannot tell.
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

/// Runs a call with a deadline.
async fn within<T>(
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
    /// The first pause is [`GAP`].
    #[must_use]
    pub fn new() -> Self {
        Self { next: GAP }
    }

    /// The pause before the next try.
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
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new();
        let pauses: Vec<_> = (0..10).map(|_| backoff.pause().as_millis()).collect();
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }
}
