//! Rebuilds the tables from the storage, except for those of tokens and unfinished uploads.

use crate::error::StoreError;
use crate::manifest_store::Entered;
use crate::meta::Arrival;
use crate::registry::Registry;
use coracle_oci::Digest;

/// Name of the property that says that the tables were filled once.
const FILLED: &str = "filled";

/// Number of objects that were entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) manifests: u64,
    pub(crate) tags: u64,
    pub(crate) blobs: u64,
}

impl Registry {
    /// Fills the tables of a new database from the storage.
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

    /// Enters all objects of the storage that have no row. Existing rows are not changed. Idempotent; the registry may serve
    /// meanwhile.
    pub(crate) async fn rebuild(&self) -> Result<Found, StoreError> {
        let mut found = Found::default();
        for (digest, size) in self.storage.blobs().await? {
            found.blobs += u64::from(self.enter_blob(&digest, size).await?);
        }
        for key in self.manifests.keys().await? {
            match self.manifests.enter(&key).await? {
                Entered::Manifest => found.manifests += 1,
                Entered::Tag => found.tags += 1,
                Entered::Nothing => {}
            }
        }
        Ok(found)
    }

    /// Enters blobs whose bytes survived a power failure that lost their rows, so that the sweep removes them after the grace
    /// period. Needed at the start only.
    pub(crate) async fn enter_orphans(&self) -> Result<(), StoreError> {
        let mut entered = 0_u64;
        for (digest, size) in self.storage.blobs().await? {
            if !self.meta.has_blob(&digest).await? && self.enter_blob(&digest, size).await? {
                entered += 1;
            }
        }
        if entered > 0 {
            tracing::info!(blobs = entered, "entered blobs without rows");
        }
        Ok(())
    }

    /// Announces a blob as an upload does, then checks that its bytes exist: a sweep may have removed them since they were
    /// listed. Returns false when the bytes are missing.
    async fn enter_blob(&self, digest: &Digest, size: u64) -> Result<bool, StoreError> {
        let row_size = i64::try_from(size).unwrap_or(i64::MAX);
        match self.meta.announce(digest, row_size, self.now(), None).await? {
            Arrival::Exists => Ok(true),
            Arrival::Wait | Arrival::Full => Ok(false),
            Arrival::New => {
                let there = self.storage.size(digest).await? == Some(size);
                if there {
                    self.meta.mark_blob_stored(digest, self.now()).await?;
                }
                Ok(there)
            }
        }
    }
}
