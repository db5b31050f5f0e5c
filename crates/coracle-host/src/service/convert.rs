//! Between the wire's types and the host's.

use std::net::Ipv4Addr;

use coracle_hypervisor::{Forward, Probe};
use coracle_proto::host as pb;
use coracle_types::{MemoryMib, UnixMillis, Vcpus, VmState};
use tonic::Status;

use crate::recipe::VmPaths;
use crate::{
    BootFirmware, CreateSpec, Exit, Host, HostError, HostEvent, Owner, PullMode, TemplateInfo, View, Volume,
    VolumeKind, VolumeWish, files,
};

/// Checks a request where it enters.
pub(super) fn create_spec(request: pb::CreateVmRequest) -> Result<CreateSpec, Status> {
    let invalid = |message: String| HostError::Invalid { message }.status();
    let pull = match request.pull_policy() {
        pb::PullPolicy::Unspecified | pb::PullPolicy::IfNotPresent => PullMode::IfNotPresent,
        pb::PullPolicy::Always => PullMode::Always,
        pb::PullPolicy::Never => PullMode::Never,
    };
    let address = match request.ip_address.as_str() {
        "" => None,
        text => Some(text.parse::<Ipv4Addr>().map_err(|_| invalid(format!("{text:?} is no IPv4 address")))?),
    };
    Ok(CreateSpec {
        name: request.name.parse().map_err(|e: coracle_types::InvalidVmName| invalid(e.to_string()))?,
        owner: owner_of(request.owner.unwrap_or_default()),
        image: request.image,
        pull,
        vcpus: Vcpus::try_from(request.vcpus).map_err(|e| invalid(e.to_string()))?,
        memory: MemoryMib::try_from(request.memory_mib).map_err(|e| invalid(e.to_string()))?,
        kernel_path: request.kernel_path,
        address,
        hostname: request.hostname,
        command: request.command,
        args: request.args,
        env: request.env,
        user: request.user,
        workdir: request.workdir,
        metadata: request.metadata.into_iter().collect(),
        ports: request.ports.iter().map(forward).collect::<Result<_, _>>().map_err(invalid)?,
        disk_mib: Some(request.disk_mib).filter(|mib| *mib > 0),
        idempotent: request.idempotent,
        cold: request.cold,
        driver: request.driver,
        volumes: request.volumes.into_iter().map(volume_wish).collect(),
        firmware: firmware(&request.firmware).map_err(invalid)?,
        user_data: request.user_data,
    })
}

fn firmware(name: &str) -> Result<Option<BootFirmware>, String> {
    match name {
        "" | "auto" => Ok(None),
        "bios" => Ok(Some(BootFirmware::Bios)),
        "uefi" => Ok(Some(BootFirmware::Uefi)),
        other => Err(format!("firmware {other:?} is none of auto, bios, uefi")),
    }
}

fn firmware_name(firmware: BootFirmware) -> String {
    match firmware {
        BootFirmware::Bios => "bios",
        BootFirmware::Uefi => "uefi",
    }
    .to_owned()
}

/// A volume that a caller wants.
pub(super) fn volume_wish(volume: pb::Volume) -> VolumeWish {
    VolumeWish {
        name: volume.name,
        source: volume.source,
        target: volume.target,
        read_only: volume.read_only,
        size_mib: Some(volume.size_mib).filter(|mib| *mib > 0),
    }
}

fn volume(volume: &Volume) -> pb::Volume {
    let kind = match volume.kind {
        VolumeKind::Disk { .. } => pb::volume::Kind::Disk,
        VolumeKind::Block { .. } => pb::volume::Kind::Block,
        VolumeKind::Folder => pb::volume::Kind::Folder,
    };
    pb::Volume {
        name: volume.name.clone(),
        source: volume.source.display().to_string(),
        target: volume.target.clone(),
        read_only: volume.read_only,
        size_mib: 0,
        kind: kind.into(),
    }
}

/// The object that a caller speaks for.
pub(super) fn owner_of(owner: pb::Owner) -> Owner {
    Owner {
        cluster: owner.cluster,
        namespace: owner.namespace,
        name: owner.name,
        uid: owner.uid,
        generation: owner.generation,
    }
}

/// A shape that somebody wants a template of.
pub(super) fn shape(request: pb::WarmTemplateRequest) -> Result<(Vcpus, MemoryMib, String), Status> {
    let invalid = |message: String| HostError::Invalid { message }.status();
    let vcpus = Vcpus::try_from(request.vcpus).map_err(|e| invalid(e.to_string()))?;
    let memory = MemoryMib::try_from(request.memory_mib).map_err(|e| invalid(e.to_string()))?;
    Ok((vcpus, memory, request.kernel_path))
}

/// A template as callers see it.
pub(super) fn driver((name, probe): &(&'static str, Probe)) -> pb::DriverInfo {
    pb::DriverInfo {
        name: (*name).to_owned(),
        version: probe.version.clone(),
        available: probe.accelerator.is_some(),
        accelerator: probe.accelerator.map(|a| a.as_str().to_owned()).unwrap_or_default(),
        reason: probe.reason.clone(),
    }
}

pub(super) fn template(info: &TemplateInfo, standby: bool) -> pb::Template {
    pb::Template {
        key: info.key.to_string(),
        vcpus: info.vcpus.into(),
        memory_mib: info.memory.into(),
        taken_at_ms: info.taken_at.0,
        took_ms: info.took_ms,
        save_ms: info.save_ms,
        disk_mib: info.disk_mib,
        ram_bytes: info.ram_bytes,
        standby,
    }
}

fn forward(port: &pb::PortMapping) -> Result<Forward, String> {
    let number = |port: u32| {
        u16::try_from(port).ok().filter(|p| *p > 0).ok_or_else(|| format!("{port} is no TCP port"))
    };
    let host_address = match port.host_address.as_str() {
        "" => Ipv4Addr::LOCALHOST,
        text => text.parse().map_err(|_| format!("{text:?} is no IPv4 address"))?,
    };
    Ok(Forward { host_address, host_port: number(port.host_port)?, guest_port: number(port.guest_port)? })
}

/// A VM as callers see it.
pub(super) fn vm(host: &Host, view: &View) -> pb::Vm {
    let record = &view.record;
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
            })
            .collect(),
        boots: record.boots,
        agent_connected: view.guest.is_some(),
        boot_ms: record.boot_ms,
        disk_bytes: files::allocated_bytes(&VmPaths::of(host.config(), &record.id).own_disk(record)),
        command: record.workload.argv.clone(),
        identity_ms: record.identity_ms,
        workload_ms: record.workload_ms,
        saved_bytes: record.saved.as_ref().map_or(0, |saved| saved.bytes),
        template: record.template.as_ref().map(ToString::to_string).unwrap_or_default(),
        standby: record.standby,
        volumes: record.volumes.iter().map(volume).collect(),
        committed: record.committed.clone().unwrap_or_default(),
        firmware: record.system.as_ref().map(|system| firmware_name(system.firmware)).unwrap_or_default(),
    }
}

fn owner(owner: &Owner) -> pb::Owner {
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
    let view = View { record: event.record.clone(), guest: None };
    pb::VmEvent { r#type: event.kind.to_wire().into(), vm: Some(vm(host, &view)), time_unix_ms: event.time.0 }
}
