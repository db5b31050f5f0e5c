//! VM disks in registries: cut into independent windows, each a blob of its own.
//!
//! ```text
//! raw disk ─window by window─▶ all zero? nothing   known by its raw digest? its blob   else zstd frames ─HEAD, upload─▶ registry
//! registry ─window by window, several at once─▶ verify ─▶ its place in a sparse file ─▶ synced, renamed
//! ```
//! A window is 64 MiB, more where a disk would have a thousand of them, less where it would have but a few. So transfers
//! are parallel, what broke off goes on, a small change moves little, and each window is verified alone.

mod artifact;
mod cocoon;
mod file;
mod foreign;
mod frame;
pub(crate) mod fuzz;
mod pull;
mod push;
mod snapshot;
mod spool;
mod window;

use crate::{Credentials, RegistryConfig, Timeouts};

pub use cocoon::{CocoonVersion, cocoon_head, pull_cocoon, push_cocoon};
pub use file::{empty_overlay, raw_copy};
pub use pull::pull_disk;
pub use push::push_disk;
pub use snapshot::{RemoteSnapshot, SnapshotBase, SnapshotFile, find_snapshot, push_snapshot};

/// How a disk is written. Each is read without being told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskFormat {
    /// Ours: independent windows, the zero ones left out.
    #[default]
    Windows,
    /// KubeVirt's containerDisk: a container image with the disk below `/disk/`.
    ContainerDisk,
    /// The original registry's cloud image: the bytes as they are, in parts of a gigabyte.
    CloudImage,
}

/// How disks are moved.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// How a pushed disk is written. Default windows.
    pub format: DiskFormat,
    /// Windows at once. Each takes up to twice a window of memory. `None`: 4, more of small ones.
    pub concurrency: Option<usize>,
    /// Bytes of a window, a power of two of at least 1 MiB. `None`: 64 MiB, less for a disk below 32 GiB.
    pub window_bytes: Option<u64>,
    /// Compression, from 1 (fast) to 19. Default 1.
    pub level: i32,
    /// Where the credentials come from.
    pub credentials: Credentials,
    /// How registries are reached.
    pub registries: std::collections::BTreeMap<String, RegistryConfig>,
    /// Bounds on waiting.
    pub timeouts: Timeouts,
    /// How often a broken request is tried again.
    pub retries: usize,
}

impl DiskOptions {
    /// Windows of a size that are moved at once.
    fn at_once(&self, window_bytes: u64) -> usize {
        /// Bytes of windows that are moved at once, and how many at least and at most.
        const USUAL: (u64, u64, u64) = (256 << 20, 4, 16);
        let fit = (USUAL.0 / window_bytes.max(1)).clamp(USUAL.1, USUAL.2);
        self.concurrency.unwrap_or_else(|| usize::try_from(fit).unwrap_or(4)).max(1)
    }
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self {
            format: DiskFormat::Windows,
            concurrency: None,
            window_bytes: None,
            level: 1,
            credentials: Credentials::default(),
            registries: std::collections::BTreeMap::new(),
            timeouts: Timeouts::default(),
            retries: 4,
        }
    }
}

/// Hears of bytes of the disk that are done, and of all that there are to do. Must not block.
pub type DiskProgress = std::sync::Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What a transfer did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReport {
    /// Digest of the manifest.
    pub digest: crate::Digest,
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// Windows of it that are not all zero.
    pub windows: usize,
    /// Windows that had to be moved; the others were there.
    pub moved: usize,
    /// Bytes of those, as they went over the wire.
    pub moved_bytes: u64,
}

/// Runs file work away from the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(std::io::Error::other(e)))
}
