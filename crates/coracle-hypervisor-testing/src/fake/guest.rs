//! Guest that never boots: the real guest protocol with fake answers.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_proto::guest as pb;
use coracle_proto::guest::early_report::Report;
use coracle_proto::guest::guest_server::{Guest, GuestServer};
use coracle_proto::guest::start_response::Result as StepResult;
use futures_util::FutureExt as _;
use futures_util::stream::BoxStream;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::containers::Containers;
use super::hostile::AttackTraffic;

/// Handle of a fake guest.
#[derive(Debug)]
pub struct Handle {
    sessions: mpsc::Sender<UnixStream>,
    state: watch::Sender<GuestState>,
    paused: watch::Sender<bool>,
    reboots: watch::Sender<u64>,
    containers: Containers,
    /// Guest's end of the console, for the single client that a VMM serves.
    console: Mutex<Option<UnixStream>>,
}

/// Progress of a guest, which is all of its memory.
#[derive(Clone, Debug, Default)]
pub struct GuestState {
    configured: Option<String>,
    started: bool,
    exit: Option<i32>,
    printed: String,
    mounted: BTreeSet<String>,
}

impl GuestState {
    /// Returns the progress as a line of text, which is the saved memory of the guest.
    #[must_use]
    pub fn save(&self) -> String {
        let exit = self.exit.map(|code| code.to_string()).unwrap_or_default();
        format!("{}|{}|{exit}", self.configured.as_deref().unwrap_or("-"), self.started)
    }

    /// Parses the text of [`GuestState::save`]; `None`: invalid.
    #[must_use]
    pub fn load(line: &str) -> Option<Self> {
        let [configured, started, exit] = line.split('|').collect::<Vec<_>>().try_into().ok()?;
        let configured = Some(configured).filter(|c| *c != "-").map(str::to_owned);
        Some(Self { configured, started: started.parse().ok()?, exit: exit.parse().ok(), ..Self::default() })
    }
}

fn exit_status(code: i32) -> pb::ExitStatus {
    pb::ExitStatus { code, signal: (code - 128).max(0), ..Default::default() }
}

impl Handle {
    /// Opens a session with the agent, which says hello when the guest runs.
    ///
    /// # Errors
    /// When too many callers wait for a session.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let (host, guest) = UnixStream::pair()?;
        self.accept(guest)?;
        Ok(host)
    }

    /// Like [`Handle::connect`], with the guest's end of a stream.
    pub(super) fn accept(&self, guest: UnixStream) -> io::Result<()> {
        self.sessions.try_send(guest).map_err(|_| io::ErrorKind::ResourceBusy.into())
    }

    /// Returns what a hostile container has done to the host.
    pub(super) fn attack_traffic(&self) -> &AttackTraffic {
        self.containers.attack_traffic()
    }

    /// Opens a console on which only [`Handle::print`] writes. It is open until the VMM ends, or the next client connects.
    pub(super) fn console(&self) -> io::Result<UnixStream> {
        let (host, guest) = UnixStream::pair()?;
        self.open_console(guest);
        Ok(host)
    }

    /// Like [`Handle::console`], with the guest's end of a stream.
    pub(super) fn open_console(&self, guest: UnixStream) {
        *self.console.lock().unwrap_or_else(PoisonError::into_inner) = Some(guest);
    }

    /// Prints on the console; returns false when no client has it open.
    pub(super) fn print(&self, text: &str) -> bool {
        let console = self.console.lock().unwrap_or_else(PoisonError::into_inner);
        console.as_ref().is_some_and(|console| console.try_write(text.as_bytes()).is_ok())
    }

    pub(super) fn exit_workload(&self, code: i32) {
        self.state.send_modify(|s| s.exit = Some(code));
    }

    /// Reboots the guest: its agent loses its state.
    pub(super) fn reboot(&self) {
        self.reboots.send_modify(|n| *n += 1);
    }

    /// Pauses or resumes the vCPUs; a paused guest answers no calls.
    pub fn hold(&self, held: bool) {
        self.paused.send_replace(held);
    }

    pub(super) fn is_held(&self) -> bool {
        *self.paused.borrow()
    }

    /// Resolves when the vCPUs run.
    pub async fn running(&self) {
        let mut held = self.paused.subscribe();
        let _runs_or_gone = held.wait_for(|held| !held).await;
    }

    /// Returns the progress of the guest.
    #[must_use]
    pub fn progress(&self) -> GuestState {
        self.state.borrow().clone()
    }
}

/// Starts the guest's task, which ends with `stop`. `power_off` powers the VM off. A saved guest continues from `saved`, paused
/// at first.
#[must_use]
pub fn start(
    boot_time: Duration,
    saved: Option<GuestState>,
    stop: CancellationToken,
    power_off: impl Fn() + Send + Sync + 'static,
) -> Handle {
    let (sessions, mut incoming) = mpsc::channel::<UnixStream>(4);
    let paused = watch::Sender::new(saved.is_some());
    let state = watch::Sender::new(saved.unwrap_or_default());
    let (reboots, memory) = (watch::Sender::new(0), state.clone());
    let mut rebooted = reboots.subscribe();
    let containers = Containers::default();
    let guest =
        FakeGuest { state: state.clone(), containers: containers.clone(), power_off: Arc::new(power_off) };
    let held = paused.subscribe();
    let serve = async move {
        tokio::time::sleep(boot_time).await;
        let mut tasks = JoinSet::new();
        let mut session = 0_u64;
        loop {
            let stream = tokio::select! {
                stream = incoming.recv() => stream,
                Ok(()) = rebooted.changed() => {
                    tasks.shutdown().await;
                    memory.send_replace(GuestState::default());
                    continue;
                }
            };
            let Some(stream) = stream else { return };
            session += 1;
            tasks.spawn(while_running(held.clone(), serve_session(stream, session, guest.clone())));
            while tasks.try_join_next().is_some() {}
        }
    };
    #[expect(
        clippy::disallowed_methods,
        reason = "owned by the machine's stop token, as a guest by its VMM"
    )]
    tokio::spawn(async move { stop.run_until_cancelled(serve).await });
    Handle { sessions, state, paused, reboots, containers, console: Mutex::default() }
}

/// Runs `work` only while the vCPUs run.
async fn while_running(mut held: watch::Receiver<bool>, work: impl Future<Output = ()>) {
    let mut work = std::pin::pin!(work);
    loop {
        // The sender lives as long as the VM.
        if held.wait_for(|held| !held).await.is_err() {
            return;
        }
        tokio::select! {
            biased;
            _ = held.wait_for(|held| *held) => {}
            () = &mut work => return,
        }
    }
}

async fn serve_session(mut stream: UnixStream, session: u64, guest: FakeGuest) {
    let mut hello = b"CORACLE1".to_vec();
    hello.extend_from_slice(&session.to_be_bytes());
    if stream.write_all(&hello).await.is_err() {
        return;
    }
    if let Ok(first) = serve_start(&mut stream, &guest).await {
        let (read, write) = stream.into_split();
        let stream = tokio::io::join(io::Cursor::new(first).chain(read), write);
        let service = TowerToHyperService::new(GuestServer::new(guest));
        let _ended = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }
}

/// Serves the start requests that the session begins with; returns the first bytes of HTTP/2.
async fn serve_start(stream: &mut UnixStream, guest: &FakeGuest) -> io::Result<[u8; 8]> {
    let mut first = [0; 8];
    loop {
        stream.read_exact(&mut first).await?;
        if first != pb::START_MAGIC {
            return Ok(first);
        }
        let length = stream.read_u32().await?;
        let mut request = vec![0; length as usize];
        stream.read_exact(&mut request).await?;
        let request: pb::StartRequest = pb::unframe(&request).map_err(io::Error::other)?;
        let mut has_started = false;
        for result in configure_and_start(guest, request).await {
            has_started = matches!(result, StepResult::Started(_));
            stream.write_all(&pb::frame(&pb::StartResponse { result: Some(result) })).await?;
        }
        if has_started {
            report(stream, guest).await?;
        }
    }
}

/// Sends the reports before HTTP/2, until the host asks for it or has the guest reset.
async fn report(stream: &mut UnixStream, guest: &FakeGuest) -> io::Result<()> {
    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    let printed = guest.state.borrow().printed.clone();
    let output =
        pb::LogChunk { stream: pb::Stream::Stdout.into(), data: printed.into(), ..Default::default() };
    let mut report = Report::Output(output);
    let (mut state, mut has_exited) = (guest.state.subscribe(), false);
    let is_reset = loop {
        stream.write_all(&pb::frame(&pb::EarlyReport { report: Some(report) })).await?;
        let mut request = [0; 8];
        report = tokio::select! {
            // The requests of a host arrive as a whole.
            read = stream.read_exact(&mut request) => match (read?, request) {
                (_, pb::ALIVE_MAGIC) => Report::Alive(pb::Alive {}),
                (_, pb::UPGRADE_MAGIC) => break false,
                (_, pb::RESET_MAGIC) => break true,
                _ => return Err(io::ErrorKind::InvalidData.into()),
            },
            state = state.wait_for(|s| s.exit.is_some()), if !has_exited => {
                has_exited = true;
                let exit = state.map_err(gone)?.exit.map(exit_status);
                Report::Exited(pb::WaitWorkloadResponse { exit, oom_killed: false })
            }
        };
    };
    let last = if is_reset {
        let _ended = guest.wait_workload(Request::new(pb::WaitWorkloadRequest {})).await;
        let reset = guest.reset(Request::new(pb::ResetRequest {})).await;
        Report::Reset(reset.map_err(io::Error::other)?.into_inner())
    } else {
        Report::Upgraded(pb::Upgraded {})
    };
    stream.write_all(&pb::frame(&pb::EarlyReport { report: Some(last) })).await
}

/// Configures the guest and starts its workload; returns the result of each step.
async fn configure_and_start(guest: &FakeGuest, request: pb::StartRequest) -> Vec<StepResult> {
    let pb::StartRequest { configure, process } = request;
    let mut results = Vec::new();
    let steps = async {
        let configured = guest.configure(Request::new(configure.unwrap_or_default())).await?;
        results.push(StepResult::Configured(configured.into_inner()));
        let started = guest.start_workload(Request::new(pb::StartWorkloadRequest { process })).await?;
        results.push(StepResult::Started(started.into_inner()));
        Ok::<(), Status>(())
    };
    if let Err(status) = steps.await {
        let (code, message) = (status.code().into(), status.message().to_owned());
        results.push(StepResult::Error(pb::StepError { code, message }));
    }
    results
}

#[derive(Clone)]
struct FakeGuest {
    state: watch::Sender<GuestState>,
    containers: Containers,
    power_off: Arc<dyn Fn() + Send + Sync>,
}

type Reply<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Guest for FakeGuest {
    async fn status(&self, _: Request<pb::StatusRequest>) -> Reply<pb::StatusResponse> {
        self.containers.wait_thawed().await;
        let state = self.state.borrow().clone();
        let workload = match (&state.exit, state.started) {
            (Some(_), _) => pb::WorkloadState::Exited,
            (None, true) => pb::WorkloadState::Running,
            (None, false) => pb::WorkloadState::NotStarted,
        };
        Ok(Response::new(pb::StatusResponse {
            agent_version: "fake".to_owned(),
            features: ["containers", "session"].map(str::to_owned).to_vec(),
            configured: state.configured.is_some(),
            workload: workload.into(),
            exit: state.exit.map(exit_status),
            ..Default::default()
        }))
    }

    async fn prepare(&self, _: Request<pb::PrepareRequest>) -> Reply<pb::PrepareResponse> {
        match &self.state.borrow().configured {
            None => Ok(Response::new(pb::PrepareResponse {})),
            Some(_) => Err(Status::failed_precondition("it is configured")),
        }
    }

    async fn reset(&self, _: Request<pb::ResetRequest>) -> Reply<pb::ResetResponse> {
        let state = self.state.borrow().clone();
        if (state.started && state.exit.is_none()) || !state.mounted.is_empty() || !self.containers.is_empty()
        {
            return Err(Status::failed_precondition("it is in use"));
        }
        self.state.send_replace(GuestState::default());
        Ok(Response::new(pb::ResetResponse {}))
    }

    async fn configure(&self, request: Request<pb::ConfigureRequest>) -> Reply<pb::ConfigureResponse> {
        let request = request.into_inner();
        let address = request.network.unwrap_or_default().address;
        self.state.send_modify(|s| {
            s.configured = Some(address.clone());
            s.mounted.extend(request.mounts.into_iter().map(|mount| mount.name));
        });
        let addresses = if address.is_empty() { vec![] } else { vec![address] };
        Ok(Response::new(pb::ConfigureResponse { addresses }))
    }

    async fn start_workload(
        &self,
        request: Request<pb::StartWorkloadRequest>,
    ) -> Reply<pb::StartWorkloadResponse> {
        let process = request.into_inner().process.filter(|p| !p.argv.is_empty());
        let process = process.ok_or_else(|| Status::invalid_argument("a process needs an argv"))?;
        self.state.send_modify(|s| {
            // Prints like `echo`; a second request starts no process.
            if !std::mem::replace(&mut s.started, true) {
                s.printed = format!("{}\n", process.argv.join(" "));
                s.exit = process.argv.last().filter(|argument| *argument == pb::WARM_UP).map(|_| 0);
            }
        });
        Ok(Response::new(pb::StartWorkloadResponse { pid: 2 }))
    }

    async fn signal_workload(
        &self,
        request: Request<pb::SignalWorkloadRequest>,
    ) -> Reply<pb::SignalWorkloadResponse> {
        let signal = request.into_inner().signal;
        self.state.send_modify(|s| s.exit = Some(128_i32.saturating_add(signal)));
        Ok(Response::new(pb::SignalWorkloadResponse {}))
    }

    async fn wait_workload(&self, _: Request<pb::WaitWorkloadRequest>) -> Reply<pb::WaitWorkloadResponse> {
        let mut state = self.state.subscribe();
        let state =
            state.wait_for(|s| s.exit.is_some()).await.map_err(|_| Status::unavailable("powered off"))?;
        Ok(Response::new(pb::WaitWorkloadResponse { exit: state.exit.map(exit_status), oom_killed: false }))
    }

    type LogsStream = BoxStream<'static, Result<pb::LogChunk, Status>>;

    /// Streams the output of the workload; ends with the workload.
    async fn logs(&self, request: Request<pb::LogsRequest>) -> Reply<Self::LogsStream> {
        let from = usize::try_from(request.into_inner().from_offset).unwrap_or(usize::MAX);
        let mut state = self.state.subscribe();
        if from > 0 && !state.borrow().started {
            return Err(Status::out_of_range("nothing was printed yet"));
        }
        let mut printing = self.state.subscribe();
        let output = async move {
            let printed = printing.wait_for(|s| s.started || s.exit.is_some()).await.ok()?.printed.clone();
            let data = printed.as_bytes().get(from..).unwrap_or_default().to_vec();
            let stream = pb::Stream::Stdout.into();
            let chunk = pb::LogChunk { offset: from as u64, stream, data, time_unix_ns: 0 };
            (!chunk.data.is_empty()).then_some(Ok(chunk))
        };
        let end = async move {
            let _end = state.wait_for(|s| s.exit.is_some()).await;
            None
        };
        let once = |part| futures_util::stream::once(part).filter_map(|chunk| chunk);
        Ok(Response::new(Box::pin(once(output.boxed()).chain(once(end.boxed())))))
    }

    type ExecStream = BoxStream<'static, Result<pb::ExecResponse, Status>>;

    /// Prints its arguments like `echo`, and exits with 0.
    async fn exec(&self, request: Request<Streaming<pb::ExecRequest>>) -> Reply<Self::ExecStream> {
        let first = request.into_inner().message().await?.and_then(|m| m.message);
        let Some(pb::exec_request::Message::Start(process)) = first else {
            return Err(Status::invalid_argument("the first message starts a process"));
        };
        if !process.container.is_empty() && !self.containers.is_running(&process.container) {
            return Err(Status::failed_precondition("the container is not running"));
        }
        use pb::exec_response::Message;
        let line = format!("{}\n", process.argv.join(" "));
        let replies = [
            Message::Started(pb::Started { pid: 3 }),
            Message::Stdout(line.into_bytes()),
            Message::Exit(pb::ExitStatus::default()),
        ];
        let replies = replies.map(|message| Ok(pb::ExecResponse { message: Some(message) }));
        Ok(Response::new(Box::pin(futures_util::stream::iter(replies))))
    }

    async fn copy_in(&self, request: Request<Streaming<pb::CopyInRequest>>) -> Reply<pb::CopyInResponse> {
        let mut request = request.into_inner();
        let mut bytes = 0;
        while let Some(message) = request.message().await? {
            if let Some(pb::copy_in_request::Message::Data(data)) = message.message {
                bytes += data.len() as u64;
            }
        }
        Ok(Response::new(pb::CopyInResponse { entries: 0, bytes }))
    }

    type CopyOutStream = BoxStream<'static, Result<pb::CopyOutChunk, Status>>;

    async fn copy_out(&self, request: Request<pb::CopyOutRequest>) -> Reply<Self::CopyOutStream> {
        Err(Status::not_found(format!("{}: no such file", request.into_inner().path)))
    }

    type ChangesStream = BoxStream<'static, Result<pb::CopyOutChunk, Status>>;

    async fn changes(&self, _: Request<pb::ChangesRequest>) -> Reply<Self::ChangesStream> {
        Err(Status::unimplemented("this guest has no overlay"))
    }

    type PortForwardStream = BoxStream<'static, Result<pb::PortForwardChunk, Status>>;

    /// Echoes its input.
    async fn port_forward(
        &self,
        request: Request<Streaming<pb::PortForwardRequest>>,
    ) -> Reply<Self::PortForwardStream> {
        let (replies, stream) = mpsc::channel(8);
        let mut request = request.into_inner();
        let echo = async move {
            while let Ok(Some(message)) = request.message().await {
                let Some(pb::port_forward_request::Message::Data(data)) = message.message else { continue };
                if replies.send(Ok(pb::PortForwardChunk { data })).await.is_err() {
                    break;
                }
            }
        };
        #[expect(clippy::disallowed_methods, reason = "ends with the stream that it serves")]
        tokio::spawn(echo);
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn mount(&self, request: Request<pb::MountRequest>) -> Reply<pb::MountResponse> {
        let name = request.into_inner().name;
        self.state.send_modify(|s| {
            s.mounted.insert(name);
        });
        Ok(Response::new(pb::MountResponse {}))
    }

    async fn unmount(&self, request: Request<pb::UnmountRequest>) -> Reply<pb::UnmountResponse> {
        let name = request.into_inner().name;
        self.state.send_modify(|s| {
            s.mounted.remove(&name);
        });
        Ok(Response::new(pb::UnmountResponse {}))
    }

    type ServeFolderStream = BoxStream<'static, Result<pb::FuseRequest, Status>>;

    /// Sends no requests; ends with the VM.
    async fn serve_folder(&self, _: Request<Streaming<pb::FuseReply>>) -> Reply<Self::ServeFolderStream> {
        Ok(Response::new(Box::pin(futures_util::stream::pending())))
    }

    async fn configure_sandbox(
        &self,
        request: Request<pb::ConfigureSandboxRequest>,
    ) -> Reply<pb::ConfigureResponse> {
        let pb::ConfigureSandboxRequest { network, mounts, .. } = request.into_inner();
        let request = pb::ConfigureRequest { network, mounts, ..Default::default() };
        self.configure(Request::new(request)).await
    }

    async fn create_container(
        &self,
        request: Request<pb::CreateContainerRequest>,
    ) -> Reply<pb::CreateContainerResponse> {
        self.containers.create(request.into_inner())?;
        let user = Some(pb::ProcessUser { uid: 0, gid: 0, groups: vec![0] });
        Ok(Response::new(pb::CreateContainerResponse { user }))
    }

    async fn start_container(
        &self,
        request: Request<pb::StartContainerRequest>,
    ) -> Reply<pb::StartContainerResponse> {
        Ok(Response::new(self.containers.start(&request.into_inner().id)?))
    }

    async fn stop_container(
        &self,
        request: Request<pb::StopContainerRequest>,
    ) -> Reply<pb::StopContainerResponse> {
        self.containers.wait_thawed().await;
        let exit = self.containers.stop(&request.into_inner().id)?;
        Ok(Response::new(pb::StopContainerResponse { exit: Some(exit) }))
    }

    async fn kill_container(
        &self,
        request: Request<pb::KillContainerRequest>,
    ) -> Reply<pb::KillContainerResponse> {
        let request = request.into_inner();
        self.containers.kill(&request.id, request.signal)?;
        Ok(Response::new(pb::KillContainerResponse {}))
    }

    async fn remove_container(
        &self,
        request: Request<pb::RemoveContainerRequest>,
    ) -> Reply<pb::RemoveContainerResponse> {
        self.containers.remove(&request.into_inner().id);
        Ok(Response::new(pb::RemoveContainerResponse {}))
    }

    async fn update_container(
        &self,
        request: Request<pb::UpdateContainerRequest>,
    ) -> Reply<pb::UpdateContainerResponse> {
        self.containers.update(&request.into_inner().id)?;
        Ok(Response::new(pb::UpdateContainerResponse {}))
    }

    async fn list_containers(
        &self,
        _: Request<pb::ListContainersRequest>,
    ) -> Reply<pb::ListContainersResponse> {
        Ok(Response::new(pb::ListContainersResponse { containers: self.containers.list() }))
    }

    type AttachStream = BoxStream<'static, Result<pb::ExecResponse, Status>>;

    /// Echoes its input until the client closes it.
    async fn attach(&self, request: Request<Streaming<pb::AttachRequest>>) -> Reply<Self::AttachStream> {
        use pb::attach_request::Message as In;
        let mut request = request.into_inner();
        let Some(In::Start(start)) = request.message().await?.and_then(|m| m.message) else {
            return Err(Status::invalid_argument("the first message starts an attachment"));
        };
        if !self.containers.is_running(&start.container) {
            return Err(Status::failed_precondition("the container is not running"));
        }
        let (replies, stream) = mpsc::channel(8);
        let echo = async move {
            use pb::exec_response::Message as Out;
            while let Ok(Some(message)) = request.message().await {
                let reply = match message.message {
                    Some(In::Stdin(data)) => Out::Stdout(data),
                    Some(In::CloseStdin(true)) => break,
                    _ => continue,
                };
                if replies.send(Ok(pb::ExecResponse { message: Some(reply) })).await.is_err() {
                    return;
                }
            }
            let exit = Out::Exit(pb::ExitStatus::default());
            let _client_gone = replies.send(Ok(pb::ExecResponse { message: Some(exit) })).await;
        };
        #[expect(clippy::disallowed_methods, reason = "ends with the stream that it serves")]
        tokio::spawn(echo);
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    type SessionStream = BoxStream<'static, Result<pb::GuestFrame, Status>>;

    async fn session(&self, request: Request<Streaming<pb::HostFrame>>) -> Reply<Self::SessionStream> {
        Ok(Response::new(self.containers.session(request.into_inner()).await?))
    }

    async fn metrics(&self, _: Request<pb::MetricsRequest>) -> Reply<pb::MetricsResponse> {
        Ok(Response::new(pb::MetricsResponse::default()))
    }

    async fn shutdown(&self, _: Request<pb::ShutdownRequest>) -> Reply<pb::ShutdownResponse> {
        self.containers.wait_thawed().await;
        let power_off = self.power_off.clone();
        #[expect(
            clippy::disallowed_methods,
            reason = "one timer, so that the answer leaves before the power"
        )]
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(10)).await;
            power_off();
        });
        Ok(Response::new(pb::ShutdownResponse {}))
    }
}
