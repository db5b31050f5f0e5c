//! Images from local files. Nothing is taken over unverified: blobs by their digest, layers by the
//! configuration's diff ids.

mod archive;
mod layout_dir;

use std::{io::Read, path::Path, sync::Arc};

use crate::{
    Digest, Image, ImageError, Progress, Reference, Source, Step,
    manifest::{Blob, Config, Manifest, Packing},
    progress::Meter,
    rootfs::{Budget, Unpacked},
    store::{Inner, index::Entry, layout, prune},
    tarball::read_error,
};

/// What an importer brings: everything but the layers, which it copies itself.
struct Brought {
    manifest: Manifest,
    manifest_bytes: Vec<u8>,
    config_bytes: Vec<u8>,
    /// Digest of the multi-platform index it came through.
    index: Option<Digest>,
    /// Names the source gives it.
    names: Vec<Reference>,
}

/// See [`crate::Store::import`]. Blocking.
#[tracing::instrument(name = "import", skip_all, fields(source = %source))]
pub(crate) fn import(
    inner: &Inner,
    source: &Source,
    name: Option<Reference>,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    match source {
        Source::OciDir { dir, tag } => layout_dir::import(inner, source, dir, tag.as_deref(), name, progress),
        Source::DockerArchive(file) => archive::import(inner, source, file, name, progress),
        Source::Registry(_) => Err(invalid(source, "it is in a registry: pull it")),
    }
}

fn invalid(source: &Source, reason: impl Into<String>) -> ImageError {
    ImageError::InvalidSource { source_text: source.to_string(), reason: reason.into() }
}

/// Checks the image, copies its layers with `copy`, and gives it its names. On failure nothing new stays.
fn take_over(
    inner: &Inner,
    brought: Brought,
    name: Option<Reference>,
    source: &Source,
    mut copy: impl FnMut(&Blob, &Digest) -> Result<(), ImageError>,
) -> Result<Image, ImageError> {
    let limits = &inner.options.limits;
    let config = Config::parse(&brought.config_bytes, limits)?;
    config.check(brought.manifest.layers.len(), &inner.options.platform, &source.to_string())?;
    let pinned = inner.pins.pin(
        brought
            .manifest
            .layers
            .iter()
            .map(|l| l.digest)
            .chain([brought.manifest.digest, brought.manifest.config.digest]),
    );
    let mut new = Vec::new();
    let copied = brought.manifest.layers.iter().zip(config.diff_ids()).try_for_each(|(layer, diff_id)| {
        if inner.layout.has(layer) {
            return Ok(());
        }
        new.push(layer.digest);
        copy(layer, diff_id)
    });
    let image = copied.and_then(|()| publish(inner, &brought, name));
    drop(pinned);
    if image.is_err() {
        prune::discard(inner, &new)?;
    }
    image
}

fn publish(inner: &Inner, brought: &Brought, name: Option<Reference>) -> Result<Image, ImageError> {
    inner.layout.put(&brought.config_bytes)?;
    let digest = inner.layout.put(&brought.manifest_bytes)?;
    let names: Vec<Option<Reference>> = match name {
        Some(name) => vec![Some(name)],
        None if brought.names.is_empty() => vec![None],
        None => brought.names.iter().cloned().map(Some).collect(),
    };
    inner.change(|index| {
        for reference in names {
            index.put(Entry {
                media_type: brought.manifest.media_type.to_owned(),
                digest,
                size_bytes: brought.manifest.size_bytes,
                reference,
                index: brought.index,
                local: true,
            });
        }
        Ok(())
    })?;
    inner.image(&digest)?.ok_or(ImageError::NotPresent { image: digest.to_string() })
}

/// Copies one layer from `from` and checks its bytes and what they unpack to.
fn copy_layer(
    inner: &Inner,
    from: &mut impl Read,
    layer: &Blob,
    diff_id: &Digest,
    progress: &Arc<dyn Progress>,
) -> Result<(), ImageError> {
    let meter = Meter::new(progress, Step::Download, Some(layer.digest), layer.size_bytes);
    // One byte more than announced is enough to see the lie.
    let mut bounded = from.take(layer.size_bytes.saturating_add(1));
    let blob = layout::copy_blob(&inner.layout, &mut bounded, |actual| match *actual == layer.digest {
        true => Ok(()),
        false => Err(ImageError::DigestMismatch {
            what: "layer".to_owned(),
            expected: layer.digest,
            actual: *actual,
        }),
    })?;
    if blob.size_bytes != layer.size_bytes {
        let (digest, said) = (layer.digest, layer.size_bytes);
        return Err(ImageError::hostile(format!(
            "layer {digest} has {} bytes, but was announced with {said}",
            blob.size_bytes
        )));
    }
    meter.at(blob.size_bytes);
    check_diff_id(inner, &inner.layout.blob(&layer.digest), layer, diff_id)
}

/// Unpacks a stored layer into nothing, to see whether it is the one the configuration means.
fn check_diff_id(inner: &Inner, path: &Path, layer: &Blob, diff_id: &Digest) -> Result<(), ImageError> {
    let packing = Packing::of_media_type(&layer.media_type)?;
    if packing == Packing::Plain && layer.digest == *diff_id {
        return Ok(());
    }
    let limits = &inner.options.limits;
    let mut budget = Budget { unpacked_bytes: limits.unpacked_bytes, entries: limits.entries };
    let mut stream = Unpacked::open(path, packing, &mut budget, None)?;
    std::io::copy(&mut stream, &mut std::io::sink()).map_err(read_error)?;
    let actual = stream.digest();
    if actual == *diff_id {
        return Ok(());
    }
    Err(ImageError::DigestMismatch {
        what: format!("unpacked layer {}", layer.digest),
        expected: *diff_id,
        actual,
    })
}
