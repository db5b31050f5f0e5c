//! Snapshots of coracle nodes: saved, copied from node to node, restored.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use coracle_proto::host as wire;
use futures_util::{
    Stream, StreamExt as _,
    future::ready,
    stream::{self, BoxStream},
};
use tokio::sync::oneshot;
use tonic::{Code, Response, Status};
use wire::import_snapshot_request::Part;

use super::{
    call::ignore_not_found,
    error::AgentError,
    host_service::{HostService, owner},
    snapshot_client::{ArchiveStream, SavedSnapshot, SnapshotClient},
};
use crate::step::{SnapshotRef, VmRef};

/// Deadline of a copy: memory and disk of a large VM over a slow network.
const COPY: Duration = Duration::from_secs(3600);

#[tonic::async_trait]
impl SnapshotClient for HostService {
    async fn save(&self, vm: &VmRef, name: &str) -> Result<(), AgentError> {
        let request =
            wire::SaveSnapshotRequest { vm: vm.id.clone(), name: name.to_owned(), owner: owner(&vm.fence) };
        let mut client = self.client.clone();
        ignore_already_exists(self.copy("SaveSnapshot", client.save_snapshot(request)).await.map(drop))
    }

    async fn export(&self, name: &str) -> Result<ArchiveStream, AgentError> {
        let mut client = self.client.clone();
        let call = client.export_snapshot(wire::ExportSnapshotRequest { name: name.to_owned() });
        let parts = self.call("ExportSnapshot", call).await?;
        let caller = self.caller.clone();
        let broken = move |status: Status| caller.status_error("ExportSnapshot", &status);
        Ok(parts.map(move |part| part.map(|part| part.data).map_err(&broken)).boxed())
    }

    async fn import(
        &self,
        snapshot: &SnapshotRef,
        archive: BoxStream<'static, Vec<u8>>,
    ) -> Result<(), AgentError> {
        let first = wire::ImportSnapshotRequest {
            part: Some(Part::Name(snapshot.name.clone())),
            owner: Some(owner_of(snapshot)),
        };
        let parts = Parts(stream::once(ready(first)).chain(archive.map(data)).boxed());
        let mut client = self.client.clone();
        ignore_already_exists(self.copy("ImportSnapshot", client.import_snapshot(parts)).await.map(drop))
    }

    async fn restore(&self, snapshot: &SnapshotRef) -> Result<(), AgentError> {
        let request = wire::RestoreVmRequest {
            snapshot: snapshot.name.clone(),
            owner: Some(owner_of(snapshot)),
            same_identity: true,
            ..wire::RestoreVmRequest::default()
        };
        let mut client = self.client.clone();
        ignore_already_exists(self.copy("RestoreVM", client.restore_vm(request)).await.map(drop))
    }

    async fn delete_snapshot(&self, name: &str) -> Result<(), AgentError> {
        let request = wire::DeleteSnapshotRequest { name: name.to_owned() };
        let mut client = self.client.clone();
        ignore_not_found(self.call("DeleteSnapshot", client.delete_snapshot(request)).await.map(drop))
    }

    async fn get_snapshot(&self, name: &str) -> Result<Option<SavedSnapshot>, AgentError> {
        let request = wire::GetSnapshotRequest { name: name.to_owned() };
        let mut client = self.client.clone();
        match self.call("GetSnapshot", client.get_snapshot(request)).await {
            Ok(found) => Ok(Some(SavedSnapshot {
                vcpus: found.vcpus,
                memory_mib: found.memory_mib,
                image: found.image,
                image_digest: found.image_digest,
                memory_bytes: found.memory_bytes,
                disk_bytes: found.disk_bytes,
                taken_at_ms: found.taken_at_ms,
            })),
            Err(error) if error.code == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl HostService {
    async fn copy<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, AgentError> {
        self.caller.call(operation, COPY, call).await
    }
}

/// Messages of an import. The named type is needed because the compiler cannot prove that calls with a boxed stream are `Send`.
struct Parts(BoxStream<'static, wire::ImportSnapshotRequest>);

impl Stream for Parts {
    type Item = wire::ImportSnapshotRequest;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next_unpin(context)
    }
}

fn data(data: Vec<u8>) -> wire::ImportSnapshotRequest {
    wire::ImportSnapshotRequest { part: Some(Part::Data(data)), owner: None }
}

/// Returns the object that the VM is restored for.
fn owner_of(snapshot: &SnapshotRef) -> wire::Owner {
    let cluster = snapshot.cluster.clone().unwrap_or_default();
    wire::Owner { cluster, ..owner(&snapshot.fence).unwrap_or_default() }
}

fn ignore_already_exists(result: Result<(), AgentError>) -> Result<(), AgentError> {
    match result {
        Err(error) if error.code == Code::AlreadyExists => Ok(()),
        result => result,
    }
}

/// Copies a snapshot from one node to another as `copy`, through this process. Idempotent; when it is dropped, it leaves
/// nothing at the target.
///
/// # Errors
/// The error of the node that ended the copy, with its address.
pub(crate) async fn copy_snapshot(
    from: &dyn SnapshotClient,
    to: &dyn SnapshotClient,
    name: &str,
    copy: &SnapshotRef,
) -> Result<(), AgentError> {
    let archive = from.export(name).await?;
    let (broken, cause) = oneshot::channel();
    let mut broken = Some(broken);
    // A node refuses an archive without its end, so a source that breaks off leaves no snapshot at the target.
    let parts = archive.scan((), move |(), part| {
        let part = part.map_err(|error| broken.take().map(|broken| broken.send(error)));
        ready(part.ok())
    });
    let imported = to.import(copy, parts.boxed()).await;
    cause.await.map_or(imported, Err)
}
