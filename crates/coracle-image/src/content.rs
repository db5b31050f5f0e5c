//! Content of the store: files, index, locks and pins. The operations of the store build on this module.

pub(crate) mod index;
pub(crate) mod layout;
pub(crate) mod locks;
pub(crate) mod prune;
mod rootfs;

use std::{fs::File, path::Path, sync::Arc, time::Duration};

use coracle_oci::{Digest, Platform, Registries, Timeouts};
use parking_lot::{Mutex, MutexGuard};

use crate::{
    Image, ImageError, Limits,
    manifest::{self, Config, Document, ImageManifest},
};
use index::Index;
use layout::Layout;
use locks::{KeyedLocks, Pins};

/// Options of a store. The default suits a host with direct access to public registries.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Limits of every image.
    pub limits: Limits,
    /// Platform for which images are selected.
    pub platform: Platform,
    /// Configured registries.
    pub registries: Registries,
    /// Time limits of registry requests.
    pub timeouts: Timeouts,
    /// Number of retries after a transient failure without progress. Default 4.
    pub retries: usize,
    /// Age after which opening the store removes a partial download. Default 7 days.
    pub partial_age_max: Duration,
    /// Bytes that stay free on the file system of the store while root file systems and layers are written. `None`: a twentieth
    /// of the file system, at most 1 GiB.
    pub reserve_bytes: Option<u64>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            platform: Platform::host(),
            registries: Registries::default(),
            timeouts: Timeouts::default(),
            retries: 4,
            partial_age_max: Duration::from_secs(7 * 24 * 3600),
            reserve_bytes: None,
        }
    }
}

/// Content of one store, shared by concurrent operations.
pub(crate) struct ContentStore {
    pub(crate) layout: Layout,
    pub(crate) options: StoreOptions,
    pub(crate) locks: KeyedLocks,
    pub(crate) pins: Pins,
    /// Index. Lock order: index before pins. Never held across an await.
    index: Mutex<Index>,
    lock: File,
}

impl Drop for ContentStore {
    /// Unlocks explicitly: a child that another thread forks shares the open file until it execs, and the store would look busy
    /// to the next process (flock(2)).
    fn drop(&mut self) {
        let _closing = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock);
    }
}

impl ContentStore {
    /// Opens the store in `dir`, see [`crate::Store::open`].
    pub(crate) fn open(dir: &Path, options: StoreOptions) -> Result<Arc<Self>, ImageError> {
        let (layout, lock) = Layout::open(dir)?;
        layout.sweep(&lock, options.partial_age_max)?;
        let index = index::load(&layout.index())?;
        if index.entries.is_empty() {
            index::save(&layout, &index)?;
        }
        let (locks, pins, index) = (KeyedLocks::default(), Pins::default(), Mutex::new(index));
        Ok(Arc::new(Self { layout, options, locks, pins, index, lock }))
    }

    pub(crate) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock()
    }

    /// Changes the index on disk, then in memory. Blocking.
    pub(crate) fn change<T>(
        &self,
        change: impl FnOnce(&mut Index) -> Result<T, ImageError>,
    ) -> Result<T, ImageError> {
        let mut index = self.index();
        let mut next = index.clone();
        let result = change(&mut next)?;
        if next != *index {
            index::save(&self.layout, &next)?;
            *index = next;
        }
        Ok(result)
    }

    /// Reads a manifest and its configuration. `None` when one is missing or damaged; the next pull repairs it.
    pub(crate) fn manifest(&self, digest: &Digest) -> Result<Option<(ImageManifest, Config)>, ImageError> {
        let limits = &self.options.limits;
        let Some(bytes) = self.layout.read(digest, limits.manifest_bytes)? else { return Ok(None) };
        let Ok(Document::Manifest(manifest)) = manifest::parse(&bytes, None, limits) else { return Ok(None) };
        let Some(config) = self.layout.read(&manifest.config.digest, limits.config_bytes)? else {
            return Ok(None);
        };
        Ok(Config::parse(&config, limits).ok().map(|config| (manifest, config)))
    }

    pub(crate) fn image(&self, digest: &Digest) -> Result<Option<Image>, ImageError> {
        let Some((manifest, config)) = self.manifest(digest)? else {
            tracing::warn!(image = %digest, "read image of the index failed");
            return Ok(None);
        };
        let references = self.index().references(digest);
        Ok(Some(manifest::image(&manifest, config, references)))
    }

    /// Image with all of its blobs, or `None`.
    pub(crate) fn complete_image(&self, digest: &Digest) -> Result<Option<Image>, ImageError> {
        match self.manifest(digest)? {
            Some((manifest, _)) if manifest.layers.iter().all(|layer| self.layout.has(layer)) => {
                self.image(digest)
            }
            _ => Ok(None),
        }
    }
}

/// Runs blocking work on tokio's blocking threads. The work continues when the future is dropped.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that shuts down cancels blocking work, and such a runtime polls no future again.
            Err(_) => std::future::pending().await,
        },
    }
}
