//! Client of the host service `coracle.host.v1` of coracle nodes.

use std::time::Duration;

use coracle_api::{ImagePullPolicy, PowerState};
use coracle_proto::host as wire;
use coracle_vm_inputs::{InputFile, InputSource, InputVolume, PullSecret};
use futures_util::{StreamExt as _, future::ready, stream::BoxStream};
use tonic::{Code, Response, Status, transport::Channel};
use wire::{VmState, host_client::HostClient, vm_event};

use super::{
    call::{Caller, ignore_not_found},
    client::NodeClient,
    error::AgentError,
    fence::traced_request,
    snapshot_client::SnapshotClient,
    vm_info::{Fence, State, VmInfo},
};
use crate::{placement::Capacity, step::VmRef, vm_spec::VmSpec};

/// Feature of nodes that know the object of each call.
const OBJECTS: &str = "objects";
/// Feature of nodes that verify the signatures of images.
const SIGNATURES: &str = "signatures";
/// Longest reply: a list has every VM of the node.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// The host service of one node.
#[derive(Debug)]
pub(super) struct HostService {
    pub(super) client: HostClient<Channel>,
    pub(super) caller: Caller,
    /// True when the node verifies signatures of images.
    checks_signatures: bool,
}

impl HostService {
    pub(super) fn new(channel: Channel, caller: Caller) -> Self {
        let client = HostClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Self { client, caller, checks_signatures: false }
    }

    /// Reads the features of the node. Returns true when the node supports the calls below.
    pub(super) async fn read_features(&mut self) -> Result<bool, AgentError> {
        let features = self.info().await?.features;
        let has = |name: &str| features.iter().any(|feature| feature == name);
        self.checks_signatures = has(SIGNATURES);
        Ok(has(OBJECTS))
    }

    async fn info(&self) -> Result<wire::InfoResponse, AgentError> {
        let mut client = self.client.clone();
        self.call("GetHostInfo", client.info(wire::InfoRequest {})).await
    }

    async fn create_in(
        &self,
        vm: &VmRef,
        spec: &VmSpec,
        power_state: wire::PowerState,
    ) -> Result<(), AgentError> {
        if !spec.inputs.image_keys.is_empty() && !self.checks_signatures {
            return Err(AgentError::unsupported(&self.caller.address, "check of signatures"));
        }
        let request = create_request(vm, spec, power_state);
        let mut client = self.client.clone();
        self.boot("CreateVM", client.create_vm(traced_request(request))).await.map(drop)
    }

    pub(super) async fn call<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AgentError> {
        self.caller.call(operation, self.caller.deadlines.call, call).await
    }

    /// Makes a call that may pull an image, boot a guest, or wait for one.
    async fn boot<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AgentError> {
        self.caller.call(operation, self.caller.deadlines.boot, call).await
    }
}

#[tonic::async_trait]
impl NodeClient for HostService {
    fn snapshots(&self) -> Option<&dyn SnapshotClient> {
        Some(self)
    }

    async fn get(&self, id: &str, fence: &Fence) -> Result<Option<VmInfo>, AgentError> {
        let request = wire::GetVmRequest { vm: id.to_owned(), exact: true, owner: owner(fence) };
        let mut client = self.client.clone();
        match self.call("GetVM", client.get_vm(traced_request(request))).await {
            Ok(vm) => Ok(Some(VmInfo::from(vm))),
            Err(error) if error.code == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn create(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError> {
        self.create_in(vm, spec, wire::PowerState::Running).await
    }

    async fn create_stopped(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError> {
        self.create_in(vm, spec, wire::PowerState::Stopped).await
    }

    async fn start(&self, vm: &VmRef) -> Result<(), AgentError> {
        let request = wire::StartVmRequest { vm: vm.id.clone(), owner: owner(&vm.fence) };
        let mut client = self.client.clone();
        self.boot("StartVM", client.start_vm(traced_request(request))).await.map(drop)
    }

    async fn set_power_state(&self, vm: &VmRef, state: PowerState) -> Result<(), AgentError> {
        let mut client = self.client.clone();
        let (id, fence) = (vm.id.clone(), &vm.fence);
        match state {
            PowerState::Running => self.start(vm).await,
            PowerState::Stopped => {
                let request =
                    wire::StopVmRequest { vm: id, grace_ms: vm.grace.map(millis), owner: owner(fence) };
                let deadline = self.caller.deadlines.boot + vm.grace.unwrap_or_default();
                self.caller.call("StopVM", deadline, client.stop_vm(traced_request(request))).await.map(drop)
            }
            PowerState::Paused => {
                let request = wire::PauseVmRequest { vm: id, owner: owner(fence) };
                self.boot("PauseVM", client.pause_vm(traced_request(request))).await.map(drop)
            }
            PowerState::Hibernated => {
                let request = wire::HibernateVmRequest { vm: id, owner: owner(fence) };
                self.boot("HibernateVM", client.hibernate_vm(traced_request(request))).await.map(drop)
            }
        }
    }

    async fn stop(&self, vm: &VmRef) -> Result<(), AgentError> {
        let grace = vm.grace.unwrap_or_default();
        let request =
            wire::StopVmRequest { vm: vm.id.clone(), grace_ms: Some(millis(grace)), owner: owner(&vm.fence) };
        let mut client = self.client.clone();
        let deadline = self.caller.deadlines.call + grace;
        ignore_not_found(
            self.caller.call("StopVM", deadline, client.stop_vm(traced_request(request))).await.map(drop),
        )
    }

    async fn delete(&self, vm: &VmRef) -> Result<(), AgentError> {
        let request = wire::DeleteVmRequest { vm: vm.id.clone(), force: true, owner: owner(&vm.fence) };
        let mut client = self.client.clone();
        ignore_not_found(self.call("DeleteVM", client.delete_vm(traced_request(request))).await.map(drop))
    }

    async fn capacity(&self) -> Result<Capacity, AgentError> {
        let info = self.info().await?;
        Ok(Capacity { vcpus: info.cpus, memory_mib: info.memory_mib })
    }

    async fn list(&self) -> Result<Vec<(String, VmInfo)>, AgentError> {
        let mut client = self.client.clone();
        let list = self.call("ListVMs", client.list_vms(wire::ListVmsRequest {})).await?;
        Ok(list.vms.into_iter().map(|vm| (id_of(&vm).to_owned(), VmInfo::from(vm))).collect())
    }

    async fn watch(&self) -> Result<BoxStream<'static, Result<String, Status>>, AgentError> {
        let mut client = self.client.clone();
        let call = client.watch_vms(wire::WatchVmsRequest { vm: String::new() });
        let events = self.call("WatchVMEvents", call).await?;
        let ids = events.filter_map(|event| {
            ready(match event {
                // The agent service has no event for updates, either.
                Ok(event) if event.r#type() == vm_event::Type::Updated => None,
                Ok(event) => event.vm.map(|vm| Ok(id_of(&vm).to_owned())),
                Err(status) => Some(Err(status)),
            })
        });
        Ok(ids.boxed())
    }
}

/// Returns the object of a call. The cluster only matters for a creation.
pub(super) fn owner(fence: &Fence) -> Option<wire::Owner> {
    let (namespace, name) = fence.object.split_once('/').unwrap_or_default();
    Some(wire::Owner {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: fence.uid.clone(),
        generation: fence.generation,
        ..wire::Owner::default()
    })
}

/// Returns the id that the operator gave the VM.
fn id_of(vm: &wire::Vm) -> &str {
    if vm.requested_name.is_empty() { &vm.name } else { &vm.requested_name }
}

/// Returns a grace period as in the message.
fn millis(grace: Duration) -> u32 {
    u32::try_from(grace.as_millis()).unwrap_or(u32::MAX)
}

fn create_request(vm: &VmRef, spec: &VmSpec, power_state: wire::PowerState) -> wire::CreateVmRequest {
    let pull_policy = match spec.image_pull_policy {
        None => wire::PullPolicy::Unspecified,
        Some(ImagePullPolicy::IfNotPresent) => wire::PullPolicy::IfNotPresent,
        Some(ImagePullPolicy::Always) => wire::PullPolicy::Always,
        Some(ImagePullPolicy::Never) => wire::PullPolicy::Never,
    };
    wire::CreateVmRequest {
        name: vm.id.clone(),
        image: spec.image.clone(),
        vcpus: u32::try_from(spec.vcpus).unwrap_or(0),
        memory_mib: u64::try_from(spec.memory_mib).unwrap_or(0),
        kernel_path: spec.kernel_path.clone(),
        pull_policy: pull_policy.into(),
        owner: Some(wire::Owner {
            cluster: spec.cluster.clone().unwrap_or_default(),
            namespace: spec.namespace.clone(),
            name: spec.name.clone(),
            uid: vm.fence.uid.clone(),
            generation: vm.fence.generation,
        }),
        idempotent: true,
        cold: spec.cold_start.as_deref() == Some("true"),
        driver: spec.driver.clone().unwrap_or_default(),
        power_state: power_state.into(),
        clone_from: spec.clone_from.clone(),
        spec_hash: spec.hash.clone(),
        hostname: spec.inputs.hostname.clone(),
        command: spec.inputs.command.clone(),
        args: spec.inputs.args.clone(),
        env: spec.inputs.env.clone(),
        user_data: spec.inputs.user_data.clone(),
        ssh_keys: spec.inputs.ssh_keys.clone(),
        volumes: spec.inputs.volumes.iter().map(volume).collect(),
        pull_secrets: spec.inputs.pull_secrets.iter().map(pull_secret).collect(),
        image_keys: spec.inputs.image_keys.clone(),
        ..wire::CreateVmRequest::default()
    }
}

fn volume(volume: &InputVolume) -> wire::Volume {
    let base = wire::Volume {
        name: volume.name.clone(),
        target: volume.target.clone(),
        read_only: volume.read_only,
        ..wire::Volume::default()
    };
    let file = |file: &InputFile| wire::VolumeFile {
        path: file.path.clone(),
        data: file.bytes.clone(),
        mode: file.mode,
    };
    match &volume.source {
        InputSource::Disk { size_mib, class } => {
            wire::Volume { own: true, size_mib: *size_mib, class: class.clone(), ..base }
        }
        InputSource::Path(path) => wire::Volume { source: path.clone(), ..base },
        InputSource::Files(files) => wire::Volume { files: files.iter().map(file).collect(), ..base },
    }
}

fn pull_secret(secret: &PullSecret) -> wire::PullSecret {
    wire::PullSecret { docker_config: secret.docker_config.clone(), legacy: secret.legacy }
}

impl From<wire::Vm> for VmInfo {
    fn from(vm: wire::Vm) -> Self {
        let some = |text: String| Some(text).filter(|text| !text.is_empty());
        let (state, power) = state(vm.state());
        let owner = vm.owner.unwrap_or_default();
        Self {
            state,
            ip: vm.ip_address,
            uid: some(owner.uid),
            object: some(owner.namespace).zip(some(owner.name)),
            cluster: some(owner.cluster),
            adopt: some(vm.adoptable_by),
            spec: some(vm.spec_hash),
            image_digest: vm.image_digest,
            created_at: vm.created_at_ms.div_euclid(1000),
            power,
        }
    }
}

/// Returns state and power state, as the agent service of coracle nodes reports them.
fn state(state: VmState) -> (State, Option<PowerState>) {
    let (state, power) = match state {
        VmState::Unspecified => return (State::Unspecified, None),
        VmState::Created | VmState::Starting => (State::Creating, PowerState::Running),
        VmState::Running | VmState::Hibernating => (State::Running, PowerState::Running),
        VmState::Paused => (State::Running, PowerState::Paused),
        VmState::Stopping => (State::Stopping, PowerState::Stopped),
        VmState::Stopped => (State::Stopped, PowerState::Stopped),
        VmState::Hibernated => (State::Stopped, PowerState::Hibernated),
        VmState::Failed => (State::Error, PowerState::Stopped),
        VmState::Deleting => (State::Deleting, PowerState::Stopped),
    };
    (state, Some(power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_of_the_host_service_has_its_object() {
        let owner = wire::Owner {
            cluster: "c".into(),
            namespace: "team".into(),
            name: "web".into(),
            uid: "u".into(),
            generation: 3,
        };
        let vm = wire::Vm {
            name: "team-web-u".into(),
            requested_name: "team-web".into(),
            state: VmState::Hibernated.into(),
            created_at_ms: 1_999,
            owner: Some(owner),
            spec_hash: "h".into(),
            ..wire::Vm::default()
        };
        assert_eq!(id_of(&vm), "team-web");
        let want = VmInfo {
            state: State::Stopped,
            uid: Some("u".into()),
            object: Some(("team".into(), "web".into())),
            cluster: Some("c".into()),
            spec: Some("h".into()),
            created_at: 1,
            power: Some(PowerState::Hibernated),
            ..VmInfo::default()
        };
        assert_eq!(VmInfo::from(vm), want);
        let local = wire::Vm { name: "web".into(), ..wire::Vm::default() };
        assert_eq!(id_of(&local), "web");
        assert_eq!(VmInfo::from(local), VmInfo::default());
    }
}
