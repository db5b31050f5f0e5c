//! Translation between messages and types of the host core. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use coracle_api::keys::vm as keys;
use coracle_host::{
    BootFirmware, EventKind, Exit, Host, HostEvent, LocalUser, OwnContent, OwnFile, OwnVolume, Owner,
    PullPolicy, TemplateInfo, View, VmSpec, Volume, VolumeKind, VolumeRequest,
};
use coracle_hypervisor::{Display, Forward, Probe, Protocol};
use coracle_image::PublicKeys;
use coracle_net::Reach;
use coracle_oci::{Credentials, OciError, PullOrigin, PullSecret, Reference};
use coracle_proto::host as pb;
use coracle_types::{MemoryMib, UnixMillis, Vcpus, VmState};
use tonic::Status;

use crate::objects::Known;
use crate::status::invalid;

/// Checks and converts a request to create a VM.
pub(super) fn vm_spec(
    request: pb::CreateVmRequest,
    local_user: LocalUser,
    origin: PullOrigin,
) -> Result<VmSpec, Status> {
    let pull = match request.pull_policy() {
        pb::PullPolicy::Unspecified | pb::PullPolicy::IfNotPresent => PullPolicy::IfNotPresent,
        pb::PullPolicy::Always => PullPolicy::Always,
        pb::PullPolicy::Never => PullPolicy::Never,
    };
    let mut metadata: BTreeMap<_, _> = request.metadata.into_iter().collect();
    if !request.spec_hash.is_empty() {
        metadata.insert(keys::SPEC.to_owned(), request.spec_hash);
    }
    let address = match request.ip_address.as_str() {
        "" => None,
        text => {
            Some(text.parse::<Ipv4Addr>().map_err(|_| invalid(format!("invalid IPv4 address {text:?}")))?)
        }
    };
    let image_keys = match request.image_keys.as_str() {
        "" => None,
        pem => Some(PublicKeys::parse(pem).map_err(|e| invalid(e.to_string()))?),
    };
    let (own, given): (Vec<_>, Vec<_>) = request.volumes.into_iter().partition(is_own);
    Ok(VmSpec {
        name: request.name.parse().map_err(|e: coracle_types::InvalidVmName| invalid(e.to_string()))?,
        owner: owner_of(request.owner.unwrap_or_default()),
        image: request.image,
        pull,
        origin,
        may_use_image: false,
        image_keys,
        vcpus: Vcpus::try_from(request.vcpus).map_err(|e| invalid(e.to_string()))?,
        memory: MemoryMib::try_from(request.memory_mib).map_err(|e| invalid(e.to_string()))?,
        kernel_path: request.kernel_path,
        network: Some(request.network).filter(|name| !name.is_empty()),
        bandwidth: None,
        address,
        hostname: request.hostname,
        command: request.command,
        args: request.args,
        env: request.env,
        user: request.user,
        workdir: request.workdir,
        metadata,
        ports: request.ports.iter().map(forward).collect::<Result<_, _>>().map_err(invalid)?,
        reach: request.reach.map(reach).unwrap_or_default(),
        cgroup_parent: String::new(),
        disk_mib: Some(request.disk_mib).filter(|mib| *mib > 0),
        idempotent: request.idempotent,
        cold: request.cold,
        driver: request.driver,
        volumes: given.into_iter().map(|volume| volume_request(volume, local_user)).collect(),
        own_volumes: own.into_iter().map(own_volume).collect::<Result<_, _>>().map_err(invalid)?,
        ssh_keys: request.ssh_keys,
        sandbox: None,
        firmware: firmware(&request.firmware).map_err(invalid)?,
        user_data: request.user_data,
        resolver: None,
        display: display(&request.display)?,
        without_agent: request.without_agent,
        address_of: None,
    })
}

fn display(size: &str) -> Result<Option<Display>, Status> {
    let parse = |size: &str| size.parse().map_err(|why| invalid(format!("display: {why}")));
    Some(size).filter(|size| !size.is_empty()).map(parse).transpose()
}

fn firmware(name: &str) -> Result<Option<BootFirmware>, String> {
    match name {
        "" | "auto" => Ok(None),
        "bios" => Ok(Some(BootFirmware::Bios)),
        "uefi" => Ok(Some(BootFirmware::Uefi)),
        other => Err(format!("invalid firmware {other:?}: auto, bios or uefi")),
    }
}

fn firmware_name(firmware: BootFirmware) -> String {
    match firmware {
        BootFirmware::Bios => "bios",
        BootFirmware::Uefi => "uefi",
    }
    .to_owned()
}

/// Request for a volume, on behalf of a local user if there is one.
pub(super) fn volume_request(volume: pb::Volume, local_user: LocalUser) -> VolumeRequest {
    VolumeRequest {
        name: volume.name,
        source: volume.source,
        target: volume.target,
        read_only: volume.read_only,
        size_mib: Some(volume.size_mib).filter(|mib| *mib > 0),
        local_user,
        ..VolumeRequest::default()
    }
}

/// True for a volume that is made and deleted with its VM.
fn is_own(volume: &pb::Volume) -> bool {
    volume.own || !volume.files.is_empty()
}

fn own_volume(volume: pb::Volume) -> Result<OwnVolume, String> {
    let pb::Volume { name, source, target, read_only, size_mib, own, class, files, .. } = volume;
    if !source.is_empty() {
        return Err(format!("volume {name}: a volume of the VM's own has no source"));
    }
    let content = if own {
        if !files.is_empty() {
            return Err(format!("volume {name}: a disk has no files"));
        }
        OwnContent::Disk { size_mib, class }
    } else {
        let file = |file: pb::VolumeFile| (file.path, OwnFile { bytes: file.data, mode: file.mode });
        OwnContent::Files(files.into_iter().map(file).collect())
    };
    Ok(OwnVolume { name, target, read_only, content })
}

/// Credentials that a caller passes for the pull of its image.
pub(super) fn credentials(image: &str, given: &[pb::PullSecret]) -> Result<Vec<Credentials>, Status> {
    if given.is_empty() {
        return Ok(vec![]);
    }
    let reference: Reference = image.parse().map_err(|e: OciError| invalid(e.to_string()))?;
    let mut found = Vec::new();
    for pb::PullSecret { docker_config, legacy } in given {
        let parsed = match legacy {
            true => PullSecret::parse_legacy(docker_config),
            false => PullSecret::parse(docker_config),
        };
        found.extend(parsed.map_err(|e| invalid(e.to_string()))?.credentials(&reference));
    }
    Ok(found)
}

fn volume(volume: &Volume) -> pb::Volume {
    let kind = match volume.kind {
        VolumeKind::Disk { .. } => pb::volume::Kind::Disk,
        VolumeKind::Block { .. } => pb::volume::Kind::Block,
        VolumeKind::SharedDir | VolumeKind::Tmpfs(_) => pb::volume::Kind::SharedDir,
    };
    pb::Volume {
        name: volume.name.clone(),
        source: volume.source.display().to_string(),
        target: volume.target.clone(),
        read_only: volume.read_only,
        kind: kind.into(),
        ..pb::Volume::default()
    }
}

/// Cluster object on whose behalf the caller acts.
pub(super) fn owner_of(owner: pb::Owner) -> Owner {
    Owner {
        cluster: owner.cluster,
        namespace: owner.namespace,
        name: owner.name,
        uid: owner.uid,
        generation: owner.generation,
    }
}

/// VM shape of a template request.
pub(super) fn shape(request: pb::WarmTemplateRequest) -> Result<(Vcpus, MemoryMib, String), Status> {
    let vcpus = Vcpus::try_from(request.vcpus).map_err(|e| invalid(e.to_string()))?;
    let memory = MemoryMib::try_from(request.memory_mib).map_err(|e| invalid(e.to_string()))?;
    Ok((vcpus, memory, request.kernel_path))
}

/// Driver and the result of its probe.
pub(super) fn driver((name, probe): &(&'static str, Probe)) -> pb::DriverInfo {
    pb::DriverInfo {
        name: (*name).to_owned(),
        version: probe.version.clone(),
        available: probe.accelerator.is_some(),
        accelerator: probe.accelerator.map(|a| a.as_str().to_owned()).unwrap_or_default(),
        reason: probe.reason.clone(),
    }
}

pub(super) fn template(info: &TemplateInfo, pooled: bool) -> pb::Template {
    pb::Template {
        key: info.key.to_string(),
        vcpus: info.vcpus.into(),
        memory_mib: info.memory.into(),
        taken_at_ms: info.taken_at.0,
        took_ms: info.took_ms,
        save_ms: info.save_ms,
        disk_mib: info.disk_mib,
        ram_bytes: info.ram_bytes,
        pooled,
    }
}

fn forward(port: &pb::PortMapping) -> Result<Forward, String> {
    let number = |port: u32| {
        u16::try_from(port).ok().filter(|p| *p > 0).ok_or_else(|| format!("invalid port {port}: 1 to 65535"))
    };
    let protocol = match port.protocol.as_str() {
        "" | "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        other => return Err(format!("invalid protocol {other:?}: tcp or udp")),
    };
    let host_address = match port.host_address.as_str() {
        "" => Ipv4Addr::LOCALHOST,
        text => text.parse().map_err(|_| format!("invalid IPv4 address {text:?}"))?,
    };
    let (host_port, guest_port) = (number(port.host_port)?, number(port.guest_port)?);
    Ok(Forward { protocol, host_address, host_port, guest_port })
}

pub(super) fn reach(reach: pb::Reach) -> Reach {
    Reach { guests: reach.guests, node: reach.node }
}

/// VM with its current state.
pub(super) fn vm(host: &Host, view: &View) -> pb::Vm {
    let record = &*view.record;
    let noted = |key: &str| record.metadata.get(key).cloned().unwrap_or_default();
    let requested_name = Known::from(record).wire_id();
    let millis = |time: Option<UnixMillis>| time.map_or(0, |t| t.0);
    pb::Vm {
        id: record.id.to_string(),
        name: record.name.to_string(),
        state: state(record.state).into(),
        image: record.image.clone(),
        image_digest: record.image_digest.clone(),
        vcpus: record.vcpus.into(),
        memory_mib: record.memory.into(),
        ip_address: record.reachable_address().map(|a| a.to_string()).unwrap_or_default(),
        mac: record.mac.to_string(),
        driver: host.driver_of(record).to_owned(),
        accelerator: record.accelerator.map(|a| a.as_str().to_owned()).unwrap_or_default(),
        vmm_pid: record.process.map_or(0, |p| p.pid),
        created_at_ms: record.created_at.0,
        started_at_ms: millis(record.started_at),
        finished_at_ms: millis(record.finished_at),
        exit: record.exit.as_ref().map(exit),
        oom_killed: record.oom_killed,
        message: record.message.clone(),
        metadata: record.metadata.clone().into_iter().collect(),
        owner: Some(owner(&record.owner)).filter(|o| !o.uid.is_empty() || !o.name.is_empty()),
        ports: record
            .ports
            .iter()
            .map(|f| pb::PortMapping {
                host_address: f.host_address.to_string(),
                host_port: f.host_port.into(),
                guest_port: f.guest_port.into(),
                protocol: f.protocol.as_str().to_owned(),
            })
            .collect(),
        boots: record.boots,
        agent_connected: view.guest.is_some(),
        boot_ms: record.boot_ms,
        disk_bytes: host.disk_bytes(record),
        command: record.workload.argv.clone(),
        identity_ms: record.identity_ms,
        workload_ms: record.workload_ms,
        saved_bytes: record.saved.as_ref().map_or(0, |saved| saved.bytes),
        template: record.template.as_ref().map(ToString::to_string).unwrap_or_default(),
        pooled: record.pooled,
        requested_name: if requested_name == record.name.as_str() {
            String::new()
        } else {
            requested_name.to_owned()
        },
        spec_hash: noted(keys::SPEC),
        adoptable_by: noted(keys::ADOPT),
        volumes: record.volumes.iter().map(volume).collect(),
        committed: record.committed.clone().unwrap_or_default(),
        firmware: record
            .disk_image_vm
            .as_ref()
            .map(|disk_image_vm| firmware_name(disk_image_vm.firmware))
            .unwrap_or_default(),
    }
}

pub(super) fn owner(owner: &Owner) -> pb::Owner {
    pb::Owner {
        cluster: owner.cluster.clone(),
        namespace: owner.namespace.clone(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
        generation: owner.generation,
    }
}

fn exit(exit: &Exit) -> pb::ExitStatus {
    pb::ExitStatus { code: exit.code, signal: exit.signal, error: exit.error.clone() }
}

fn state(state: VmState) -> pb::VmState {
    match state {
        VmState::Creating | VmState::Created => pb::VmState::Created,
        VmState::Starting => pb::VmState::Starting,
        VmState::Running => pb::VmState::Running,
        VmState::Paused => pb::VmState::Paused,
        VmState::Hibernating => pb::VmState::Hibernating,
        VmState::Hibernated => pb::VmState::Hibernated,
        VmState::Stopping => pb::VmState::Stopping,
        VmState::Stopped => pb::VmState::Stopped,
        VmState::Failed => pb::VmState::Failed,
        VmState::Deleting => pb::VmState::Deleting,
    }
}

pub(super) fn event(host: &Host, event: &HostEvent) -> pb::VmEvent {
    let view = View { record: event.record.clone(), guest: None, containers: Arc::default() };
    pb::VmEvent {
        r#type: event_type(event.kind).into(),
        vm: Some(vm(host, &view)),
        time_unix_ms: event.time.0,
    }
}

fn event_type(kind: EventKind) -> pb::vm_event::Type {
    match kind {
        EventKind::Created => pb::vm_event::Type::Created,
        EventKind::Started => pb::vm_event::Type::Started,
        EventKind::Stopped => pb::vm_event::Type::Stopped,
        EventKind::Deleted => pb::vm_event::Type::Deleted,
        EventKind::Failed => pb::vm_event::Type::Failed,
        EventKind::Updated => pb::vm_event::Type::Updated,
    }
}
