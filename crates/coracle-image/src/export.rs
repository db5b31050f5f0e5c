//! Exports an image as one archive that is both an OCI layout and a docker archive.

use std::{fs::File, io::Write, sync::Arc};

use serde_json::json;

use crate::{ImageError, content::ContentStore};
use coracle_oci::{Descriptor, Digest, Reference, media_types::OCI_INDEX};

/// See [`crate::Store::export`]. Blocking.
pub(crate) fn export(
    inner: &Arc<ContentStore>,
    reference: &Reference,
    out: &mut dyn Write,
) -> Result<(), ImageError> {
    let absent = || ImageError::NotPresent { image: reference.to_string() };
    let digest = inner.index().find(reference).map(|e| e.digest).ok_or_else(absent)?;
    let (manifest, _) = inner.manifest(&digest)?.ok_or_else(absent)?;
    let blobs: Vec<Descriptor> = [&manifest.config].into_iter().chain(&manifest.layers).cloned().collect();
    let _pinned = inner.pins.pin(blobs.iter().map(|b| b.digest).chain([digest]));
    let bytes = inner.layout.read(&digest, inner.options.limits.manifest_bytes)?.ok_or_else(absent)?;
    let name = reference.to_string();
    let index = json!({
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [{
            "mediaType": manifest.media_type,
            "digest": digest.to_string(),
            "size": bytes.len(),
            "annotations": {"org.opencontainers.image.ref.name": name, "io.containerd.image.name": name},
        }],
    });
    let layers: Vec<String> = manifest.layers.iter().map(|l| path(&l.digest)).collect();
    let docker = json!([{"Config": path(&manifest.config.digest), "RepoTags": [name], "Layers": layers}]);
    let written = || -> std::io::Result<()> {
        let mut archive = tar::Builder::new(out);
        member(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        member(&mut archive, "index.json", index.to_string().as_bytes())?;
        member(&mut archive, "manifest.json", docker.to_string().as_bytes())?;
        member(&mut archive, &path(&digest), &bytes)?;
        let mut seen = std::collections::BTreeSet::new();
        for blob in blobs.iter().filter(|b| seen.insert(b.digest)) {
            let mut header = header(blob.size_bytes);
            archive.append_data(
                &mut header,
                path(&blob.digest),
                File::open(inner.layout.blob(&blob.digest))?,
            )?;
        }
        archive.finish()
    };
    written().map_err(|e| ImageError::io("write the archive of", inner.layout.blob(&digest), e))
}

fn path(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm().name(), digest.hex())
}

fn header(bytes: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes);
    header.set_mode(0o644);
    header.set_entry_type(tar::EntryType::Regular);
    header
}

fn member(archive: &mut tar::Builder<&mut dyn Write>, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    archive.append_data(&mut header(bytes.len() as u64), name, bytes)
}
