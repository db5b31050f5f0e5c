//! A disk into a registry.

use std::{collections::HashMap, fs::File, io, ops::Range, path::Path, sync::Arc};

use bytes::Bytes;
use tokio::{sync::Semaphore, task::JoinSet};

use super::{
    DiskFormat, DiskOptions, DiskProgress, DiskReport,
    artifact::{self, Disk, EMPTY_BLOB, MANIFEST, Window},
    blocking, foreign, frame, pull, window,
};
use crate::{
    Digest, ImageError, Reference,
    registry::{Operation, Session},
};

/// What every window's work needs.
struct Job {
    session: Arc<Session>,
    file: Arc<File>,
    path: std::path::PathBuf,
    level: i32,
    known: Arc<Known>,
}

/// Blobs of what the tag named before, by the digest of their raw bytes.
pub(super) type Known = HashMap<Digest, (Digest, u64)>;

/// Pushes a disk as [`DiskOptions::format`] says. In windows a raw disk alone makes sense: those that are all zero are left out; those that the tag had before, or that the
/// repository has, are not moved again. Idempotent; what broke off is found by the next call.
///
/// # Errors
/// [`ImageError::Io`] for the file; those of the registry.
pub async fn push_disk(
    path: &Path,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    match options.format {
        DiskFormat::Windows => {}
        DiskFormat::ContainerDisk => {
            return foreign::push_container_disk(path, reference, options, progress).await;
        }
        DiskFormat::CloudImage => {
            return foreign::push_cloud_image(path, reference, options, progress).await;
        }
    }
    let session = Arc::new(pull::open(reference, options, Operation::Push).await?);
    let known = Arc::new(before(&session, reference).await);
    let (disk, moved) = file_from(&session, path, &known, options, &progress).await?;
    let title = path.file_name().map_or_else(|| "disk.raw".into(), |n| n.to_string_lossy());
    let (config, manifest) = disk.write(&title);
    let empty = disk.windows.is_empty();
    let digest = seal(&session, reference, config, manifest, empty).await?.digest;
    let moved = Moved { disks: vec![disk], moved };
    Ok(moved.report(digest))
}

/// Files that are in a registry now.
pub(super) struct Moved {
    pub(super) disks: Vec<Disk>,
    /// Bytes of each window that was moved.
    pub(super) moved: Vec<u64>,
}

impl Moved {
    pub(super) fn report(&self, digest: Digest) -> DiskReport {
        DiskReport {
            digest,
            disk_bytes: self.disks.iter().map(|d| d.bytes).sum(),
            windows: self.disks.iter().map(|d| d.windows.len()).sum(),
            moved: self.moved.len(),
            moved_bytes: self.moved.iter().sum(),
        }
    }
}

/// Brings the windows of a file there; its manifest is somebody else's. Returns also the bytes of each that was moved.
pub(super) async fn file_from(
    session: &Arc<Session>,
    path: &Path,
    known: &Arc<Known>,
    options: &DiskOptions,
    progress: &DiskProgress,
) -> Result<(Disk, Vec<u64>), ImageError> {
    let fail = |operation: &'static str| move |e: io::Error| ImageError::io(operation, path, e);
    let file = File::open(path).map_err(fail("open"))?;
    let bytes = file.metadata().map_err(fail("look at"))?.len();
    let window_bytes = window::choose(bytes, options.window_bytes);
    let job = Job {
        session: Arc::clone(session),
        file: Arc::new(file),
        path: path.to_owned(),
        level: options.level,
        known: Arc::clone(known),
    };
    let parts = window::all(bytes, window_bytes).collect();
    let (windows, moved) = windows(&Arc::new(job), parts, options.at_once(window_bytes), progress).await?;
    Ok((Disk { bytes, window_bytes, windows }, moved))
}

/// A manifest that is there.
pub(super) struct Sealed {
    pub(super) digest: Digest,
    /// The registry lists it among those who refer to its subject.
    pub(super) is_listed: bool,
}

/// Configuration and manifest, when all that they name is there.
pub(super) async fn seal(
    session: &Session,
    reference: &Reference,
    config: Vec<u8>,
    manifest: Vec<u8>,
    empty: bool,
) -> Result<Sealed, ImageError> {
    session.put_blob(&Digest::of(&config), config.into()).await?;
    if empty {
        session.put_blob(&Digest::of(EMPTY_BLOB), Bytes::from_static(EMPTY_BLOB)).await?;
    }
    let digest = Digest::of(&manifest);
    let is_listed = session.put_manifest(&reference.api_name(), MANIFEST, manifest.into()).await?;
    Ok(Sealed { digest, is_listed })
}

/// The windows of what the tag names now; only an optimisation, so nothing of it is an error.
pub(super) async fn before(session: &Session, reference: &Reference) -> Known {
    let read = async {
        let manifest = session.manifest(&reference.api_name(), pull::MANIFEST_MAX).await?.bytes;
        artifact::windows_of(&artifact::parse(&manifest, "manifest")?, |_| true)
    };
    let windows = read.await.unwrap_or_default();
    windows.into_iter().map(|w| (w.raw, (w.blob, w.blob_bytes))).collect()
}

/// Brings every window there, several at once. The first failure ends the others.
async fn windows(
    job: &Arc<Job>,
    parts: Vec<Range<u64>>,
    concurrency: usize,
    progress: &DiskProgress,
) -> Result<(Vec<Window>, Vec<u64>), ImageError> {
    let total_bytes = parts.last().map_or(0, |part| part.end);
    let slots = Arc::new(Semaphore::new(concurrency.max(1)));
    let mut tasks = JoinSet::new();
    for part in parts {
        let (job, slots) = (Arc::clone(job), Arc::clone(&slots));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _slot = slots.acquire().await;
            one(&job, part.clone()).await.map(|done| (part, done))
        });
    }
    let (mut windows, mut moved, mut done_bytes) = (Vec::new(), Vec::new(), 0);
    while let Some(ended) = tasks.join_next().await {
        let (part, done) = ended.map_err(|e| job.session.network("move window", e))??;
        done_bytes += part.end - part.start;
        progress(done_bytes, total_bytes);
        let Some((window, was_moved)) = done else { continue };
        moved.extend(was_moved.then_some(window.blob_bytes));
        windows.push(window);
    }
    windows.sort_by_key(|w| w.part.start);
    Ok((windows, moved))
}

/// One window: nothing when it is all zero; whether its bytes were moved.
async fn one(job: &Arc<Job>, part: Range<u64>) -> Result<Option<(Window, bool)>, ImageError> {
    let fail = |e: io::Error| ImageError::io("read", &job.path, e);
    let (file, place) = (Arc::clone(&job.file), part.clone());
    let raw = blocking(move || frame::look(&file, &place)).await.map_err(fail)?;
    let Some(raw) = raw else { return Ok(None) };
    if let Some((blob, blob_bytes)) = job.known.get(&raw).copied()
        && job.session.has_blob(&blob).await?
    {
        return Ok(Some((Window { part, raw, blob, blob_bytes }, false)));
    }
    let (file, place, level) = (Arc::clone(&job.file), part.clone(), job.level);
    let packed =
        blocking(move || frame::pack(&file, &place, level).map(|packed| (Digest::of(&packed), packed)));
    let (blob, packed) = packed.await.map_err(fail)?;
    let blob_bytes = packed.len() as u64;
    let moved = job.session.put_blob(&blob, packed.into()).await?;
    Ok(Some((Window { part, raw, blob, blob_bytes }, moved)))
}
