//! What the controllers ask of a node about snapshots.

use futures_util::stream::BoxStream;

use super::error::AgentError;
use crate::step::{SnapshotRef, VmRef};

/// The archive of a snapshot, in parts.
pub(crate) type ArchiveStream = BoxStream<'static, Result<Vec<u8>, AgentError>>;

/// The calls about snapshots to one node. Each has a deadline and fails with an [`AgentError`].
#[tonic::async_trait]
pub(crate) trait SnapshotClient: Send + Sync {
    /// Copies memory and disk of the VM, which stays as it is. `Ok` when the node has a snapshot of that name.
    async fn save(&self, vm: &VmRef, name: &str) -> Result<(), AgentError>;

    /// The archive of a snapshot. Dropping the stream ends it.
    async fn export(&self, name: &str) -> Result<ArchiveStream, AgentError>;

    /// Takes a snapshot from an archive; of a part of an archive nothing is left. `Ok` when the node has a snapshot of that
    /// name.
    async fn import(
        &self,
        snapshot: &SnapshotRef,
        archive: BoxStream<'static, Vec<u8>>,
    ) -> Result<(), AgentError>;

    /// Makes the VM of the snapshot again, under its identity, and runs it. `Ok` when the node has the VM.
    async fn restore(&self, snapshot: &SnapshotRef) -> Result<(), AgentError>;

    /// Removes a snapshot. An unknown one is `Ok`.
    async fn delete_snapshot(&self, name: &str) -> Result<(), AgentError>;

    /// The snapshot of that name; `None`: not found.
    async fn get_snapshot(&self, name: &str) -> Result<Option<SavedSnapshot>, AgentError>;
}

/// A snapshot as its node describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedSnapshot {
    /// CPUs of its VM.
    pub vcpus: u32,
    /// Memory of its VM, in MiB.
    pub memory_mib: u64,
    /// Reference of the image of its VM.
    pub image: String,
    /// Digest of that image.
    pub image_digest: String,
    /// Bytes of memory and devices.
    pub memory_bytes: u64,
    /// Bytes that its disk takes.
    pub disk_bytes: u64,
    /// When it was taken, Unix milliseconds.
    pub taken_at_ms: i64,
}
