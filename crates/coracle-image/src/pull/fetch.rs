//! Fetches an image from one server.

use std::{collections::BTreeSet, fs::File, sync::Arc};

use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    Image, ImageError,
    content::{ContentStore, blocking, index::Entry, layout, prune},
    manifest::{self, Config, Document, ImageManifest},
    space,
};
use coracle_oci::{
    BlobFile, Descriptor, Digest, Meter, Progress, Reference, Session, Step, fetch_bytes, fetch_file, select,
};

/// Manifest and configuration of an image, verified.
struct Resolved {
    manifest: ImageManifest,
    manifest_bytes: Vec<u8>,
    config_bytes: Vec<u8>,
    index: Option<Digest>,
}

/// Fetches the image that the server has as `name`, and stores it under `reference`. The image becomes visible when it is
/// complete. A permanent failure removes its new blobs; after a transient failure they stay, so that the next pull resumes.
pub(super) async fn fetch(
    inner: &Arc<ContentStore>,
    session: Session,
    (reference, name): (&Reference, &str),
    concurrency: usize,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let resolved = resolve(inner, &session, reference, name).await?;
    let manifest = &resolved.manifest;
    let layers = manifest.layers.iter().map(|l| l.digest);
    let pinned = inner.pins.pin(layers.clone().chain([manifest.digest, manifest.config.digest]));
    let before: BTreeSet<Digest> =
        manifest.layers.iter().filter(|l| inner.layout.has(l)).map(|l| l.digest).collect();
    let fetched = match check_space(inner, manifest, reference) {
        Ok(()) => fetch_layers(inner, session, manifest, concurrency, progress).await,
        Err(error) => Err(error),
    };
    if let Err(error) = fetched {
        let new_blobs: Vec<_> = layers.filter(|d| !before.contains(d)).collect();
        drop(pinned);
        if !error.is_transient() {
            let inner = Arc::clone(inner);
            blocking(move || prune::discard(&inner, &new_blobs)).await?;
        }
        return Err(error);
    }
    let (inner, reference) = (Arc::clone(inner), reference.clone());
    blocking(move || {
        let image = publish(&inner, &resolved, reference);
        drop(pinned);
        image
    })
    .await
}

/// Resolves the tag or digest `name` to the manifest and configuration for this platform.
async fn resolve(
    inner: &Arc<ContentStore>,
    session: &Session,
    reference: &Reference,
    name: &str,
) -> Result<Resolved, ImageError> {
    let (limits, platform) = (&inner.options.limits, &inner.options.platform);
    let first = session.manifest(name, limits.manifest_bytes).await?;
    let name = reference.to_string();
    let (manifest, manifest_bytes, index) =
        match manifest::parse(&first.bytes, first.content_type.as_deref(), limits)? {
            Document::Manifest(manifest) => (manifest, first.bytes, None),
            Document::Index(entries) => {
                let chosen = &select(&entries, platform, &name)?.descriptor;
                let second = session.manifest(&chosen.digest.to_string(), limits.manifest_bytes).await?;
                match manifest::parse(&second.bytes, Some(&chosen.media_type), limits)? {
                    Document::Manifest(manifest) => (manifest, second.bytes, Some(Digest::of(&first.bytes))),
                    Document::Index(_) => return Err(ImageError::unsupported("index inside an index")),
                }
            }
        };
    let config_bytes = fetch_bytes(session, &manifest.config.digest, manifest.config.size_bytes).await?;
    Config::parse(&config_bytes, limits)?.check(manifest.layers.len(), platform, &name)?;
    Ok(Resolved { manifest, manifest_bytes, config_bytes, index })
}

fn check_space(
    inner: &ContentStore,
    manifest: &ImageManifest,
    reference: &Reference,
) -> Result<(), ImageError> {
    let have =
        |blob: &Descriptor| std::fs::metadata(inner.layout.partial(&blob.digest)).map_or(0, |m| m.len());
    let missing = manifest
        .layers
        .iter()
        .filter(|l| !inner.layout.has(l))
        .map(|l| l.size_bytes.saturating_sub(have(l)))
        .sum::<u64>();
    space::check(&inner.layout.dir, missing, &format!("pull {reference}"))
}

/// Fetches missing layers concurrently. The first failure cancels the others.
async fn fetch_layers(
    inner: &Arc<ContentStore>,
    session: Session,
    manifest: &ImageManifest,
    concurrency: usize,
    progress: &Arc<dyn Progress>,
) -> Result<(), ImageError> {
    let session = Arc::new(session);
    let slots = Arc::new(Semaphore::new(concurrency.max(1)));
    let mut seen = BTreeSet::new();
    let mut tasks = JoinSet::new();
    for layer in manifest.layers.iter().filter(|l| seen.insert(l.digest)) {
        let (inner, session, slots) = (Arc::clone(inner), Arc::clone(&session), Arc::clone(&slots));
        let (layer, progress) = (layer.clone(), Arc::clone(progress));
        tasks.spawn(async move {
            // Cannot fail: the semaphore is never closed.
            let _slot = slots.acquire().await;
            fetch_layer(&inner, &session, &layer, &progress).await
        });
    }
    let mut outcome = Ok(());
    while let Some(ended) = tasks.join_next().await {
        let result = match ended {
            Ok(result) => result.map(drop),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => continue, // cancelled below, after a failure
            },
        };
        if result.is_err() && outcome.is_ok() {
            outcome = result;
            tasks.abort_all();
        }
    }
    outcome
}

/// Downloads a layer into the store. Returns false when the store has it already. Concurrent calls for one layer share the
/// work. Cancel-safe: received bytes stay, and the next call resumes.
///
/// # Errors
/// Errors of [`fetch_file`]; partial content is removed unless the error is transient.
async fn fetch_layer(
    inner: &Arc<ContentStore>,
    session: &Session,
    layer: &Descriptor,
    progress: &Arc<dyn Progress>,
) -> Result<bool, ImageError> {
    // Also held by the last write of a cancelled download, which ends in the background.
    let guard = Arc::new(inner.locks.lock(layer.digest).await);
    if inner.layout.has(layer) {
        return Ok(false);
    }
    let meter = Meter::new(progress, Step::Download, Some(layer.digest), layer.size_bytes);
    let path = inner.layout.partial(&layer.digest);
    let opened = path.clone();
    let open = move || File::options().create(true).truncate(false).read(true).write(true).open(opened);
    let file = blocking(open).await.map_err(|e| ImageError::io("open", &path, e))?;
    let to = BlobFile { file, path: path.clone(), guard: Arc::clone(&guard) };
    let received = |bytes| meter.at(bytes);
    let fetched = fetch_file(session, &layer.digest, layer.size_bytes, to, &received).await;
    let (inner, layer) = (Arc::clone(inner), layer.clone());
    match fetched {
        Ok(file) => {
            blocking(move || {
                let published = inner.layout.publish_partial(&file, &layer.digest);
                drop(guard);
                published.map(|()| true)
            })
            .await
        }
        Err(error) if error.is_transient() => Err(error.into()),
        Err(error) => {
            blocking(move || {
                let removed = layout::remove(&path);
                drop(guard);
                removed
            })
            .await?;
            Err(error.into())
        }
    }
}

/// Stores configuration and manifest, then the name.
fn publish(inner: &ContentStore, resolved: &Resolved, reference: Reference) -> Result<Image, ImageError> {
    inner.layout.put_as(resolved.manifest.config.digest, &resolved.config_bytes)?;
    let digest = inner.layout.put(&resolved.manifest_bytes)?;
    let entry = Entry {
        media_type: resolved.manifest.media_type.to_owned(),
        digest,
        size_bytes: resolved.manifest.size_bytes,
        reference: Some(reference),
        index: resolved.index,
        local: false,
    };
    inner.change(|index| {
        index.put(entry);
        Ok(())
    })?;
    inner.image(&digest)?.ok_or(ImageError::NotPresent { image: digest.to_string() })
}
