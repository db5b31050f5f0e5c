//! Spool directory: downloaded blobs in files named by digest. A later call resumes from it.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::blocking;
use coracle_image::ImageError;
use coracle_oci::{BlobFile, Digest, OciError, Session, fetch_file};
use parking_lot::Mutex;

/// Locked directory of one pull.
pub(super) struct Spool {
    folder: PathBuf,
    /// Locked directory. Closing it releases the lock.
    _own: File,
    /// Locks by blob: a disk may use one blob in several places.
    turns: Mutex<BTreeMap<Digest, Arc<tokio::sync::Mutex<()>>>>,
}

impl Spool {
    /// Opens or creates a directory and locks it. Deletes files other than `wanted`.
    ///
    /// # Errors
    /// `ImageError::Oci`, also when another pull uses the directory.
    pub(super) async fn open(folder: &Path, wanted: &[Digest]) -> Result<Self, ImageError> {
        let names: Vec<String> = wanted.iter().map(Digest::hex).collect();
        let own = folder.to_owned();
        let opened = blocking(move || open(&own, &names)).await;
        let _own = opened.map_err(|e| ImageError::io("use", folder, e))?;
        Ok(Self { folder: folder.to_owned(), _own, turns: Mutex::default() })
    }

    /// Path of the directory, also for other temporary files of the pull.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Received bytes of a blob.
    pub(super) fn have(&self, blob: &Digest) -> u64 {
        fs::metadata(self.folder.join(blob.hex())).map_or(0, |m| m.len())
    }

    /// Fetches and verifies a blob. Returns its file, positioned at the beginning. Cancel-safe: received bytes stay.
    ///
    /// # Errors
    /// Like [`fetch_file`].
    pub(super) async fn fetch(
        &self,
        session: &Session,
        blob: &Digest,
        bytes: u64,
    ) -> Result<File, ImageError> {
        let turn = Arc::clone(self.turns.lock().entry(*blob).or_default());
        // Also held by the last write of a cancelled download, which ends in the background.
        let turn = turn.lock_owned().await;
        let path = self.folder.join(blob.hex());
        let own = path.clone();
        let file = blocking(move || {
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(own)
        });
        let file = file.await.map_err(|e| ImageError::io("open", &path, e))?;
        let to = BlobFile { file, path, guard: turn };
        Ok(fetch_file(session, blob, bytes, to, &|_| {}).await?)
    }

    /// Deletes a blob whose bytes were written to their destination.
    pub(super) fn remove(&self, blob: &Digest) {
        let _deleted_with_the_directory_otherwise = fs::remove_file(self.folder.join(blob.hex()));
    }

    /// Deletes the directory, unless a later call can resume from it.
    pub(super) fn finish<T>(self, outcome: Result<T, ImageError>) -> Result<T, ImageError> {
        let keep = outcome.as_ref().is_err_and(is_resumable);
        if !keep {
            let gone = fs::remove_dir_all(&self.folder);
            if outcome.is_ok() {
                gone.map_err(|e| ImageError::io("remove", &self.folder, e))?;
            }
        }
        outcome
    }
}

/// True when a later call may succeed with the received bytes: the error came from the network, the credentials, the file
/// system or the program that reads the output.
pub(super) fn is_resumable(error: &ImageError) -> bool {
    error.is_transient()
        || matches!(
            error,
            ImageError::Oci(OciError::Io { .. }) | ImageError::Oci(OciError::Unauthorized { .. })
        )
}

/// Creates and locks the directory. Blocking.
fn open(folder: &Path, wanted: &[String]) -> io::Result<File> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let own = File::open(folder)?;
    match rustix::fs::flock(&own, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "another pull uses the directory"));
        }
        locked => locked?,
    }
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if wanted.iter().all(|name| entry.file_name() != name.as_str()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn spool_keeps_wanted_blobs_and_is_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let (kept, old) = (Digest::of(b"kept"), Digest::of(b"old"));
        drop(Spool::open(&folder, &[]).await.unwrap());
        for name in [kept, old] {
            fs::write(folder.join(name.hex()), b"x").unwrap();
        }
        let spool = Spool::open(&folder, &[kept]).await.unwrap();
        assert!(folder.join(kept.hex()).exists() && !folder.join(old.hex()).exists());
        let second = Spool::open(&folder, &[kept]).await.err().unwrap();
        assert!(matches!(second, ImageError::Oci(OciError::Io { .. })), "{second}");
        let io = ImageError::io("write", "x", io::ErrorKind::BrokenPipe.into());
        assert!(spool.finish::<()>(Err(io)).is_err());
        assert!(folder.join(kept.hex()).exists(), "a later call resumes");
        let spool = Spool::open(&folder, &[kept]).await.unwrap();
        assert!(spool.finish::<()>(Err(ImageError::hostile("x"))).is_err());
        assert!(!folder.exists());
        Spool::open(&folder, &[]).await.unwrap().finish(Ok(())).unwrap();
        assert!(!folder.exists());
    }
}
