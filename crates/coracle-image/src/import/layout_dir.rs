//! `oci:DIR[:TAG]`: an OCI image layout.

use std::{fs::File, io::Read, path::Path, sync::Arc};

use super::{ImportedImage, copy_layer, invalid, store_image};
use crate::{
    Image, ImageError, Source,
    content::ContentStore,
    manifest::{self, Document},
};
use coracle_oci::{
    Descriptor, Digest, IndexEntry, OciError, Progress, Reference, media_types::OCI_INDEX, select,
};

pub(super) fn import(
    inner: &ContentStore,
    source: &Source,
    dir: &Path,
    tag: Option<&str>,
    name: Option<Reference>,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let (limits, platform) = (&inner.options.limits, &inner.options.platform);
    let bytes = read(&dir.join("index.json"), limits.manifest_bytes, source)?;
    let Document::Index(entries) = manifest::parse(&bytes, Some(OCI_INDEX), limits)? else {
        return Err(invalid(source, "index.json is not an index"));
    };
    let entry = choose(&entries, tag).map_err(|reason| invalid(source, reason))?;
    let small = |blob: &Descriptor, max| read_verified(dir, blob, max, source);
    let first = small(&entry.descriptor, limits.manifest_bytes)?;
    let (manifest, manifest_bytes, index) =
        match manifest::parse(&first, Some(&entry.descriptor.media_type), limits)? {
            Document::Manifest(manifest) => (manifest, first, None),
            Document::Index(platforms) => {
                let chosen = &select(&platforms, platform, &source.to_string())?.descriptor;
                let second = small(chosen, limits.manifest_bytes)?;
                match manifest::parse(&second, Some(&chosen.media_type), limits)? {
                    Document::Manifest(manifest) => (manifest, second, Some(entry.descriptor.digest)),
                    Document::Index(_) => return Err(ImageError::unsupported("index inside an index")),
                }
            }
        };
    let config_bytes = small(&manifest.config, limits.config_bytes)?;
    let names = entry.name.iter().filter_map(|n| full_name(n)).collect();
    let imported = ImportedImage { manifest, manifest_bytes, config_bytes, index, names };
    store_image(inner, imported, name, source, |layer, diff_id| {
        let mut file = open(&blob_path(dir, &layer.digest), source)?;
        copy_layer(inner, &mut file, layer, diff_id, progress)
    })
}

/// Finds the entry of a tag, by its whole name or by the tag of a full reference.
fn choose<'e>(entries: &'e [IndexEntry], tag: Option<&str>) -> Result<&'e IndexEntry, String> {
    let known = || entries.iter().filter_map(|e| e.name.as_deref()).take(20).collect::<Vec<_>>().join(", ");
    match (tag, entries) {
        (None, [only]) => Ok(only),
        (None, []) => Err("it has no image".to_owned()),
        (None, _) => Err(format!("it has {} images, choose one: {}", entries.len(), known())),
        (Some(tag), _) => {
            let named = |e: &&IndexEntry| e.name.as_deref() == Some(tag);
            let tagged =
                |e: &&IndexEntry| e.name.as_deref().and_then(full_name).is_some_and(|r| r.tag() == Some(tag));
            let found = entries.iter().find(named).or_else(|| entries.iter().find(tagged));
            found.ok_or_else(|| format!("image {tag:?} not found, only: {}", known()))
        }
    }
}

/// Name as a full reference. `None` for a plain word, which is a tag without a repository.
fn full_name(name: &str) -> Option<Reference> {
    name.contains(['/', ':']).then(|| name.parse().ok()).flatten()
}

fn blob_path(dir: &Path, digest: &Digest) -> std::path::PathBuf {
    dir.join("blobs").join(digest.algorithm().name()).join(digest.hex())
}

/// Reads a small blob and verifies size and digest.
fn read_verified(
    dir: &Path,
    blob: &Descriptor,
    bytes_max: u64,
    source: &Source,
) -> Result<Vec<u8>, ImageError> {
    let bytes = read(&blob_path(dir, &blob.digest), bytes_max, source)?;
    let actual = Digest::with(blob.digest.algorithm(), &bytes);
    if actual != blob.digest {
        let what = format!("blob of {source}");
        return Err(OciError::digest_mismatch(what, blob.digest, actual).into());
    }
    if bytes.len() as u64 != blob.size_bytes {
        let (digest, said) = (blob.digest, blob.size_bytes);
        return Err(ImageError::hostile(format!(
            "blob {digest} has {} bytes, but was announced with {said}",
            bytes.len()
        )));
    }
    Ok(bytes)
}

fn read(path: &Path, bytes_max: u64, source: &Source) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    let file = open(path, source)?.take(bytes_max.saturating_add(1));
    { file }.read_to_end(&mut bytes).map_err(|e| ImageError::io("read", path, e))?;
    if bytes.len() as u64 > bytes_max {
        return Err(ImageError::hostile(format!("{} is larger than {bytes_max} bytes", path.display())));
    }
    Ok(bytes)
}

/// Opens a regular file; opening anything else could block.
fn open(path: &Path, source: &Source) -> Result<File, ImageError> {
    let regular = std::fs::metadata(path).map(|m| m.is_file());
    match regular {
        Ok(true) => File::open(path).map_err(|e| ImageError::io("open", path, e)),
        Ok(false) => Err(invalid(source, format!("{} is not a regular file", path.display()))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(invalid(source, format!("{} is missing", path.display())))
        }
        Err(e) => Err(ImageError::io("stat", path, e)),
    }
}
