//! Calls on snapshots.

use std::io;

use coracle_host::{
    Host, InvalidSnapshotName, LocalUser, RestoreSpec, RestoredIdentity, SnapshotInfo, SnapshotName,
    chunk_progress,
};
use coracle_oci::{PullOrigin, Step};
use coracle_proto::host as pb;
use tokio::sync::mpsc;
use tonic::{Response, Status, Streaming};

use super::messages::{MessageWriter, message_reader};
use super::streams::drive_stream;
use super::{Replies, Reply, convert, images};
use crate::status::{OrStatus as _, invalid, to_status};

/// Maximum number of queued messages.
const QUEUE: usize = 4;

pub(super) fn snapshot_message(info: &SnapshotInfo) -> pb::Snapshot {
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
        owner: Some(convert::owner(&info.owner)),
        shared_with: info.shared_with.iter().cloned().collect(),
    }
}

fn name(text: &str) -> Result<SnapshotName, Status> {
    text.parse().map_err(|e: InvalidSnapshotName| invalid(e))
}

/// Takes a snapshot of `vm`, the VM of the request.
pub(super) async fn save(host: &Host, vm: &str, wanted: &str) -> Reply<pb::Snapshot> {
    let wanted = if wanted.is_empty() { None } else { Some(name(wanted)?) };
    let info = host.save_snapshot(vm, wanted).await.or_status()?;
    Ok(Response::new(snapshot_message(&info)))
}

pub(super) async fn share(host: &Host, request: pb::ShareSnapshotRequest) -> Reply<pb::Snapshot> {
    let info = host.share_snapshot(&request.name, &request.namespace, !request.revoke).await.or_status()?;
    Ok(Response::new(snapshot_message(&info)))
}

pub(super) async fn list(host: &Host) -> Reply<pb::ListSnapshotsResponse> {
    let snapshots = host.snapshots().await.or_status()?.iter().map(snapshot_message).collect();
    Ok(Response::new(pb::ListSnapshotsResponse { snapshots }))
}

pub(super) async fn restore(
    host: &Host,
    request: pb::RestoreVmRequest,
    (origin, user): (PullOrigin, LocalUser),
) -> Reply<pb::Vm> {
    let vm = match request.name.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|e: coracle_types::InvalidVmName| invalid(e))?),
    };
    let owner = convert::owner_of(request.owner.unwrap_or_default());
    let volumes = request.volumes.into_iter().map(|volume| convert::volume_request(volume, user)).collect();
    let identity = match request.same_identity {
        true => RestoredIdentity::Same,
        false => RestoredIdentity::New,
    };
    let reach = request.reach.map(convert::reach).unwrap_or_default();
    let spec = RestoreSpec { name: vm, owner, origin, volumes, identity, reach, ..RestoreSpec::default() };
    let record = host.restore(&request.snapshot, spec).await.or_status()?;
    let view = host.get(record.id.as_str()).or_status()?;
    Ok(Response::new(convert::vm(host, &view)))
}

pub(super) async fn fork(host: &Host, request: pb::ForkVmRequest) -> Reply<pb::ForkVmResponse> {
    let prefix = match request.prefix.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|e: coracle_types::InvalidVmName| invalid(e))?),
    };
    let mut vms = Vec::new();
    for record in host.fork(&request.vm, request.count, prefix).await.or_status()? {
        vms.push(convert::vm(host, &*host.get(record.id.as_str()).or_status()?));
    }
    Ok(Response::new(pb::ForkVmResponse { vms }))
}

pub(super) async fn export(host: &Host, wanted: String) -> Replies<pb::ExportSnapshotResponse> {
    host.snapshot(&wanted).await.or_status()?;
    let (to_caller, replies) = mpsc::channel(QUEUE);
    let out = MessageWriter::new(to_caller.clone(), |data| pb::ExportSnapshotResponse { data });
    let host = host.clone();
    let work = async move {
        if let Err(error) = host.export_snapshot(&wanted, out).await {
            let _caller_gone = to_caller.send(Err(to_status(&error))).await;
        }
    };
    Ok(Response::new(Box::pin(drive_stream(work, replies))))
}

pub(super) async fn import(
    host: &Host,
    mut input: Streaming<pb::ImportSnapshotRequest>,
) -> Reply<pb::Snapshot> {
    use pb::import_snapshot_request::Part;
    let first = input.message().await?.unwrap_or_default();
    let owner = convert::owner_of(first.owner.unwrap_or_default());
    let Some(Part::Name(wanted)) = first.part else {
        return Err(Status::invalid_argument("the first message must be a name"));
    };
    let data = |message: pb::ImportSnapshotRequest| match message.part {
        Some(Part::Data(data)) => Ok(data),
        _ => Err(io::Error::other("a message without data")),
    };
    let info = host.import_snapshot(name(&wanted)?, owner, message_reader(input, data)).await.or_status()?;
    Ok(Response::new(snapshot_message(&info)))
}

pub(super) fn push(host: &Host, request: pb::PushSnapshotRequest) -> Replies<pb::PushResponse> {
    let reference = images::reference(&request.reference)?;
    let host = host.clone();
    images::run_push(move |progress| async move {
        let progress = chunk_progress(Step::Upload, progress);
        let report = host.push_snapshot(&request.name, &reference, progress).await.or_status()?;
        Ok(pb::PushReport {
            digest: report.digest.to_string(),
            pieces: u32::try_from(report.chunks).unwrap_or(u32::MAX),
            moved: u32::try_from(report.moved).unwrap_or(u32::MAX),
            moved_bytes: report.moved_bytes,
        })
    })
}

pub(super) fn pull(host: &Host, request: pb::PullSnapshotRequest) -> Replies<pb::PullSnapshotResponse> {
    use pb::pull_snapshot_response::Message;
    let (reference, wanted) = (images::reference(&request.reference)?, name(&request.name)?);
    let host = host.clone();
    let to_message = |progress| pb::PullSnapshotResponse { message: Some(Message::Progress(progress)) };
    images::run_with_progress(to_message, move |progress| async move {
        let info = host
            .pull_snapshot(&reference, wanted, chunk_progress(Step::Download, progress))
            .await
            .or_status()?;
        Ok(pb::PullSnapshotResponse { message: Some(Message::Snapshot(snapshot_message(&info))) })
    })
}
