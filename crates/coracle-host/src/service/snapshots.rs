//! Calls about snapshots.

use std::io;

use coracle_image::Step;
use coracle_proto::host as pb;
use tokio::sync::mpsc;
use tonic::{Response, Status, Streaming};

use super::pieces::{Incoming, Pieces};
use super::streams::driven;
use super::{Replies, Reply, convert, images};
use crate::host::registries::windows;
use crate::{Host, HostError, RestoreSpec, SnapshotInfo, SnapshotName};

/// Messages that wait for a slow caller.
const QUEUE: usize = 4;

pub(super) fn wire(info: &SnapshotInfo) -> pb::Snapshot {
    pb::Snapshot {
        name: info.name.to_string(),
        vm: info.vm.to_string(),
        image: info.image.clone(),
        image_digest: info.image_digest.clone(),
        vcpus: info.vcpus.into(),
        memory_mib: info.memory.into(),
        taken_at_ms: info.taken_at.0,
        memory_bytes: info.memory_bytes,
        disk_bytes: info.disk_bytes,
        driver: info.machine.driver.clone(),
        vmm_version: info.machine.vmm.clone(),
        accelerator: info.machine.accelerator.clone(),
        agent_version: info.agent.clone(),
    }
}

fn name(text: &str) -> Result<SnapshotName, Status> {
    text.parse().map_err(|e: crate::InvalidSnapshotName| invalid(&e))
}

fn invalid(why: &impl ToString) -> Status {
    HostError::Invalid { message: why.to_string() }.status()
}

pub(super) async fn save(host: &Host, request: pb::SaveSnapshotRequest) -> Reply<pb::Snapshot> {
    let wanted = if request.name.is_empty() { None } else { Some(name(&request.name)?) };
    let info = host.save_snapshot(&request.vm, wanted).await?;
    Ok(Response::new(wire(&info)))
}

pub(super) async fn list(host: &Host) -> Reply<pb::ListSnapshotsResponse> {
    let snapshots = host.snapshots().await?.iter().map(wire).collect();
    Ok(Response::new(pb::ListSnapshotsResponse { snapshots }))
}

pub(super) async fn restore(host: &Host, request: pb::RestoreVmRequest) -> Reply<pb::Vm> {
    let vm = match request.name.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|e: coracle_types::InvalidVmName| invalid(&e))?),
    };
    let owner = convert::owner_of(request.owner.unwrap_or_default());
    let record =
        host.restore(&request.snapshot, RestoreSpec { name: vm, owner, ..RestoreSpec::default() }).await?;
    let view = host.get(record.id.as_str())?;
    Ok(Response::new(convert::vm(host, &view)))
}

pub(super) async fn fork(host: &Host, request: pb::ForkVmRequest) -> Reply<pb::ForkVmResponse> {
    let prefix = match request.prefix.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|e: coracle_types::InvalidVmName| invalid(&e))?),
    };
    let mut vms = Vec::new();
    for record in host.fork(&request.vm, request.count, prefix).await? {
        vms.push(convert::vm(host, &*host.get(record.id.as_str())?));
    }
    Ok(Response::new(pb::ForkVmResponse { vms }))
}

pub(super) async fn export(host: &Host, wanted: String) -> Replies<pb::ExportSnapshotResponse> {
    host.snapshot(&wanted).await?;
    let (to_caller, replies) = mpsc::channel(QUEUE);
    let out = Pieces::new(to_caller.clone(), |data| pb::ExportSnapshotResponse { data });
    let host = host.clone();
    let work = async move {
        if let Err(error) = host.export_snapshot(&wanted, out).await {
            let _caller_gone = to_caller.send(Err(error.status())).await;
        }
    };
    Ok(Response::new(Box::pin(driven(work, replies))))
}

pub(super) async fn import(
    host: &Host,
    mut input: Streaming<pb::ImportSnapshotRequest>,
) -> Reply<pb::Snapshot> {
    use pb::import_snapshot_request::Part;
    let Some(Part::Name(wanted)) = input.message().await?.and_then(|m| m.part) else {
        return Err(Status::invalid_argument("the first message must be a name"));
    };
    let data = |message: pb::ImportSnapshotRequest| match message.part {
        Some(Part::Data(data)) => Ok(data),
        _ => Err(io::Error::other("a message that is no data")),
    };
    let info = host.import_snapshot(name(&wanted)?, Incoming::new(input, data)).await?;
    Ok(Response::new(wire(&info)))
}

pub(super) fn push(host: &Host, request: pb::PushSnapshotRequest) -> Replies<pb::PushResponse> {
    let reference = images::reference(&request.reference)?;
    let host = host.clone();
    images::pushing(move |progress| async move {
        let heard = windows(Step::Upload, progress);
        let report = host.push_snapshot(&request.name, &reference, heard).await?;
        Ok(pb::PushReport {
            digest: report.digest.to_string(),
            pieces: u32::try_from(report.windows).unwrap_or(u32::MAX),
            moved: u32::try_from(report.moved).unwrap_or(u32::MAX),
            moved_bytes: report.moved_bytes,
        })
    })
}

pub(super) fn pull(host: &Host, request: pb::PullSnapshotRequest) -> Replies<pb::PullSnapshotResponse> {
    use pb::pull_snapshot_response::Message;
    let (reference, wanted) = (images::reference(&request.reference)?, name(&request.name)?);
    let host = host.clone();
    let told = |progress| pb::PullSnapshotResponse { message: Some(Message::Progress(progress)) };
    images::followed(told, move |progress| async move {
        let info = host.pull_snapshot(&reference, wanted, windows(Step::Download, progress)).await?;
        Ok(pb::PullSnapshotResponse { message: Some(Message::Snapshot(wire(&info))) })
    })
}
