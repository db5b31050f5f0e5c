//! Blobs, manifests and uploads as files of one directory.
//!
//! ```text
//! blobs/<algorithm>/<hex>             named by a rename, after content and digest were synced
//! uploads/<id>                        grows with each chunk
//! manifests/<repository>/_digests/…   and _tags/<tag>.json
//! ```
//! Reads and writes happen on the blocking pool. The threads of the runtime only move buffers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Incoming, Storage, Taken, pump};
use crate::error::StoreError;
use crate::upload_id::UploadId;
use coracle_oci::{Algorithm, Digest, Hasher};

/// Size of one read of a blob, bytes. With half of it, the reading and sending threads wake each other too often. A stalled
/// reader holds twice as much.
const READ_BYTES: usize = 512 << 10;
/// Frames of a body that wait for the disk. A frame of hyper has at most some 400 KiB.
const QUEUE_FRAMES: usize = 4;
/// Bytes after which the kernel is asked to start writing, so that the final sync is short.
const WRITE_OUT_BYTES: u64 = 8 << 20;

/// Storage in a directory.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    /// Lock of the directory, held while the registry runs: two processes would not know of each other's uploads.
    _lock: Arc<File>,
}

impl Files {
    /// Opens the directory, and creates it if missing.
    pub(crate) fn open(dir: &Path) -> Result<Self, StoreError> {
        for part in ["blobs/sha256", "blobs/sha512", "uploads", "manifests", "tmp"] {
            let path = dir.join(part);
            fs::create_dir_all(&path).map_err(|e| StoreError::file("make", &path, e))?;
        }
        let path = dir.join("lock");
        let lock = File::create(&path).map_err(|e| StoreError::file("make", &path, e))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| StoreError::Busy { path: dir.display().to_string() })?;
        let files = Self { dir: dir.to_owned(), _lock: Arc::new(lock) };
        files.clear_tmp()?;
        Ok(files)
    }

    /// Removes incomplete files that a crash left.
    fn clear_tmp(&self) -> Result<(), StoreError> {
        let tmp = self.dir.join("tmp");
        for entry in list(&tmp)? {
            fs::remove_file(&entry).map_err(|e| StoreError::file("remove", &entry, e))?;
        }
        Ok(())
    }

    fn blob(&self, digest: &Digest) -> PathBuf {
        self.dir.join("blobs").join(digest.algorithm().name()).join(digest.hex())
    }

    fn upload(&self, id: &UploadId) -> PathBuf {
        self.dir.join("uploads").join(id.as_str())
    }
}

/// Runs file operations on a blocking thread.
async fn blocking<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(StoreError::Worker { operation }))
}

fn list(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(StoreError::file("list", dir, e)),
    };
    entries.map(|e| e.map(|e| e.path()).map_err(|e| StoreError::file("list", dir, e))).collect()
}

fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| StoreError::file("sync", dir, e))
}

fn absent_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes and hashes frames on a blocking thread.
fn write_frames(
    path: &Path,
    offset: u64,
    mut hasher: Hasher,
    mut frames: mpsc::Receiver<Bytes>,
) -> Result<(u64, Hasher), StoreError> {
    let fail = |operation| move |e| StoreError::file(operation, path, e);
    let mut file = OpenOptions::new().write(true).open(path).map_err(fail("open"))?;
    // Truncates bytes of an interrupted request, which were not counted.
    file.set_len(offset).map_err(fail("cut"))?;
    file.seek(SeekFrom::Start(offset)).map_err(fail("seek in"))?;
    let (mut at, mut flushed) = (offset, offset);
    while let Some(frame) = frames.blocking_recv() {
        file.write_all(&frame).map_err(fail("write"))?;
        hasher.update(&frame);
        at += frame.len() as u64;
        if at - flushed >= WRITE_OUT_BYTES {
            write_out(&file, flushed, at - flushed);
            flushed = at;
        }
    }
    file.sync_data().map_err(fail("sync"))?;
    Ok((at, hasher))
}

/// Asks the kernel to start writing. Errors are ignored: they appear again at the sync.
fn write_out(file: &File, from: u64, bytes: u64) {
    use std::os::fd::AsRawFd;
    let _hint = crate::sys::write_out(file.as_raw_fd(), from, bytes);
}

#[async_trait]
impl Storage for Files {
    async fn begin(&self, id: &UploadId) -> Result<(), StoreError> {
        let path = self.upload(id);
        blocking("begin an upload", move || {
            File::create_new(&path).map(drop).map_err(|e| StoreError::file("make", &path, e))
        })
        .await
    }

    async fn append(&self, id: &UploadId, incoming: Incoming) -> Result<Taken, StoreError> {
        let Incoming { body, offset, length, room, idle, hasher } = incoming;
        let (send, frames) = mpsc::channel(QUEUE_FRAMES);
        let path = self.upload(id);
        let writer = blocking("write an upload", move || write_frames(&path, offset, hasher, frames));
        let (ended, written) = tokio::join!(pump(body, length, room, idle, send), writer);
        let (offset, hasher) = written?;
        Ok(Taken { offset, hasher, ended })
    }

    async fn rehash(&self, id: &UploadId, mut hasher: Hasher) -> Result<Option<(u64, Hasher)>, StoreError> {
        let path = self.upload(id);
        blocking("read an upload", move || {
            let fail = |e| StoreError::file("read", &path, e);
            let Some(mut file) = absent_is_none(File::open(&path)).map_err(fail)? else { return Ok(None) };
            let (mut buffer, mut size) = (vec![0; READ_BYTES], 0);
            loop {
                let n = file.read(&mut buffer).map_err(fail)?;
                if n == 0 {
                    return Ok(Some((size, hasher)));
                }
                hasher.update(&buffer[..n]);
                size += n as u64;
            }
        })
        .await
    }

    async fn seal(&self, id: &UploadId, digest: &Digest) -> Result<(), StoreError> {
        let (from, to) = (self.upload(id), self.blob(digest));
        blocking("seal a blob", move || {
            // A blob gets its name by the rename only, so it is complete or absent.
            fs::rename(&from, &to).map_err(|e| StoreError::file("rename", &from, e))?;
            to.parent().map_or(Ok(()), sync_dir)
        })
        .await
    }

    async fn discard(&self, id: &UploadId) -> Result<(), StoreError> {
        let path = self.upload(id);
        blocking("discard an upload", move || {
            absent_is_none(fs::remove_file(&path)).map(drop).map_err(|e| StoreError::file("remove", &path, e))
        })
        .await
    }

    async fn uploads(&self) -> Result<Vec<UploadId>, StoreError> {
        let dir = self.dir.join("uploads");
        blocking("list uploads", move || {
            let names = list(&dir)?;
            Ok(names.iter().filter_map(|p| p.file_name()?.to_str()?.parse().ok()).collect())
        })
        .await
    }

    async fn read(&self, digest: &Digest, part: Range<u64>) -> Result<Option<Body>, StoreError> {
        let path = self.blob(digest);
        let opened = blocking("open a blob", move || {
            absent_is_none(File::open(&path)).map_err(|e| StoreError::file("open", &path, e))
        });
        Ok(opened.await?.map(|file| stream_file(file, part)))
    }

    async fn size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        let path = self.blob(digest);
        blocking("look at a blob", move || {
            let found =
                absent_is_none(fs::metadata(&path)).map_err(|e| StoreError::file("look at", &path, e))?;
            Ok(found.map(|m| m.len()))
        })
        .await
    }

    async fn remove(&self, digest: &Digest) -> Result<(), StoreError> {
        let path = self.blob(digest);
        blocking("remove a blob", move || {
            absent_is_none(fs::remove_file(&path)).map(drop).map_err(|e| StoreError::file("remove", &path, e))
        })
        .await
    }

    async fn blobs(&self) -> Result<Vec<(Digest, u64)>, StoreError> {
        let dir = self.dir.join("blobs");
        blocking("list blobs", move || {
            let mut found = Vec::new();
            for algorithm in Algorithm::ALL.map(Algorithm::name) {
                for path in list(&dir.join(algorithm))? {
                    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
                    let Ok(digest) = format!("{algorithm}:{name}").parse() else { continue };
                    let size = absent_is_none(fs::metadata(&path).map(|m| m.len()));
                    let size = size.map_err(|e| StoreError::file("look at", &path, e))?;
                    // A sweep may have removed the blob since it was listed.
                    found.extend(size.map(|size| (digest, size)));
                }
            }
            Ok(found)
        })
        .await
    }

    /// Differs from the key in an object store: as a file, a tag `x` of `a` would conflict with a repository `a/x.json`.
    fn tag_key(&self, repository: &str, tag: &str) -> String {
        format!("manifests/{repository}/_tags/{tag}.json")
    }

    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        let (tmp, path) = (self.dir.join("tmp").join(UploadId::random().as_str()), self.dir.join(key));
        blocking("write a manifest", move || put_whole(&tmp, &path, &bytes)).await
    }

    async fn get(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        let path = self.dir.join(key);
        blocking("read a manifest", move || {
            let bytes = absent_is_none(fs::read(&path)).map_err(|e| StoreError::file("read", &path, e))?;
            Ok(bytes.map(Bytes::from))
        })
        .await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = self.dir.join(key);
        blocking("remove a manifest", move || {
            match absent_is_none(fs::remove_file(&path)).map_err(|e| StoreError::file("remove", &path, e))? {
                Some(()) => path.parent().map_or(Ok(()), sync_dir),
                None => Ok(()),
            }
        })
        .await
    }

    async fn manifests(&self) -> Result<Vec<String>, StoreError> {
        let dir = self.dir.clone();
        blocking("list manifests", move || {
            let (mut found, mut open) = (Vec::new(), vec![dir.join("manifests")]);
            while let Some(folder) = open.pop() {
                for path in list(&folder)? {
                    if path.is_dir() {
                        open.push(path);
                    } else if let Some(key) = path.strip_prefix(&dir).ok().and_then(Path::to_str) {
                        found.push(key.to_owned());
                    }
                }
            }
            Ok(found)
        })
        .await
    }
}

fn put_whole(tmp: &Path, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let fail = |operation, path: &Path| {
        let path = path.to_owned();
        move |e| StoreError::file(operation, &path, e)
    };
    let parent = path.parent().unwrap_or(Path::new("/"));
    make_dirs(parent)?;
    let mut file = File::create_new(tmp).map_err(fail("make", tmp))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).map_err(fail("write", tmp));
    if let Err(error) = written.and_then(|()| fs::rename(tmp, path).map_err(fail("rename", path))) {
        // On a full file system, the temporary file would take space until the next start.
        let _swept_at_the_next_start = fs::remove_file(tmp);
        return Err(error);
    }
    sync_dir(parent)
}

/// Creates a directory and its parents, and syncs each in its parent: a manifest inside is acknowledged.
fn make_dirs(dir: &Path) -> Result<(), StoreError> {
    if dir.is_dir() {
        return Ok(());
    }
    let Some(parent) = dir.parent() else { return Ok(()) };
    make_dirs(parent)?;
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(StoreError::file("make", dir, e)),
        _ => sync_dir(parent),
    }
}

/// Reusable buffers of one body: the kernel needs as much time for fresh memory as for copying the bytes.
#[derive(Clone, Default)]
struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl Buffers {
    fn take(&self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.free().pop().unwrap_or_default();
        buffer.clear();
        buffer.reserve_exact(bytes);
        buffer
    }

    /// Bytes whose buffer returns when the last reader drops them.
    fn wrap_buffer(&self, buffer: Vec<u8>) -> Bytes {
        Bytes::from_owner(Lent { buffer, home: self.clone() })
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock()
    }
}

struct Lent {
    buffer: Vec<u8>,
    home: Buffers,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.home.free().push(std::mem::take(&mut self.buffer));
    }
}

/// Read of the next buffer: file, offset, bytes.
type Ahead = JoinHandle<(File, u64, io::Result<Vec<u8>>)>;

/// Streams a part of a file. Reads the next buffer while the last one is sent.
fn stream_file(file: File, part: Range<u64>) -> Body {
    let buffers = Buffers::default();
    let lent = buffers.clone();
    let read = move |file: File, part: Range<u64>| {
        let buffers = buffers.clone();
        tokio::task::spawn_blocking(move || {
            let left = usize::try_from(part.end - part.start).unwrap_or(usize::MAX);
            let mut buffer = buffers.take(left.min(READ_BYTES));
            let read = rustix::io::pread(&file, rustix::buffer::spare_capacity(&mut buffer), part.start);
            buffer.truncate(left);
            (file, part.start, read.map(|_| buffer).map_err(io::Error::from))
        })
    };
    let first = (part.start < part.end).then(|| read(file, part.clone()));
    let next = move |pending: Option<Ahead>| {
        let (end, read, lent) = (part.end, read.clone(), lent.clone());
        async move {
            let (file, at, buffer) = match pending?.await {
                Ok(done) => done,
                Err(error) => return Some((Err(io::Error::other(error)), None)),
            };
            match buffer {
                Ok(buffer) if buffer.is_empty() => Some((Err(io::ErrorKind::UnexpectedEof.into()), None)),
                Ok(buffer) => {
                    let at = at + buffer.len() as u64;
                    let ahead = (at < end).then(|| read(file, at..end));
                    Some((Ok(lent.wrap_buffer(buffer)), ahead))
                }
                Err(error) => Some((Err(error), None)),
            }
        }
    };
    Body::from_stream(stream::unfold(first, next))
}
