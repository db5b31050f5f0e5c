//! Fake nodes whose VMs have one word of memory each, and can be hibernated, saved, copied and restored.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
};

use coracle_proto::host as wire;
use coracle_testkit::sim::Sim;
use futures_util::{
    StreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use tokio::task::JoinSet;
use tonic::{
    Code, Request, Response, Status, Streaming,
    body::Body,
    server::NamedService,
    transport::{Server, ServerTlsConfig},
};
use wire::{VmState, import_snapshot_request::Part};

use crate::fake_host::{Reply, unary};

/// VM, or its copy in a snapshot.
#[derive(Clone, Debug)]
struct Machine {
    owner: wire::Owner,
    state: VmState,
    /// Memory content; different for each VM that was booted.
    memory: String,
}

#[derive(Debug, Default)]
struct Node {
    vms: BTreeMap<String, Machine>,
    snapshots: BTreeMap<String, Machine>,
    refuses_restore: bool,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<String, Node>,
    booted: usize,
    /// Violated invariants: a VM that runs twice, or memory that is older than the VM.
    violations: Vec<String>,
}

/// Nodes of one simulation. They end when this is dropped.
pub(crate) struct MovingNodes {
    sim: Sim,
    state: Arc<Mutex<State>>,
    tasks: JoinSet<()>,
}

impl MovingNodes {
    pub(crate) fn new(sim: &Sim) -> Self {
        Self { sim: sim.clone(), state: Arc::default(), tasks: JoinSet::new() }
    }

    /// Starts a node, and returns its address.
    pub(crate) fn start(&mut self, node: &str, tls: ServerTlsConfig) -> String {
        let incoming = self.sim.network().listen();
        let address = incoming.address().to_owned();
        self.state.lock().unwrap().nodes.insert(node.to_owned(), Node::default());
        let service = Service { node: node.to_owned(), sim: self.sim.clone(), state: self.state.clone() };
        let routes = Server::builder().tls_config(tls).unwrap().add_service(service);
        self.tasks.spawn(async move { routes.serve_with_incoming(incoming).await.unwrap() });
        address
    }

    pub(crate) fn refuse_restores(&self, node: &str) {
        self.state.lock().unwrap().nodes.get_mut(node).unwrap().refuses_restore = true;
    }

    /// Returns the memory of the VMs that run on a node.
    pub(crate) fn running(&self, node: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let running = state.nodes[node].vms.values().filter(|vm| vm.state == VmState::Running);
        running.map(|vm| vm.memory.clone()).collect()
    }

    /// Returns everything that is left, and the violated invariants.
    pub(crate) fn facts(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let mut facts = vec![format!("VMs booted: {}", state.booted)];
        for (name, node) in &state.nodes {
            facts.extend(node.vms.iter().map(|(id, vm)| format!("{name}: VM {id} {:?}", vm.state)));
            facts.push(format!("{name}: snapshots {}", node.snapshots.len()));
        }
        facts.extend(state.violations.iter().cloned());
        facts
    }
}

#[derive(Clone)]
struct Service {
    node: String,
    sim: Sim,
    state: Arc<Mutex<State>>,
}

impl NamedService for Service {
    const NAME: &'static str = "coracle.host.v1.Host";
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(service.route(request).await) })
    }
}

type Parts = BoxStream<'static, Result<wire::ExportSnapshotResponse, Status>>;
type Events = BoxStream<'static, Result<wire::VmEvent, Status>>;

impl Service {
    async fn route(self, request: http::Request<Body>) -> http::Response<Body> {
        let rpc = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        match rpc.as_str() {
            "Info" => self.reply(&rpc, request, Self::info).await,
            "CreateVm" => self.reply(&rpc, request, Self::create).await,
            "StartVm" => self.reply(&rpc, request, Self::start).await,
            "StopVm" => self.reply(&rpc, request, Self::stop).await,
            "HibernateVm" => self.reply(&rpc, request, Self::hibernate).await,
            "DeleteVm" => self.reply(&rpc, request, Self::delete).await,
            "GetVm" => self.reply(&rpc, request, Self::get).await,
            "ListVms" => self.reply(&rpc, request, Self::list).await,
            "SaveSnapshot" => self.reply(&rpc, request, Self::save).await,
            "DeleteSnapshot" => self.reply(&rpc, request, Self::delete_snapshot).await,
            "RestoreVm" => self.reply(&rpc, request, Self::restore).await,
            "ExportSnapshot" => {
                let codec = tonic_prost::ProstCodec::<
                    wire::ExportSnapshotResponse,
                    wire::ExportSnapshotRequest,
                >::default();
                let export = tower::service_fn(move |request| self.clone().export(request));
                tonic::server::Grpc::new(codec).server_streaming(export, request).await
            }
            "ImportSnapshot" => {
                let codec = tonic_prost::ProstCodec::<wire::Snapshot, wire::ImportSnapshotRequest>::default();
                let import = tower::service_fn(move |request| self.clone().import(request));
                tonic::server::Grpc::new(codec).client_streaming(import, request).await
            }
            "WatchVms" => {
                let codec = tonic_prost::ProstCodec::<wire::VmEvent, wire::WatchVmsRequest>::default();
                let watch = tower::service_fn(|_: Request<wire::WatchVmsRequest>| async {
                    Ok::<_, Status>(Response::new(stream::pending().boxed() as Events))
                });
                tonic::server::Grpc::new(codec).server_streaming(watch, request).await
            }
            _ => Status::new(Code::Unimplemented, rpc).into_http(),
        }
    }

    /// Answers a call, and counts it in the simulation.
    async fn reply<Req, Res>(
        &self,
        rpc: &str,
        request: http::Request<Body>,
        work: fn(&Self, Req) -> Result<Res, Status>,
    ) -> http::Response<Body>
    where
        Req: prost::Message + Default + Send + Sync + 'static,
        Res: prost::Message + Default + Send + Sync + 'static,
    {
        let (service, call) = (self.clone(), format!("{rpc} {}", self.node));
        let answer = move |request: Request<Req>| {
            let (service, call) = (service.clone(), call.clone());
            async move {
                let result = work(&service, request.into_inner());
                service.sim.after_call(&call).await;
                result.map(Response::new)
            }
        };
        unary(request, answer).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn info(&self, _: wire::InfoRequest) -> Result<wire::InfoResponse, Status> {
        Ok(wire::InfoResponse {
            features: vec!["objects".into()],
            cpus: 64,
            memory_mib: 65_536,
            ..Default::default()
        })
    }

    fn create(&self, request: wire::CreateVmRequest) -> Result<wire::Vm, Status> {
        let mut state = self.state();
        state.booted += 1;
        let memory = format!("memory {}", state.booted);
        let owner = request.owner.unwrap_or_default();
        let machine = Machine { owner, state: VmState::Running, memory };
        self.put(&mut state, &request.name, machine)
    }

    /// Adds a running VM.
    fn put(&self, state: &mut State, id: &str, machine: Machine) -> Result<wire::Vm, Status> {
        if state.nodes[&self.node].vms.contains_key(id) {
            return Err(Status::already_exists(format!("VM {id} already exists")));
        }
        if state.nodes.values().any(|node| node.vms.contains_key(id)) {
            state.violations.push(format!("VM {id} is made on {} while another node has it", self.node));
        }
        let vm = wire_vm(id, &machine);
        state.nodes.get_mut(&self.node).unwrap().vms.insert(id.to_owned(), machine);
        Ok(vm)
    }

    fn with(&self, id: &str, change: impl FnOnce(&mut Machine)) -> Result<wire::Vm, Status> {
        let mut state = self.state();
        let machine = state.nodes.get_mut(&self.node).unwrap().vms.get_mut(id).ok_or_else(|| missing(id))?;
        change(machine);
        Ok(wire_vm(id, machine))
    }

    fn start(&self, request: wire::StartVmRequest) -> Result<wire::Vm, Status> {
        // A guest that continues to run changes its memory.
        self.with(&request.vm, |vm| {
            if vm.state != VmState::Running {
                vm.memory.push('+');
            }
            vm.state = VmState::Running;
        })
    }

    fn stop(&self, request: wire::StopVmRequest) -> Result<wire::Vm, Status> {
        self.with(&request.vm, |vm| vm.state = VmState::Stopped)
    }

    fn hibernate(&self, request: wire::HibernateVmRequest) -> Result<wire::Vm, Status> {
        self.with(&request.vm, |vm| vm.state = VmState::Hibernated)
    }

    fn delete(&self, request: wire::DeleteVmRequest) -> Result<wire::DeleteVmResponse, Status> {
        let removed = self.state().nodes.get_mut(&self.node).unwrap().vms.remove(&request.vm);
        removed.map(|_| wire::DeleteVmResponse {}).ok_or_else(|| missing(&request.vm))
    }

    fn get(&self, request: wire::GetVmRequest) -> Result<wire::Vm, Status> {
        self.with(&request.vm, |_| ())
    }

    fn list(&self, _: wire::ListVmsRequest) -> Result<wire::ListVmsResponse, Status> {
        let state = self.state();
        let vms = state.nodes[&self.node].vms.iter().map(|(id, vm)| wire_vm(id, vm)).collect();
        Ok(wire::ListVmsResponse { vms })
    }

    fn save(&self, request: wire::SaveSnapshotRequest) -> Result<wire::Snapshot, Status> {
        let mut state = self.state();
        let node = state.nodes.get_mut(&self.node).unwrap();
        let machine = node.vms.get(&request.vm).ok_or_else(|| missing(&request.vm))?.clone();
        assert_eq!(machine.state, VmState::Hibernated, "a guest that runs on would be older in its snapshot");
        assert!(
            request.owner.is_some_and(|owner| owner.uid == machine.owner.uid),
            "for the object of the VM"
        );
        if node.snapshots.contains_key(&request.name) {
            return Err(Status::already_exists(request.name));
        }
        node.snapshots.insert(request.name.clone(), machine);
        Ok(wire::Snapshot { name: request.name, ..Default::default() })
    }

    fn delete_snapshot(
        &self,
        request: wire::DeleteSnapshotRequest,
    ) -> Result<wire::DeleteSnapshotResponse, Status> {
        let removed = self.state().nodes.get_mut(&self.node).unwrap().snapshots.remove(&request.name);
        removed.map(|_| wire::DeleteSnapshotResponse {}).ok_or_else(|| missing(&request.name))
    }

    fn restore(&self, request: wire::RestoreVmRequest) -> Result<wire::Vm, Status> {
        assert!(request.same_identity);
        let mut state = self.state();
        let node = &state.nodes[&self.node];
        if node.refuses_restore {
            return Err(Status::failed_precondition("another CPU"));
        }
        let saved = node.snapshots.get(&request.snapshot).ok_or_else(|| missing(&request.snapshot))?;
        let machine = Machine { state: VmState::Running, ..saved.clone() };
        let id = format!("{}-{}", machine.owner.namespace, machine.owner.name);
        self.put(&mut state, &id, machine)
    }

    async fn export(self, request: Request<wire::ExportSnapshotRequest>) -> Reply<Parts> {
        let name = request.into_inner().name;
        let saved =
            self.state().nodes[&self.node].snapshots.get(&name).cloned().ok_or_else(|| missing(&name))?;
        self.sim.after_call(&format!("ExportSnapshot {}", self.node)).await;
        let text =
            [&saved.memory, "|", &saved.owner.uid, "|", &saved.owner.namespace, "|", &saved.owner.name]
                .concat();
        let bytes = text.into_bytes();
        let parts = bytes.chunks(7).map(|data| Ok(wire::ExportSnapshotResponse { data: data.to_vec() }));
        Ok(Response::new(stream::iter(parts.collect::<Vec<_>>()).boxed()))
    }

    async fn import(self, request: Request<Streaming<wire::ImportSnapshotRequest>>) -> Reply<wire::Snapshot> {
        let mut parts = request.into_inner();
        let Some(Part::Name(name)) = parts.message().await?.and_then(|m| m.part) else {
            return Err(Status::invalid_argument("no name"));
        };
        let mut text = Vec::new();
        while let Some(Part::Data(data)) = parts.message().await?.and_then(|m| m.part) {
            text.extend(data);
        }
        let text = String::from_utf8(text).unwrap();
        let mut fields = text.split('|').map(str::to_owned);
        let (Some(memory), Some(uid), Some(namespace), Some(vm)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return Err(Status::invalid_argument("the archive has no end"));
        };
        let owner = wire::Owner { uid, namespace, name: vm, ..Default::default() };
        let machine = Machine { owner, state: VmState::Hibernated, memory };
        let taken = self.state().nodes.get_mut(&self.node).unwrap().snapshots.insert(name.clone(), machine);
        self.sim.after_call(&format!("ImportSnapshot {}", self.node)).await;
        match taken {
            Some(_) => Err(Status::already_exists(name)),
            None => Ok(Response::new(wire::Snapshot { name, ..Default::default() })),
        }
    }
}

fn missing(what: &str) -> Status {
    Status::not_found(format!("{what} not found"))
}

fn wire_vm(id: &str, machine: &Machine) -> wire::Vm {
    wire::Vm {
        name: id.to_owned(),
        state: machine.state.into(),
        ip_address: if machine.state == VmState::Running { "10.100.0.42".into() } else { String::new() },
        owner: Some(machine.owner.clone()),
        ..Default::default()
    }
}
