//! VM disks and snapshots in registries, stored as independent chunks, each of which is a blob.
//!
//! ```text
//! raw disk ─chunk by chunk─▶ all zero? nothing   known by its raw digest? its blob   else zstd frames ─HEAD, upload─▶ registry
//! registry ─chunk by chunk, several at once─▶ verify ─▶ sparse file ─▶ synced, renamed
//! ```
//! A chunk is 64 MiB, larger for a disk that would have a thousand chunks, smaller for a disk below 32 GiB. Memory does not
//! grow with the size of the disk: chunks in transit share a budget of bytes, and large chunks go through a file. Transfers are
//! parallel and resume, a small change transfers few bytes, and each chunk is verified independently. `coracle-disk` depends on
//! `coracle-oci` (client) and `coracle-image` (archive readers). This crate never opens a file that a disk image refers to,
//! never trusts a size in a manifest, and never shows a disk before it is complete.

mod artifact;
pub mod blank;
mod budget;
mod chunk;
mod cocoon;
mod file;
mod foreign;
mod frame;
#[doc(hidden)]
pub mod fuzz;
mod images;
mod local;
mod pull;
mod push;
mod snapshot;
mod sparse;
mod spool;

use std::path::PathBuf;
use std::sync::Arc;

use coracle_oci::{Credentials, PullOrigin, Registries, Timeouts};

pub use cocoon::{CocoonVersion, pull_cocoon, push_cocoon};
pub use file::{empty_overlay, merged_copy, raw_copy, take_raw};
pub use images::{DiskImage, DiskImages, digest_of, name_of};
pub use local::{DiskPart, LocalParts};
pub use pull::{pull_disk, resolve_disk};
pub use push::push_disk;
pub use snapshot::{
    RemoteSnapshot, SnapshotBase, SnapshotFile, delete_snapshot, find_snapshot, push_snapshot,
};

/// Format in which a disk is pushed. Pulls detect the format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// Format of this project: independent chunks. Zero chunks are omitted.
    #[default]
    Chunks,
    /// KubeVirt's containerDisk: a container image with the disk below `/disk/`.
    ContainerDisk,
    /// Cloud image of epoch: raw bytes in parts of 1 GiB.
    CloudImage,
    /// Image of tart: parts of 512 MiB, compressed independently.
    Tart,
}

/// Options of a transfer.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Format of a pushed disk. Default: chunks.
    pub format: DiskFormat,
    /// Limit of concurrent chunks. `None`: up to 16, together at most 256 MiB. Otherwise 64 MiB per chunk. A chunk needs up to
    /// twice its size in memory; a chunk above 64 MiB needs a file of its size instead.
    pub concurrency: Option<usize>,
    /// Directory for temporary files of a push: archives of snapshots, chunks above 64 MiB. Created if missing. `None`:
    /// directory of the pushed file, and for an archive the temporary directory of the system.
    pub spool: Option<PathBuf>,
    /// Size of a chunk, bytes: a power of two of at least 1 MiB. `None`: 64 MiB, less for a disk below 32 GiB.
    pub chunk_bytes: Option<u64>,
    /// Compression level, from 1 (fast) to 19. Default 1.
    pub level: i32,
    /// Source of credentials.
    pub credentials: Credentials,
    /// Configured registries.
    pub registries: Registries,
    /// Origin of the requests.
    pub origin: PullOrigin,
    /// Time limits of requests.
    pub timeouts: Timeouts,
    /// Number of retries after a transient failure.
    pub retries: usize,
    /// Parts of other disks on this node. A pull copies them instead of fetching them.
    pub local: Arc<LocalParts>,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self {
            format: DiskFormat::Chunks,
            concurrency: None,
            spool: None,
            chunk_bytes: None,
            level: 1,
            credentials: Credentials::default(),
            registries: Registries::default(),
            origin: PullOrigin::default(),
            timeouts: Timeouts::default(),
            retries: 4,
            local: Arc::default(),
        }
    }
}

/// Callback with the bytes of the disk that are done, and the total. Must not block.
pub type DiskProgress = std::sync::Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Result of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReport {
    /// Digest of the manifest.
    pub digest: coracle_oci::Digest,
    /// Size of the disk, bytes.
    pub disk_bytes: u64,
    /// Number of chunks that are not zero.
    pub chunks: usize,
    /// Number of chunks that were transferred. The others were present.
    pub moved: usize,
    /// Compressed bytes of the transferred chunks.
    pub moved_bytes: u64,
    /// Parts of the disk whose digests are in the manifest.
    pub parts: Vec<DiskPart>,
}

/// Runs file operations on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(std::io::Error::other(e)))
}
