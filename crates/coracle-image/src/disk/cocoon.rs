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
pub(super) mod fuzz;
mod wire;

use std::{collections::BTreeMap, io::Read, path::Path, sync::Arc};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::{
    DiskOptions, DiskReport,
    artifact::{CONFIG_MAX, digest, number, parse, wrong},
    blocking, pull, push,
    spool::Spool,
};
use crate::{
    Digest, ImageError, Reference,
    registry::{Offered, Operation, Payload, Sent, Session, fetch_small_of},
    space,
};

pub use wire::{CocoonVersion, cocoon_head};

/// Blobs that are moved at once.
const AT_ONCE: usize = 8;

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
    let offers = spooled.files.iter().flat_map(|file| &file.blobs).map(async |blob| {
        let payload = Payload::File { path: blob.file.to_path_buf(), start: 0, bytes: blob.bytes };
        let offered = session.offer_blob(&blob.digest, &payload, None, &quiet).await?;
        Ok::<_, ImageError>((offered == Offered::Moved).then_some(blob.bytes))
    });
    let offered: Vec<Option<u64>> =
        stream::iter(offers).buffered(options.concurrency.unwrap_or(AT_ONCE).max(1)).try_collect().await?;
    let (blobs, moved) = (offered.len(), offered.iter().flatten().count());
    let moved_bytes = offered.iter().flatten().sum();
    let (config, manifest) = wire::write(&spooled, version);
    let digest = push::seal(&session, reference, config, manifest, false).await?.digest;
    let disk_bytes = spooled.files.iter().map(|file| file.body_bytes).sum();
    Ok(DiskReport { digest, disk_bytes, windows: blobs, moved, moved_bytes })
}

/// Pulls a snapshot artifact of the original runtime, of either version, and writes it to `out` as the archive that it
/// imports, under the name `name`. Everything is verified before the first byte is written. Until then it is kept in the
/// folder `spool`, which is made, and is gone when this returns. Cancel-safe: what has come stays there, as it does when
/// the registry or `out` fails, and the next call goes on with it.
///
/// # Errors
/// [`ImageError::Unsupported`] for another artifact; [`ImageError::Hostile`], [`ImageError::DigestMismatch`]; those of
/// the registry; [`ImageError::Io`], also when `out` takes no more, or another pull is at work in the folder.
pub async fn pull_cocoon(
    reference: &Reference,
    name: &str,
    options: &DiskOptions,
    spool: &Path,
    out: impl std::io::Write + Send + 'static,
) -> Result<DiskReport, ImageError> {
    let session = pull::open(reference, options, Operation::Pull).await?;
    let bytes = pull::one_of(&session, reference).await?;
    let manifest = parse(&bytes, "manifest")?;
    let size = number(&manifest["config"]["size"]).filter(|n| *n <= CONFIG_MAX * 64);
    let size = size.ok_or_else(|| wrong("the configuration's size"))?;
    let config = fetch_small_of(&session, &digest(&manifest["config"]["digest"])?, size).await?;
    let snapshot = wire::read(&manifest, &parse(&config, "configuration")?)?;
    let blobs = snapshot.files.iter().flat_map(|file| &file.blobs);
    let (windows, moved_bytes) = (blobs.clone().count(), blobs.clone().map(|b| b.bytes).sum());
    let spool = Spool::open(spool, &blobs.map(|b| b.digest).collect::<Vec<_>>()).await?;
    let at_once = options.concurrency.unwrap_or(AT_ONCE).max(1);
    let disk_bytes = assemble(&session, snapshot, name, &spool, at_once, out).await;
    let disk_bytes = spool.end(disk_bytes)?;
    Ok(DiskReport { digest: Digest::of(&bytes), disk_bytes, windows, moved: windows, moved_bytes })
}

/// Brings all blobs here and writes the archive. Returns the bytes of its files.
async fn assemble(
    session: &Session,
    snapshot: wire::Remote,
    name: &str,
    spool: &Spool,
    at_once: usize,
    mut out: impl std::io::Write + Send + 'static,
) -> Result<u64, ImageError> {
    // A blob that two files have is fetched once.
    let named = snapshot.files.iter().flat_map(|file| &file.blobs).map(|b| (b.digest, b.bytes));
    let named: BTreeMap<Digest, u64> = named.collect();
    let unpacked = snapshot.files.iter().filter(|f| f.packed).filter_map(|f| f.body_bytes);
    let missing = named.iter().map(|(digest, bytes)| bytes.saturating_sub(spool.have(digest)));
    let needed = unpacked.chain(missing).fold(0, u64::saturating_add);
    space::check(spool.folder(), needed, &format!("fetch {name}"))?;
    let fetch = async |(digest, bytes): (&Digest, &u64)| spool.fetch(session, digest, *bytes).await.map(drop);
    stream::iter(named.iter().map(fetch)).buffer_unordered(at_once).try_collect::<()>().await?;
    let (name, folder) = (name.to_owned(), spool.folder().to_owned());
    let failed = |e| ImageError::io("write", "a snapshot's archive", e);
    blocking(move || Ok(archive::write(&snapshot, &name, &folder, &mut out))).await.map_err(failed)?
}
