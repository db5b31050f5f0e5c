//! Calls about snapshots.

use std::io::{self, Read, Write};

use bytes::Bytes;
use coracle_proto::host as pb;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tonic::{Response, Status, Streaming};

use super::streams::driven;
use super::{Replies, Reply, convert};
use crate::{Host, HostError, RestoreSpec, SnapshotInfo, SnapshotName};

/// Bytes of one message of an archive.
const CHUNK: usize = 256 * 1024;
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
    let (host, out) = (host.clone(), Pieces { to_caller: to_caller.clone(), piece: Vec::new() });
    let work = async move {
        if let Err(error) = host.export_snapshot(&wanted, out).await {
            let _caller_gone = to_caller.send(Err(error.status())).await;
        }
    };
    Ok(Response::new(Box::pin(driven(work, replies))))
}

/// Sends what is written as messages, and waits for the caller to take them.
struct Pieces {
    to_caller: mpsc::Sender<Result<pb::ExportSnapshotResponse, Status>>,
    piece: Vec<u8>,
}

impl Pieces {
    fn send(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let data = Bytes::from(std::mem::take(&mut self.piece));
        let message = Ok(pb::ExportSnapshotResponse { data: data.into() });
        self.to_caller.blocking_send(message).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= CHUNK {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

pub(super) async fn import(
    host: &Host,
    mut input: Streaming<pb::ImportSnapshotRequest>,
) -> Reply<pb::Snapshot> {
    use pb::import_snapshot_request::Part;
    let Some(Part::Name(wanted)) = input.message().await?.and_then(|m| m.part) else {
        return Err(Status::invalid_argument("the first message must be a name"));
    };
    let input = Incoming { runtime: Handle::current(), input, piece: Bytes::new() };
    let info = host.import_snapshot(name(&wanted)?, input).await?;
    Ok(Response::new(wire(&info)))
}

/// Reads the messages of a caller. For threads outside of the runtime.
struct Incoming {
    runtime: Handle,
    input: Streaming<pb::ImportSnapshotRequest>,
    piece: Bytes,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        use pb::import_snapshot_request::Part;
        while self.piece.is_empty() {
            let message = self.runtime.block_on(self.input.message());
            match message.map_err(|status| io::Error::other(status.message().to_owned()))? {
                None => return Ok(0),
                Some(pb::ImportSnapshotRequest { part: Some(Part::Data(data)) }) => self.piece = data.into(),
                Some(_) => return Err(io::Error::other("a message that is no data")),
            }
        }
        let taken = self.piece.split_to(self.piece.len().min(buffer.len()));
        buffer.get_mut(..taken.len()).unwrap_or_default().copy_from_slice(&taken);
        Ok(taken.len())
    }
}
