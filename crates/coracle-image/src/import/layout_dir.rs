//! `oci:DIR[:TAG]`.

use std::{fs::File, io::Read, path::Path, sync::Arc};

use super::{Brought, copy_layer, invalid, take_over};
use crate::{
    Digest, Image, ImageError, Progress, Reference, Source,
    manifest::{self, Blob, Document, Entry},
    store::Inner,
};

pub(super) fn import(
    inner: &Inner,
    source: &Source,
    dir: &Path,
    tag: Option<&str>,
    name: Option<Reference>,
    progress: &Arc<dyn Progress>,
) -> Result<Image, ImageError> {
    let (limits, platform) = (&inner.options.limits, &inner.options.platform);
    let bytes = read(&dir.join("index.json"), limits.manifest_bytes, source)?;
    let Document::Index(entries) = manifest::parse(&bytes, Some(manifest::OCI_INDEX), limits)? else {
        return Err(invalid(source, "its index.json is no index"));
    };
    let entry = choose(&entries, tag).map_err(|reason| invalid(source, reason))?;
    let small = |blob: &Blob, max| verified(dir, blob, max, source);
    let first = small(&entry.blob, limits.manifest_bytes)?;
    let (manifest, manifest_bytes, index) =
        match manifest::parse(&first, Some(&entry.blob.media_type), limits)? {
            Document::Manifest(manifest) => (manifest, first, None),
            Document::Index(platforms) => {
                let chosen = &manifest::select(&platforms, platform, &source.to_string())?.blob;
                let second = small(chosen, limits.manifest_bytes)?;
                match manifest::parse(&second, Some(&chosen.media_type), limits)? {
                    Document::Manifest(manifest) => (manifest, second, Some(entry.blob.digest)),
                    Document::Index(_) => return Err(ImageError::unsupported("an index inside an index")),
                }
            }
        };
    let config_bytes = small(&manifest.config, limits.config_bytes)?;
    let names = entry.name.iter().filter_map(|n| full_name(n)).collect();
    let brought = Brought { manifest, manifest_bytes, config_bytes, index, names };
    take_over(inner, brought, name, source, |layer, diff_id| {
        let mut file = open(&blob_path(dir, &layer.digest), source)?;
        copy_layer(inner, &mut file, layer, diff_id, progress)
    })
}

/// The entry a tag means: by its name, or by the tag of a full reference.
fn choose<'e>(entries: &'e [Entry], tag: Option<&str>) -> Result<&'e Entry, String> {
    let known = || entries.iter().filter_map(|e| e.name.as_deref()).take(20).collect::<Vec<_>>().join(", ");
    match (tag, entries) {
        (None, [only]) => Ok(only),
        (None, []) => Err("it holds no image".to_owned()),
        (None, _) => Err(format!("it holds {} images, say which: {}", entries.len(), known())),
        (Some(tag), _) => {
            let named = |e: &&Entry| e.name.as_deref() == Some(tag);
            let tagged =
                |e: &&Entry| e.name.as_deref().and_then(full_name).is_some_and(|r| r.tag() == Some(tag));
            let found = entries.iter().find(named).or_else(|| entries.iter().find(tagged));
            found.ok_or_else(|| format!("it holds no image {tag:?}, only: {}", known()))
        }
    }
}

/// A name that is a whole reference. A bare word there is a tag without a repository, which names nothing
/// outside the layout.
fn full_name(name: &str) -> Option<Reference> {
    name.contains(['/', ':']).then(|| name.parse().ok()).flatten()
}

fn blob_path(dir: &Path, digest: &Digest) -> std::path::PathBuf {
    dir.join("blobs/sha256").join(digest.hex())
}

/// Reads a small blob and checks size and digest.
fn verified(dir: &Path, blob: &Blob, bytes_max: u64, source: &Source) -> Result<Vec<u8>, ImageError> {
    let bytes = read(&blob_path(dir, &blob.digest), bytes_max, source)?;
    let actual = Digest::of(&bytes);
    if actual != blob.digest {
        return Err(ImageError::DigestMismatch {
            what: format!("blob of {source}"),
            expected: blob.digest,
            actual,
        });
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

/// Opens a regular file; anything else could hang.
fn open(path: &Path, source: &Source) -> Result<File, ImageError> {
    let regular = std::fs::metadata(path).map(|m| m.is_file());
    match regular {
        Ok(true) => File::open(path).map_err(|e| ImageError::io("open", path, e)),
        Ok(false) => Err(invalid(source, format!("{} is no file", path.display()))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(invalid(source, format!("{} is missing", path.display())))
        }
        Err(e) => Err(ImageError::io("look at", path, e)),
    }
}
