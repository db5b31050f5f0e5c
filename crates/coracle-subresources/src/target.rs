//! VM of an object: the host service of its node, and its id there.

use coracle_api::MikromVM;
use coracle_proto::host as pb;
use coracle_proto::host::host_client::HostClient;
use kube::Api;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::SubresourceApi;
use crate::failure::Failure;
use crate::guard::Object;

/// Longest reply: a list has every VM of the node.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// VM on its node.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) channel: Channel,
    /// Id of the VM on the node.
    pub(crate) vm: String,
}

/// Finds the VM of an object, by its present state.
///
/// # Errors
/// 404 without the object or its VM, 409 for a VM that is on no node yet, 503 when the node does not respond.
pub(crate) async fn find(api: &SubresourceApi, object: &Object) -> Result<Target, Failure> {
    let objects: Api<MikromVM> = Api::namespaced(api.client.clone(), &object.namespace);
    let found = objects.get_opt(&object.name).await;
    let found =
        found.map_err(|error| Failure::unavailable(format!("read MikromVM {}: {error}", object.name)))?;
    let found = found
        .ok_or_else(|| Failure::not_found(format!("mikromvms.vm.mikrom.es \"{}\" not found", object.name)))?;
    let channel = api.nodes.open(&found).await?;
    let uid = found.metadata.uid.clone().unwrap_or_default();
    let mut node = HostClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let failed = |status: Status| {
        Failure::unavailable(format!("ask the node of MikromVM {}: {}", object.name, status.message()))
    };
    let request = pb::GetVmRequest { vm: found.vm_id(), exact: true, ..Default::default() };
    match node.get_vm(request).await {
        Ok(vm) if is_of(vm.get_ref(), &uid) => return Ok(Target { channel, vm: vm.into_inner().id }),
        Err(status) if status.code() != Code::NotFound => return Err(failed(status)),
        // Another VM may have the name. The VM of the object then has a different id.
        Ok(_) | Err(_) => {}
    }
    let all = node.list_vms(pb::ListVmsRequest {}).await.map_err(failed)?.into_inner().vms;
    match all.into_iter().find(|vm| is_of(vm, &uid)) {
        Some(vm) => Ok(Target { channel, vm: vm.id }),
        None => Err(Failure::not_found(format!("the node of MikromVM {} has no VM of it", object.name))),
    }
}

/// True when the node created the VM for this object.
fn is_of(vm: &pb::Vm, uid: &str) -> bool {
    !uid.is_empty() && vm.owner.as_ref().is_some_and(|owner| owner.uid == uid)
}
