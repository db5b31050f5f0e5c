//! What makes two machines alike.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::files;

/// 16 hex digits over kernel, agent, devices, sizes, CPU and VMM build: what a saved state depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TemplateKey(String);

impl TemplateKey {
    pub(crate) fn of(fingerprint: &str, digests: &[[u8; 32]]) -> Self {
        let mut hash = Sha256::new();
        hash.update(fingerprint.as_bytes());
        for digest in digests {
            hash.update(digest);
        }
        Self(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }

    /// Parses a key; `None` when it is invalid.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.len() == 16 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        hex.then(|| Self(text.to_owned()))
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TemplateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Digests of files that are read again only when they have changed.
#[derive(Debug, Default)]
pub(crate) struct FileDigests(Mutex<HashMap<PathBuf, (Stamp, [u8; 32])>>);

/// Device, inode, length, and time of change in nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

impl FileDigests {
    /// SHA-256 of each file.
    ///
    /// # Errors
    /// When one cannot be read.
    pub(crate) async fn of<const N: usize>(&self, paths: [&PathBuf; N]) -> io::Result<Vec<[u8; 32]>> {
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
                    files::blocking(move || files::sha256(&file)).await?
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

    #[test]
    fn anything_that_differs_makes_another_key() {
        let key = |fingerprint: &str, kernel: u8| TemplateKey::of(fingerprint, &[[kernel; 32], [2; 32]]);
        assert_eq!(key("-smp 1", 1), key("-smp 1", 1));
        assert_ne!(key("-smp 1", 1), key("-smp 2", 1));
        assert_ne!(key("-smp 1", 1), key("-smp 1", 3));
        assert_eq!(TemplateKey::parse(key("x", 1).as_str()), Some(key("x", 1)));
        assert_eq!(TemplateKey::parse("../../../../etc/"), None);
    }

    #[tokio::test]
    async fn a_changed_file_has_another_digest() {
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
