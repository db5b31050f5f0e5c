//! A disk out of a registry.

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Semaphore, task::JoinSet};

use super::{
    DiskOptions, DiskProgress, DiskReport,
    artifact::{self, Disk, Window},
    blocking,
    foreign::{self, Found},
    frame,
    push::Moved,
    window,
};
use crate::{
    Digest, ImageError, Limits, Platform, Reference, auth,
    manifest::{self, Document},
    registry::{self, Operation, Session, fetch_small_of},
    space,
};

/// Largest manifest, in bytes: a thousand windows take less than one mebibyte.
pub(super) const MANIFEST_MAX: u64 = 4 << 20;

/// How long a pull waits for another's hand on its file, and how often it looks.
const ALONE_MAX: Duration = Duration::from_secs(10);
const ALONE_EVERY: Duration = Duration::from_millis(20);

/// Begins a conversation with the registry itself; mirrors are for images.
pub(super) async fn open(
    reference: &Reference,
    options: &DiskOptions,
    operation: Operation,
) -> Result<Session, ImageError> {
    let endpoint = registry::home(reference, &options.registries);
    let http = registry::client(&options.timeouts, operation, &endpoint.trust);
    let http = http.map_err(|e| registry::unprepared(reference, e))?;
    let login = auth::lookup(&options.credentials, &endpoint.host).await?;
    Session::open_for(
        http,
        endpoint,
        reference.clone(),
        login,
        options.timeouts.clone(),
        options.retries,
        operation,
    )
    .await
}

/// Pulls a disk into the file `path`, which is there, whole, synced and sparse, when this returns. Until then it grows
/// beside it as `path.partial`; what is in there and right is not fetched again, nor is what a file that is there has in the same place. Idempotent. A containerDisk, a cloud
/// image and the disks of tart, lume and macOS-vz are read, too, and gone on with (a containerDisk is not); qcow2 stays
/// qcow2.
///
/// # Errors
/// [`ImageError::Unsupported`] for what is no disk; [`ImageError::DigestMismatch`] and [`ImageError::Hostile`] for
/// wrong bytes; [`ImageError::StorageFull`], [`ImageError::Io`] for the file; those of the registry.
pub async fn pull_disk(
    reference: &Reference,
    path: &Path,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<DiskReport, ImageError> {
    let session = Arc::new(open(reference, options, Operation::Pull).await?);
    let manifest = one_of(&session, reference).await?;
    let found = foreign::found(&artifact::parse(&manifest, "manifest")?)?;
    if found != Found::Other {
        let taken =
            foreign::pull(&session, &found, path, options.concurrency.unwrap_or(4), &progress).await?;
        return Ok(DiskReport {
            digest: Digest::of(&manifest),
            disk_bytes: taken.disk_bytes,
            windows: taken.pieces,
            moved: taken.blobs,
            moved_bytes: taken.blob_bytes,
        });
    }
    let (config, size) = Disk::config_of(&manifest)?;
    let disk = Disk::read(&manifest, &fetch_small_of(&session, &config, size).await?)?;
    let moved = file_into(&session, &disk, path, options.at_once(disk.window_bytes), &progress).await?;
    Ok(Moved { disks: vec![disk], moved }.report(Digest::of(&manifest)))
}

/// The manifest; of an index the one for this machine, else the first that is for any: what is moved need not run here.
pub(super) async fn one_of(session: &Session, reference: &Reference) -> Result<Vec<u8>, ImageError> {
    let bytes = session.manifest(&reference.api_name(), MANIFEST_MAX).await?.bytes;
    if !artifact::parse(&bytes, "manifest")?["manifests"].is_array() {
        return Ok(bytes);
    }
    let limits = Limits::default();
    let Document::Index(entries) = manifest::parse(&bytes, None, &limits)? else { return Ok(bytes) };
    let here = manifest::select(&entries, &Platform::host(), &reference.to_string());
    let chosen = match here {
        Ok(entry) => entry,
        Err(error) => entries.iter().find(|e| e.architecture != "unknown").ok_or(error)?,
    };
    Ok(session.manifest(&chosen.blob.digest.to_string(), MANIFEST_MAX).await?.bytes)
}

/// Brings a file here, as [`pull_disk`] says. Returns the bytes of each window that was moved.
pub(super) async fn file_into(
    session: &Arc<Session>,
    disk: &Disk,
    path: &Path,
    concurrency: usize,
    progress: &DiskProgress,
) -> Result<Vec<u64>, ImageError> {
    let partial = partial(path);
    let fail = |operation: &'static str, path: &Path| {
        let path = path.to_owned();
        move |e: io::Error| ImageError::io(operation, path.clone(), e)
    };
    let file = alone(&partial).await.map_err(fail("open", &partial))?;
    let layout = disk.clone();
    let prepared = blocking(move || prepare(&file, &layout).map(|resumed| (file, resumed)));
    let (file, resumed) = prepared.await.map_err(fail("prepare", &partial))?;
    check_space(disk, &file, path)?;
    // What is to be replaced has most of what replaces it, often.
    let before = File::open(path).ok().filter(|f| f.metadata().is_ok_and(|m| m.is_file()));
    let (session, file, before) = (Arc::clone(session), Arc::new(file), before.map(Arc::new));
    let job = Arc::new(Job { session, file, path: partial.clone(), resumed, before });
    let moved = fetch(&job, disk, concurrency, progress).await?;
    let (file, to) = (Arc::clone(&job.file), path.to_owned());
    let named = blocking(move || name(&file, &partial, &to));
    named.await.map_err(fail("name", path))?;
    Ok(moved)
}

/// All windows fit, besides what is there of them.
fn check_space(disk: &Disk, file: &File, path: &Path) -> Result<(), ImageError> {
    use std::os::unix::fs::MetadataExt;
    let there = file.metadata().map_err(|e| ImageError::io("look at", path, e))?.blocks() * 512;
    let all: u64 = disk.windows.iter().map(|w| w.part.end - w.part.start).sum();
    space::check(folder(path), all.saturating_sub(there), &format!("fetch {}", path.display()))
}

pub(super) fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Gives a whole file its name, on disk.
pub(super) fn name(file: &File, partial: &Path, to: &Path) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(partial, to)?;
    File::open(folder(to))?.sync_all()
}

struct Job {
    session: Arc<Session>,
    file: Arc<File>,
    path: PathBuf,
    /// The file was there: what is in it may be right.
    resumed: bool,
    /// What has the name now.
    before: Option<Arc<File>>,
}

/// What a file is called until it is whole.
pub(super) fn partial(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.partial", path.display()))
}

/// Makes a whole file of an earlier pull one to go on with, so that its windows are looked at again.
pub(super) fn reopen(path: &Path) -> io::Result<()> {
    match fs::rename(path, partial(path)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        renamed => renamed,
    }
}

/// Opens the file for us alone: the last write of a pull that was cut off goes on for a moment behind its back.
pub(super) async fn alone(path: &Path) -> io::Result<File> {
    let give_up = tokio::time::Instant::now() + ALONE_MAX;
    loop {
        let path = path.to_owned();
        if let Some(file) = blocking(move || try_alone(&path)).await? {
            return Ok(file);
        }
        if tokio::time::Instant::now() >= give_up {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "another pull writes it"));
        }
        tokio::time::sleep(ALONE_EVERY).await;
    }
}

/// The file, locked as long as it is open; `None` while somebody else has it.
fn try_alone(path: &Path) -> io::Result<Option<File>> {
    use std::os::unix::fs::MetadataExt;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    // Whoever had it may have given it its name.
    let same =
        fs::metadata(path).is_ok_and(|there| file.metadata().is_ok_and(|own| own.ino() == there.ino()));
    Ok(same.then_some(file))
}

/// Makes the file as long as the disk, with nothing where the disk has nothing. True when it was that long.
fn prepare(file: &File, disk: &Disk) -> io::Result<bool> {
    let resumed = file.metadata()?.len() == disk.bytes && disk.bytes > 0;
    if !resumed {
        file.set_len(0)?;
        file.set_len(disk.bytes)?;
        return Ok(false);
    }
    let mut empty: Vec<Range<u64>> = window::all(disk.bytes, disk.window_bytes).collect();
    empty.retain(|part| disk.windows.iter().all(|w| w.part.end <= part.start || w.part.start >= part.end));
    for part in empty {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, part.start, part.end - part.start)?;
    }
    Ok(true)
}

/// Fetches what is missing, several windows at once. Returns the bytes of each that was moved.
async fn fetch(
    job: &Arc<Job>,
    disk: &Disk,
    concurrency: usize,
    progress: &DiskProgress,
) -> Result<Vec<u64>, ImageError> {
    let total_bytes = disk.windows.iter().map(|w| w.part.end - w.part.start).sum();
    let slots = Arc::new(Semaphore::new(concurrency.max(1)));
    let mut tasks = JoinSet::new();
    for window in disk.windows.iter().cloned() {
        let (job, slots) = (Arc::clone(job), Arc::clone(&slots));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _slot = slots.acquire().await;
            one(&job, &window).await.map(|moved| (window, moved))
        });
    }
    let (mut moved, mut done_bytes) = (Vec::new(), 0);
    while let Some(ended) = tasks.join_next().await {
        let (window, was_moved) = ended.map_err(|e| job.session.network("move window", e))??;
        done_bytes += window.part.end - window.part.start;
        progress(done_bytes, total_bytes);
        moved.extend(was_moved.then_some(window.blob_bytes));
    }
    Ok(moved)
}

/// One window into its place, verified by the digest of its raw bytes, which the manifest names. `false` when its bytes
/// were on this machine already.
async fn one(job: &Arc<Job>, window: &Window) -> Result<bool, ImageError> {
    let fail = |operation: &'static str| move |e: io::Error| ImageError::io(operation, &job.path, e);
    if job.resumed {
        let (file, part) = (Arc::clone(&job.file), window.part.clone());
        if blocking(move || frame::look(&file, &part)).await.map_err(fail("read"))? == Some(window.raw) {
            return Ok(false);
        }
    }
    if let Some(before) = &job.before {
        let (from, to, part) = (Arc::clone(before), Arc::clone(&job.file), window.part.clone());
        if blocking(move || frame::copy(&from, &to, &part)).await.map_err(fail("copy"))? == Some(window.raw) {
            return Ok(false);
        }
    }
    let packed = Arc::new(registry::fetch_whole(&job.session, &window.blob, window.blob_bytes).await?);
    let (file, part, bytes) = (Arc::clone(&job.file), window.part.clone(), Arc::clone(&packed));
    let wrong = match blocking(move || frame::unpack(&bytes, &file, &part)).await {
        Ok(actual) if actual == window.raw => return Ok(true),
        Ok(actual) => mismatch(format!("raw bytes of window {}", window.blob), window.raw, actual),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            ImageError::hostile(format!("window {}: {e}", window.blob))
        }
        Err(e) => return Err(fail("write")(e)),
    };
    // Only now does it matter whether the registry sent what it should, or the manifest lies about it.
    let sent = blocking(move || Ok(Digest::of(&packed))).await.map_err(fail("hash"))?;
    match sent == window.blob {
        true => Err(wrong),
        false => Err(mismatch("window".to_owned(), window.blob, sent)),
    }
}

fn mismatch(what: String, expected: Digest, actual: Digest) -> ImageError {
    ImageError::DigestMismatch { what, expected, actual }
}
