//! Pushes disks to registries.

use std::{
    collections::HashMap,
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use tokio::task::JoinSet;

use super::{
    DiskFormat, DiskOptions, DiskPart, DiskProgress, DiskReport,
    artifact::{self, Chunk, Disk, EMPTY_BLOB, MANIFEST},
    blocking,
    budget::{MEMORY_MAX, TransferBudget},
    chunk, foreign, frame, pull,
};
use coracle_image::{ImageError, space};
use coracle_oci::{
    Digest, Hasher, HashingWriter, Offered, Operation, Payload, Reference, SentBytes, Session,
};

/// State shared by all chunks of a push.
struct Job {
    session: Arc<Session>,
    file: Arc<File>,
    path: PathBuf,
    level: i32,
    /// Directory for large compressed chunks.
    spool: PathBuf,
    known: Arc<Known>,
}

/// Blobs of the manifest that the tag named before, by digest of the raw bytes.
pub(super) type Known = HashMap<Digest, (Digest, u64)>;

/// Pushes a disk in the format [`DiskOptions::format`]. The format of chunks is for raw disks: zero chunks are omitted, and
/// chunks that the previous manifest of the tag or the repository has are not transferred again. Idempotent; a later call
/// resumes an interrupted push.
///
/// # Errors
/// `OciError::Io` for the file; those of the registry.
pub async fn push_disk(
    path: &Path,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    match options.format {
        DiskFormat::Chunks => {}
        DiskFormat::ContainerDisk => {
            return foreign::push_container_disk(path, reference, options, progress).await;
        }
        DiskFormat::CloudImage => {
            return foreign::push_cloud_image(path, reference, options, progress).await;
        }
        DiskFormat::Tart => return foreign::push_tart(path, reference, options, progress).await,
    }
    let session = Arc::new(pull::open(reference, options, Operation::Push).await?);
    let known = Arc::new(known_chunks(&session, reference).await);
    let (disk, moved) = push_file(&session, path, &known, options, &progress).await?;
    let title = path.file_name().map_or_else(|| "disk.raw".into(), |n| n.to_string_lossy());
    let (config, manifest) = disk.write(&title);
    let empty = disk.chunks.is_empty();
    let digest = push_manifest(&session, reference, config, manifest, empty).await?.digest;
    let moved = Transferred { disks: vec![disk], moved };
    Ok(moved.report(digest))
}

/// Result of the transfer of some disks.
pub(super) struct Transferred {
    pub(super) disks: Vec<Disk>,
    /// Compressed size of each transferred chunk.
    pub(super) moved: Vec<u64>,
}

impl Transferred {
    /// Parts of a single disk. Empty for several disks, because each has offsets of its own.
    fn parts(&self) -> Vec<DiskPart> {
        let [disk] = self.disks.as_slice() else { return vec![] };
        let part = |chunk: &Chunk| DiskPart {
            start: chunk.part.start,
            bytes: chunk.part.end - chunk.part.start,
            raw: chunk.raw,
        };
        disk.chunks.iter().map(part).collect()
    }

    pub(super) fn report(&self, digest: Digest) -> DiskReport {
        DiskReport {
            digest,
            disk_bytes: self.disks.iter().map(|d| d.bytes).sum(),
            chunks: self.disks.iter().map(|d| d.chunks.len()).sum(),
            moved: self.moved.len(),
            moved_bytes: self.moved.iter().sum(),
            parts: self.parts(),
        }
    }
}

/// Pushes the chunks of a file, without a manifest. Also returns the compressed size of each transferred chunk.
pub(super) async fn push_file(
    session: &Arc<Session>,
    path: &Path,
    known: &Arc<Known>,
    options: &DiskOptions,
    progress: &DiskProgress,
) -> Result<(Disk, Vec<u64>), ImageError> {
    let fail = |operation: &'static str| move |e: io::Error| ImageError::io(operation, path, e);
    let file = File::open(path).map_err(fail("open"))?;
    let bytes = file.metadata().map_err(fail("stat"))?.len();
    let chunk_bytes = chunk::choose(bytes, options.chunk_bytes);
    if !chunk::is_read(bytes, chunk_bytes) {
        return Err(ImageError::unsupported(format!(
            "{}: a disk of {bytes} bytes has more than 4096 chunks of 4 GiB",
            path.display()
        )));
    }
    let spool = options.spool.clone().unwrap_or_else(|| pull::parent_dir(path).to_owned());
    let job = Job {
        session: Arc::clone(session),
        file: Arc::new(file),
        path: path.to_owned(),
        level: options.level,
        spool,
        known: Arc::clone(known),
    };
    let parts = chunk::all(bytes, chunk_bytes).collect();
    let (chunks, moved) =
        push_chunks(&Arc::new(job), parts, TransferBudget::new(options.concurrency), progress).await?;
    Ok((Disk { bytes, chunk_bytes, chunks }, moved))
}

/// Manifest in the registry.
pub(super) struct StoredManifest {
    pub(super) digest: Digest,
    /// True when the registry lists the manifest as a referrer of its subject.
    pub(super) is_listed: bool,
}

/// Pushes configuration and manifest. The registry must have all layers already.
pub(super) async fn push_manifest(
    session: &Session,
    reference: &Reference,
    config: Vec<u8>,
    manifest: Vec<u8>,
    empty: bool,
) -> Result<StoredManifest, ImageError> {
    session.put_blob(&Digest::of(&config), config.into()).await?;
    if empty {
        session.put_blob(&Digest::of(EMPTY_BLOB), Bytes::from_static(EMPTY_BLOB)).await?;
    }
    let digest = Digest::of(&manifest);
    let is_listed = session.put_manifest(&reference.api_name(), MANIFEST, manifest.into()).await?;
    Ok(StoredManifest { digest, is_listed })
}

/// Chunks of the manifest that the tag names now. Errors are ignored, because this is only an optimisation.
pub(super) async fn known_chunks(session: &Session, reference: &Reference) -> Known {
    let read = async {
        let manifest = session.manifest(&reference.api_name(), pull::MANIFEST_MAX).await?.bytes;
        artifact::chunks_of(&artifact::parse(&manifest, "manifest")?, |_| true)
    };
    let chunks = read.await.unwrap_or_default();
    chunks.into_iter().map(|w| (w.raw, (w.blob, w.blob_bytes))).collect()
}

/// Pushes chunks concurrently. The first failure cancels the others.
async fn push_chunks(
    job: &Arc<Job>,
    parts: Vec<Range<u64>>,
    budget: TransferBudget,
    progress: &DiskProgress,
) -> Result<(Vec<Chunk>, Vec<u64>), ImageError> {
    let total_bytes = parts.last().map_or(0, |part| part.end);
    let mut tasks = JoinSet::new();
    for part in parts {
        let (job, budget) = (Arc::clone(job), budget.clone());
        tasks.spawn(async move {
            let _permit = budget.acquire(part.end - part.start).await;
            push_chunk(&job, part.clone()).await.map(|done| (part, done))
        });
    }
    let (mut chunks, mut moved, mut done_bytes) = (Vec::new(), Vec::new(), 0);
    while let Some(ended) = tasks.join_next().await {
        let (part, done) = ended.map_err(|e| job.session.network("transfer chunk", e))??;
        done_bytes += part.end - part.start;
        progress(done_bytes, total_bytes);
        let Some((chunk, was_moved)) = done else { continue };
        moved.extend(was_moved.then_some(chunk.blob_bytes));
        chunks.push(chunk);
    }
    chunks.sort_by_key(|w| w.part.start);
    Ok((chunks, moved))
}

/// Pushes one chunk. Returns the chunk and whether its bytes were uploaded. `None` when the chunk is zero.
async fn push_chunk(job: &Arc<Job>, part: Range<u64>) -> Result<Option<(Chunk, bool)>, ImageError> {
    let fail = |e: io::Error| ImageError::io("read", &job.path, e);
    let (file, place) = (Arc::clone(&job.file), part.clone());
    let raw = blocking(move || frame::hash_range(&file, &place)).await.map_err(fail)?;
    let Some(raw) = raw else { return Ok(None) };
    if let Some((blob, blob_bytes)) = job.known.get(&raw).copied()
        && job.session.has_blob(&blob).await?
    {
        return Ok(Some((Chunk { part, raw, blob, blob_bytes }, false)));
    }
    let (blob, blob_bytes, moved) = match part.end - part.start > MEMORY_MAX {
        true => push_through_file(job, part.clone()).await?,
        false => {
            let (file, place, level) = (Arc::clone(&job.file), part.clone(), job.level);
            let compressed = blocking(move || {
                frame::compress(&file, &place, level).map(|compressed| (Digest::of(&compressed), compressed))
            });
            let (blob, compressed) = compressed.await.map_err(fail)?;
            let blob_bytes = compressed.len() as u64;
            (blob, blob_bytes, job.session.put_blob(&blob, compressed.into()).await?)
        }
    };
    Ok(Some((Chunk { part, raw, blob, blob_bytes }, moved)))
}

/// Pushes a large chunk through a temporary file. Returns its blob, its compressed size, and whether it was uploaded. Needs
/// memory for a few frames.
async fn push_through_file(job: &Job, part: Range<u64>) -> Result<(Digest, u64, bool), ImageError> {
    let (file, spool, level) = (Arc::clone(&job.file), job.spool.clone(), job.level);
    let compressed = blocking(move || Ok(compress_file(&spool, &file, &part, level))).await;
    let compressed = compressed.map_err(|e| ImageError::io("compress", &job.path, e))??;
    let payload = Payload::File { path: compressed.file.to_path_buf(), start: 0, bytes: compressed.bytes };
    let quiet: SentBytes = Arc::new(|_| {});
    let offered = job.session.offer_blob(&compressed.digest, &payload, None, &quiet).await?;
    Ok((compressed.digest, compressed.bytes, offered == Offered::Uploaded))
}

/// Compressed chunk in a temporary file, which is deleted on drop.
struct CompressedFile {
    file: tempfile::TempPath,
    digest: Digest,
    bytes: u64,
}

/// Compresses a chunk into a temporary file. Blocking.
fn compress_file(
    spool: &Path,
    file: &File,
    part: &Range<u64>,
    level: i32,
) -> Result<CompressedFile, ImageError> {
    let fail = |e| ImageError::io("compress a chunk in", spool, e);
    std::fs::create_dir_all(spool).map_err(fail)?;
    space::check(spool, part.end - part.start, "compress a chunk")?;
    let to = tempfile::Builder::new().prefix(".coracle-").tempfile_in(spool).map_err(fail)?;
    let mut compressed = HashingWriter { to: to.as_file(), hasher: Hasher::default() };
    frame::compress_into(&mut compressed, file, part, level).map_err(fail)?;
    let bytes = compressed.hasher.bytes();
    let digest = compressed.hasher.finish();
    Ok(CompressedFile { file: to.into_temp_path(), digest, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_compressed_in_a_file_is_equal_and_deleted() {
        let (disk, spool) = (tempfile::tempfile().unwrap(), tempfile::tempdir().unwrap());
        let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n / 100).to_le_bytes()[0]).collect();
        std::os::unix::fs::FileExt::write_all_at(&disk, &bytes, 0).unwrap();
        let (folder, part) = (spool.path().join("made"), 1000..3_000_000);
        let compressed = compress_file(&folder, &disk, &part, 1).unwrap();
        let want = frame::compress(&disk, &part, 1).unwrap();
        assert!(std::fs::read(&compressed.file).unwrap() == want);
        assert_eq!((compressed.digest, compressed.bytes), (Digest::of(&want), want.len() as u64));
        drop(compressed);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    }
}
