//! Pushing an image of the store: its blobs in parallel, its manifest at the end, byte for byte as it was made.

use std::sync::Arc;

use bytes::Bytes;
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    Credentials, Digest, ImageError, Progress, Reference, Step, auth,
    manifest::{Blob, Manifest},
    progress::Meter,
    registry::{self, Offered, Operation, Payload, Sent, Session},
    store::{Inner, blocking},
};

/// How one push is done.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// Where credentials come from.
    pub credentials: Credentials,
    /// Blobs sent at the same time, at least 1. Default 8.
    pub concurrency: usize,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { credentials: Credentials::default(), concurrency: 8 }
    }
}

/// What a push did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushReport {
    /// Digest of the manifest.
    pub digest: Digest,
    /// Configuration and layers.
    pub blobs: usize,
    /// Of those, taken by the registry from another of its repositories.
    pub mounted: usize,
    /// Of those, moved; the others were there.
    pub moved: usize,
    /// Bytes of the moved ones.
    pub moved_bytes: u64,
}

/// What every blob's work needs.
struct Job {
    inner: Arc<Inner>,
    session: Session,
    /// Another repository of the registry that had the image.
    from: Option<String>,
    progress: Arc<dyn Progress>,
}

/// See [`crate::Store::push`].
#[tracing::instrument(name = "push", skip_all, fields(image = %source, to = %target))]
pub(crate) async fn push(
    inner: &Arc<Inner>,
    source: &Reference,
    target: &Reference,
    options: &PushOptions,
    progress: Arc<dyn Progress>,
) -> Result<PushReport, ImageError> {
    let absent = || ImageError::NotPresent { image: source.to_string() };
    let (store, name) = (Arc::clone(inner), source.clone());
    let (manifest, bytes, from) = blocking(move || look(&store, &name)).await?.ok_or_else(absent)?;
    let from = from.into_iter().find(|r| same_registry(r, target)).map(|r| r.repository().to_owned());
    // What is being sent is not pruned meanwhile.
    let blobs: Vec<Blob> = manifest.layers.iter().chain([&manifest.config]).cloned().collect();
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
        moved: count(Offered::Moved),
        moved_bytes: offered.iter().filter(|(_, o)| *o == Offered::Moved).map(|(n, _)| n).sum(),
    })
}

fn same_registry(source: &Reference, target: &Reference) -> bool {
    source.registry() == target.registry() && source.repository() != target.repository()
}

type Looked = Option<(Manifest, Bytes, Vec<Reference>)>;

/// Manifest, its bytes, and all names of an image. Blocking.
fn look(inner: &Inner, source: &Reference) -> Result<Looked, ImageError> {
    let Some(digest) = inner.index().find(source).map(|e| e.digest) else { return Ok(None) };
    let Some((manifest, _)) = inner.manifest(&digest)? else { return Ok(None) };
    let Some(bytes) = inner.layout.read(&digest, inner.options.limits.manifest_bytes)? else {
        return Ok(None);
    };
    let names = inner.index().references(&digest);
    Ok(Some((manifest, bytes.into(), names)))
}

/// A conversation with the registry itself: mirrors are for pulling.
async fn open(inner: &Arc<Inner>, target: &Reference, options: &PushOptions) -> Result<Session, ImageError> {
    let endpoint = registry::home(target, &inner.options.registries);
    let login = auth::lookup(&options.credentials, &endpoint.host).await?;
    let timeouts = inner.options.timeouts.clone();
    let http =
        registry::client(&timeouts, Operation::Push, &[]).map_err(|e| registry::unprepared(target, e))?;
    Session::open_for(http, endpoint, target.clone(), login, timeouts, inner.options.retries, Operation::Push)
        .await
}

/// Several at once. The first failure ends the others; what is there is found by the next call.
async fn offer_all(
    job: &Arc<Job>,
    blobs: Vec<Blob>,
    concurrency: usize,
) -> Result<Vec<(u64, Offered)>, ImageError> {
    let slots = Arc::new(Semaphore::new(concurrency.max(1)));
    let mut tasks = JoinSet::new();
    for blob in blobs {
        let (job, slots) = (Arc::clone(job), Arc::clone(&slots));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _slot = slots.acquire().await;
            let path = job.inner.layout.blob(&blob.digest);
            let payload = Payload::File { path, start: 0, bytes: blob.size_bytes };
            let meter = Meter::new(&job.progress, Step::Upload, Some(blob.digest), blob.size_bytes);
            let heard = meter.clone();
            let sent: Sent = Arc::new(move |done| heard.at(done));
            let offered = job.session.offer_blob(&blob.digest, &payload, job.from.as_deref(), &sent).await?;
            meter.at(blob.size_bytes);
            Ok((blob.size_bytes, offered))
        });
    }
    let mut all = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        all.push(ended.map_err(|e| job.session.network("send blob", e))??);
    }
    Ok(all)
}
