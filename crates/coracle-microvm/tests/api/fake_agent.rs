//! An agent service that keeps its VMs in memory, records its calls, and fails on request.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    future, io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use coracle_microvm::{Connect, agent::ByteStream};
use coracle_proto::firecracker::{
    firecracker_agent_server::{FirecrackerAgent, FirecrackerAgentServer},
    *,
};
use coracle_testkit::sim::Sim;
use futures_util::{Stream, StreamExt as _, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpListener,
    sync::broadcast,
    task::JoinSet,
};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{
    Code, Request, Response, Status,
    transport::{Server, ServerTlsConfig, server::Connected},
};

use crate::fake_host::HostRoutes;

/// Failure of one call.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    Status(Code, &'static str),
    /// OK as gRPC status with an error in the message, as first-generation agents answer.
    InBand(&'static str),
    /// The call is executed, and answered after this is notified.
    Hold(Arc<tokio::sync::Notify>),
    /// The call is executed, but not answered.
    HangAfter,
    /// The call is neither executed nor answered.
    HangBefore,
}

/// Network where agents listen.
#[derive(Clone, Debug)]
pub(crate) enum Net {
    /// On loopback, in real time.
    Tcp,
    /// In memory, in a simulation, which counts the calls.
    Memory(Sim),
}

/// Connects to agents that listen in memory.
#[derive(Debug)]
pub(crate) struct MemoryConnect(pub(crate) Sim);

impl Connect for MemoryConnect {
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn ByteStream>>> {
        let stream = self.0.network().connect(address);
        Box::pin(async move { Ok(Box::new(stream?) as Box<dyn ByteStream>) })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Vm {
    pub(crate) state: VmState,
    pub(crate) request: CreateVmRequest,
    started: bool,
}

#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) vms: Mutex<BTreeMap<String, Vec<Vm>>>,
    pub(crate) calls: Mutex<Vec<String>>,
    /// `coracle-uid` and `coracle-generation` of mutating calls.
    pub(crate) fences: Mutex<Vec<(String, String)>>,
    faults: Mutex<HashMap<&'static str, VecDeque<Fault>>>,
    always: Mutex<HashMap<&'static str, Fault>>,
    /// Connections that are open.
    pub(crate) open: Arc<AtomicUsize>,
    /// Connections so far.
    pub(crate) accepted: Arc<AtomicUsize>,
    events: Mutex<Option<broadcast::Sender<VmEvent>>>,
    /// The agent hides a VM from GetVM and CreateVM until the VM was started: a deliberate violation of the contract.
    pub(crate) hides_new_vms: AtomicBool,
    /// Calls of CreateVM that created a VM.
    pub(crate) created: AtomicUsize,
    /// StartVM of a stopped VM is refused, as by the first generation.
    pub(crate) cannot_restart: AtomicBool,
    /// No events are sent, as when the first generation's VM crashes.
    pub(crate) mute: AtomicBool,
}

/// Service of a fake node.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Agent,
    Host,
}

/// Fake agent. It stops when it is dropped.
pub(crate) struct FakeAgent {
    pub(crate) shared: Arc<Shared>,
    pub(crate) address: String,
    tasks: JoinSet<()>,
    dead: CancellationToken,
}

impl FakeAgent {
    pub(crate) async fn start(net: &Net) -> Self {
        Self::start_with(net, Arc::default(), None).await
    }

    /// Starts an agent with the VMs of an agent that was killed, at its address or a new one.
    pub(crate) async fn start_with(net: &Net, shared: Arc<Shared>, address: Option<&str>) -> Self {
        Self::listen(net, shared, address, (Kind::Agent, Server::builder())).await
    }

    /// Starts an agent with the host service instead, and mutual TLS, without which no node serves it.
    pub(crate) async fn start_host(net: &Net, tls: ServerTlsConfig) -> Self {
        let server = Server::builder().tls_config(tls).unwrap();
        Self::listen(net, Arc::default(), None, (Kind::Host, server)).await
    }

    /// Starts an agent with mutual TLS.
    pub(crate) async fn start_tls(
        net: &Net,
        shared: Arc<Shared>,
        address: Option<&str>,
        tls: ServerTlsConfig,
    ) -> Self {
        let server = Server::builder().tls_config(tls).unwrap();
        Self::listen(net, shared, address, (Kind::Agent, server)).await
    }

    async fn listen(net: &Net, shared: Arc<Shared>, address: Option<&str>, server: (Kind, Server)) -> Self {
        match net {
            Net::Tcp => {
                let listener = TcpListener::bind(address.unwrap_or("127.0.0.1:0")).await.unwrap();
                let address = listener.local_addr().unwrap().to_string();
                Self::serve(net, shared, address, TcpListenerStream::new(listener), server)
            }
            Net::Memory(sim) => {
                let listener = match address {
                    Some(address) => sim.network().listen_at(address),
                    None => sim.network().listen(),
                };
                let address = listener.address().to_owned();
                Self::serve(net, shared, address, listener, server)
            }
        }
    }

    fn serve<S>(
        net: &Net,
        shared: Arc<Shared>,
        address: String,
        incoming: impl Stream<Item = std::io::Result<S>> + Send + 'static,
        (kind, mut server): (Kind, Server),
    ) -> Self
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        shared.events.lock().unwrap().get_or_insert_with(|| broadcast::channel(100).0);
        let (open, dead) = (shared.open.clone(), CancellationToken::new());
        let broken = dead.clone();
        let accepted = shared.accepted.clone();
        let incoming = incoming.map(move |stream| {
            accepted.fetch_add(1, Ordering::SeqCst);
            stream.map(|stream| Counted::new(stream, open.clone(), &broken))
        });
        let service = Service(shared.clone(), net.clone());
        let routes = match kind {
            Kind::Agent => server.add_service(FirecrackerAgentServer::new(service)),
            Kind::Host => server.add_service(HostRoutes(service)),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { routes.serve_with_incoming(incoming).await.unwrap() });
        Self { shared, address, tasks, dead }
    }

    /// Ends the agent with its connections. The returned state contains its VMs.
    pub(crate) async fn kill(mut self) -> (Arc<Shared>, String) {
        self.tasks.shutdown().await;
        self.dead.cancel();
        (self.shared, self.address)
    }

    pub(crate) fn fail(&self, rpc: &'static str, fault: Fault) {
        self.shared.faults.lock().unwrap().entry(rpc).or_default().push_back(fault);
    }

    pub(crate) fn fail_always(&self, rpc: &'static str, fault: Option<Fault>) {
        let mut always = self.shared.always.lock().unwrap();
        match fault {
            Some(fault) => always.insert(rpc, fault),
            None => always.remove(rpc),
        };
    }

    /// Returns the mutating calls so far, in order, as `Rpc vm-id`.
    pub(crate) fn mutations(&self) -> Vec<String> {
        let calls = self.shared.calls.lock().unwrap();
        calls
            .iter()
            .filter(|c| !c.starts_with("Get") && !c.starts_with("List") && !c.starts_with("Watch"))
            .cloned()
            .collect()
    }

    pub(crate) fn count(&self, rpc: &str) -> usize {
        self.shared.calls.lock().unwrap().iter().filter(|c| c.split(' ').next() == Some(rpc)).count()
    }

    /// Returns the id and state of every VM. Two VMs with one id are the defect that tests look for.
    pub(crate) fn machines(&self) -> Vec<String> {
        let vms = self.shared.vms.lock().unwrap();
        vms.iter()
            .flat_map(|(id, all)| all.iter().map(move |vm| format!("{id} {}", vm.state.as_str_name())))
            .collect()
    }

    pub(crate) fn request(&self, id: &str) -> CreateVmRequest {
        self.shared.vms.lock().unwrap()[id][0].request.clone()
    }

    /// Marks a VM as adoptable by `object`.
    pub(crate) fn mark(&self, id: &str, object: &str) {
        let mut vms = self.shared.vms.lock().unwrap();
        for vm in vms.get_mut(id).unwrap() {
            vm.request.metadata.insert("coracle.dev/adopt".into(), object.into());
        }
    }

    /// Changes the state of a VM, as a crash does.
    pub(crate) fn set_state(&self, id: &str, state: VmState) {
        self.shared.vms.lock().unwrap().get_mut(id).unwrap().iter_mut().for_each(|vm| vm.state = state);
        self.shared.emit(id, state);
    }

    /// Removes a VM without a call.
    pub(crate) fn remove_vm(&self, id: &str) {
        self.shared.vms.lock().unwrap().remove(id);
        self.shared.emit(id, VmState::Unspecified);
    }

    /// Adds a VM that another client created.
    pub(crate) fn add_vm(&self, id: &str, uid: Option<&str>, state: VmState) {
        let metadata = uid.map(|uid| ("coracle.dev/uid".to_owned(), uid.to_owned())).into_iter().collect();
        let request = CreateVmRequest { vm_id: id.into(), metadata, ..Default::default() };
        self.shared.vms.lock().unwrap().insert(id.into(), vec![Vm { state, request, started: true }]);
    }
}

impl Shared {
    fn emit(&self, id: &str, state: VmState) {
        if self.mute.load(Ordering::SeqCst) {
            return;
        }
        if let Some(events) = self.events.lock().unwrap().as_ref() {
            let _ = events.send(VmEvent { vm_id: id.into(), state: state.into(), ..Default::default() });
        }
    }

    fn record(&self, rpc: &'static str, id: &str) -> Option<Fault> {
        self.calls.lock().unwrap().push(format!("{rpc} {id}").trim().to_owned());
        let queued = self.faults.lock().unwrap().get_mut(rpc).and_then(VecDeque::pop_front);
        queued.or_else(|| self.always.lock().unwrap().get(rpc).cloned())
    }

    /// Records the call, fails it as requested, executes `work`, and counts the call in a simulation.
    async fn answer<T: Default>(
        &self,
        net: &Net,
        rpc: &'static str,
        id: &str,
        in_band: impl FnOnce(String) -> T,
        work: impl FnOnce() -> Result<T, Status>,
    ) -> Result<Response<T>, Status> {
        let fault = self.record(rpc, id);
        let result = match fault {
            Some(Fault::Status(code, message)) => Err(Status::new(code, message)),
            Some(Fault::InBand(message)) => Ok(in_band(message.to_owned())),
            Some(Fault::HangBefore) => future::pending().await,
            Some(Fault::HangAfter) => {
                let _ = work();
                future::pending().await
            }
            Some(Fault::Hold(until)) => {
                until.notified().await;
                work()
            }
            None => work(),
        };
        if let Net::Memory(sim) = net {
            sim.after_call(&format!("{rpc} {id}")).await;
        }
        result.map(Response::new)
    }

    fn fence<T>(&self, request: &Request<T>) {
        let text =
            |key| request.metadata().get(key).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        self.fences.lock().unwrap().push((text("coracle-uid"), text("coracle-generation")));
    }

    fn missing(id: &str) -> Status {
        Status::not_found(format!("VM {id} not found"))
    }
}

#[derive(Clone)]
pub(crate) struct Service(Arc<Shared>, Net);

#[tonic::async_trait]
impl FirecrackerAgent for Service {
    async fn create_vm(
        &self,
        request: Request<CreateVmRequest>,
    ) -> Result<Response<CreateVmResponse>, Status> {
        self.0.fence(&request);
        let request = request.into_inner();
        let id = request.vm_id.clone();
        let in_band =
            |m| CreateVmResponse { state: VmState::Error.into(), error_message: m, ..Default::default() };
        let work = || {
            let mut vms = self.0.vms.lock().unwrap();
            let all = vms.entry(id.clone()).or_default();
            let hides = self.0.hides_new_vms.load(Ordering::SeqCst);
            if all.iter().any(|vm| vm.started || !hides) {
                return Err(Status::already_exists(format!("VM {id} already exists")));
            }
            all.push(Vm { state: VmState::Running, request: request.clone(), started: false });
            self.0.created.fetch_add(1, Ordering::SeqCst);
            Ok(CreateVmResponse { vm_id: id.clone(), state: VmState::Running.into(), ..Default::default() })
        };
        self.0.answer(&self.1, "CreateVM", &id, in_band, work).await
    }

    async fn start_vm(&self, request: Request<StartVmRequest>) -> Result<Response<StartVmResponse>, Status> {
        self.0.fence(&request);
        let id = request.into_inner().vm_id;
        let in_band =
            |m| StartVmResponse { state: VmState::Error.into(), error_message: m, ..Default::default() };
        let work = || {
            let mut vms = self.0.vms.lock().unwrap();
            let vm = vms.get_mut(&id).and_then(|all| all.last_mut()).ok_or_else(|| Shared::missing(&id))?;
            if vm.state != VmState::Running && self.0.cannot_restart.load(Ordering::SeqCst) {
                return Ok(in_band_start(&id));
            }
            (vm.state, vm.started) = (VmState::Running, true);
            Ok(StartVmResponse { vm_id: id.clone(), state: VmState::Running.into(), ..Default::default() })
        };
        self.0.answer(&self.1, "StartVM", &id, in_band, work).await
    }

    async fn stop_vm(&self, request: Request<StopVmRequest>) -> Result<Response<StopVmResponse>, Status> {
        self.0.fence(&request);
        let request = request.into_inner();
        assert!(request.force, "deletion stops by force");
        let id = request.vm_id;
        let in_band =
            |m| StopVmResponse { state: VmState::Error.into(), error_message: m, ..Default::default() };
        let work = || {
            let mut vms = self.0.vms.lock().unwrap();
            let all = vms.get_mut(&id).ok_or_else(|| Shared::missing(&id))?;
            all.iter_mut().for_each(|vm| vm.state = VmState::Stopped);
            Ok(StopVmResponse { vm_id: id.clone(), state: VmState::Stopped.into(), ..Default::default() })
        };
        self.0.answer(&self.1, "StopVM", &id, in_band, work).await
    }

    async fn delete_vm(
        &self,
        request: Request<DeleteVmRequest>,
    ) -> Result<Response<DeleteVmResponse>, Status> {
        self.0.fence(&request);
        let id = request.into_inner().vm_id;
        let in_band = |m| DeleteVmResponse { success: false, error_message: m, ..Default::default() };
        let work = || match self.0.vms.lock().unwrap().remove(&id) {
            Some(_) => Ok(DeleteVmResponse { vm_id: id.clone(), success: true, ..Default::default() }),
            None => Err(Shared::missing(&id)),
        };
        self.0.answer(&self.1, "DeleteVM", &id, in_band, work).await
    }

    async fn get_vm(&self, request: Request<GetVmRequest>) -> Result<Response<GetVmResponse>, Status> {
        let id = request.into_inner().vm_id;
        let work = || {
            let vms = self.0.vms.lock().unwrap();
            let hides = self.0.hides_new_vms.load(Ordering::SeqCst);
            let vm = vms.get(&id).and_then(|all| all.last()).filter(|vm| vm.started || !hides);
            let vm = vm.ok_or_else(|| Shared::missing(&id))?;
            let ip_address = if vm.state == VmState::Running { "10.100.0.42".into() } else { String::new() };
            let metadata = vm.request.metadata.clone();
            let info = VmInfo {
                vm_id: id.clone(),
                state: vm.state.into(),
                ip_address,
                metadata,
                ..Default::default()
            };
            Ok(GetVmResponse { vm: Some(info) })
        };
        self.0.answer(&self.1, "GetVM", &id, |_| GetVmResponse::default(), work).await
    }

    async fn list_v_ms(&self, _: Request<ListVMsRequest>) -> Result<Response<ListVMsResponse>, Status> {
        self.0.calls.lock().unwrap().push("ListVMs".into());
        let vms = self.0.vms.lock().unwrap();
        let info = |vm: &Vm| VmInfo {
            vm_id: vm.request.vm_id.clone(),
            state: vm.state.into(),
            metadata: vm.request.metadata.clone(),
            ..Default::default()
        };
        Ok(Response::new(ListVMsResponse {
            vms: vms.values().flatten().map(info).collect(),
            ..Default::default()
        }))
    }

    type WatchVMEventsStream = Pin<Box<dyn Stream<Item = Result<VmEvent, Status>> + Send>>;

    async fn watch_vm_events(
        &self,
        _: Request<WatchVmEventsRequest>,
    ) -> Result<Response<Self::WatchVMEventsStream>, Status> {
        self.0.calls.lock().unwrap().push("WatchVMEvents".into());
        let events = self.0.events.lock().unwrap().as_ref().unwrap().subscribe();
        let events = tokio_stream::wrappers::BroadcastStream::new(events);
        Ok(Response::new(Box::pin(events.map(|e| e.map_err(|_| Status::data_loss("too slow"))))))
    }

    async fn get_host_info(
        &self,
        _: Request<GetHostInfoRequest>,
    ) -> Result<Response<GetHostInfoResponse>, Status> {
        let work = || Ok(GetHostInfoResponse { total_cpus: 4, total_memory_mb: 4096, ..Default::default() });
        self.0.answer(&self.1, "GetHostInfo", "", |_| GetHostInfoResponse::default(), work).await
    }

    async fn health_check(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        Ok(Response::new(HealthCheckResponse { healthy: true, ..Default::default() }))
    }
}

fn in_band_start(id: &str) -> StartVmResponse {
    let error_message = format!("VM {id} is stopped and must be recreated");
    StartVmResponse { vm_id: id.into(), state: VmState::Error.into(), error_message }
}

/// Connection that is counted while it is open, and breaks when its agent is killed.
struct Counted<S>(S, Arc<AtomicUsize>, Pin<Box<WaitForCancellationFutureOwned>>);

impl<S> Counted<S> {
    fn new(stream: S, open: Arc<AtomicUsize>, dead: &CancellationToken) -> Self {
        open.fetch_add(1, Ordering::SeqCst);
        Self(stream, open, Box::pin(dead.clone().cancelled_owned()))
    }
}

impl<S> Drop for Counted<S> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<S> Connected for Counted<S> {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.2.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(std::io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
