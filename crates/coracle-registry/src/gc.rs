//! Garbage: blobs that nobody names, uploads that nobody goes on with, and, where that is wanted, manifests without
//! a tag. Mark, grace, sweep; `meta` says why no push has to wait for it.

use tokio_util::sync::CancellationToken;

use crate::digest::Digest;
use crate::error::StoreError;
use crate::meta::Doomed;
use crate::names::{RepositoryName, UploadId};
use crate::registry::Registry;
use crate::storage::manifest_key;

/// What a sweep removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Swept {
    pub(crate) blobs: u64,
    pub(crate) bytes: u64,
    pub(crate) uploads: u64,
    pub(crate) manifests: u64,
}

impl Registry {
    /// Sweeps now and then, until `stop`. A sweep that fails is tried again at the next time.
    pub(crate) async fn keep_sweeping(&self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(self.sweeping.every)).await.is_some() {
            match self.sweep().await {
                Ok(swept) if swept != Swept::default() => {
                    tracing::info!(
                        blobs = swept.blobs,
                        bytes = swept.bytes,
                        uploads = swept.uploads,
                        manifests = swept.manifests,
                        "garbage removed"
                    );
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "garbage not removed"),
            }
        }
    }

    /// What a sweep would free now.
    pub(crate) async fn would_free(&self) -> Result<Vec<Doomed>, StoreError> {
        self.meta.would_free(self.before(self.sweeping.grace)).await
    }

    /// One sweep. Safe to repeat, and to be cut anywhere.
    pub(crate) async fn sweep(&self) -> Result<Swept, StoreError> {
        let mut swept = Swept { uploads: self.expire_uploads().await?, ..Swept::default() };
        if let Some(age) = self.sweeping.untagged {
            swept.manifests = self.remove_untagged(age).await?;
        }
        let cutoff = self.before(self.sweeping.grace);
        for doomed in self.meta.doom(cutoff).await? {
            if let Ok(digest) = doomed.digest.parse::<Digest>() {
                self.storage.remove(&digest).await?;
            }
            self.meta.bury(&doomed.digest).await?;
            swept.blobs += 1;
            swept.bytes += u64::try_from(doomed.size).unwrap_or(0);
        }
        self.meta.forget_empty(cutoff).await?;
        self.write_catalog().await?;
        self.metrics.swept(swept.bytes);
        Ok(swept)
    }

    async fn expire_uploads(&self) -> Result<u64, StoreError> {
        // Files first: what has no row afterwards had none when it was listed.
        let files = self.storage.uploads().await?;
        let rows = self.meta.uploads().await?;
        let cutoff = self.before(self.limits.upload_age);
        let mut gone = 0;
        for row in rows.iter().filter(|row| row.updated < cutoff) {
            let Ok(id) = row.id.parse::<UploadId>() else { continue };
            self.storage.discard(&id).await?;
            self.meta.end_upload(&id).await?;
            self.sessions.forget(&id);
            gone += 1;
        }
        for id in files.iter().filter(|id| rows.iter().all(|row| row.id != id.as_str())) {
            self.storage.discard(id).await?;
            gone += 1;
        }
        Ok(gone)
    }

    async fn remove_untagged(&self, age: std::time::Duration) -> Result<u64, StoreError> {
        let mut gone = 0;
        for (repo, digest) in self.meta.untagged(self.before(age)).await? {
            let (Ok(repo), Ok(digest)) = (repo.parse::<RepositoryName>(), digest.parse::<Digest>()) else {
                continue;
            };
            gone += u64::from(self.remove_manifest(&repo, &digest).await?);
        }
        Ok(gone)
    }

    /// Removes a manifest with its tags. `false` when there was none.
    pub(crate) async fn remove_manifest(
        &self,
        repo: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        let _turn = self.turns.of(repo).await;
        for tag in self.meta.tags_of(repo, digest).await? {
            self.storage.delete(&self.storage.tag_key(repo.as_str(), &tag)).await?;
        }
        self.storage.delete(&manifest_key(repo.as_str(), digest)).await?;
        self.meta.remove_manifest(repo, digest, self.now()).await
    }
}
