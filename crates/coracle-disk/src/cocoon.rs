//! Snapshots of cocoon: the archive that cocoon imports and exports, and both versions of its artifact.
//!
//! ```text
//! archive   snapshot.json, then each file; a sparse file with a map, and only its data in the body
//! v1        one blob for each file; maps of sparse files in the configuration
//! v2        files of at least 1 MiB in zstd chunks, numbered
//! ```
//! Archives and registries are untrusted: names are plain file names, sizes are limited, and each file of the configuration
//! needs a layer.

mod archive;
pub(super) mod fuzz;
mod wire;

use std::{collections::BTreeMap, io::Read, path::Path, sync::Arc};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::{
    DiskOptions, DiskReport,
    artifact::{CONFIG_MAX, digest, invalid, number, parse},
    blocking, pull, push,
    spool::Spool,
};
use coracle_image::{ImageError, space};
use coracle_oci::{Digest, Offered, Operation, Payload, Reference, SentBytes, Session, fetch_bytes};

pub use wire::CocoonVersion;

/// Limit of blobs that are transferred concurrently.
const AT_ONCE: usize = 8;

/// Pushes an archive of cocoon as a snapshot artifact. Spools the archive to temporary files first. Idempotent.
///
/// # Errors
/// `OciError::Hostile` and `OciError::Unsupported` for an invalid archive; `OciError::Io`; those of the registry.
pub async fn push_cocoon(
    input: impl Read + Send + 'static,
    version: CocoonVersion,
    reference: &Reference,
    options: &DiskOptions,
) -> Result<DiskReport, ImageError> {
    let (level, folder) = (options.level, options.spool.clone().unwrap_or_else(std::env::temp_dir));
    let spooled = blocking(move || Ok(archive::spool(input, version, level, &folder))).await;
    let spooled = spooled.map_err(|e| ImageError::io("read", "the archive of a snapshot", e))??;
    let session = pull::open(reference, options, Operation::Push).await?;
    let quiet: SentBytes = Arc::new(|_| {});
    let offers = spooled.files.iter().flat_map(|file| &file.blobs).map(async |blob| {
        let payload = Payload::File { path: blob.file.to_path_buf(), start: 0, bytes: blob.bytes };
        let offered = session.offer_blob(&blob.digest, &payload, None, &quiet).await?;
        Ok::<_, ImageError>((offered == Offered::Uploaded).then_some(blob.bytes))
    });
    let offered: Vec<Option<u64>> =
        stream::iter(offers).buffered(options.concurrency.unwrap_or(AT_ONCE).max(1)).try_collect().await?;
    let (blobs, moved) = (offered.len(), offered.iter().flatten().count());
    let moved_bytes = offered.iter().flatten().sum();
    let (config, manifest) = wire::write(&spooled, version);
    let digest = push::push_manifest(&session, reference, config, manifest, false).await?.digest;
    let disk_bytes = spooled.files.iter().map(|file| file.body_bytes).sum();
    Ok(DiskReport { digest, disk_bytes, chunks: blobs, moved, moved_bytes, parts: vec![] })
}

/// Pulls a snapshot artifact of either version and writes it to `out` as the archive that cocoon imports as snapshot `name`.
/// All blobs are verified before the first byte is written. Until then they are in the directory `spool`, which is created, and
/// deleted before this returns. Cancel-safe: after a cancellation, or a failure of the registry or of `out`, received bytes
/// stay in the directory and the next call resumes.
///
/// # Errors
/// `OciError::Unsupported` for another artifact; `OciError::Hostile`, `OciError::DigestMismatch`; those of the registry;
/// `OciError::Io`, also when writing to `out` fails or another pull uses the directory.
pub async fn pull_cocoon(
    reference: &Reference,
    name: &str,
    options: &DiskOptions,
    spool: &Path,
    out: impl std::io::Write + Send + 'static,
) -> Result<DiskReport, ImageError> {
    let session = pull::open(reference, options, Operation::Pull).await?;
    let bytes = pull::fetch_manifest(&session, reference).await?;
    let manifest = parse(&bytes, "manifest")?;
    let size = number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX * 64);
    let size = size.ok_or_else(|| invalid("size of the configuration"))?;
    let config = fetch_bytes(&session, &digest(&manifest["config"]["digest"])?, size).await?;
    let snapshot = wire::read(&manifest, &parse(&config, "configuration")?)?;
    let blobs = snapshot.files.iter().flat_map(|file| &file.blobs);
    let (chunks, moved_bytes) = (blobs.clone().count(), blobs.clone().map(|b| b.bytes).sum());
    let spool = Spool::open(spool, &blobs.map(|b| b.digest).collect::<Vec<_>>()).await?;
    let at_once = options.concurrency.unwrap_or(AT_ONCE).max(1);
    let disk_bytes = assemble(&session, snapshot, name, &spool, at_once, out).await;
    let disk_bytes = spool.finish(disk_bytes)?;
    Ok(DiskReport {
        digest: Digest::of(&bytes),
        disk_bytes,
        chunks,
        moved: chunks,
        moved_bytes,
        parts: vec![],
    })
}

/// Fetches all blobs and writes the archive. Returns the total bytes of its files.
async fn assemble(
    session: &Session,
    snapshot: wire::Remote,
    name: &str,
    spool: &Spool,
    at_once: usize,
    mut out: impl std::io::Write + Send + 'static,
) -> Result<u64, ImageError> {
    // A blob that two files share is fetched once.
    let named = snapshot.files.iter().flat_map(|file| &file.blobs).map(|b| (b.digest, b.bytes));
    let named: BTreeMap<Digest, u64> = named.collect();
    let unpacked = snapshot.files.iter().filter(|f| f.packed).filter_map(|f| f.body_bytes);
    let missing = named.iter().map(|(digest, bytes)| bytes.saturating_sub(spool.have(digest)));
    let needed = unpacked.chain(missing).fold(0, u64::saturating_add);
    space::check(spool.folder(), needed, &format!("fetch {name}"))?;
    let fetch = async |(digest, bytes): (&Digest, &u64)| spool.fetch(session, digest, *bytes).await.map(drop);
    stream::iter(named.iter().map(fetch)).buffer_unordered(at_once).try_collect::<()>().await?;
    let (name, folder) = (name.to_owned(), spool.folder().to_owned());
    let failed = |e| ImageError::io("write", "the archive of a snapshot", e);
    blocking(move || Ok(archive::write(&snapshot, &name, &folder, &mut out))).await.map_err(failed)?
}
