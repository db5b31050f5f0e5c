//! The image store: an OCI layout on disk and the root file systems made from it.
//!
//! ```text
//! oci-layout, index.json, blobs/sha256/…   what the OCI specification says
//! rootfs/<chain-id>.erofs                   derived, can be built again
//! partial/<digest>                          downloads to be resumed
//! tmp/                                      unfinished files, removed at the next open
//! ```
//! Everything gets its name by a rename after it was verified and synced, so a process killed at any instant
//! leaves a store that works.

pub(crate) mod index;
pub(crate) mod layout;
pub(crate) mod locks;
pub(crate) mod prune;

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    fs::File,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use crate::{
    Descriptor, Digest, Image, ImageError, Limits, NoProgress, Platform, Progress, PullOptions, PushOptions,
    PushReport, Reference, RegistryConfig, Rootfs, Source, Timeouts, commit, export, import,
    manifest::{self, Config, Document, Manifest, Packing},
    pull, push, rootfs,
};
use index::{Entry, Index};
use layout::Layout;
use locks::{KeyedLocks, Pins};

pub use prune::{PruneReport, Removed};

/// How a store behaves. The default suits a host with direct access to public registries.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Bounds on every image.
    pub limits: Limits,
    /// What images must be for.
    pub platform: Platform,
    /// Mirrors and plain HTTP, by registry host as it stands in references (`docker.io`, `localhost:5000`).
    pub registries: BTreeMap<String, RegistryConfig>,
    /// Bounds on waiting for registries.
    pub timeouts: Timeouts,
    /// How often a broken request is tried again without getting anywhere. Default 4.
    pub retries: usize,
    /// Unfinished downloads older than this are removed when the store is opened. Default 7 days.
    pub partial_age_max: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            platform: Platform::host(),
            registries: BTreeMap::new(),
            timeouts: Timeouts::default(),
            retries: 4,
            partial_age_max: Duration::from_secs(7 * 24 * 3600),
        }
    }
}

/// A store, opened by one process. Clones share it; operations may run at the same time.
#[derive(Clone)]
pub struct Store(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) layout: Layout,
    pub(crate) options: StoreOptions,
    pub(crate) locks: KeyedLocks,
    pub(crate) pins: Pins,
    pub(crate) http: OnceLock<reqwest::Client>,
    /// Locked before pins, and never across an await.
    index: Mutex<Index>,
    lock: File,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.0.layout.dir.display())
    }
}

impl Store {
    /// Opens the store in `dir`, which is made if it is missing, and clears what a crash left. Blocking, for
    /// a few milliseconds.
    ///
    /// # Errors
    /// [`ImageError::StoreBusy`] when another `Store` has it open, [`ImageError::Corrupt`],
    /// [`ImageError::Io`].
    pub fn open(dir: impl AsRef<Path>, options: StoreOptions) -> Result<Self, ImageError> {
        let (layout, lock) = Layout::open(dir.as_ref())?;
        layout.sweep(&lock, options.partial_age_max)?;
        let index = index::load(&layout.index())?;
        if index.entries.is_empty() {
            index::save(&layout, &index)?;
        }
        let (locks, pins, http, index) =
            (KeyedLocks::default(), Pins::default(), OnceLock::new(), Mutex::new(index));
        Ok(Self(Arc::new(Inner { layout, options, locks, pins, http, index, lock })))
    }

    /// Brings an image into the store, as the policy in `options` says, and returns it. Idempotent.
    /// Cancel-safe: what was downloaded is kept and resumed by the next call.
    ///
    /// # Errors
    /// Every kind but [`ImageError::InvalidReference`], [`ImageError::InvalidSource`] and
    /// [`ImageError::StoreBusy`]. Transient ones were retried already, as often as [`StoreOptions::retries`]
    /// says.
    pub async fn pull(
        &self,
        reference: &Reference,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, ImageError> {
        Box::pin(pull::pull(&self.0, reference, options, progress)).await
    }

    /// Brings an image from a local source into the store and names it `name`; without one, by the names the
    /// source has. An image without any name is kept until the next prune. Idempotent. When cancelled, the
    /// copy ends in the background and may finish.
    ///
    /// # Errors
    /// [`ImageError::InvalidSource`] (also for [`Source::Registry`], which is pulled, not imported),
    /// [`ImageError::DigestMismatch`], [`ImageError::Hostile`], [`ImageError::Unsupported`],
    /// [`ImageError::WrongArchitecture`], [`ImageError::StorageFull`], [`ImageError::Io`].
    pub async fn import(
        &self,
        source: &Source,
        name: Option<&Reference>,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, ImageError> {
        let (inner, source, name) = (Arc::clone(&self.0), source.clone(), name.cloned());
        blocking(move || import::import(&inner, &source, name, &progress)).await
    }

    /// Pushes the image that `source` means here to `target`, byte for byte. Blobs that the registry has are not moved,
    /// nor those that it has in another repository of the image. Idempotent. Cancel-safe: blobs that arrived whole are
    /// found by the next call.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`], [`ImageError::Unauthorized`], [`ImageError::Network`], [`ImageError::Registry`],
    /// [`ImageError::Io`].
    pub async fn push(
        &self,
        source: &Reference,
        target: &Reference,
        options: &PushOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<PushReport, ImageError> {
        Box::pin(push::push(&self.0, source, target, options, progress)).await
    }

    /// Writes the image that `reference` means here as one archive: an OCI layout and a docker archive in one, not
    /// compressed beyond its layers. When cancelled, the writing goes on until `out` fails or all is written.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`]; [`ImageError::Io`], also when `out` takes no more.
    pub async fn export(
        &self,
        reference: &Reference,
        mut out: impl std::io::Write + Send + 'static,
    ) -> Result<(), ImageError> {
        let (inner, reference) = (Arc::clone(&self.0), reference.clone());
        blocking(move || export::export(&inner, &reference, &mut out)).await
    }

    /// Makes an image named `name` of the image with manifest digest `base` and the root of a machine that runs it;
    /// `created_ms` are Unix milliseconds. When it fails nothing is named. When cancelled, the work goes on until the
    /// stream ends.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`], [`ImageError::Hostile`], [`ImageError::Unsupported`], [`ImageError::DigestMismatch`],
    /// [`ImageError::StorageFull`], [`ImageError::Io`].
    pub async fn commit(
        &self,
        base: &Digest,
        mut root: crate::MachineRoot<impl std::io::Read + Send + 'static>,
        name: &Reference,
        created_ms: i64,
    ) -> Result<Image, ImageError> {
        let created = jiff::Timestamp::from_millisecond(created_ms).unwrap_or_default();
        let (inner, base, name) = (Arc::clone(&self.0), *base, name.clone());
        blocking(move || commit::commit(&inner, &base, &mut root, &name, created)).await
    }

    /// All images, by digest. An image whose manifest is damaged is left out. Cancel-safe.
    ///
    /// # Errors
    /// [`ImageError::Io`]
    pub async fn list(&self) -> Result<Vec<Image>, ImageError> {
        let inner = Arc::clone(&self.0);
        blocking(move || {
            let entries = inner.index().entries.clone();
            let digests: std::collections::BTreeSet<_> = entries.iter().map(|e| e.digest).collect();
            digests.iter().filter_map(|digest| inner.image(digest).transpose()).collect()
        })
        .await
    }

    /// The image a reference means here; `None` when it is not in the store. A pinned reference also finds an
    /// image that was pulled from the same repository by tag. Cancel-safe.
    ///
    /// # Errors
    /// [`ImageError::Io`]
    pub async fn get(&self, reference: &Reference) -> Result<Option<Image>, ImageError> {
        let (inner, reference) = (Arc::clone(&self.0), reference.clone());
        blocking(move || {
            let digest = inner.index().find(&reference).map(|e| e.digest);
            digest.map_or(Ok(None), |digest| inner.image(&digest))
        })
        .await
    }

    /// The image with this manifest digest, named or not. Cancel-safe.
    ///
    /// # Errors
    /// [`ImageError::Io`]
    pub async fn get_by_digest(&self, digest: &Digest) -> Result<Option<Image>, ImageError> {
        let (inner, digest) = (Arc::clone(&self.0), *digest);
        blocking(move || {
            let known = inner.index().by_digest(&digest).is_some();
            if known { inner.image(&digest) } else { Ok(None) }
        })
        .await
    }

    /// The manifest with this digest, as others name it. `None`: it is of no image here.
    #[must_use]
    pub fn descriptor(&self, digest: &Digest) -> Option<Descriptor> {
        let index = self.0.index();
        let entry = index.by_digest(digest)?;
        Some(Descriptor { media_type: entry.media_type.clone(), digest: *digest, size: entry.size_bytes })
    }

    /// Gives the image with manifest digest `digest` one more name; the name leaves whatever image had it.
    /// Idempotent.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`], [`ImageError::StorageFull`], [`ImageError::Io`].
    pub async fn tag(&self, digest: &Digest, reference: &Reference) -> Result<Image, ImageError> {
        let (inner, digest, reference) = (Arc::clone(&self.0), *digest, reference.clone());
        blocking(move || {
            let absent = || ImageError::NotPresent { image: digest.to_string() };
            inner.change(|index| {
                let entry = index.by_digest(&digest).cloned().ok_or_else(absent)?;
                index.put(Entry { reference: Some(reference), local: true, ..entry });
                Ok(())
            })?;
            inner.image(&digest)?.ok_or_else(absent)
        })
        .await
    }

    /// Takes a name away. The content stays until a prune. `Ok(false)` when nothing had the name. Idempotent.
    ///
    /// # Errors
    /// [`ImageError::StorageFull`], [`ImageError::Io`].
    pub async fn remove(&self, reference: &Reference) -> Result<bool, ImageError> {
        let (inner, reference) = (Arc::clone(&self.0), reference.clone());
        blocking(move || inner.change(|index| Ok(index.untag(&reference)))).await
    }

    /// Removes images without a name, and every blob, root file system and unfinished download that nothing
    /// needs. What `in_use` names (image digests of VMs that exist) and what a running operation needs stays.
    /// With `dry_run` it only reports. Idempotent.
    ///
    /// # Errors
    /// [`ImageError::Io`]; what was removed until then stays removed.
    pub async fn prune(&self, in_use: &HashSet<Digest>, dry_run: bool) -> Result<PruneReport, ImageError> {
        let (inner, in_use) = (Arc::clone(&self.0), in_use.clone());
        blocking(move || prune::prune(&inner, &in_use, dry_run)).await
    }

    /// The image's root file system, built if it is not there yet. Idempotent; callers that ask at the same
    /// time share the work. When cancelled, the building ends in the background and its result is kept.
    /// Nothing is copied for a file that exists.
    ///
    /// # Errors
    /// [`ImageError::Hostile`], [`ImageError::DigestMismatch`], [`ImageError::Unsupported`],
    /// [`ImageError::NotPresent`] when layers are missing, [`ImageError::StorageFull`], [`ImageError::Io`].
    /// Nothing is left behind.
    pub async fn rootfs(&self, image: &Image) -> Result<Rootfs, ImageError> {
        self.rootfs_with(image, Arc::new(NoProgress)).await
    }

    /// As [`Store::rootfs`], with progress by layer.
    ///
    /// # Errors
    /// As [`Store::rootfs`].
    pub async fn rootfs_with(
        &self,
        image: &Image,
        progress: Arc<dyn Progress>,
    ) -> Result<Rootfs, ImageError> {
        let inner = Arc::clone(&self.0);
        let pinned =
            inner.pins.pin(image.layers.iter().map(|l| l.digest).chain([image.digest, image.chain_id]));
        let guard = inner.locks.lock(rootfs_key(&image.chain_id)).await;
        let image = image.clone();
        blocking(move || {
            let made = inner.ensure_rootfs(&image, progress);
            drop((guard, pinned));
            made
        })
        .await
    }
}

/// The lock of a root file system: a digest of its own, because a single layer's chain id may be a blob's
/// digest.
fn rootfs_key(chain_id: &Digest) -> Digest {
    Digest::of(format!("rootfs {chain_id}").as_bytes())
}

impl Drop for Inner {
    /// Closing alone is not enough: a child that another thread is just forking holds the same open file until it
    /// execs, and the store would look busy to whoever opens it next (flock(2)).
    fn drop(&mut self) {
        let _closing = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock);
    }
}

impl Inner {
    pub(crate) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Reads a manifest and its configuration. `None` when one is missing or damaged: a pull mends that.
    pub(crate) fn manifest(&self, digest: &Digest) -> Result<Option<(Manifest, Config)>, ImageError> {
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
            tracing::warn!(image = %digest, "image in the index cannot be read");
            return Ok(None);
        };
        let references = self.index().references(digest);
        Ok(Some(manifest::image(&manifest, config, references)))
    }

    /// The image, if all of its blobs are there.
    pub(crate) fn complete_image(&self, digest: &Digest) -> Result<Option<Image>, ImageError> {
        match self.manifest(digest)? {
            Some((manifest, _)) if manifest.layers.iter().all(|layer| self.layout.has(layer)) => {
                self.image(digest)
            }
            _ => Ok(None),
        }
    }

    /// Builds the root file system unless it is there. The caller holds its lock.
    fn ensure_rootfs(&self, image: &Image, progress: Arc<dyn Progress>) -> Result<Rootfs, ImageError> {
        let path = self.layout.rootfs(&image.chain_id);
        let rootfs = |path: std::path::PathBuf| match std::fs::metadata(&path) {
            Ok(meta) => Ok(Rootfs { bytes: meta.len(), path }),
            Err(e) => Err(ImageError::io("look at", path, e)),
        };
        let ours =
            File::open(&path).and_then(|file| crate::erofs::identity(&file, &rootfs::uuid(&image.chain_id)));
        if ours.unwrap_or(false) {
            return rootfs(path);
        }
        let job = self.rootfs_job(image, progress)?;
        let temp = self.layout.temp_file()?;
        let file = temp.reopen().map_err(|e| ImageError::io("open", temp.path(), e))?;
        rootfs::build(&job, file)?;
        self.layout.publish(temp, &path, 0o444)?;
        rootfs(path)
    }

    fn rootfs_job(&self, image: &Image, progress: Arc<dyn Progress>) -> Result<rootfs::Job, ImageError> {
        let layer = |layer: &crate::Layer| {
            let path = self.layout.blob(&layer.digest);
            if !path.exists() {
                return Err(ImageError::NotPresent {
                    image: format!("{} (its layer {} is missing)", image.digest, layer.digest),
                });
            }
            let packing = Packing::of_media_type(&layer.media_type)?;
            Ok(rootfs::LayerFile {
                path,
                packing,
                digest: layer.digest,
                diff_id: layer.diff_id,
                size_bytes: layer.size_bytes,
            })
        };
        let layers = image.layers.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
        let chain_id = manifest::chain_id(&layers.iter().map(|l| l.diff_id).collect::<Vec<_>>());
        if chain_id != image.chain_id {
            let what = format!("layers of image {}", image.digest);
            return Err(ImageError::DigestMismatch { what, expected: image.chain_id, actual: chain_id });
        }
        Ok(rootfs::Job { layers, chain_id, limits: self.options.limits.clone(), progress })
    }
}

/// Runs blocking work on tokio's threads for it. The work goes on when the future is dropped.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that is being shut down cancels blocking work, and it polls nobody any more.
            Err(_) => std::future::pending().await,
        },
    }
}
