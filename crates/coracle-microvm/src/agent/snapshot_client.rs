//! Calls of the controllers to a node about snapshots.

use futures_util::stream::BoxStream;

use super::error::AgentError;
use crate::step::{SnapshotRef, VmRef};

/// Archive of a snapshot, in parts.
pub(crate) type ArchiveStream = BoxStream<'static, Result<Vec<u8>, AgentError>>;

/// Calls about snapshots to one node. Each call has a deadline and fails with an [`AgentError`].
#[tonic::async_trait]
pub(crate) trait SnapshotClient: Send + Sync {
    /// Copies memory and disk of the VM, whose state does not change. Returns `Ok` when the node already has a snapshot with
    /// that name.
    async fn save(&self, vm: &VmRef, name: &str) -> Result<(), AgentError>;

    /// Streams the archive of a snapshot. Dropping the stream ends it.
    async fn export(&self, name: &str) -> Result<ArchiveStream, AgentError>;

    /// Creates a snapshot from an archive; an incomplete archive leaves nothing behind. Returns `Ok` when the node already has
    /// a snapshot with that name.
    async fn import(
        &self,
        snapshot: &SnapshotRef,
        archive: BoxStream<'static, Vec<u8>>,
    ) -> Result<(), AgentError>;

    /// Creates the VM of the snapshot again, under its identity, and runs it. Returns `Ok` when the node already has the VM.
    async fn restore(&self, snapshot: &SnapshotRef) -> Result<(), AgentError>;

    /// Removes a snapshot. Returns `Ok` for an unknown snapshot.
    async fn delete_snapshot(&self, name: &str) -> Result<(), AgentError>;

    /// Returns the snapshot with that name; `None`: not found.
    async fn get_snapshot(&self, name: &str) -> Result<Option<SavedSnapshot>, AgentError>;
}

/// Description of a snapshot by its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedSnapshot {
    /// vCPUs of the VM.
    pub vcpus: u32,
    /// Memory of the VM, in MiB.
    pub memory_mib: u64,
    /// Reference of the VM's image.
    pub image: String,
    /// Digest of that image.
    pub image_digest: String,
    /// Size of memory and device state, in bytes.
    pub memory_bytes: u64,
    /// Size of the disk, in bytes.
    pub disk_bytes: u64,
    /// Time when the snapshot was taken, in Unix milliseconds.
    pub taken_at_ms: i64,
}
