//! Fetching one image from one server.

use std::{collections::BTreeSet, sync::Arc};

use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    Digest, Image, ImageError, Progress, Reference,
    manifest::{self, Blob, Config, Document, Manifest},
    registry::{self, Session},
    space,
    store::{Inner, blocking, index::Entry, prune},
};

/// What a reference resolved to: everything small, verified, in memory.
struct Resolved {
    manifest: Manifest,
    manifest_bytes: Vec<u8>,
    config_bytes: Vec<u8>,
    index: Option<Digest>,
}

/// Fetches the image and names it. Nothing of it is visible before all of it is there. After a failure that
/// will not go away by itself the blobs it brought are removed again; after a transient one they stay, to be
/// resumed.
pub(super) async fn fetch(
    inner: &Arc<Inner>,
    session: Session,
    reference: &Reference,
    concurrency: usize,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let resolved = resolve(inner, &session, reference).await?;
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
        let brought: Vec<_> = layers.filter(|d| !before.contains(d)).collect();
        drop(pinned);
        if !error.is_transient() {
            let inner = Arc::clone(inner);
            blocking(move || prune::discard(&inner, &brought)).await?;
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

/// Finds manifest and configuration for this host.
async fn resolve(
    inner: &Arc<Inner>,
    session: &Session,
    reference: &Reference,
) -> Result<Resolved, ImageError> {
    let (limits, platform) = (&inner.options.limits, &inner.options.platform);
    let name = reference.to_string();
    let first = session.manifest(&reference.api_name(), limits.manifest_bytes).await?;
    let (manifest, manifest_bytes, index) =
        match manifest::parse(&first.bytes, first.content_type.as_deref(), limits)? {
            Document::Manifest(manifest) => (manifest, first.bytes, None),
            Document::Index(entries) => {
                let chosen = &manifest::select(&entries, platform, &name)?.blob;
                let second = session.manifest(&chosen.digest.to_string(), limits.manifest_bytes).await?;
                match manifest::parse(&second.bytes, Some(&chosen.media_type), limits)? {
                    Document::Manifest(manifest) => (manifest, second.bytes, Some(Digest::of(&first.bytes))),
                    Document::Index(_) => return Err(ImageError::unsupported("an index inside an index")),
                }
            }
        };
    let config_bytes = registry::fetch_small(session, &manifest.config).await?;
    Config::parse(&config_bytes, limits)?.check(manifest.layers.len(), platform, &name)?;
    Ok(Resolved { manifest, manifest_bytes, config_bytes, index })
}

fn check_space(inner: &Inner, manifest: &Manifest, reference: &Reference) -> Result<(), ImageError> {
    let have = |blob: &Blob| std::fs::metadata(inner.layout.partial(&blob.digest)).map_or(0, |m| m.len());
    let missing = manifest
        .layers
        .iter()
        .filter(|l| !inner.layout.has(l))
        .map(|l| l.size_bytes.saturating_sub(have(l)))
        .sum::<u64>();
    space::check(&inner.layout.dir, missing, &format!("pull {reference}"))
}

/// Fetches what is missing, several layers at a time. The first failure ends the others.
async fn fetch_layers(
    inner: &Arc<Inner>,
    session: Session,
    manifest: &Manifest,
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
            // The semaphore is never closed.
            let _slot = slots.acquire().await;
            registry::fetch(&inner, &session, &layer, &progress).await
        });
    }
    let mut outcome = Ok(());
    while let Some(ended) = tasks.join_next().await {
        let result = match ended {
            Ok(result) => result.map(drop),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => continue, // ended by us, below
            },
        };
        if result.is_err() && outcome.is_ok() {
            outcome = result;
            tasks.abort_all();
        }
    }
    outcome
}

/// Stores the small blobs and, last, the name.
fn publish(inner: &Inner, resolved: &Resolved, reference: Reference) -> Result<Image, ImageError> {
    inner.layout.put(&resolved.config_bytes)?;
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
