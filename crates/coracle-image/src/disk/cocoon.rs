//! Snapshots of the original runtime: its import and export archive, and the two versions of its artifact.
//!
//! ```text
//! archive   snapshot.json, then each file; sparse ones with a map, their data alone in the body
//! v1        each file one blob; what its map says stands in the configuration
//! v2        files of a mebibyte or more in zstd chunks, in order, none missing
//! ```
//! Archive and registry are hostile: names are plain, sizes bounded, a file that the configuration names and no layer
//! has is an error.

mod archive;
mod wire;

use std::{io::Read, sync::Arc};

use super::{
    DiskOptions, DiskReport,
    artifact::{CONFIG_MAX, digest, number, parse, wrong},
    blocking, pull, push,
};
use crate::{
    Digest, ImageError, Reference,
    registry::{Offered, Operation, Payload, Sent, fetch_file, fetch_small_of},
};

pub use wire::{CocoonVersion, cocoon_head};

/// Pushes an archive of the original runtime as its snapshot artifact. The archive is spooled to temporary files first.
/// Idempotent.
///
/// # Errors
/// [`ImageError::Hostile`] and [`ImageError::Unsupported`] for what is no such archive; [`ImageError::Io`]; those of the
/// registry.
pub async fn push_cocoon(
    input: impl Read + Send + 'static,
    version: CocoonVersion,
    reference: &Reference,
    options: &DiskOptions,
) -> Result<DiskReport, ImageError> {
    let level = options.level;
    let spooled = blocking(move || Ok(archive::spool(input, version, level))).await;
    let spooled = spooled.map_err(|e| ImageError::io("read", "the archive", e))??;
    let session = pull::open(reference, options, Operation::Push).await?;
    let quiet: Sent = Arc::new(|_| {});
    let (mut moved, mut moved_bytes, mut blobs) = (0, 0, 0);
    for blob in spooled.files.iter().flat_map(|file| &file.blobs) {
        let payload = Payload::File { path: blob.file.to_path_buf(), start: 0, bytes: blob.bytes };
        let was_moved = session.offer_blob(&blob.digest, &payload, None, &quiet).await? == Offered::Moved;
        blobs += 1;
        moved += usize::from(was_moved);
        moved_bytes += if was_moved { blob.bytes } else { 0 };
    }
    let (config, manifest) = wire::write(&spooled, version);
    let digest = push::seal(&session, reference, config, manifest, false).await?;
    let disk_bytes = spooled.files.iter().map(|file| file.body_bytes).sum();
    Ok(DiskReport { digest, disk_bytes, windows: blobs, moved, moved_bytes })
}

/// Pulls a snapshot artifact of the original runtime, of either version, and writes it to `out` as the archive that it
/// imports, under the name `name`. Everything is verified before the first byte is written.
///
/// # Errors
/// [`ImageError::Unsupported`] for another artifact; [`ImageError::Hostile`], [`ImageError::DigestMismatch`]; those of
/// the registry; [`ImageError::Io`], also when `out` takes no more.
pub async fn pull_cocoon(
    reference: &Reference,
    name: &str,
    options: &DiskOptions,
    mut out: impl std::io::Write + Send + 'static,
) -> Result<DiskReport, ImageError> {
    let session = pull::open(reference, options, Operation::Pull).await?;
    let bytes = session.manifest(&reference.api_name(), pull::MANIFEST_MAX).await?.bytes;
    let manifest = parse(&bytes, "manifest")?;
    let size = number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX * 64);
    let size = size.ok_or_else(|| wrong("the configuration's size"))?;
    let config = fetch_small_of(&session, &digest(&manifest["config"]["digest"])?, size).await?;
    let snapshot = wire::read(&manifest, &parse(&config, "configuration")?)?;
    let failed = |e| ImageError::io("spool", "a snapshot", e);
    let (mut fetched, mut moved, mut moved_bytes) = (Vec::new(), 0, 0);
    for file in &snapshot.files {
        let mut blobs = Vec::new();
        for blob in &file.blobs {
            let spool = tempfile::tempfile().map_err(failed)?;
            let to = tokio::fs::File::from_std(spool.try_clone().map_err(failed)?);
            fetch_file(&session, &blob.digest, blob.bytes, to).await?;
            blobs.push(spool);
            moved += 1;
            moved_bytes += blob.bytes;
        }
        fetched.push(blobs);
    }
    let name = name.to_owned();
    let written = blocking(move || Ok(archive::write(&snapshot, &name, fetched, &mut out))).await;
    let disk_bytes = written.map_err(failed)??;
    Ok(DiskReport { digest: Digest::of(&bytes), disk_bytes, windows: moved, moved, moved_bytes })
}
