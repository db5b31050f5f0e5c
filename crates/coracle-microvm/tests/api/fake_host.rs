//! Host service in front of the VMs of a fake agent. Each call becomes the agent's call, so that both services share state,
//! recorded calls and faults.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use coracle_api::keys::fence;
use coracle_proto::{
    firecracker::{self as agent, firecracker_agent_server::FirecrackerAgent as _},
    host as wire,
};
use futures_util::{StreamExt as _, future::BoxFuture};
use tonic::{Code, Request, Response, Status, body::Body, server::NamedService};

use crate::fake_agent::Service;

/// Router of exactly the calls that the operator makes.
#[derive(Clone)]
pub(crate) struct HostRoutes(pub(crate) Service);

impl NamedService for HostRoutes {
    const NAME: &'static str = "coracle.host.v1.Host";
}

impl tower::Service<http::Request<Body>> for HostRoutes {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let vms = self.0.clone();
        Box::pin(async move { Ok(answer(vms, request).await) })
    }
}

async fn answer(vms: Service, request: http::Request<Body>) -> http::Response<Body> {
    let rpc = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    match rpc.as_str() {
        "Info" => unary(request, move |_: Request<wire::InfoRequest>| info(vms.clone())).await,
        "CreateVm" => unary(request, move |request| create(vms.clone(), request)).await,
        "StartVm" => unary(request, move |request| start(vms.clone(), request)).await,
        "StopVm" => unary(request, move |request| stop(vms.clone(), request)).await,
        "DeleteVm" => unary(request, move |request| delete(vms.clone(), request)).await,
        "GetVm" => unary(request, move |request| get(vms.clone(), request)).await,
        "ListVms" => unary(request, move |_: Request<wire::ListVmsRequest>| list(vms.clone())).await,
        "WatchVms" => {
            let codec = tonic_prost::ProstCodec::<wire::VmEvent, wire::WatchVmsRequest>::default();
            let watch = tower::service_fn(move |_: Request<wire::WatchVmsRequest>| watch(vms.clone()));
            tonic::server::Grpc::new(codec).server_streaming(watch, request).await
        }
        _ => Status::new(Code::Unimplemented, rpc).into_http(),
    }
}

pub(crate) async fn unary<Req, Res, F>(
    request: http::Request<Body>,
    handler: impl FnMut(Request<Req>) -> F + Send,
) -> http::Response<Body>
where
    Req: prost::Message + Default + Send + Sync + 'static,
    Res: prost::Message + Default + Send + Sync + 'static,
    F: Future<Output = Result<Response<Res>, Status>> + Send,
{
    let codec = tonic_prost::ProstCodec::<Res, Req>::default();
    tonic::server::Grpc::new(codec).unary(tower::service_fn(handler), request).await
}

pub(crate) type Reply<T> = Result<Response<T>, Status>;

/// Returns a call of the agent service for the object that a message of the host service names.
fn for_owner<T>(owner: Option<wire::Owner>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let Some(wire::Owner { namespace, name, uid, generation, .. }) = owner else { return request };
    let values = [
        (fence::UID, uid),
        (fence::OBJECT, format!("{namespace}/{name}")),
        (fence::GENERATION, generation.to_string()),
    ];
    for (key, value) in values {
        request.metadata_mut().insert(key, value.parse().unwrap());
    }
    request
}

async fn info(vms: Service) -> Reply<wire::InfoResponse> {
    let info = vms.get_host_info(Request::new(agent::GetHostInfoRequest {})).await?.into_inner();
    Ok(Response::new(wire::InfoResponse {
        features: vec!["objects".into()],
        cpus: info.total_cpus.unsigned_abs(),
        memory_mib: info.total_memory_mb.unsigned_abs(),
        ..Default::default()
    }))
}

async fn create(vms: Service, request: Request<wire::CreateVmRequest>) -> Reply<wire::Vm> {
    assert!(request.metadata().get(fence::UID).is_none(), "the message names the object");
    let create = request.into_inner();
    assert_eq!(create.power_state(), wire::PowerState::Running);
    let message = {
        let owner = create.owner.clone().unwrap_or_default();
        let metadata = [
            ("coracle.dev/uid", owner.uid),
            ("coracle.dev/namespace", owner.namespace),
            ("coracle.dev/name", owner.name),
            ("coracle.dev/cluster", owner.cluster),
            ("coracle.dev/spec", create.spec_hash),
            ("coracle.dev/idempotent", create.idempotent.to_string()),
        ];
        agent::CreateVmRequest {
            vm_id: create.name,
            image_ref: create.image,
            vcpu_count: create.vcpus.cast_signed(),
            memory_mb: i32::try_from(create.memory_mib).unwrap(),
            metadata: metadata.map(|(key, value)| (key.to_owned(), value)).into(),
            ..Default::default()
        }
    };
    let created = vms.create_vm(for_owner(create.owner, message)).await?.into_inner();
    Ok(Response::new(wire::Vm { name: created.vm_id, ..Default::default() }))
}

async fn start(vms: Service, request: Request<wire::StartVmRequest>) -> Reply<wire::Vm> {
    let wire::StartVmRequest { vm, owner } = request.into_inner();
    let started = vms.start_vm(for_owner(owner, agent::StartVmRequest { vm_id: vm })).await?;
    Ok(Response::new(wire::Vm { name: started.into_inner().vm_id, ..Default::default() }))
}

async fn stop(vms: Service, request: Request<wire::StopVmRequest>) -> Reply<wire::Vm> {
    let wire::StopVmRequest { vm, grace_ms, owner } = request.into_inner();
    let message = agent::StopVmRequest { vm_id: vm, force: grace_ms == Some(0) };
    let stopped = vms.stop_vm(for_owner(owner, message)).await?;
    Ok(Response::new(wire::Vm { name: stopped.into_inner().vm_id, ..Default::default() }))
}

async fn delete(vms: Service, request: Request<wire::DeleteVmRequest>) -> Reply<wire::DeleteVmResponse> {
    let wire::DeleteVmRequest { vm, owner, .. } = request.into_inner();
    vms.delete_vm(for_owner(owner, agent::DeleteVmRequest { vm_id: vm })).await?;
    Ok(Response::new(wire::DeleteVmResponse {}))
}

async fn get(vms: Service, request: Request<wire::GetVmRequest>) -> Reply<wire::Vm> {
    let wire::GetVmRequest { vm: vm_id, owner, .. } = request.into_inner();
    let found = vms.get_vm(for_owner(owner, agent::GetVmRequest { vm_id })).await?.into_inner();
    Ok(Response::new(vm(found.vm.unwrap_or_default())))
}

async fn list(vms: Service) -> Reply<wire::ListVmsResponse> {
    let list = vms.list_v_ms(Request::new(agent::ListVMsRequest::default())).await?.into_inner();
    Ok(Response::new(wire::ListVmsResponse { vms: list.vms.into_iter().map(vm).collect() }))
}

type Events = futures_util::stream::BoxStream<'static, Result<wire::VmEvent, Status>>;

async fn watch(vms: Service) -> Reply<Events> {
    let events =
        vms.watch_vm_events(Request::new(agent::WatchVmEventsRequest::default())).await?.into_inner();
    let event = |event: agent::VmEvent| wire::VmEvent {
        r#type: wire::vm_event::Type::Started.into(),
        vm: Some(wire::Vm { name: event.vm_id, ..Default::default() }),
        ..Default::default()
    };
    Ok(Response::new(events.map(move |next| next.map(event)).boxed()))
}

fn vm(info: agent::VmInfo) -> wire::Vm {
    let noted = |key: &str| info.metadata.get(key).cloned().unwrap_or_default();
    let state = match info.state() {
        agent::VmState::Running => wire::VmState::Running,
        agent::VmState::Stopped => wire::VmState::Stopped,
        agent::VmState::Error => wire::VmState::Failed,
        other => panic!("no fake VM becomes {other:?}"),
    };
    let owner = wire::Owner {
        cluster: noted("coracle.dev/cluster"),
        namespace: noted("coracle.dev/namespace"),
        name: noted("coracle.dev/name"),
        uid: noted("coracle.dev/uid"),
        generation: 0,
    };
    wire::Vm {
        name: info.vm_id.clone(),
        state: state.into(),
        ip_address: info.ip_address.clone(),
        owner: Some(owner),
        spec_hash: noted("coracle.dev/spec"),
        adoptable_by: noted("coracle.dev/adopt"),
        ..Default::default()
    }
}
