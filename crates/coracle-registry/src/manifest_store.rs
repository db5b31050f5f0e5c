//! Manifests: bytes in the storage and rows in the tables. Only this module changes them. It changes a repository once at a
//! time over all replicas.
//!
//! ```text
//! put     bytes of the manifest ─▶ rows, and a note of each tag ─▶ bytes of the tags ─▶ notes removed
//! remove  rows removed, and a note of each file ─▶ files removed ─▶ notes removed
//! ```
//! The rows are authoritative, and files follow them. Interrupted changes are completed from their notes, at the next start and
//! at each sweep. Bytes with neither a row nor a note belong to an interrupted push.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use coracle_types::Clock;
use tokio::sync::{Mutex, MutexGuard};

use crate::error::StoreError;
use crate::manifest::{self, PushedManifest};
use crate::meta::{Change, Entry, Lock, Meta, NewManifest, Put};
use crate::storage::{Storage, manifest_key};
use coracle_oci::{Algorithm, Digest, RepositoryName, Tag, TagOrDigest};

/// Number of locks that repositories share within the process.
const LOCKS: usize = 32;
/// Limit of rows without bytes that a start removes. A kill interrupts fewer deletions: when more bytes are missing, the
/// storage probably does not belong to the tables.
const REPAIRS_MAX: usize = 64;
/// Number of rows read at once.
const ROWS_READ: i64 = 1000;

/// Kind of a key of the storage. Pure.
#[derive(Debug, PartialEq, Eq)]
enum Key {
    Manifest(RepositoryName, Digest),
    Tag(RepositoryName, Tag),
}

fn parse(key: &str) -> Option<Key> {
    let rest = key.strip_prefix("manifests/")?.strip_suffix(".json")?;
    let (front, last) = rest.rsplit_once('/')?;
    if let Some(repo) = front.strip_suffix("/_digests") {
        return Some(Key::Manifest(repo.parse().ok()?, last.replacen('-', ":", 1).parse().ok()?));
    }
    let repo = front.strip_suffix("/_tags").unwrap_or(front);
    Some(Key::Tag(repo.parse().ok()?, last.parse().ok()?))
}

/// Parses a stored manifest. A manifest without a media type was pushed as an OCI manifest.
fn parse_stored(bytes: &[u8]) -> Option<PushedManifest> {
    manifest::parse(bytes, None)
        .or_else(|_| manifest::parse(bytes, Some(coracle_oci::media_types::OCI_MANIFEST)))
        .ok()
}

fn length(bytes: &Bytes) -> i64 {
    i64::try_from(bytes.len()).unwrap_or(i64::MAX)
}

/// Kind of object that was entered into the tables for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    Nothing,
    Manifest,
    Tag,
}

/// Lock on a repository, in this process and, with PostgreSQL, in all replicas.
struct RepositoryLock<'a> {
    _own: MutexGuard<'a, ()>,
    _shared: Lock,
}

/// Manifests of all repositories, in storage and tables.
#[derive(Debug)]
pub(crate) struct ManifestStore {
    storage: Arc<dyn Storage>,
    meta: Meta,
    clock: Clock,
    locks: [Mutex<()>; LOCKS],
}

impl ManifestStore {
    pub(crate) fn new(storage: Arc<dyn Storage>, meta: Meta, clock: Clock) -> Self {
        Self { storage, meta, clock, locks: Default::default() }
    }

    /// Stores a manifest with its tags, if the repository has the dependencies of the manifest.
    pub(crate) async fn put(
        &self,
        new: &NewManifest<'_>,
        bytes: Bytes,
        entry: Entry,
    ) -> Result<Put, StoreError> {
        let _lock = self.lock_repository(new.repo).await?;
        let key = manifest_key(new.repo.as_str(), new.digest);
        let known = self.meta.manifest(new.repo, &new.digest.to_string()).await?.is_some();
        self.storage.put(&key, bytes.clone()).await?;
        let put = self.meta.put_manifest(new, self.now(), entry).await?;
        if put != Put::Done {
            if !known {
                self.storage.delete(&key).await?;
            }
            return Ok(put);
        }
        for tag in new.tags {
            self.storage.put(&self.storage.tag_key(new.repo.as_str(), tag.as_str()), bytes.clone()).await?;
            self.meta.end_change(new.repo, tag.as_str()).await?;
        }
        Ok(put)
    }

    /// Removes a tag. Returns false when it did not exist.
    pub(crate) async fn untag(&self, repo: &RepositoryName, tag: &Tag) -> Result<bool, StoreError> {
        let _lock = self.lock_repository(repo).await?;
        let gone = self.meta.remove_tag(repo, tag).await?;
        self.follow(repo, &TagOrDigest::Tag(tag.clone())).await?;
        Ok(gone)
    }

    /// Removes a manifest with its tags. Returns false when it did not exist.
    pub(crate) async fn remove(&self, repo: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let _lock = self.lock_repository(repo).await?;
        self.remove_in_turn(repo, digest).await
    }

    async fn remove_in_turn(&self, repo: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let Some(tags) = self.meta.remove_manifest(repo, digest, self.now()).await? else {
            return Ok(false);
        };
        for tag in tags.iter().filter_map(|tag| tag.parse().ok()) {
            self.follow(repo, &TagOrDigest::Tag(tag)).await?;
        }
        self.follow(repo, &TagOrDigest::Digest(*digest)).await?;
        Ok(true)
    }

    /// Removes a manifest if it has no tag and was not pushed since `cutoff`. Returns false when it stays.
    pub(crate) async fn remove_untagged(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        cutoff: i64,
    ) -> Result<bool, StoreError> {
        let _lock = self.lock_repository(repo).await?;
        let gone = self.meta.remove_untagged(repo, digest, cutoff, self.now()).await?;
        if gone {
            self.follow(repo, &TagOrDigest::Digest(*digest)).await?;
        }
        Ok(gone)
    }

    /// Completes noted changes whose files do not match their rows. Idempotent; the registry may serve meanwhile.
    pub(crate) async fn finish_changes(&self) -> Result<(), StoreError> {
        for Change { repo, reference } in self.meta.changes().await? {
            let (Ok(repo), Ok(reference)) =
                (repo.parse::<RepositoryName>(), reference.parse::<TagOrDigest>())
            else {
                continue;
            };
            let _lock = self.lock_repository(&repo).await?;
            self.finish(&repo, &reference).await?;
        }
        Ok(())
    }

    /// Completes changes that a crash interrupted. No client got a response to these changes. Idempotent; the registry may
    /// serve meanwhile.
    pub(crate) async fn repair(&self) -> Result<(), StoreError> {
        self.finish_changes().await?;
        let keys = self.storage.manifests().await?;
        for key in &keys {
            if let Some(Key::Manifest(repo, digest)) = parse(key)
                && self.meta.manifest(&repo, &digest.to_string()).await?.is_none()
            {
                self.enter_or_delete(key, &repo, &digest).await?;
            }
        }
        let keys: HashSet<String> = keys.into_iter().collect();
        self.repair_manifests(&keys).await?;
        self.repair_tags(&keys).await
    }

    /// Enters a manifest that has bytes but no row, if the repository has its dependencies. Otherwise removes the bytes.
    async fn enter_or_delete(
        &self,
        key: &str,
        repo: &RepositoryName,
        digest: &Digest,
    ) -> Result<(), StoreError> {
        let _lock = self.lock_repository(repo).await?;
        if self.meta.manifest(repo, &digest.to_string()).await?.is_some() {
            return Ok(());
        }
        let Some(bytes) = self.storage.get(key).await? else { return Ok(()) };
        let whole = Digest::with(digest.algorithm(), &bytes) == *digest;
        let entered = match parse_stored(&bytes).filter(|_| whole) {
            Some(manifest) => {
                let new = NewManifest { repo, digest, tags: &[], size: length(&bytes), manifest: &manifest };
                self.meta.put_manifest(&new, self.now(), Entry::Pushed).await? == Put::Done
            }
            None => false,
        };
        tracing::info!(key, entered, "repaired manifest of an interrupted push");
        match entered {
            true => Ok(()),
            false => self.storage.delete(key).await,
        }
    }

    /// Removes manifests that have a row but no bytes: an earlier release removed the bytes first.
    async fn repair_manifests(&self, keys: &HashSet<String>) -> Result<(), StoreError> {
        let (mut missing, mut last) = (Vec::new(), (String::new(), String::new()));
        loop {
            let rows = self.meta.manifest_names(&last.0, &last.1, ROWS_READ).await?;
            let Some(end) = rows.last().cloned() else { break };
            last = end;
            for (repo, digest) in rows {
                let (Ok(repo), Ok(digest)) = (repo.parse::<RepositoryName>(), digest.parse::<Digest>())
                else {
                    continue;
                };
                if !keys.contains(&manifest_key(repo.as_str(), &digest)) {
                    missing.push((repo, digest));
                }
            }
        }
        if missing.len() > REPAIRS_MAX {
            tracing::error!(
                manifests = missing.len(),
                "manifests have no bytes in the storage, none repaired"
            );
            return Ok(());
        }
        for (repo, digest) in missing {
            let _lock = self.lock_repository(&repo).await?;
            // A push may have stored the manifest after the keys were listed.
            if self.storage.get(&manifest_key(repo.as_str(), &digest)).await?.is_none() {
                let removed = self.remove_in_turn(&repo, &digest).await?;
                tracing::info!(repository = %repo, %digest, removed, "removed manifest of an interrupted deletion");
            }
        }
        Ok(())
    }

    /// Writes the files of tags that have a row only.
    async fn repair_tags(&self, keys: &HashSet<String>) -> Result<(), StoreError> {
        let mut last = (String::new(), String::new());
        loop {
            let rows = self.meta.tag_rows(&last.0, &last.1, ROWS_READ).await?;
            let Some(end) = rows.last().cloned() else { return Ok(()) };
            last = end;
            for (repo, tag) in rows {
                let (Ok(repo), Ok(tag)) = (repo.parse::<RepositoryName>(), tag.parse::<Tag>()) else {
                    continue;
                };
                if !keys.contains(&self.storage.tag_key(repo.as_str(), tag.as_str())) {
                    let _lock = self.lock_repository(&repo).await?;
                    self.follow(&repo, &TagOrDigest::Tag(tag)).await?;
                }
            }
        }
    }

    /// Keys of all objects in the storage.
    pub(crate) async fn keys(&self) -> Result<Vec<String>, StoreError> {
        self.storage.manifests().await
    }

    /// Enters the object of a key into the tables, unless it has a row. Existing rows are not changed.
    pub(crate) async fn enter(&self, key: &str) -> Result<Entered, StoreError> {
        match parse(key) {
            Some(Key::Manifest(repo, digest)) => self.enter_manifest(key, &repo, &digest).await,
            Some(Key::Tag(repo, tag)) => self.enter_tag(key, &repo, &tag).await,
            None => Ok(Entered::Nothing),
        }
    }

    async fn enter_manifest(
        &self,
        key: &str,
        repo: &RepositoryName,
        digest: &Digest,
    ) -> Result<Entered, StoreError> {
        let _lock = self.lock_repository(repo).await?;
        self.finish(repo, &TagOrDigest::Digest(*digest)).await?;
        let Some(bytes) = self.storage.get(key).await? else { return Ok(Entered::Nothing) };
        if Digest::with(digest.algorithm(), &bytes) != *digest {
            tracing::warn!(key, "verify stored manifest failed");
            return Ok(Entered::Nothing);
        }
        let known = self.enter_bytes(repo, digest, &bytes).await?;
        Ok(if known { Entered::Manifest } else { Entered::Nothing })
    }

    async fn enter_tag(&self, key: &str, repo: &RepositoryName, tag: &Tag) -> Result<Entered, StoreError> {
        let _lock = self.lock_repository(repo).await?;
        self.finish(repo, &TagOrDigest::Tag(tag.clone())).await?;
        let Some(bytes) = self.storage.get(key).await? else { return Ok(Entered::Nothing) };
        if self.meta.tag_digest(repo, tag).await?.is_some() {
            return Ok(Entered::Tag);
        }
        // The key does not contain the digest algorithm by which the manifest was pushed.
        let sha512 = Digest::with(Algorithm::Sha512, &bytes);
        let digest = match self.meta.manifest(repo, &sha512.to_string()).await? {
            Some(_) => sha512,
            None => Digest::of(&bytes),
        };
        let own = manifest_key(repo.as_str(), &digest);
        if parse_stored(&bytes).is_some() && self.storage.get(&own).await?.is_none() {
            self.storage.put(&own, bytes.clone()).await?;
        }
        if !self.enter_bytes(repo, &digest, &bytes).await? {
            return Ok(Entered::Nothing);
        }
        self.meta.insert_found_tag(repo, tag, &digest, self.now()).await?;
        Ok(Entered::Tag)
    }

    /// Enters a stored manifest. Returns false when the bytes are not a manifest.
    async fn enter_bytes(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
        bytes: &Bytes,
    ) -> Result<bool, StoreError> {
        if self.meta.manifest(repo, &digest.to_string()).await?.is_some() {
            return Ok(true);
        }
        let Some(manifest) = parse_stored(bytes) else { return Ok(false) };
        let now = self.now();
        for child in &manifest.blobs {
            self.meta.link(repo, &child.digest.to_string(), now).await?;
        }
        let new = NewManifest { repo, digest, tags: &[], size: length(bytes), manifest: &manifest };
        self.meta.put_manifest(&new, now, Entry::Found).await?;
        Ok(true)
    }

    /// Completes an interrupted change of a reference. The caller holds the lock of the repository.
    async fn finish(&self, repo: &RepositoryName, reference: &TagOrDigest) -> Result<(), StoreError> {
        match self.meta.has_change(repo, &reference.to_string()).await? {
            true => self.follow(repo, reference).await,
            false => Ok(()),
        }
    }

    /// Makes the file of a reference match its row, and removes the note. The caller holds the lock of the repository.
    async fn follow(&self, repo: &RepositoryName, reference: &TagOrDigest) -> Result<(), StoreError> {
        match reference {
            TagOrDigest::Tag(tag) => {
                let key = self.storage.tag_key(repo.as_str(), tag.as_str());
                match self.bytes_behind(repo, tag).await? {
                    Some(bytes) => self.storage.put(&key, bytes).await?,
                    None => self.storage.delete(&key).await?,
                }
            }
            TagOrDigest::Digest(digest) => {
                if self.meta.manifest(repo, &digest.to_string()).await?.is_none() {
                    self.storage.delete(&manifest_key(repo.as_str(), digest)).await?;
                }
            }
        }
        self.meta.end_change(repo, &reference.to_string()).await
    }

    async fn bytes_behind(&self, repo: &RepositoryName, tag: &Tag) -> Result<Option<Bytes>, StoreError> {
        let Some(digest) = self.meta.tag_digest(repo, tag).await? else { return Ok(None) };
        let Ok(digest) = digest.parse::<Digest>() else { return Ok(None) };
        self.storage.get(&manifest_key(repo.as_str(), &digest)).await
    }

    async fn lock_repository(&self, repo: &RepositoryName) -> Result<RepositoryLock<'_>, StoreError> {
        let sum = repo.as_str().bytes().fold(7usize, |sum, b| sum.wrapping_mul(31).wrapping_add(b.into()));
        let own = self.locks[sum % LOCKS].lock().await;
        Ok(RepositoryLock { _own: own, _shared: self.meta.lock(repo).await? })
    }

    fn now(&self) -> i64 {
        self.clock.now().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_table() {
        let digest = Digest::of(b"x");
        let named = format!("manifests/a/b/_digests/sha256-{}.json", digest.hex());
        let repo = || "a/b".parse().unwrap();
        assert_eq!(parse(&named), Some(Key::Manifest(repo(), digest)));
        assert_eq!(
            parse("manifests/a/b/_tags/v1.json"),
            Some(Key::Tag(repo(), "v1".parse().unwrap())),
            "ours"
        );
        assert_eq!(
            parse("manifests/a/b/v1.json"),
            Some(Key::Tag(repo(), "v1".parse().unwrap())),
            "the original's"
        );
        assert_eq!(parse("manifests/../x.json"), None);
        assert_eq!(parse("catalog.json"), None);
    }
}
