//! Calls of `coracle.host.v1`.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Access, Fence, Host, LocalUser, Record, TemplateInfo};
use coracle_oci::{NoProgress, PullOrigin};
use coracle_proto::host as pb;
use coracle_proto::host::host_server::Host as HostRpc;
use futures_util::stream::BoxStream;
use tokio::sync::broadcast::error::RecvError;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use super::{Replies, Reply, convert, images, snapshots, streams};
use crate::objects::{self, Caller, Creation};
use crate::status::{OrStatus as _, invalid};

/// Default time for a guest to power off.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// Features that were added after the first release of the protocol.
const FEATURES: [&str; 9] =
    ["hibernate", "hold", "images", "objects", "pause", "registries", "signatures", "snapshots", "volumes"];

/// Host service. Clones share the host core.
#[derive(Clone, Debug)]
pub struct HostService {
    host: Host,
    started: tokio::time::Instant,
}

impl HostService {
    /// Makes a service for `host`.
    #[must_use]
    pub fn new(host: Host) -> Self {
        Self { host, started: tokio::time::Instant::now() }
    }
}

/// Fence that refuses calls of older generations than the VM has seen; `None` for a call without an object.
fn fence(owner: Option<&pb::Owner>) -> Option<Fence> {
    let pb::Owner { uid, generation, .. } = owner.filter(|owner| !owner.uid.is_empty())?;
    Some(Fence { uid: uid.clone(), generation: *generation })
}

/// Object on whose behalf a call is made; `None` if the call names a VM of the node.
fn caller(owner: Option<&pb::Owner>) -> Option<Caller> {
    let pb::Owner { namespace, name, uid, .. } = owner.filter(|owner| !owner.name.is_empty())?;
    Some(Caller { uid: uid.clone(), object: format!("{namespace}/{name}") })
}

/// User of a call on the node's own socket.
fn local_user<T>(request: &Request<T>) -> LocalUser {
    let connection = request.extensions().get::<UdsConnectInfo>()?;
    connection.peer_cred.map(|credential| credential.uid())
}

/// Origin of registry requests: a caller over the network reaches only what its cluster may reach.
fn origin<T>(request: &Request<T>) -> PullOrigin {
    match request.remote_addr() {
        Some(_) => PullOrigin::Cluster,
        None => PullOrigin::Local,
    }
}

#[tonic::async_trait]
impl HostRpc for HostService {
    async fn info(&self, _: Request<pb::InfoRequest>) -> Reply<pb::InfoResponse> {
        let host = &self.host;
        let capacity = host.capacity();
        Ok(Response::new(pb::InfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            features: FEATURES.map(str::to_owned).to_vec(),
            hostname: hostname(),
            drivers: host.probes().iter().map(convert::driver).collect(),
            cpus: u32::try_from(capacity.cpus).unwrap_or(u32::MAX),
            memory_mib: capacity.memory_mib,
            memory_available_mib: capacity.memory_available_mib,
            vcpus_declared: capacity.vcpus_declared,
            memory_declared_mib: capacity.memory_declared_mib,
            vms: u32::try_from(capacity.vms).unwrap_or(u32::MAX),
            vms_running: u32::try_from(capacity.vms_running).unwrap_or(u32::MAX),
            state_dir: host.config().state_dir.display().to_string(),
            network_mode: host.network().mode().to_owned(),
            subnet: host.network().subnet().map(|s| s.to_string()).unwrap_or_default(),
            uptime_seconds: self.started.elapsed().as_secs(),
            jail_missing: host.jail_missing().to_vec(),
        }))
    }

    async fn create_vm(&self, request: Request<pb::CreateVmRequest>) -> Reply<pb::Vm> {
        let (user, origin) = (local_user(&request), origin(&request));
        let request = request.into_inner();
        let credentials = convert::credentials(&request.image, &request.pull_secrets)?;
        let owner = request.owner.as_ref();
        let (caller, fence) = (caller(owner).unwrap_or_default(), fence(owner));
        let power = request.power_state();
        let snapshot = Some(request.clone_from.clone()).filter(|name| !name.is_empty());
        let mut spec = convert::vm_spec(request, user, origin)?;
        if let Some(name) = spec.network.as_deref().filter(|_| self.host.network().mode() != "cni") {
            return Err(invalid(format!(
                "no network {name:?}: this node has no CNI networks; start it with --network cni"
            )));
        }
        if let (Some(snapshot), Some(keys)) = (&snapshot, &spec.image_keys) {
            self.host.verify_snapshot(snapshot, keys, spec.origin).await.or_status()?;
        }
        if snapshot.is_none() && objects::pull(&self.host, &spec, &credentials).await.or_status()? {
            spec.may_use_image = true;
        }
        let stays_off = match (power, &snapshot) {
            (pb::PowerState::Unspecified, Some(_)) => {
                return Err(invalid("clone_from needs a power_state: a clone runs at once"));
            }
            (pb::PowerState::Unspecified, None) => {
                let record = self.host.create(spec, Arc::new(NoProgress)).await.or_status()?;
                return self.vm(record.name.as_str());
            }
            (pb::PowerState::Running, _) => false,
            (pb::PowerState::Stopped, _) => true,
        };
        let creation = Creation { spec, snapshot, stays_off, caller, fence };
        let view = objects::create(&self.host, creation, || ()).await.or_status()?;
        Ok(Response::new(convert::vm(&self.host, &view)))
    }

    async fn start_vm(&self, request: Request<pb::StartVmRequest>) -> Reply<pb::Vm> {
        let pb::StartVmRequest { vm, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        let record = self.host.start(&vm, fence(owner.as_ref())).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn stop_vm(&self, request: Request<pb::StopVmRequest>) -> Reply<pb::Vm> {
        let pb::StopVmRequest { vm, grace_ms, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        let grace = grace_ms.map_or(DEFAULT_GRACE, |ms| Duration::from_millis(ms.into()));
        let record = self.host.stop(&vm, grace, fence(owner.as_ref())).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn delete_vm(&self, request: Request<pb::DeleteVmRequest>) -> Reply<pb::DeleteVmResponse> {
        let pb::DeleteVmRequest { vm, force, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        self.host.delete(&vm, force, fence(owner.as_ref())).await.or_status()?;
        Ok(Response::new(pb::DeleteVmResponse {}))
    }

    async fn pause_vm(&self, request: Request<pb::PauseVmRequest>) -> Reply<pb::Vm> {
        let pb::PauseVmRequest { vm, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        let record = self.host.pause(&vm, fence(owner.as_ref())).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn resume_vm(&self, request: Request<pb::ResumeVmRequest>) -> Reply<pb::Vm> {
        let pb::ResumeVmRequest { vm, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        let record = self.host.resume(&vm, fence(owner.as_ref())).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn hibernate_vm(&self, request: Request<pb::HibernateVmRequest>) -> Reply<pb::Vm> {
        let pb::HibernateVmRequest { vm, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        let record = self.host.hibernate(&vm, fence(owner.as_ref())).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn attach_volume(&self, request: Request<pb::AttachVolumeRequest>) -> Reply<pb::Vm> {
        let user = local_user(&request);
        let pb::AttachVolumeRequest { vm, volume } = request.into_inner();
        let request = convert::volume_request(volume.unwrap_or_default(), user);
        let record = self.host.attach_volume(&vm, request, None).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn detach_volume(&self, request: Request<pb::DetachVolumeRequest>) -> Reply<pb::Vm> {
        let pb::DetachVolumeRequest { vm, volume } = request.into_inner();
        let record = self.host.detach_volume(&vm, &volume, None).await.or_status()?;
        self.vm(record.id.as_str())
    }

    async fn get_vm(&self, request: Request<pb::GetVmRequest>) -> Reply<pb::Vm> {
        let pb::GetVmRequest { vm, exact, owner } = request.into_inner();
        if let Some(caller) = caller(owner.as_ref()) {
            let view = objects::find_vm(&self.host, &vm, &caller).or_status()?;
            return Ok(Response::new(convert::vm(&self.host, &view)));
        }
        self.vm_as(&vm, if exact { Access::Change } else { Access::Read })
    }

    async fn list_vms(&self, _: Request<pb::ListVmsRequest>) -> Reply<pb::ListVmsResponse> {
        let vms = self.host.list().iter().map(|view| convert::vm(&self.host, view)).collect();
        Ok(Response::new(pb::ListVmsResponse { vms }))
    }

    type WatchVmsStream = BoxStream<'static, Result<pb::VmEvent, Status>>;

    async fn watch_vms(&self, request: Request<pb::WatchVmsRequest>) -> Replies<pb::VmEvent> {
        let wanted = request.into_inner().vm;
        let (host, stop) = (self.host.clone(), self.host.stopping());
        let events = futures_util::stream::unfold(host.events(), move |mut events| {
            let (host, stop, wanted) = (host.clone(), stop.clone(), wanted.clone());
            async move {
                loop {
                    let event = stop.run_until_cancelled(events.recv()).await?;
                    match event {
                        Ok(e) if wanted.is_empty() || is_named(&e.record, &wanted) => {
                            return Some((Ok(convert::event(&host, &e)), events));
                        }
                        Ok(_) => {}
                        Err(RecvError::Lagged(n)) => {
                            let lost = Status::data_loss(format!("{n} events lost: list again"));
                            return Some((Err(lost), events));
                        }
                        Err(RecvError::Closed) => return None,
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(events)))
    }

    type HoldVmStream = BoxStream<'static, Result<pb::HoldVmResponse, Status>>;

    async fn hold_vm(&self, request: Request<pb::HoldVmRequest>) -> Replies<pb::HoldVmResponse> {
        let hold = self.host.hold(&request.into_inner().vm).or_status()?;
        let stop = self.host.stopping();
        let until_released = futures_util::stream::once(async move {
            stop.cancelled().await;
            drop(hold);
            Err(Status::unavailable("the node is stopping"))
        });
        Ok(Response::new(Box::pin(until_released)))
    }

    type ExecStream = BoxStream<'static, Result<pb::ExecResponse, Status>>;

    async fn exec(&self, request: Request<Streaming<pb::ExecRequest>>) -> Replies<pb::ExecResponse> {
        streams::exec(&self.host, request.into_inner()).await
    }

    async fn wait_vm(&self, request: Request<pb::WaitVmRequest>) -> Reply<pb::Vm> {
        let view = self.host.wait(&request.into_inner().vm).await.or_status()?;
        Ok(Response::new(convert::vm(&self.host, &view)))
    }

    type LogsStream = BoxStream<'static, Result<pb::LogsResponse, Status>>;

    async fn logs(&self, request: Request<pb::LogsRequest>) -> Replies<pb::LogsResponse> {
        streams::logs(&self.host, request.into_inner()).await
    }

    type ConsoleStream = BoxStream<'static, Result<pb::ConsoleResponse, Status>>;

    async fn console(&self, request: Request<Streaming<pb::ConsoleRequest>>) -> Replies<pb::ConsoleResponse> {
        streams::console(&self.host, request.into_inner()).await
    }

    type DisplayStream = BoxStream<'static, Result<pb::DisplayResponse, Status>>;

    async fn display(&self, request: Request<Streaming<pb::DisplayRequest>>) -> Replies<pb::DisplayResponse> {
        streams::display(&self.host, request.into_inner()).await
    }

    type PortForwardStream = BoxStream<'static, Result<pb::PortForwardResponse, Status>>;

    async fn port_forward(
        &self,
        request: Request<Streaming<pb::PortForwardRequest>>,
    ) -> Replies<pb::PortForwardResponse> {
        streams::port_forward(&self.host, request.into_inner()).await
    }

    async fn copy_in(&self, request: Request<Streaming<pb::CopyInRequest>>) -> Reply<pb::CopyInResponse> {
        streams::copy_in(&self.host, request.into_inner()).await
    }

    type CopyOutStream = BoxStream<'static, Result<pb::CopyOutResponse, Status>>;

    async fn copy_out(&self, request: Request<pb::CopyOutRequest>) -> Replies<pb::CopyOutResponse> {
        streams::copy_out(&self.host, request.into_inner()).await
    }

    type PullImageStream = BoxStream<'static, Result<pb::PullImageResponse, Status>>;

    async fn pull_image(&self, request: Request<pb::PullImageRequest>) -> Replies<pb::PullImageResponse> {
        let origin = origin(&request);
        images::pull(&self.host, request.into_inner(), origin)
    }

    type ImportImageStream = BoxStream<'static, Result<pb::PullImageResponse, Status>>;

    async fn import_image(&self, request: Request<pb::ImportImageRequest>) -> Replies<pb::PullImageResponse> {
        let user = local_user(&request);
        images::import(&self.host, request.into_inner(), user)
    }

    async fn list_images(&self, _: Request<pb::ListImagesRequest>) -> Reply<pb::ListImagesResponse> {
        images::list(&self.host).await
    }

    async fn get_image(&self, request: Request<pb::GetImageRequest>) -> Reply<pb::Image> {
        images::get(&self.host, &request.into_inner().reference).await
    }

    async fn remove_image(&self, request: Request<pb::RemoveImageRequest>) -> Reply<pb::RemoveImageResponse> {
        images::remove(&self.host, request.into_inner()).await
    }

    async fn prune_images(&self, request: Request<pb::PruneImagesRequest>) -> Reply<pb::PruneImagesResponse> {
        images::prune(&self.host, request.into_inner().dry_run).await
    }

    async fn tag_image(&self, request: Request<pb::TagImageRequest>) -> Reply<pb::Image> {
        images::tag(&self.host, request.into_inner()).await
    }

    type PushImageStream = BoxStream<'static, Result<pb::PushResponse, Status>>;

    async fn push_image(&self, request: Request<pb::PushImageRequest>) -> Replies<pb::PushResponse> {
        let origin = origin(&request);
        images::push(&self.host, request.into_inner(), origin)
    }

    type ExportImageStream = BoxStream<'static, Result<pb::ExportImageResponse, Status>>;

    async fn export_image(
        &self,
        request: Request<pb::ExportImageRequest>,
    ) -> Replies<pb::ExportImageResponse> {
        images::export(&self.host, request.into_inner().reference).await
    }

    async fn commit_vm(&self, request: Request<pb::CommitVmRequest>) -> Reply<pb::Image> {
        images::commit(&self.host, request.into_inner()).await
    }

    async fn list_templates(&self, _: Request<pb::ListTemplatesRequest>) -> Reply<pb::ListTemplatesResponse> {
        let to_wire = |info: &TemplateInfo| convert::template(info, self.host.has_pooled(&info.key));
        let templates = self.host.templates().iter().map(to_wire).collect();
        Ok(Response::new(pb::ListTemplatesResponse { templates }))
    }

    async fn warm_template(&self, request: Request<pb::WarmTemplateRequest>) -> Reply<pb::Template> {
        let request = request.into_inner();
        let disk_mib = Some(request.disk_mib).filter(|mib| *mib > 0);
        let (vcpus, memory, kernel_path) = convert::shape(request)?;
        let info = self.host.warm_template(vcpus, memory, &kernel_path, disk_mib).await.or_status()?;
        Ok(Response::new(convert::template(&info, self.host.has_pooled(&info.key))))
    }

    async fn delete_template(
        &self,
        request: Request<pb::DeleteTemplateRequest>,
    ) -> Reply<pb::DeleteTemplateResponse> {
        self.host.delete_template(&request.into_inner().key).or_status()?;
        Ok(Response::new(pb::DeleteTemplateResponse {}))
    }

    async fn save_snapshot(&self, request: Request<pb::SaveSnapshotRequest>) -> Reply<pb::Snapshot> {
        let pb::SaveSnapshotRequest { vm, name, owner } = request.into_inner();
        let vm = self.target(vm, caller(owner.as_ref()))?;
        snapshots::save(&self.host, &vm, &name).await
    }

    async fn list_snapshots(&self, _: Request<pb::ListSnapshotsRequest>) -> Reply<pb::ListSnapshotsResponse> {
        snapshots::list(&self.host).await
    }

    async fn share_snapshot(&self, request: Request<pb::ShareSnapshotRequest>) -> Reply<pb::Snapshot> {
        snapshots::share(&self.host, request.into_inner()).await
    }

    async fn get_snapshot(&self, request: Request<pb::GetSnapshotRequest>) -> Reply<pb::Snapshot> {
        let info = self.host.snapshot(&request.into_inner().name).await.or_status()?;
        Ok(Response::new(snapshots::snapshot_message(&info)))
    }

    async fn delete_snapshot(
        &self,
        request: Request<pb::DeleteSnapshotRequest>,
    ) -> Reply<pb::DeleteSnapshotResponse> {
        self.host.delete_snapshot(&request.into_inner().name).await.or_status()?;
        Ok(Response::new(pb::DeleteSnapshotResponse {}))
    }

    type ExportSnapshotStream = BoxStream<'static, Result<pb::ExportSnapshotResponse, Status>>;

    async fn export_snapshot(
        &self,
        request: Request<pb::ExportSnapshotRequest>,
    ) -> Replies<pb::ExportSnapshotResponse> {
        snapshots::export(&self.host, request.into_inner().name).await
    }

    async fn import_snapshot(
        &self,
        request: Request<Streaming<pb::ImportSnapshotRequest>>,
    ) -> Reply<pb::Snapshot> {
        snapshots::import(&self.host, request.into_inner()).await
    }

    type PushSnapshotStream = BoxStream<'static, Result<pb::PushResponse, Status>>;

    async fn push_snapshot(&self, request: Request<pb::PushSnapshotRequest>) -> Replies<pb::PushResponse> {
        snapshots::push(&self.host, request.into_inner())
    }

    type PullSnapshotStream = BoxStream<'static, Result<pb::PullSnapshotResponse, Status>>;

    async fn pull_snapshot(
        &self,
        request: Request<pb::PullSnapshotRequest>,
    ) -> Replies<pb::PullSnapshotResponse> {
        snapshots::pull(&self.host, request.into_inner())
    }

    async fn restore_vm(&self, request: Request<pb::RestoreVmRequest>) -> Reply<pb::Vm> {
        let caller = (origin(&request), local_user(&request));
        snapshots::restore(&self.host, request.into_inner(), caller).await
    }

    async fn fork_vm(&self, request: Request<pb::ForkVmRequest>) -> Reply<pb::ForkVmResponse> {
        snapshots::fork(&self.host, request.into_inner()).await
    }
}

impl HostService {
    /// Name or id on this node of the VM of a call.
    fn target(&self, vm: String, caller: Option<Caller>) -> Result<String, Status> {
        match caller {
            None => Ok(vm),
            Some(caller) => Ok(objects::find_vm(&self.host, &vm, &caller).or_status()?.record.id.to_string()),
        }
    }

    fn vm(&self, name: &str) -> Reply<pb::Vm> {
        self.vm_as(name, Access::Change)
    }

    fn vm_as(&self, name: &str, access: Access) -> Reply<pb::Vm> {
        let view = self.host.find(name, access).or_status()?;
        Ok(Response::new(convert::vm(&self.host, &view)))
    }
}

fn is_named(record: &Record, wanted: &str) -> bool {
    record.id.as_str() == wanted || record.name.as_str() == wanted
}

fn hostname() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
