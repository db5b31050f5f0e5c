//! Image store: the public operations.
//!
//! ```text
//! oci-layout, index.json, blobs/<algorithm>/…   as in the OCI image layout specification
//! rootfs/<chain-id>.erofs2 or .erofs            derived, can be built again; the layout is in the name
//! partial/<digest>                              downloads to be resumed
//! tmp/                                          unfinished files, removed at the next open
//! ```
//! A file gets its name by a rename after it was verified and synced: a process killed at any moment leaves a usable store.

use std::{collections::HashSet, fmt, path::Path, sync::Arc};

use coracle_oci::{Descriptor, Digest, NoProgress, Progress, Reference};
use coracle_types::RootfsLayout;

use crate::{
    Image, ImageError, ImageName, PruneReport, PullOptions, PushOptions, PushReport, Rootfs, Source,
    StoreOptions, commit,
    content::{ContentStore, blocking, index::Entry, prune},
    export, import, pull, push,
    signature::{self, PublicKeys, SignatureError},
};

/// Image store, opened by one process. Clones share it, and operations may run concurrently.
#[derive(Clone)]
pub struct Store(Arc<ContentStore>);

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.0.layout.dir.display())
    }
}

impl Store {
    /// Opens the store in `dir`, creates it if missing, and removes leftovers of a crash. Blocks for a few milliseconds.
    ///
    /// # Errors
    /// [`ImageError::StoreBusy`] when another `Store` has it open, [`ImageError::Corrupt`], [`ImageError::Oci`].
    pub fn open(dir: impl AsRef<Path>, options: StoreOptions) -> Result<Self, ImageError> {
        ContentStore::open(dir.as_ref(), options).map(Self)
    }

    /// Pulls an image into the store by the policy in `options`, and returns it. Idempotent. Cancel-safe: the next call resumes
    /// downloads.
    ///
    /// # Errors
    /// Every kind except [`ImageError::InvalidSource`] and [`ImageError::StoreBusy`]. Transient errors were retried
    /// [`StoreOptions::retries`] times.
    pub async fn pull(
        &self,
        reference: &Reference,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, ImageError> {
        Box::pin(pull::pull(&self.0, reference, options, progress)).await
    }

    /// Verifies that the stored image of a reference, or the index through which it was found, is signed by one of the keys.
    /// Asks the registry of the reference with the credentials of `options`. Cancel-safe.
    ///
    /// # Errors
    /// [`SignatureError`].
    pub async fn verify(
        &self,
        reference: &Reference,
        image: &Digest,
        keys: &PublicKeys,
        options: &PullOptions,
    ) -> Result<(), SignatureError> {
        let index =
            self.0.index().find(reference).filter(|entry| entry.digest == *image).and_then(|e| e.index);
        let digests: Vec<_> = std::iter::once(*image).chain(index).collect();
        signature::verify(&pull::client(&self.0, options), reference, &digests, keys).await
    }

    /// Imports an image from a local source and names it `name`, or by the names in the source. An image without a name is kept
    /// until the next prune. Idempotent. After a cancellation, the copy ends in the background and may finish.
    ///
    /// # Errors
    /// [`ImageError::InvalidSource`] (also for [`Source::Registry`], which is pulled, not imported), [`ImageError::Oci`] with
    /// the kinds `DigestMismatch`, `Hostile`, `Unsupported`, `WrongArchitecture`, `StorageFull`, `Io`.
    pub async fn import(
        &self,
        source: &Source,
        name: Option<&Reference>,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, ImageError> {
        let (inner, source, name) = (Arc::clone(&self.0), source.clone(), name.cloned());
        blocking(move || import::import(&inner, &source, name, &progress)).await
    }

    /// Pushes the stored image of `source` to `target`, byte for byte. Blobs that the registry has, also in another repository
    /// of the image, are not uploaded. Idempotent. Cancel-safe: the next call skips complete blobs.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`], [`ImageError::Oci`] with the kinds `Unauthorized`, `Network`, `Registry`, `Io`.
    pub async fn push(
        &self,
        source: &Reference,
        target: &Reference,
        options: &PushOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<PushReport, ImageError> {
        Box::pin(push::push(&self.0, source, target, options, progress)).await
    }

    /// Writes the image of `reference` as one uncompressed archive that is both an OCI layout and a docker archive. After a
    /// cancellation, writing continues until `out` fails or the archive is complete.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`]; [`ImageError::Io`](ImageError::Oci), also when writing to `out` fails.
    pub async fn export(
        &self,
        reference: &Reference,
        mut out: impl std::io::Write + Send + 'static,
    ) -> Result<(), ImageError> {
        let (inner, reference) = (Arc::clone(&self.0), reference.clone());
        blocking(move || export::export(&inner, &reference, &mut out)).await
    }

    /// Creates an image named `name` from the image with manifest digest `base` and the root of a VM that runs it. `created_ms`
    /// are Unix milliseconds. A failure changes no name. After a cancellation, the work continues until the stream ends.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`], [`ImageError::Oci`] with the kinds `Hostile`, `Unsupported`, `DigestMismatch`,
    /// `StorageFull`, `Io`.
    pub async fn commit(
        &self,
        base: &Digest,
        mut root: crate::VmRoot<impl std::io::Read + Send + 'static>,
        name: &Reference,
        created_ms: i64,
    ) -> Result<Image, ImageError> {
        let created = jiff::Timestamp::from_millisecond(created_ms).unwrap_or_default();
        let (inner, base, name) = (Arc::clone(&self.0), *base, name.clone());
        blocking(move || commit::commit(&inner, &base, &mut root, &name, created)).await
    }

    /// All images, sorted by digest, without those whose manifest is damaged. Cancel-safe.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a file operation.
    pub async fn list(&self) -> Result<Vec<Image>, ImageError> {
        let inner = Arc::clone(&self.0);
        blocking(move || {
            let entries = inner.index().entries.clone();
            let digests: std::collections::BTreeSet<_> = entries.iter().map(|e| e.digest).collect();
            digests.iter().filter_map(|digest| inner.image(digest).transpose()).collect()
        })
        .await
    }

    /// Stored image of a reference; `None` when it is not stored. A pinned reference also finds an image that was pulled from
    /// the same repository by tag. Cancel-safe.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a file operation.
    pub async fn get(&self, reference: &Reference) -> Result<Option<Image>, ImageError> {
        let (inner, reference) = (Arc::clone(&self.0), reference.clone());
        blocking(move || {
            let digest = inner.index().find(&reference).map(|e| e.digest);
            digest.map_or(Ok(None), |digest| inner.image(&digest))
        })
        .await
    }

    /// Image with this manifest digest, named or not. Cancel-safe.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a file operation.
    pub async fn get_by_digest(&self, digest: &Digest) -> Result<Option<Image>, ImageError> {
        let (inner, digest) = (Arc::clone(&self.0), *digest);
        blocking(move || {
            let known = inner.index().by_digest(&digest).is_some();
            if known { inner.image(&digest) } else { Ok(None) }
        })
        .await
    }

    /// All names, sorted. Does no file I/O.
    #[must_use]
    pub fn names(&self) -> Vec<ImageName> {
        let named =
            |e: &Entry| Some(ImageName { reference: e.reference.clone()?, digest: e.digest, index: e.index });
        self.0.index().entries.iter().filter_map(named).collect()
    }

    /// Removes images with all of their names. Their content stays until a prune. Returns false when none of them was stored.
    /// Idempotent.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a file operation.
    pub async fn remove_images(&self, digests: &[Digest]) -> Result<bool, ImageError> {
        let (inner, digests) = (Arc::clone(&self.0), digests.to_vec());
        blocking(move || inner.change(|index| Ok(index.remove(&digests)))).await
    }

    /// Directory of the store.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0.layout.dir
    }

    /// Descriptor of the manifest of a stored image.
    #[must_use]
    pub fn descriptor(&self, digest: &Digest) -> Option<Descriptor> {
        let index = self.0.index();
        let entry = index.by_digest(digest)?;
        Some(Descriptor {
            media_type: entry.media_type.clone(),
            digest: *digest,
            size_bytes: entry.size_bytes,
        })
    }

    /// Adds a name to the image with manifest digest `digest`, and removes that name from any other image. Idempotent.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`], [`ImageError::Oci`] for a file operation.
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

    /// Removes a name. The content stays until a prune. Returns false when no image had the name. Idempotent.
    ///
    /// # Errors
    /// [`ImageError::Oci`] for a file operation.
    pub async fn remove(&self, reference: &Reference) -> Result<bool, ImageError> {
        let (inner, reference) = (Arc::clone(&self.0), reference.clone());
        blocking(move || inner.change(|index| Ok(index.untag(&reference)))).await
    }

    /// Removes unnamed images, and unreferenced blobs, root file systems and partial downloads. Keeps the content of `in_use`
    /// (image digests of existing VMs) and of running operations. With `dry_run`, only reports. Idempotent.
    ///
    /// # Errors
    /// [`ImageError::Oci`]; files removed before the failure stay removed.
    pub async fn prune(&self, in_use: &HashSet<Digest>, dry_run: bool) -> Result<PruneReport, ImageError> {
        let (inner, in_use) = (Arc::clone(&self.0), in_use.clone());
        blocking(move || prune::prune(&inner, &in_use, dry_run)).await
    }

    /// Size of the root file system of an image, bytes; 0: not built yet. Blocking, briefly: reads one block.
    #[must_use]
    pub fn rootfs_bytes(&self, image: &Image) -> u64 {
        let built = self.0.built_rootfs(image, None);
        built.and_then(|path| path.metadata().ok()).map_or(0, |meta| meta.len())
    }

    /// Root file system of an image, built if missing. Idempotent; concurrent callers share the work. After a cancellation, the
    /// build ends in the background and its result is kept.
    ///
    /// # Errors
    /// [`ImageError::NotPresent`] when layers are missing, [`ImageError::Oci`] with the kinds `Hostile`, `DigestMismatch`,
    /// `Unsupported`, `StorageFull`, `Io`. No file is left behind.
    pub async fn rootfs(&self, image: &Image) -> Result<Rootfs, ImageError> {
        self.rootfs_with(image, Arc::new(NoProgress)).await
    }

    /// Like [`Store::rootfs`], with progress per layer.
    ///
    /// # Errors
    /// Like [`Store::rootfs`].
    pub async fn rootfs_with(
        &self,
        image: &Image,
        progress: Arc<dyn Progress>,
    ) -> Result<Rootfs, ImageError> {
        Arc::clone(&self.0).rootfs(image, None, progress).await
    }

    /// Like [`Store::rootfs`], in the layout that a saved guest has mounted.
    ///
    /// # Errors
    /// Like [`Store::rootfs`].
    pub async fn rootfs_in(&self, image: &Image, layout: RootfsLayout) -> Result<Rootfs, ImageError> {
        Arc::clone(&self.0).rootfs(image, Some(layout), Arc::new(NoProgress)).await
    }
}
