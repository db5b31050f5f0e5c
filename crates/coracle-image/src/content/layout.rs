//! Directory of the store: paths, and atomic creation of files.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tempfile::NamedTempFile;

use crate::ImageError;
use coracle_oci::{Algorithm, Descriptor, Digest, Hasher};
use coracle_types::RootfsLayout;

/// Paths of one store.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) dir: PathBuf,
}

const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Longest wait for the lock of a killed process: a child between fork and exec shares the open file (flock(2)).
const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Locks the file. `WOULDBLOCK`: another process holds the lock.
fn exclusive(file: &File) -> rustix::io::Result<()> {
    let began = Instant::now();
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < LOCK_LIMIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            outcome => return outcome,
        }
    }
}

impl Layout {
    /// Creates missing directories and locks the store. The lock is held as long as the file is open.
    pub(crate) fn open(dir: &Path) -> Result<(Self, File), ImageError> {
        let layout = Self { dir: dir.to_owned() };
        for sub in
            layout.blob_dirs().into_iter().chain([layout.rootfs_dir(), layout.partials(), layout.temp()])
        {
            fs::create_dir_all(&sub).map_err(|e| ImageError::io("create", &sub, e))?;
        }
        let path = dir.join(".lock");
        let open = File::options().create(true).write(true).truncate(false).open(&path);
        let mut lock = open.map_err(|e| ImageError::io("open", &path, e))?;
        match exclusive(&lock) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(ImageError::StoreBusy { path: dir.to_owned() }),
            Err(e) => return Err(ImageError::io("lock", path, e.into())),
        }
        // The process id is for administrators. The modification time of the file is the current time of the file system.
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .map_err(|e| ImageError::io("write", &path, e))?;
        if !layout.marker().exists() {
            layout.replace(&layout.marker(), LAYOUT)?;
        }
        Ok((layout, lock))
    }

    /// Directories of blobs, one for each digest algorithm.
    pub(crate) fn blob_dirs(&self) -> [PathBuf; 2] {
        Algorithm::ALL.map(|algorithm| self.blobs(algorithm))
    }

    fn blobs(&self, algorithm: Algorithm) -> PathBuf {
        self.dir.join("blobs").join(algorithm.name())
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs(digest.algorithm()).join(digest.hex())
    }

    pub(crate) fn index(&self) -> PathBuf {
        self.dir.join("index.json")
    }

    pub(crate) fn rootfs_dir(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    pub(crate) fn rootfs(&self, chain_id: &Digest, layout: RootfsLayout) -> PathBuf {
        self.rootfs_dir().join(format!("{}.{}", chain_id.hex(), layout.extension()))
    }

    /// Downloads that can be resumed, named by digest.
    pub(crate) fn partials(&self) -> PathBuf {
        self.dir.join("partial")
    }

    pub(crate) fn partial(&self, digest: &Digest) -> PathBuf {
        self.partials().join(digest.hex())
    }

    fn temp(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    fn marker(&self) -> PathBuf {
        self.dir.join("oci-layout")
    }

    /// True when the blob exists in full size. Blobs are verified before they get their name.
    pub(crate) fn has(&self, blob: &Descriptor) -> bool {
        fs::metadata(self.blob(&blob.digest)).is_ok_and(|m| m.is_file() && m.len() == blob.size_bytes)
    }

    /// Creates a temporary file, which becomes visible by [`Layout::publish`]. It is deleted on drop, or when the store is
    /// opened after a crash.
    pub(crate) fn temp_file(&self) -> Result<NamedTempFile, ImageError> {
        NamedTempFile::new_in(self.temp()).map_err(|e| ImageError::io("create a file in", self.temp(), e))
    }

    /// Syncs a complete file and renames it to `to`, replacing an existing file.
    pub(crate) fn publish(&self, file: NamedTempFile, to: &Path, mode: u32) -> Result<(), ImageError> {
        let fail = |e| ImageError::io("write", to, e);
        file.as_file().set_permissions(Permissions::from_mode(mode)).map_err(fail)?;
        file.as_file().sync_all().map_err(fail)?;
        file.persist(to).map_err(|e| fail(e.error))?;
        sync_parent(to)
    }

    /// Syncs a verified download and moves it to the blobs.
    pub(crate) fn publish_partial(&self, file: &File, digest: &Digest) -> Result<(), ImageError> {
        let (from, to) = (self.partial(digest), self.blob(digest));
        file.sync_all().map_err(|e| ImageError::io("sync", &from, e))?;
        fs::rename(&from, &to).map_err(|e| ImageError::io("rename to", &to, e))?;
        sync_parent(&to)
    }

    /// Replaces a small file atomically.
    pub(crate) fn replace(&self, to: &Path, bytes: &[u8]) -> Result<(), ImageError> {
        let mut file = self.temp_file()?;
        file.write_all(bytes).map_err(|e| ImageError::io("write", to, e))?;
        self.publish(file, to, 0o644)
    }

    /// Stores bytes under their SHA-256. Idempotent.
    pub(crate) fn put(&self, bytes: &[u8]) -> Result<Digest, ImageError> {
        let digest = Digest::of(bytes);
        self.put_as(digest, bytes)?;
        Ok(digest)
    }

    /// Stores bytes under `digest`, which the caller has verified. Idempotent.
    pub(crate) fn put_as(&self, digest: Digest, bytes: &[u8]) -> Result<(), ImageError> {
        let blob = Descriptor { media_type: String::new(), digest, size_bytes: bytes.len() as u64 };
        if !self.has(&blob) {
            self.replace(&self.blob(&digest), bytes)?;
        }
        Ok(())
    }

    /// Reads a small blob and verifies it again, so that damage in the store cannot reach a VM. `None` when the blob is missing
    /// or damaged.
    pub(crate) fn read(&self, digest: &Digest, bytes_max: u64) -> Result<Option<Vec<u8>>, ImageError> {
        let path = self.blob(digest);
        match fs::metadata(&path) {
            Ok(m) if m.len() > bytes_max => return Ok(None),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(ImageError::io("stat", path, e)),
        }
        let bytes = fs::read(&path).map_err(|e| ImageError::io("read", &path, e))?;
        Ok((Digest::with(digest.algorithm(), &bytes) == *digest).then_some(bytes))
    }

    /// Removes leftovers of a crash: temporary files, and partial downloads older than `partial_age_max`. `now` is a file just
    /// written, whose modification time is the current time.
    pub(crate) fn sweep(&self, now: &File, partial_age_max: Duration) -> Result<(), ImageError> {
        let fail = |e| ImageError::io("sweep", &self.dir, e);
        for entry in fs::read_dir(self.temp()).map_err(fail)? {
            remove(&entry.map_err(fail)?.path())?;
        }
        let now = now.metadata().and_then(|m| m.modified()).map_err(fail)?;
        for entry in fs::read_dir(self.partials()).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let changed = entry.metadata().and_then(|m| m.modified()).map_err(fail)?;
            let old = now.duration_since(changed).is_ok_and(|age| age > partial_age_max);
            let ours = entry.file_name().to_str().is_some_and(|name| Digest::from_hex(name).is_ok());
            if old || !ours {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// Removes a file. `Ok` when it does not exist.
pub(crate) fn remove(path: &Path) -> Result<(), ImageError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ImageError::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Syncs the parent directory, which makes a rename durable.
pub(crate) fn sync_parent(path: &Path) -> Result<(), ImageError> {
    let Some(parent) = path.parent() else { return Ok(()) };
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| ImageError::io("sync", parent, e))
}

/// Copies a stream into a blob. Calls `pin` with its digest before the blob becomes visible; `pin` may refuse the blob.
pub(crate) fn copy_blob(
    layout: &Layout,
    from: &mut impl io::Read,
    algorithm: Algorithm,
    pin: impl FnOnce(&Digest) -> Result<(), ImageError>,
) -> Result<Descriptor, ImageError> {
    let mut file = layout.temp_file()?;
    let mut hasher = Hasher::new(algorithm);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let got = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(got) => got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(crate::tarball::read_error(e)),
        };
        hasher.update(&buffer[..got]);
        file.write_all(&buffer[..got]).map_err(|e| ImageError::io("write blob in", &layout.dir, e))?;
    }
    let blob = Descriptor { media_type: String::new(), size_bytes: hasher.bytes(), digest: hasher.finish() };
    pin(&blob.digest)?;
    if !layout.has(&blob) {
        layout.publish(file, &layout.blob(&blob.digest), 0o644)?;
    }
    Ok(blob)
}
