//! Client of the agent service `firecracker.v1`, of both generations.

use coracle_api::{
    PowerState,
    keys::{POWER, vm as meta},
};
use coracle_proto::firecracker as wire;
use futures_util::{StreamExt as _, stream::BoxStream};
use tonic::{Code, Request, Status, metadata::AsciiMetadataValue, transport::Channel};
use wire::firecracker_agent_client::FirecrackerAgentClient;

use super::{
    call::{Caller, ignore_not_found, sanitise_message},
    client::NodeClient,
    error::AgentError,
    fence::fenced_request,
    vm_info::{Fence, State, VmInfo},
};
use crate::{placement::Capacity, step::VmRef, vm_spec::VmSpec};

/// Largest number of VMs in one reply to ListVMs.
const PAGE_SIZE: i32 = 500;

/// The agent service of one node.
#[derive(Debug)]
pub(super) struct AgentService {
    client: FirecrackerAgentClient<Channel>,
    caller: Caller,
}

impl AgentService {
    pub(super) fn new(channel: Channel, caller: Caller) -> Self {
        Self { client: FirecrackerAgentClient::new(channel), caller }
    }

    async fn call_create(&self, request: Request<wire::CreateVmRequest>) -> Result<(), AgentError> {
        let mut client = self.client.clone();
        let call = client.create_vm(request);
        let reply = self.caller.call("CreateVM", self.caller.deadlines.boot, call).await?;
        self.check_reply("CreateVM", &reply.error_message, reply.state == State::Error as i32)
    }

    /// Refuses a VM with inputs: the CreateVM message is frozen and has no fields for the guest's inputs.
    fn check_inputs(&self, spec: &VmSpec) -> Result<(), AgentError> {
        if spec.inputs.is_empty() {
            return Ok(());
        }
        let message = "the node has no host service: it cannot be sent command, args, env, envFrom, userData, \
                       hostname, sshAuthorizedKeys, volumes, imagePullSecrets or keys of signatures";
        Err(self.caller.error("CreateVM", Code::Unimplemented, message.to_owned()))
    }

    /// Returns the error in a reply: first-generation agents answer OK and report the error in the message
    /// (docs/reference/agent-service.md).
    fn check_reply(&self, operation: &'static str, message: &str, failed: bool) -> Result<(), AgentError> {
        if message.is_empty() && !failed {
            return Ok(());
        }
        Err(self.caller.error(operation, classify(message), sanitise_message(message)))
    }
}

#[tonic::async_trait]
impl NodeClient for AgentService {
    async fn get(&self, id: &str, fence: &Fence) -> Result<Option<VmInfo>, AgentError> {
        let request = fenced_request(wire::GetVmRequest { vm_id: id.to_owned() }, fence);
        let mut client = self.client.clone();
        match self.caller.call("GetVM", self.caller.deadlines.call, client.get_vm(request)).await {
            Ok(reply) => Ok(reply.vm.map(VmInfo::from)),
            Err(error) if error.code == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn create(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError> {
        self.check_inputs(spec)?;
        self.call_create(fenced_request(create_request(vm, spec), &vm.fence)).await
    }

    async fn create_stopped(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError> {
        self.check_inputs(spec)?;
        let mut request = fenced_request(create_request(vm, spec), &vm.fence);
        let off = AsciiMetadataValue::from_static(PowerState::Stopped.as_str());
        request.metadata_mut().insert(POWER, off);
        self.call_create(request).await
    }

    async fn start(&self, vm: &VmRef) -> Result<(), AgentError> {
        let request = fenced_request(wire::StartVmRequest { vm_id: vm.id.clone() }, &vm.fence);
        let mut client = self.client.clone();
        let call = client.start_vm(request);
        let reply = self.caller.call("StartVM", self.caller.deadlines.boot, call).await?;
        self.check_reply("StartVM", &reply.error_message, reply.state == State::Error as i32)
    }

    async fn set_power_state(&self, vm: &VmRef, state: PowerState) -> Result<(), AgentError> {
        if state == PowerState::Running {
            return self.start(vm).await;
        }
        let mut request =
            fenced_request(wire::StopVmRequest { vm_id: vm.id.clone(), force: false }, &vm.fence);
        if state != PowerState::Stopped {
            request.metadata_mut().insert(POWER, AsciiMetadataValue::from_static(state.as_str()));
        }
        let mut client = self.client.clone();
        let call = client.stop_vm(request);
        let reply = self.caller.call("StopVM", self.caller.deadlines.boot, call).await?;
        self.check_reply("StopVM", &reply.error_message, reply.state == State::Error as i32)
    }

    async fn stop(&self, vm: &VmRef) -> Result<(), AgentError> {
        // StopVM has no field for the grace period.
        let grace = vm.grace.unwrap_or_default();
        let request =
            fenced_request(wire::StopVmRequest { vm_id: vm.id.clone(), force: grace.is_zero() }, &vm.fence);
        let mut client = self.client.clone();
        let deadline = self.caller.deadlines.call + grace;
        let called = self.caller.call("StopVM", deadline, client.stop_vm(request)).await;
        ignore_not_found(
            called.and_then(|r| self.check_reply("StopVM", &r.error_message, r.state == State::Error as i32)),
        )
    }

    async fn delete(&self, vm: &VmRef) -> Result<(), AgentError> {
        let request = fenced_request(wire::DeleteVmRequest { vm_id: vm.id.clone() }, &vm.fence);
        let mut client = self.client.clone();
        let call = client.delete_vm(request);
        let called = self.caller.call("DeleteVM", self.caller.deadlines.call, call).await;
        ignore_not_found(called.and_then(|r| self.check_reply("DeleteVM", &r.error_message, !r.success)))
    }

    /// Reads the size of the node. First-generation agents take a second to answer.
    async fn capacity(&self) -> Result<Capacity, AgentError> {
        let mut client = self.client.clone();
        let call = client.get_host_info(wire::GetHostInfoRequest {});
        let info = self.caller.call("GetHostInfo", self.caller.deadlines.call, call).await?;
        Ok(Capacity {
            vcpus: u32::try_from(info.total_cpus).unwrap_or(0),
            memory_mib: u64::try_from(info.total_memory_mb).unwrap_or(0),
        })
    }

    async fn list(&self) -> Result<Vec<(String, VmInfo)>, AgentError> {
        let (mut all, mut page_token) = (Vec::new(), String::new());
        let mut client = self.client.clone();
        loop {
            let request = wire::ListVMsRequest { page_size: PAGE_SIZE, page_token: page_token.clone() };
            let call = client.list_v_ms(request);
            let page = self.caller.call("ListVMs", self.caller.deadlines.call, call).await?;
            all.extend(page.vms.into_iter().map(|vm| (vm.vm_id.clone(), VmInfo::from(vm))));
            // An agent that repeats its page token would make this loop endless.
            if page.next_page_token.is_empty() || page.next_page_token == page_token {
                return Ok(all);
            }
            page_token = page.next_page_token;
        }
    }

    async fn watch(&self) -> Result<BoxStream<'static, Result<String, Status>>, AgentError> {
        let mut client = self.client.clone();
        let call = client.watch_vm_events(wire::WatchVmEventsRequest { vm_id: String::new() });
        let events = self.caller.call("WatchVMEvents", self.caller.deadlines.call, call).await?;
        Ok(events.map(|event| event.map(|event| event.vm_id)).boxed())
    }
}

/// Builds the CreateVM request. Values without a field in the frozen message are sent in its metadata.
fn create_request(vm: &VmRef, spec: &VmSpec) -> wire::CreateVmRequest {
    let optional = |value: &str| Some(value.to_owned()).filter(|value| !value.is_empty());
    let metadata = [
        (meta::UID, Some(vm.fence.uid.clone())),
        (meta::IDEMPOTENT, Some("true".to_owned())),
        (meta::NAMESPACE, Some(spec.namespace.clone())),
        (meta::NAME, Some(spec.name.clone())),
        (meta::SPEC, Some(spec.hash.clone())),
        (meta::CLUSTER, spec.cluster.clone()),
        (meta::IMAGE_PULL_POLICY, spec.image_pull_policy.map(|policy| policy.as_str().to_owned())),
        (meta::CLONE_FROM, optional(&spec.clone_from)),
        (meta::COLD_START, spec.cold_start.clone()),
        (meta::DRIVER, spec.driver.clone()),
    ];
    let present = |(key, value): (&str, Option<String>)| value.map(|value| (key.to_owned(), value));
    wire::CreateVmRequest {
        vm_id: vm.id.clone(),
        vcpu_count: spec.vcpus,
        memory_mb: spec.memory_mib,
        kernel_path: spec.kernel_path.clone(),
        image_ref: spec.image.clone(),
        metadata: metadata.into_iter().filter_map(present).collect(),
        ..wire::CreateVmRequest::default()
    }
}

/// Derives the gRPC code of an in-band error from its text.
fn classify(message: &str) -> Code {
    if message.contains("not found") {
        Code::NotFound
    } else if message.contains("already exists") {
        Code::AlreadyExists
    } else if message.contains("must be recreated") {
        Code::FailedPrecondition
    } else {
        Code::Internal
    }
}

impl From<wire::VmInfo> for VmInfo {
    fn from(mut info: wire::VmInfo) -> Self {
        let said = |key| info.metadata.get(key).filter(|v| !v.is_empty()).cloned();
        let (object, cluster) = (said(meta::NAMESPACE).zip(said(meta::NAME)), said(meta::CLUSTER));
        Self {
            state: info.state(),
            ip: info.ip_address,
            uid: info.metadata.remove(meta::UID).filter(|uid| !uid.is_empty()),
            object,
            cluster,
            adopt: info.metadata.remove(meta::ADOPT).filter(|object| !object.is_empty()),
            spec: info.metadata.remove(meta::SPEC).filter(|spec| !spec.is_empty()),
            image_digest: info.metadata.remove(meta::IMAGE_DIGEST).unwrap_or_default(),
            created_at: info.created_at,
            power: info.metadata.remove(meta::POWER_STATE).as_deref().and_then(PowerState::parse),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_band_errors_have_codes() {
        for (message, want) in [
            ("VM default-web not found", Code::NotFound),
            ("VM default-web already exists", Code::AlreadyExists),
            ("VM default-web is stopped and must be recreated", Code::FailedPrecondition),
            ("jailer: exit status 1", Code::Internal),
        ] {
            assert_eq!(classify(message), want, "{message}");
        }
    }
}
