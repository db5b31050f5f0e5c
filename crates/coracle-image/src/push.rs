//! Pushes images of the store: blobs concurrently, then the manifest, byte for byte.

use std::sync::Arc;

use bytes::Bytes;
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    ImageError, StoreOptions,
    content::{ContentStore, blocking},
    manifest::ImageManifest,
};
use coracle_oci::{
    Client, Credentials, Descriptor, Digest, Meter, OciError, Offered, Operation, Payload, Progress,
    PullOrigin, Reference, RetryPolicy, SentBytes, Session, Step,
};

/// Options of a push.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// Source of credentials.
    pub credentials: Credentials,
    /// Number of blobs pushed concurrently, at least 1. Default 8.
    pub concurrency: usize,
    /// Origin of the requests.
    pub origin: PullOrigin,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { credentials: Credentials::default(), concurrency: 8, origin: PullOrigin::default() }
    }
}

/// Result of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushReport {
    /// Digest of the manifest.
    pub digest: Digest,
    /// Number of blobs: configuration and layers.
    pub blobs: usize,
    /// Number of blobs that the registry mounted from another repository.
    pub mounted: usize,
    /// Number of blobs that were uploaded. The others were present or mounted.
    pub moved: usize,
    /// Bytes of uploaded blobs.
    pub moved_bytes: u64,
}

/// State shared by all blobs of a push.
struct Job {
    inner: Arc<ContentStore>,
    session: Session,
    /// Another repository of the same registry that has the image, to mount blobs from.
    from: Option<String>,
    progress: Arc<dyn Progress>,
}

/// See [`crate::Store::push`].
#[tracing::instrument(name = "push", skip_all, fields(image = %source, to = %target))]
pub(crate) async fn push(
    inner: &Arc<ContentStore>,
    source: &Reference,
    target: &Reference,
    options: &PushOptions,
    progress: Arc<dyn Progress>,
) -> Result<PushReport, ImageError> {
    let absent = || ImageError::NotPresent { image: source.to_string() };
    let (store, name) = (Arc::clone(inner), source.clone());
    let (manifest, bytes, from) = blocking(move || lookup(&store, &name)).await?.ok_or_else(absent)?;
    let from = from.into_iter().find(|r| same_registry(r, target)).map(|r| r.repository().to_owned());
    // Protects the blobs from a prune.
    let blobs: Vec<Descriptor> = manifest.layers.iter().chain([&manifest.config]).cloned().collect();
    let _pinned = inner.pins.pin(blobs.iter().map(|b| b.digest).chain([manifest.digest]));
    let session = open(inner, target, options).await?;
    let job = Arc::new(Job { inner: Arc::clone(inner), session, from, progress });
    let offered = offer_all(&job, blobs, options.concurrency).await?;
    let api_name = target.api_name();
    job.session.put_manifest(&api_name, manifest.media_type, bytes).await?;
    let count = |what| offered.iter().filter(|(_, o)| *o == what).count();
    Ok(PushReport {
        digest: manifest.digest,
        blobs: offered.len(),
        mounted: count(Offered::Mounted),
        moved: count(Offered::Uploaded),
        moved_bytes: offered.iter().filter(|(_, o)| *o == Offered::Uploaded).map(|(n, _)| n).sum(),
    })
}

fn same_registry(source: &Reference, target: &Reference) -> bool {
    source.registry() == target.registry() && source.repository() != target.repository()
}

type StoredImage = Option<(ImageManifest, Bytes, Vec<Reference>)>;

/// Manifest, its bytes, and all names of an image. Blocking.
fn lookup(inner: &ContentStore, source: &Reference) -> Result<StoredImage, ImageError> {
    let Some(digest) = inner.index().find(source).map(|e| e.digest) else { return Ok(None) };
    let Some((manifest, _)) = inner.manifest(&digest)? else { return Ok(None) };
    let Some(bytes) = inner.layout.read(&digest, inner.options.limits.manifest_bytes)? else {
        return Ok(None);
    };
    let names = inner.index().references(&digest);
    Ok(Some((manifest, bytes.into(), names)))
}

/// Logs in to the first server that accepts uploads.
async fn open(
    inner: &Arc<ContentStore>,
    target: &Reference,
    options: &PushOptions,
) -> Result<Session, ImageError> {
    let StoreOptions { registries, timeouts, retries, .. } = &inner.options;
    let retry_policy = RetryPolicy { timeouts: timeouts.clone(), retries: *retries };
    let client =
        Client { registries, credentials: &options.credentials, origin: options.origin, retry_policy };
    Ok(client.open_first(target, Operation::Push).await?)
}

/// Offers blobs concurrently. The first failure cancels the others.
async fn offer_all(
    job: &Arc<Job>,
    blobs: Vec<Descriptor>,
    concurrency: usize,
) -> Result<Vec<(u64, Offered)>, ImageError> {
    let slots = Arc::new(Semaphore::new(concurrency.max(1)));
    let mut tasks = JoinSet::new();
    for blob in blobs {
        let (job, slots) = (Arc::clone(job), Arc::clone(&slots));
        tasks.spawn(async move {
            // Cannot fail: the semaphore is never closed.
            let _slot = slots.acquire().await;
            let path = job.inner.layout.blob(&blob.digest);
            let payload = Payload::File { path, start: 0, bytes: blob.size_bytes };
            let meter = Meter::new(&job.progress, Step::Upload, Some(blob.digest), blob.size_bytes);
            let heard = meter.clone();
            let sent: SentBytes = Arc::new(move |done| heard.at(done));
            let offered = job.session.offer_blob(&blob.digest, &payload, job.from.as_deref(), &sent).await?;
            meter.at(blob.size_bytes);
            Ok::<_, OciError>((blob.size_bytes, offered))
        });
    }
    let mut all = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        all.push(ended.map_err(|e| job.session.network("send blob", e))??);
    }
    Ok(all)
}
