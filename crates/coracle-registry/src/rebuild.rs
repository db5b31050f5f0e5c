//! The tables, made again from the storage. Tokens and unfinished uploads are not in it.

use crate::digest::Digest;
use crate::error::StoreError;
use crate::manifest::{self, Manifest};
use crate::meta::{NewManifest, Put};
use crate::names::{RepositoryName, Tag};
use crate::registry::Registry;

/// The fact that the tables were filled once.
const FILLED: &str = "filled";

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) manifests: u64,
    pub(crate) tags: u64,
    pub(crate) blobs: u64,
}

/// A key of the storage. Pure.
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

/// A manifest that was taken once. One without a word on its type came as an OCI manifest.
fn stored(bytes: &[u8]) -> Option<Manifest> {
    manifest::parse(bytes, None).or_else(|_| manifest::parse(bytes, Some(manifest::OCI_MANIFEST))).ok()
}

impl Registry {
    /// Fills the tables of a new database from what the storage has.
    pub(crate) async fn fill(&self) -> Result<(), StoreError> {
        if self.meta.fact(FILLED).await?.is_some() {
            return Ok(());
        }
        let found = self.rebuild().await?;
        if found != Found::default() {
            tracing::info!(
                manifests = found.manifests,
                tags = found.tags,
                blobs = found.blobs,
                "index made from the storage"
            );
        }
        self.meta.set_fact(FILLED, "yes").await
    }

    /// Ends what a crash cut off between the file of a manifest and its row: the manifest is entered when all that it
    /// needs is there, else its file goes. Nobody was told of it either way. Safe while the registry works.
    pub(crate) async fn settle(&self) -> Result<(), StoreError> {
        for key in self.storage.manifests().await? {
            let Some(Key::Manifest(repo, digest)) = parse(&key) else { continue };
            if self.meta.manifest(&repo, &digest.to_string()).await?.is_some() {
                continue;
            }
            let _turn = self.turns.of(&repo).await;
            let Some(bytes) = self.storage.get(&key).await? else { continue };
            let whole = Digest::made(&bytes, digest.algorithm()) == digest;
            let entered = match stored(&bytes).filter(|_| whole) {
                Some(manifest) => {
                    let size = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
                    let new =
                        NewManifest { repo: &repo, digest: &digest, tags: &[], size, manifest: &manifest };
                    self.meta.put_manifest(&new, self.now(), false).await? == Put::Done
                }
                None => false,
            };
            tracing::info!(key, entered, "manifest of a push that was cut off");
            if !entered {
                self.storage.delete(&key).await?;
            }
        }
        Ok(())
    }

    /// Enters everything that the storage has. Takes nothing away. Safe to repeat, and while the registry works.
    pub(crate) async fn rebuild(&self) -> Result<Found, StoreError> {
        let now = self.now();
        let mut found = Found::default();
        for (digest, size) in self.storage.blobs().await? {
            self.meta.found_blob(&digest, i64::try_from(size).unwrap_or(i64::MAX), now).await?;
            found.blobs += 1;
        }
        for key in self.storage.manifests().await? {
            let (repo, digest, tag) = match parse(&key) {
                Some(Key::Manifest(repo, digest)) => (repo, Some(digest), None),
                Some(Key::Tag(repo, tag)) => (repo, None, Some(tag)),
                None => continue,
            };
            let Some(bytes) = self.storage.get(&key).await? else { continue };
            let actual = match &digest {
                Some(digest) => Digest::made(&bytes, digest.algorithm()),
                None => Digest::of(&bytes),
            };
            let Some(parsed) = stored(&bytes) else { continue };
            if digest.is_some_and(|named| named != actual) {
                tracing::warn!(key, "a stored manifest does not have its digest");
                continue;
            }
            for child in &parsed.blobs {
                self.meta.link(&repo, &child.digest.to_string(), now).await?;
            }
            let tags: Vec<Tag> = tag.into_iter().collect();
            let size = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
            let new = NewManifest { repo: &repo, digest: &actual, tags: &tags, size, manifest: &parsed };
            self.meta.put_manifest(&new, now, true).await?;
            found.tags += tags.len() as u64;
            found.manifests += u64::from(tags.is_empty());
        }
        Ok(found)
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
