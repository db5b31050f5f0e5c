//! Blobs on their way: files that are called by their digests, in a folder of their own, which the next try goes on with.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::blocking;
use crate::{
    Digest, ImageError,
    registry::{Session, fetch_file},
};

/// The folder, ours alone while this lives.
pub(super) struct Spool {
    folder: PathBuf,
    /// Locked.
    _own: File,
    /// A disk may have the same blob in several places: one brings it at a time.
    turns: Mutex<BTreeMap<Digest, Arc<tokio::sync::Mutex<()>>>>,
}

impl Spool {
    /// Opens a folder, or makes it. What is in there and is none of `wanted` goes.
    ///
    /// # Errors
    /// [`ImageError::Io`], also when another pull is at work in there.
    pub(super) async fn open(folder: &Path, wanted: &[Digest]) -> Result<Self, ImageError> {
        let names: Vec<String> = wanted.iter().map(Digest::hex).collect();
        let own = folder.to_owned();
        let opened = blocking(move || open(&own, &names)).await;
        let _own = opened.map_err(|e| ImageError::io("use the folder", folder, e))?;
        Ok(Self { folder: folder.to_owned(), _own, turns: Mutex::default() })
    }

    /// The folder, for what else belongs to this pull.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes of a blob that have come.
    pub(super) fn have(&self, blob: &Digest) -> u64 {
        fs::metadata(self.folder.join(blob.hex())).map_or(0, |m| m.len())
    }

    /// A blob, verified, at its beginning. Cancel-safe: what has come stays.
    ///
    /// # Errors
    /// As [`fetch_file`].
    pub(super) async fn fetch(
        &self,
        session: &Session,
        blob: &Digest,
        bytes: u64,
    ) -> Result<File, ImageError> {
        let turn =
            Arc::clone(self.turns.lock().unwrap_or_else(PoisonError::into_inner).entry(*blob).or_default());
        let _turn = turn.lock().await;
        let path = self.folder.join(blob.hex());
        let own = path.clone();
        let file = blocking(move || {
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(own)
        });
        let file = file.await.map_err(|e| ImageError::io("open", &path, e))?;
        fetch_file(session, blob, bytes, file).await
    }

    /// A blob is where it belongs.
    pub(super) fn done(&self, blob: &Digest) {
        let _found_again_and_removed_with_the_folder = fs::remove_file(self.folder.join(blob.hex()));
    }

    /// Ends a pull: its folder goes, unless the next try can make use of it.
    pub(super) fn end<T>(self, outcome: Result<T, ImageError>) -> Result<T, ImageError> {
        let keep = outcome.as_ref().is_err_and(is_worth_a_try);
        if !keep {
            let gone = fs::remove_dir_all(&self.folder);
            if outcome.is_ok() {
                gone.map_err(|e| ImageError::io("remove", &self.folder, e))?;
            }
        }
        outcome
    }
}

/// The same bytes may do when nobody stands in their way: the network was, or the disk or the program that takes them.
pub(super) fn is_worth_a_try(error: &ImageError) -> bool {
    error.is_transient() || matches!(error, ImageError::Io { .. } | ImageError::Unauthorized { .. })
}

/// Blocking.
fn open(folder: &Path, wanted: &[String]) -> io::Result<File> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let own = File::open(folder)?;
    match rustix::fs::flock(&own, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "another pull is at work there"));
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
    async fn a_spool_keeps_what_is_wanted_and_is_one_pulls() {
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
        assert!(matches!(second, ImageError::Io { .. }), "{second}");
        let io = ImageError::io("write", "x", io::ErrorKind::BrokenPipe.into());
        assert!(spool.end::<()>(Err(io)).is_err());
        assert!(folder.join(kept.hex()).exists(), "the next try goes on with it");
        let spool = Spool::open(&folder, &[kept]).await.unwrap();
        assert!(spool.end::<()>(Err(ImageError::hostile("x"))).is_err());
        assert!(!folder.exists());
        Spool::open(&folder, &[]).await.unwrap().end(Ok(())).unwrap();
        assert!(!folder.exists());
    }
}
