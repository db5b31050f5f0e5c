//! Translation between messages of the agent service and types of the host core. Pure.

use std::collections::BTreeMap;

use coracle_api::keys::vm as keys;
use coracle_host::{EventKind, HostError, Owner, PullOrigin, PullPolicy, Record, View, VmSpec};
use coracle_proto::firecracker as pb;
use coracle_types::{MemoryMib, Vcpus, VmState};
use tonic::metadata::MetadataMap;

use crate::objects::{Known, fence_of, vm_name};

/// Form in which failures are reported to the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorStyle {
    /// gRPC status, which the second generation of clients expects.
    #[default]
    Status,
    /// Status OK with an error text in the reply, which the first generation of clients expects.
    Inband,
}

/// Maximum page size of ListVMs.
pub(crate) const PAGE_MAX: usize = 1000;

/// State of a record, as a state of the agent service.
pub(crate) fn state(record: &Record, style: ErrorStyle) -> pb::VmState {
    match (record.state, style) {
        (VmState::Creating | VmState::Created | VmState::Starting, _) => pb::VmState::Creating,
        // The original API has no paused state: the guest is in memory and can be resumed.
        (VmState::Running | VmState::Paused | VmState::Hibernating, _) => pb::VmState::Running,
        (VmState::Stopping, _) => pb::VmState::Stopping,
        (VmState::Stopped | VmState::Hibernated, _) => pb::VmState::Stopped,
        (VmState::Deleting, _) => pb::VmState::Deleting,
        // First-generation clients expect STOPPED for a VM that ran and whose VMM died.
        (VmState::Failed, ErrorStyle::Inband) if record.started_at.is_some() => pb::VmState::Stopped,
        (VmState::Failed, _) => pb::VmState::Error,
    }
}

/// Power state of the VM, which includes states that the agent service does not have.
fn power_state(state: VmState) -> &'static str {
    match state {
        VmState::Paused => "Paused",
        VmState::Hibernated => "Hibernated",
        VmState::Creating
        | VmState::Created
        | VmState::Starting
        | VmState::Running
        | VmState::Hibernating => "Running",
        VmState::Stopping | VmState::Stopped | VmState::Failed | VmState::Deleting => "Stopped",
    }
}

/// VM as a message of the agent service.
pub(crate) fn info(view: &View, socket_dir: &str, style: ErrorStyle) -> pb::VmInfo {
    let record = &*view.record;
    let mut metadata: BTreeMap<_, _> = record.metadata.clone();
    if !record.image_digest.is_empty() {
        metadata.insert(keys::IMAGE_DIGEST.to_owned(), record.image_digest.clone());
    }
    identify(&mut metadata, record);
    metadata.insert(keys::POWER_STATE.to_owned(), power_state(record.state).to_owned());
    pb::VmInfo {
        vm_id: Known::from(record).wire_id().to_owned(),
        state: state(record, style).into(),
        vcpu_count: u32::from(record.vcpus).cast_signed(),
        memory_mb: record.memory.get().cast_signed(),
        ip_address: record.reachable_address().map(|a| a.to_string()).unwrap_or_default(),
        socket_path: socket_path(record, socket_dir),
        created_at: record.created_at.seconds(),
        metadata: metadata.into_iter().collect(),
    }
}

/// Sets the metadata of the owner from the record: the metadata of a restored snapshot are those of the original VM.
fn identify(metadata: &mut BTreeMap<String, String>, record: &Record) {
    let owner = &record.owner;
    for (key, value) in [
        (keys::UID, &owner.uid),
        (keys::NAMESPACE, &owner.namespace),
        (keys::NAME, &owner.name),
        (keys::CLUSTER, &owner.cluster),
    ] {
        match value.is_empty() {
            true => metadata.remove(key),
            false => metadata.insert(key.to_owned(), value.clone()),
        };
    }
}

/// Control socket of the VM's VMM.
pub(crate) fn socket_path(record: &Record, socket_dir: &str) -> String {
    format!("{socket_dir}/{}/qmp.sock", record.id.short())
}

/// Validates and converts a request to create a VM. Clients match on the error messages.
pub(crate) fn vm_spec(
    request: pb::CreateVmRequest,
    caller: &MetadataMap,
    default_image: &str,
    default_kernel: &str,
) -> Result<VmSpec, HostError> {
    let invalid = |message: String| HostError::Invalid { message };
    let name = vm_name(&request.vm_id)?;
    let vcpus = u32::try_from(request.vcpu_count).unwrap_or(0);
    let vcpus = Vcpus::try_from(vcpus).map_err(|e| invalid(e.to_string()))?;
    let memory = u64::try_from(request.memory_mb).unwrap_or(0);
    let memory = MemoryMib::try_from(memory).map_err(|e| invalid(e.to_string()))?;
    let address = match request.ip_address.as_str() {
        "" => None,
        text => Some(
            text.parse()
                .map_err(|_| invalid(format!("invalid ip_address {text:?}: want an IPv4 address")))?,
        ),
    };
    let metadata: BTreeMap<_, _> = request.metadata.into_iter().collect();
    let said = |key: &str| metadata.get(key).cloned().unwrap_or_default();
    let image = [request.image_ref, said("image_ref"), request.rootfs_path, default_image.to_owned()]
        .into_iter()
        .find(|image| !image.is_empty())
        .ok_or_else(|| invalid("image_ref is required: the node has no default image".to_owned()))?;
    let pull = match said(keys::IMAGE_PULL_POLICY).as_str() {
        "Always" => PullPolicy::Always,
        "Never" => PullPolicy::Never,
        _ => PullPolicy::IfNotPresent,
    };
    let generation = fence_of(caller).map_or(0, |f| f.generation);
    let owner = Owner {
        cluster: said(keys::CLUSTER),
        namespace: said(keys::NAMESPACE),
        name: said(keys::NAME),
        uid: said(keys::UID),
        generation,
    };
    let kernel_path =
        if request.kernel_path.is_empty() { default_kernel.to_owned() } else { request.kernel_path };
    Ok(VmSpec {
        owner,
        pull,
        origin: PullOrigin::Cluster,
        vcpus,
        memory,
        kernel_path,
        address,
        idempotent: said(keys::IDEMPOTENT) == "true",
        cold: said(keys::COLD_START) == "true",
        driver: said(keys::DRIVER),
        metadata,
        ..VmSpec::of(name, &image)
    })
}

/// Event type of the agent service for a change; `None` if it has no such type.
pub(crate) fn event_type(kind: EventKind) -> Option<pb::EventType> {
    match kind {
        EventKind::Created => Some(pb::EventType::Created),
        EventKind::Started => Some(pb::EventType::Started),
        EventKind::Stopped => Some(pb::EventType::Stopped),
        EventKind::Deleted => Some(pb::EventType::Deleted),
        EventKind::Failed => Some(pb::EventType::Error),
        EventKind::Updated => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(change: impl FnOnce(&mut pb::CreateVmRequest)) -> pb::CreateVmRequest {
        let mut request = pb::CreateVmRequest {
            vm_id: "default-web".into(),
            vcpu_count: 1,
            memory_mb: 128,
            ..Default::default()
        };
        change(&mut request);
        request
    }

    fn refusal(change: impl FnOnce(&mut pb::CreateVmRequest)) -> String {
        vm_spec(request(change), &MetadataMap::new(), "default:1", "").unwrap_err().to_string()
    }

    #[test]
    fn invalid_arguments_keep_the_original_messages() {
        assert_eq!(refusal(|r| r.vm_id.clear()), "vm_id is required");
        assert_eq!(refusal(|r| r.vcpu_count = 0), "vcpu_count must be between 1 and 32");
        assert_eq!(refusal(|r| r.vcpu_count = -1), "vcpu_count must be between 1 and 32");
        assert_eq!(refusal(|r| r.vcpu_count = 64), "vcpu_count must be between 1 and 32");
        assert_eq!(refusal(|r| r.memory_mb = 64), "memory_mb must be at least 128");
        assert_eq!(refusal(|r| r.ip_address = "x".into()), "invalid ip_address \"x\": want an IPv4 address");
    }

    #[test]
    fn image_ref_precedes_metadata_rootfs_and_default() {
        let image = |change: fn(&mut pb::CreateVmRequest)| {
            vm_spec(request(change), &MetadataMap::new(), "default:1", "").unwrap().image
        };
        assert_eq!(image(|_| ()), "default:1");
        assert_eq!(image(|r| r.rootfs_path = "root:2".into()), "root:2");
        let both = |r: &mut pb::CreateVmRequest| {
            r.rootfs_path = "root:2".into();
            r.metadata.insert("image_ref".into(), "meta:3".into());
        };
        assert_eq!(image(both), "meta:3");
        assert_eq!(image(|r| r.image_ref = "ref:4".into()), "ref:4");
    }
}
