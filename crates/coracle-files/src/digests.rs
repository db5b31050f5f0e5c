//! Digests of files that rarely change.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Cache of file digests; a file is read again only when it has changed.
#[derive(Debug, Default)]
pub struct FileDigests(Mutex<HashMap<PathBuf, (Stamp, [u8; 32])>>);

/// Device, inode, length, and time of change in nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

impl FileDigests {
    /// Returns the SHA-256 digest of each file.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub async fn of<const N: usize>(&self, paths: [&PathBuf; N]) -> io::Result<Vec<[u8; 32]>> {
        let mut digests = Vec::with_capacity(N);
        for path in paths {
            let metadata = std::fs::metadata(path)?;
            let stamp =
                (metadata.dev(), metadata.ino(), metadata.len(), metadata.ctime(), metadata.ctime_nsec());
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(path).copied();
            let digest = match known {
                Some((then, digest)) if then == stamp => digest,
                _ => {
                    let file = path.clone();
                    crate::blocking(move || crate::sha256(&file)).await?
                }
            };
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone(), (stamp, digest));
            digests.push(digest);
        }
        Ok(digests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changed_file_has_another_digest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel");
        std::fs::write(&path, "one").unwrap();
        let digests = FileDigests::default();
        let first = digests.of([&path]).await.unwrap();
        assert_eq!(digests.of([&path]).await.unwrap(), first);
        std::fs::write(&path, "another").unwrap();
        assert_ne!(digests.of([&path]).await.unwrap(), first);
    }
}
