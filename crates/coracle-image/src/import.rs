//! Imports images from local files. All blobs are verified by digest, and layers also by the diff ids of the configuration.

mod archive;
mod layout_dir;

use std::{io::Read, path::Path, sync::Arc};

use crate::{
    Budget, Compression, DecompressReader, Image, ImageError, Source,
    content::{ContentStore, index::Entry, layout, prune},
    manifest::{Config, ImageManifest},
    tarball::read_error,
};
use coracle_oci::{Descriptor, Digest, Meter, OciError, Progress, Reference, Step};

/// Image to import, without its layers.
struct ImportedImage {
    manifest: ImageManifest,
    manifest_bytes: Vec<u8>,
    config_bytes: Vec<u8>,
    /// Digest of the multi-platform index, if there is one.
    index: Option<Digest>,
    /// Names given in the source.
    names: Vec<Reference>,
}

/// See [`crate::Store::import`]. Blocking.
#[tracing::instrument(name = "import", skip_all, fields(source = %source))]
pub(crate) fn import(
    inner: &ContentStore,
    source: &Source,
    name: Option<Reference>,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    match source {
        Source::OciDir { dir, tag } => layout_dir::import(inner, source, dir, tag.as_deref(), name, progress),
        Source::DockerArchive(file) => archive::import(inner, source, file, name, progress),
        Source::Registry(_) => Err(invalid(source, "the image is in a registry: pull it")),
    }
}

fn invalid(source: &Source, reason: impl Into<String>) -> ImageError {
    ImageError::InvalidSource { source_text: source.to_string(), reason: reason.into() }
}

/// Checks the image, copies its layers with `copy`, and names it. Removes new blobs after a failure.
fn store_image(
    inner: &ContentStore,
    imported: ImportedImage,
    name: Option<Reference>,
    source: &Source,
    mut copy: impl FnMut(&Descriptor, &Digest) -> Result<(), ImageError>,
) -> Result<Image, ImageError> {
    let limits = &inner.options.limits;
    let config = Config::parse(&imported.config_bytes, limits)?;
    config.check(imported.manifest.layers.len(), &inner.options.platform, &source.to_string())?;
    let pinned = inner.pins.pin(
        imported
            .manifest
            .layers
            .iter()
            .map(|l| l.digest)
            .chain([imported.manifest.digest, imported.manifest.config.digest]),
    );
    let mut new = Vec::new();
    let copied = imported.manifest.layers.iter().zip(config.diff_ids()).try_for_each(|(layer, diff_id)| {
        if inner.layout.has(layer) {
            return Ok(());
        }
        new.push(layer.digest);
        copy(layer, diff_id)
    });
    let image = copied.and_then(|()| publish(inner, &imported, name));
    drop(pinned);
    if image.is_err() {
        prune::discard(inner, &new)?;
    }
    image
}

fn publish(
    inner: &ContentStore,
    imported: &ImportedImage,
    name: Option<Reference>,
) -> Result<Image, ImageError> {
    inner.layout.put_as(imported.manifest.config.digest, &imported.config_bytes)?;
    let digest = inner.layout.put(&imported.manifest_bytes)?;
    let names: Vec<Option<Reference>> = match name {
        Some(name) => vec![Some(name)],
        None if imported.names.is_empty() => vec![None],
        None => imported.names.iter().cloned().map(Some).collect(),
    };
    inner.change(|index| {
        for reference in names {
            index.put(Entry {
                media_type: imported.manifest.media_type.to_owned(),
                digest,
                size_bytes: imported.manifest.size_bytes,
                reference,
                index: imported.index,
                local: true,
            });
        }
        Ok(())
    })?;
    inner.image(&digest)?.ok_or(ImageError::NotPresent { image: digest.to_string() })
}

/// Copies one layer and verifies its digest and its diff id.
fn copy_layer(
    inner: &ContentStore,
    from: &mut impl Read,
    layer: &Descriptor,
    diff_id: &Digest,
    progress: &Arc<dyn Progress>,
) -> Result<(), ImageError> {
    let meter = Meter::new(progress, Step::Download, Some(layer.digest), layer.size_bytes);
    // Reads one byte more than announced, to detect a wrong size.
    let mut bounded = from.take(layer.size_bytes.saturating_add(1));
    let check = |actual: &Digest| {
        if *actual == layer.digest {
            return Ok(());
        }
        let what = "layer".to_owned();
        Err(OciError::digest_mismatch(what, layer.digest, *actual).into())
    };
    let blob = layout::copy_blob(&inner.layout, &mut bounded, layer.digest.algorithm(), check)?;
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

/// Decompresses a stored layer to verify its diff id.
fn check_diff_id(
    inner: &ContentStore,
    path: &Path,
    layer: &Descriptor,
    diff_id: &Digest,
) -> Result<(), ImageError> {
    let compression = Compression::of_media_type(&layer.media_type)?;
    if compression == Compression::None && layer.digest == *diff_id {
        return Ok(());
    }
    let limits = &inner.options.limits;
    let mut budget = Budget::of(limits);
    let mut stream = DecompressReader::open(path, compression, &mut budget, None)?.hashed_like(diff_id);
    std::io::copy(&mut stream, &mut std::io::sink()).map_err(read_error)?;
    let actual = stream.digest();
    if actual == *diff_id {
        return Ok(());
    }
    let what = format!("unpacked layer {}", layer.digest);
    Err(OciError::digest_mismatch(what, *diff_id, actual).into())
}
