//! The store's directory: where things are, and how they get there whole or not at all.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use tempfile::NamedTempFile;

use crate::{Digest, ImageError, digest::Hasher, manifest::Blob};

/// Paths of one store.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) dir: PathBuf,
}

const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

impl Layout {
    /// Makes what is missing and takes the lock that keeps other processes out. The lock lives as long as the
    /// file.
    pub(crate) fn open(dir: &Path) -> Result<(Self, File), ImageError> {
        let layout = Self { dir: dir.to_owned() };
        for sub in [layout.blobs(), layout.rootfs_dir(), layout.partials(), layout.temp()] {
            fs::create_dir_all(&sub).map_err(|e| ImageError::io("create", &sub, e))?;
        }
        let path = dir.join(".lock");
        let open = File::options().create(true).write(true).truncate(false).open(&path);
        let mut lock = open.map_err(|e| ImageError::io("open", &path, e))?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(ImageError::StoreBusy { path: dir.to_owned() }),
            Err(e) => return Err(ImageError::io("lock", path, e.into())),
        }
        // The content is for a curious administrator; its time of change is "now" by the file system's own
        // clock.
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .map_err(|e| ImageError::io("write", &path, e))?;
        if !layout.marker().exists() {
            layout.replace(&layout.marker(), LAYOUT)?;
        }
        Ok((layout, lock))
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.dir.join("blobs/sha256")
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    pub(crate) fn index(&self) -> PathBuf {
        self.dir.join("index.json")
    }

    pub(crate) fn rootfs_dir(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    pub(crate) fn rootfs(&self, chain_id: &Digest) -> PathBuf {
        self.rootfs_dir().join(format!("{}.erofs", chain_id.hex()))
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

    /// True when the blob is there with its whole size. Blobs are verified before they get their name.
    pub(crate) fn has(&self, blob: &Blob) -> bool {
        fs::metadata(self.blob(&blob.digest)).is_ok_and(|m| m.is_file() && m.len() == blob.size_bytes)
    }

    /// A file that nobody sees until [`Layout::publish`]; gone when dropped, or when the store is opened
    /// after a crash.
    pub(crate) fn temp_file(&self) -> Result<NamedTempFile, ImageError> {
        NamedTempFile::new_in(self.temp()).map_err(|e| ImageError::io("create a file in", self.temp(), e))
    }

    /// Makes a finished file durable and gives it its name, replacing what had it.
    pub(crate) fn publish(&self, file: NamedTempFile, to: &Path, mode: u32) -> Result<(), ImageError> {
        let fail = |e| ImageError::io("write", to, e);
        file.as_file().set_permissions(Permissions::from_mode(mode)).map_err(fail)?;
        file.as_file().sync_all().map_err(fail)?;
        file.persist(to).map_err(|e| fail(e.error))?;
        sync_parent(to)
    }

    /// Replaces a small file as a whole.
    pub(crate) fn replace(&self, to: &Path, bytes: &[u8]) -> Result<(), ImageError> {
        let mut file = self.temp_file()?;
        file.write_all(bytes).map_err(|e| ImageError::io("write", to, e))?;
        self.publish(file, to, 0o644)
    }

    /// Stores bytes under their digest. Idempotent.
    pub(crate) fn put(&self, bytes: &[u8]) -> Result<Digest, ImageError> {
        let digest = Digest::of(bytes);
        let blob = Blob { media_type: String::new(), digest, size_bytes: bytes.len() as u64 };
        if !self.has(&blob) {
            self.replace(&self.blob(&digest), bytes)?;
        }
        Ok(digest)
    }

    /// Reads a small blob and checks it again: a damaged store must not become a wrong VM. `None` when it is
    /// missing or damaged.
    pub(crate) fn read(&self, digest: &Digest, bytes_max: u64) -> Result<Option<Vec<u8>>, ImageError> {
        let path = self.blob(digest);
        match fs::metadata(&path) {
            Ok(m) if m.len() > bytes_max => return Ok(None),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(ImageError::io("look at", path, e)),
        }
        let bytes = fs::read(&path).map_err(|e| ImageError::io("read", &path, e))?;
        Ok((Digest::of(&bytes) == *digest).then_some(bytes))
    }

    /// Removes what a crash left: temporary files, and downloads too old to be worth resuming. `now` is a
    /// file just written.
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

/// Removes a file. `Ok` when it is gone already.
pub(crate) fn remove(path: &Path) -> Result<(), ImageError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ImageError::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Makes a rename durable.
pub(crate) fn sync_parent(path: &Path) -> Result<(), ImageError> {
    let Some(parent) = path.parent() else { return Ok(()) };
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| ImageError::io("sync", parent, e))
}

/// Copies a stream into a blob. `pin` hears of its digest before it is visible, and may refuse it.
pub(crate) fn copy_blob(
    layout: &Layout,
    from: &mut impl io::Read,
    pin: impl FnOnce(&Digest) -> Result<(), ImageError>,
) -> Result<Blob, ImageError> {
    let mut file = layout.temp_file()?;
    let mut hasher = Hasher::default();
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
    let blob = Blob { media_type: String::new(), size_bytes: hasher.bytes, digest: hasher.finish() };
    pin(&blob.digest)?;
    if !layout.has(&blob) {
        layout.publish(file, &layout.blob(&blob.digest), 0o644)?;
    }
    Ok(blob)
}
