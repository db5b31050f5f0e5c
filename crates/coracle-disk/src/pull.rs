//! Pulls disks from registries.

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::task::JoinSet;

use super::{
    DiskOptions, DiskProgress, DiskReport, LocalParts,
    artifact::{self, Chunk, Disk},
    blocking,
    budget::{self, TransferBudget},
    chunk,
    foreign::{self, ForeignDisk},
    frame,
    push::Transferred,
};
use crate::sparse;
use coracle_image::{ImageError, space};
use coracle_oci::{
    BlobFile, Client, Digest, Manifest, OciError, Operation, Platform, Reference, RetryPolicy, Session,
    fetch_bytes, fetch_file, fetch_unverified, select,
};

/// Largest manifest, bytes: a thousand chunks need less than 1 MiB.
pub(super) const MANIFEST_MAX: u64 = 4 << 20;

/// Longest wait for the lock of a file, and the interval between attempts.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(10);
const LOCK_POLL: Duration = Duration::from_millis(20);

/// Logs in to the first server that has the manifest, or that accepts uploads.
pub(super) async fn open(
    reference: &Reference,
    options: &DiskOptions,
    operation: Operation,
) -> Result<Session, ImageError> {
    let DiskOptions { registries, credentials, timeouts, retries, origin, .. } = options;
    let retry_policy = RetryPolicy { timeouts: timeouts.clone(), retries: *retries };
    let client = Client { registries, credentials, origin: *origin, retry_policy };
    Ok(client.open_first(reference, operation).await?)
}

/// Pulls a disk into the file `path`. When this returns, the file is complete, sparse and synced. Until then it grows as
/// `path.partial`: a later call keeps its valid chunks, and copies equal chunks from an older file at `path`. Idempotent. Also
/// reads containerDisks, cloud images and disks of tart, lume and macOS-vz, and resumes all except containerDisks. A qcow2
/// image stays qcow2.
///
/// # Errors
/// `OciError::Unsupported` when the artifact is not a disk; `OciError::DigestMismatch` and `OciError::Hostile` for wrong bytes;
/// `OciError::StorageFull`, `OciError::Io` for the file; those of the registry.
pub async fn pull_disk(
    reference: &Reference,
    path: &Path,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let session = Arc::new(open(reference, options, Operation::Pull).await?);
    let manifest = fetch_manifest(&session, reference).await?;
    let found = foreign::detect(&artifact::parse(&manifest, "manifest")?)?;
    if found != ForeignDisk::Other {
        let taken = foreign::pull(&session, &found, path, options, &progress).await?;
        return Ok(DiskReport {
            digest: Digest::of(&manifest),
            disk_bytes: taken.disk_bytes,
            chunks: taken.parts,
            moved: taken.blobs,
            moved_bytes: taken.blob_bytes,
            parts: taken.digests,
        });
    }
    let (config, size) = Disk::config_of(&manifest)?;
    let disk = Disk::read(&manifest, &fetch_bytes(&session, &config, size).await?)?;
    let moved = pull_file(&session, &disk, path, options, &progress).await?;
    Ok(Transferred { disks: vec![disk], moved }.report(Digest::of(&manifest)))
}

/// Digest of the manifest that the reference names at its registry. `None` when the registry does not report it. Transfers
/// nothing.
///
/// # Errors
/// Errors of the registry.
pub async fn resolve_disk(
    reference: &Reference,
    options: &DiskOptions,
) -> Result<Option<Digest>, ImageError> {
    Ok(open(reference, options, Operation::Pull).await?.resolve().await?)
}

/// Manifest of the reference. For an index, the manifest for this platform, or else the first one: a transferred disk need not
/// run here.
pub(super) async fn fetch_manifest(session: &Session, reference: &Reference) -> Result<Vec<u8>, ImageError> {
    let bytes = session.manifest(&reference.api_name(), MANIFEST_MAX).await?.bytes;
    if !artifact::parse(&bytes, "manifest")?["manifests"].is_array() {
        return Ok(bytes);
    }
    let index = Manifest::parse(&bytes);
    let index = index.map_err(|e| ImageError::hostile(format!("cannot parse index: {e}")))?;
    let entries = index.index_entries()?;
    let entry = match select(&entries, &Platform::host(), &reference.to_string()) {
        Ok(entry) => entry,
        Err(error) => entries.iter().find(|e| e.architecture != "unknown").ok_or(error)?,
    };
    Ok(session.manifest(&entry.descriptor.digest.to_string(), MANIFEST_MAX).await?.bytes)
}

/// Fetches a disk into a file, see [`pull_disk`]. Returns the compressed bytes of each transferred chunk.
pub(super) async fn pull_file(
    session: &Arc<Session>,
    disk: &Disk,
    path: &Path,
    options: &DiskOptions,
    progress: &DiskProgress,
) -> Result<Vec<u64>, ImageError> {
    let partial = partial_path(path);
    let fail = |operation: &'static str, path: &Path| {
        let path = path.to_owned();
        move |e: io::Error| ImageError::io(operation, path.clone(), e)
    };
    let file = open_exclusive(&partial).await.map_err(fail("open", &partial))?;
    let layout = disk.clone();
    let prepared = blocking(move || prepare(&file, &layout).map(|resumed| (file, resumed)));
    let (file, resumed) = prepared.await.map_err(fail("prepare", &partial))?;
    check_space(disk, &file, path)?;
    // The file to be replaced often has most chunks of the new disk.
    let previous = File::open(path).ok().filter(|f| f.metadata().is_ok_and(|m| m.is_file()));
    let (session, file, previous) = (Arc::clone(session), Arc::new(file), previous.map(Arc::new));
    let job = Arc::new(Job {
        session,
        file,
        path: partial.clone(),
        resumed,
        previous,
        local: Arc::clone(&options.local),
    });
    let moved = fetch(&job, disk, TransferBudget::new(options.concurrency), progress).await?;
    let (file, to) = (Arc::clone(&job.file), path.to_owned());
    let named = blocking(move || publish(&file, &partial, &to));
    named.await.map_err(fail("rename to", path))?;
    Ok(moved)
}

/// Fails unless all chunks fit. Blocks that the file already has are not counted.
fn check_space(disk: &Disk, file: &File, path: &Path) -> Result<(), ImageError> {
    use std::os::unix::fs::MetadataExt;
    let there = file.metadata().map_err(|e| ImageError::io("stat", path, e))?.blocks() * 512;
    let bytes = |w: &Chunk| w.part.end - w.part.start;
    let all: u64 = disk.chunks.iter().map(bytes).sum();
    // Blobs of large chunks are stored in temporary files.
    let spooled = disk.chunks.iter().filter(|w| bytes(w) > budget::MEMORY_MAX).map(|w| w.blob_bytes).max();
    let spooled = spooled.map_or(0, |largest| largest.max(budget::BYTES_MAX));
    space::check(
        parent_dir(path),
        all.saturating_sub(there).saturating_add(spooled),
        &format!("fetch {}", path.display()),
    )
}

pub(super) fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs a complete file and renames it.
pub(super) fn publish(file: &File, partial: &Path, to: &Path) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(partial, to)?;
    File::open(parent_dir(to))?.sync_all()
}

struct Job {
    session: Arc<Session>,
    file: Arc<File>,
    path: PathBuf,
    /// True when the file existed: its chunks may be valid.
    resumed: bool,
    /// Existing file that is replaced.
    previous: Option<Arc<File>>,
    local: Arc<LocalParts>,
}

/// Path of the file while it is incomplete.
pub(super) fn partial_path(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.partial", path.display()))
}

/// Turns a complete file of an earlier pull into a partial one, so that its chunks are verified again.
pub(super) fn make_partial(path: &Path) -> io::Result<()> {
    match fs::rename(path, partial_path(path)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        renamed => renamed,
    }
}

/// Opens and locks the file. Retries for a while, because the last write of a cancelled pull ends in the background.
pub(super) async fn open_exclusive(path: &Path) -> io::Result<File> {
    let give_up = tokio::time::Instant::now() + LOCK_WAIT_MAX;
    loop {
        let path = path.to_owned();
        if let Some(file) = blocking(move || try_open_exclusive(&path)).await? {
            return Ok(file);
        }
        if tokio::time::Instant::now() >= give_up {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "another pull uses it"));
        }
        tokio::time::sleep(LOCK_POLL).await;
    }
}

/// Opens and locks the file. The lock is held as long as the file is open. `None` while another pull holds the lock.
fn try_open_exclusive(path: &Path) -> io::Result<Option<File>> {
    use std::os::unix::fs::MetadataExt;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    // The pull that held the lock may have renamed the file.
    let same =
        fs::metadata(path).is_ok_and(|there| file.metadata().is_ok_and(|own| own.ino() == there.ino()));
    Ok(same.then_some(file))
}

/// Sets the length of the file and clears ranges that are zero in the disk. Returns true when the file already had the length.
fn prepare(file: &File, disk: &Disk) -> io::Result<bool> {
    let resumed = file.metadata()?.len() == disk.bytes && disk.bytes > 0;
    if !resumed {
        file.set_len(0)?;
        file.set_len(disk.bytes)?;
        return Ok(false);
    }
    let mut empty: Vec<Range<u64>> = chunk::all(disk.bytes, disk.chunk_bytes).collect();
    empty.retain(|part| disk.chunks.iter().all(|w| w.part.end <= part.start || w.part.start >= part.end));
    for part in empty {
        sparse::clear(file, &part)?;
    }
    Ok(true)
}

/// Fetches missing chunks concurrently. Returns the compressed size of each transferred chunk.
async fn fetch(
    job: &Arc<Job>,
    disk: &Disk,
    budget: TransferBudget,
    progress: &DiskProgress,
) -> Result<Vec<u64>, ImageError> {
    let total_bytes = disk.chunks.iter().map(|w| w.part.end - w.part.start).sum();
    let mut tasks = JoinSet::new();
    for chunk in disk.chunks.iter().cloned() {
        let (job, budget) = (Arc::clone(job), budget.clone());
        tasks.spawn(async move {
            let _permit = budget.acquire(chunk.part.end - chunk.part.start).await;
            fetch_chunk(&job, &chunk).await.map(|moved| (chunk, moved))
        });
    }
    let (mut moved, mut done_bytes) = (Vec::new(), 0);
    while let Some(ended) = tasks.join_next().await {
        let (chunk, was_moved) = ended.map_err(|e| job.session.network("transfer chunk", e))??;
        done_bytes += chunk.part.end - chunk.part.start;
        progress(done_bytes, total_bytes);
        moved.extend(was_moved.then_some(chunk.blob_bytes));
    }
    Ok(moved)
}

/// Fetches one chunk and verifies the digest of its raw bytes. Returns false when the bytes were on this node already.
async fn fetch_chunk(job: &Arc<Job>, chunk: &Chunk) -> Result<bool, ImageError> {
    let fail = |operation: &'static str| move |e: io::Error| ImageError::io(operation, &job.path, e);
    if job.resumed {
        let (file, part) = (Arc::clone(&job.file), chunk.part.clone());
        if blocking(move || frame::hash_range(&file, &part)).await.map_err(fail("read"))? == Some(chunk.raw) {
            return Ok(false);
        }
    }
    if let Some(previous) = &job.previous {
        let (from, to, part) = (Arc::clone(previous), Arc::clone(&job.file), chunk.part.clone());
        if blocking(move || frame::copy_range(&from, &to, &part)).await.map_err(fail("copy"))?
            == Some(chunk.raw)
        {
            return Ok(false);
        }
    }
    let (local, own, to) = (Arc::clone(&job.local), chunk.clone(), Arc::clone(&job.file));
    if blocking(move || local.copy(&own.raw, &to, &own.part)).await.map_err(fail("copy a part to"))? {
        return Ok(false);
    }
    if chunk.part.end - chunk.part.start > budget::MEMORY_MAX {
        return fetch_through_file(job, chunk).await.map(|()| true);
    }
    let packed = Arc::new(fetch_unverified(&job.session, &chunk.blob, chunk.blob_bytes).await?);
    let (file, part, bytes) = (Arc::clone(&job.file), chunk.part.clone(), Arc::clone(&packed));
    let wrong = match blocking(move || frame::decompress(bytes.as_slice(), &file, &part)).await {
        Ok(actual) if actual == chunk.raw => return Ok(true),
        Ok(actual) => mismatch(format!("raw bytes of chunk {}", chunk.blob), chunk.raw, actual),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            ImageError::hostile(format!("chunk {}: {e}", chunk.blob))
        }
        Err(e) => return Err(fail("write")(e)),
    };
    // Distinguishes wrong bytes of the registry from a wrong manifest.
    let algorithm = chunk.blob.algorithm();
    let sent = blocking(move || Ok(Digest::with(algorithm, &packed))).await.map_err(fail("hash"))?;
    match sent == chunk.blob {
        true => Err(wrong),
        false => Err(mismatch("chunk".to_owned(), chunk.blob, sent)),
    }
}

/// Fetches a large chunk through a temporary file. Needs memory for a few frames.
async fn fetch_through_file(job: &Job, chunk: &Chunk) -> Result<(), ImageError> {
    let fail = |operation: &'static str| move |e: io::Error| ImageError::io(operation, &job.path, e);
    let file = tempfile::tempfile_in(parent_dir(&job.path)).map_err(fail("create a file beside"))?;
    let spool = BlobFile { file, path: job.path.clone(), guard: () };
    let packed = fetch_file(&job.session, &chunk.blob, chunk.blob_bytes, spool, &|_| {}).await?;
    let (file, part) = (Arc::clone(&job.file), chunk.part.clone());
    match blocking(move || frame::decompress(&packed, &file, &part)).await {
        Ok(actual) if actual == chunk.raw => Ok(()),
        Ok(actual) => Err(mismatch(format!("raw bytes of chunk {}", chunk.blob), chunk.raw, actual)),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            Err(ImageError::hostile(format!("chunk {}: {e}", chunk.blob)))
        }
        Err(e) => Err(fail("write")(e)),
    }
}

fn mismatch(what: String, expected: Digest, actual: Digest) -> ImageError {
    ImageError::Oci(OciError::digest_mismatch(what, expected, actual))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::sparse::WithoutHoles;

    #[test]
    fn resumed_disk_is_cleared_without_hole_punching() {
        let Some(place) = WithoutHoles::mount() else { return };
        let path = place.0.path().join("disk");
        fs::write(&path, vec![7; 3 << 20]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let digest = Digest::of(&[7; 1 << 20]);
        let chunk = Chunk { part: 1 << 20..2 << 20, raw: digest, blob: digest, blob_bytes: 100 };
        let disk = Disk { bytes: 3 << 20, chunk_bytes: 1 << 20, chunks: vec![chunk] };
        assert!(prepare(&file, &disk).unwrap(), "it is resumed");
        let mut bytes = vec![9; 3 << 20];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let of = |n: usize| &bytes[n << 20..(n + 1) << 20];
        assert!(of(0) == [0; 1 << 20] && of(1) == [7; 1 << 20] && of(2) == [0; 1 << 20]);
    }
}
