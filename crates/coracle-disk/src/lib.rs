//! VM disks and snapshots in registries: disks in independent chunks, each a blob of its own.
//!
//! ```text
//! raw disk ─chunk by chunk─▶ all zero? nothing   known by its raw digest? its blob   else zstd frames ─HEAD, upload─▶ registry
//! registry ─chunk by chunk, several at once─▶ verify ─▶ sparse file ─▶ synced, renamed
//! ```
//! A chunk is 64 MiB, larger for a disk that would have a thousand of them, smaller for a disk below 32 GiB.
//! Memory does not grow with it: chunks in transit share a budget of bytes, and large ones go through a file.
//! Transfers are parallel and resume, a small change moves few bytes, and each chunk is verified alone.
//! `coracle-disk` stands on `coracle-oci` (client) and `coracle-image` (archive readers). What this crate
//! never does: open a file that a disk image names, trust a size in a manifest, or show a disk before it is
//! whole.

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

/// Format of a pushed disk. Pulls detect the format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// Coracle's: independent chunks; zero chunks are omitted.
    #[default]
    Chunks,
    /// KubeVirt's containerDisk: a container image with the disk below `/disk/`.
    ContainerDisk,
    /// Cloud image of epoch: the bytes as they are, in parts of a gigabyte.
    CloudImage,
    /// Image of tart: parts of 512 MiB, compressed alone.
    Tart,
}

/// Options of a transfer.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Format of a pushed disk. Default chunks.
    pub format: DiskFormat,
    /// Concurrent chunks. `None`: up to 16, together at most 256 MiB; else 64 MiB for each. A chunk takes up
    /// to twice its size of memory, one above 64 MiB a file of its size instead.
    pub concurrency: Option<usize>,
    /// Directory of temporary files of a push: archives of snapshots, chunks above 64 MiB. Created when
    /// missing. `None`: directory of the pushed file; for an archive the system's temporary directory.
    pub spool: Option<PathBuf>,
    /// Bytes of a chunk, a power of two of at least 1 MiB. `None`: 64 MiB, less for a disk below 32 GiB.
    pub chunk_bytes: Option<u64>,
    /// Compression, from 1 (fast) to 19. Default 1.
    pub level: i32,
    /// Source of credentials.
    pub credentials: Credentials,
    /// Configured registries.
    pub registries: Registries,
    /// Origin of the requests.
    pub origin: PullOrigin,
    /// Time limits of requests.
    pub timeouts: Timeouts,
    /// Retries of a transient failure.
    pub retries: usize,
    /// Parts of other disks of this host: a pull copies them instead of fetching them.
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

/// Callback with the bytes of the disk that are done, and all of them. Must not block.
pub type DiskProgress = std::sync::Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Result of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReport {
    /// Digest of the manifest.
    pub digest: coracle_oci::Digest,
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// Chunks that are not zero.
    pub chunks: usize,
    /// Chunks that were transferred; the others were present.
    pub moved: usize,
    /// Compressed bytes of the transferred chunks.
    pub moved_bytes: u64,
    /// Parts of the disk whose digests the manifest has.
    pub parts: Vec<DiskPart>,
}

/// Runs file operations on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(std::io::Error::other(e)))
}
