//! Garbage collection of unreferenced blobs, abandoned uploads and, if configured, untagged manifests. It marks, waits for a
//! grace period, and sweeps; `meta` explains why no push waits for it.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use tokio_util::sync::CancellationToken;

use crate::error::StoreError;
use crate::meta::Doomed;
use crate::registry::Registry;
use crate::upload_id::UploadId;
use coracle_oci::{Digest, RepositoryName};

/// Number of objects that a sweep removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Swept {
    pub(crate) blobs: u64,
    pub(crate) bytes: u64,
    pub(crate) uploads: u64,
    pub(crate) manifests: u64,
}

impl Registry {
    /// Sweeps at intervals until `stop`. A failed sweep is retried at the next interval.
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
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "sweep garbage failed")
                }
            }
        }
    }

    /// Blobs that a sweep would remove now. Removes nothing.
    pub(crate) async fn would_free(&self) -> Result<Vec<Doomed>, StoreError> {
        self.meta.would_free(self.before(self.sweeping.grace)).await
    }

    /// Runs one sweep. Idempotent, and safe to interrupt.
    pub(crate) async fn sweep(&self) -> Result<Swept, StoreError> {
        self.manifests.finish_changes().await?;
        if !self.orphans_entered.load(Ordering::Acquire) {
            self.enter_orphans().await?;
            self.orphans_entered.store(true, Ordering::Release);
        }
        let mut swept = Swept { uploads: self.expire_uploads().await?, ..Swept::default() };
        if let Some(age) = self.sweeping.untagged {
            swept.manifests = self.remove_untagged(age).await?;
        }
        let cutoff = self.before(self.sweeping.grace);
        for doomed in self.meta.mark_garbage(cutoff).await? {
            if let Ok(digest) = doomed.digest.parse::<Digest>() {
                self.storage.remove(&digest).await?;
            }
            self.meta.delete_doomed(&doomed.digest).await?;
            self.used.forget();
            swept.blobs += 1;
            swept.bytes += u64::try_from(doomed.size).unwrap_or(0);
        }
        self.meta.forget_empty(cutoff).await?;
        self.write_catalog().await?;
        self.metrics.count_swept(swept.bytes);
        Ok(swept)
    }

    async fn expire_uploads(&self) -> Result<u64, StoreError> {
        // Lists files before rows: a file without a row then had no row when it was listed.
        let files = self.storage.uploads().await?;
        let rows = self.meta.uploads().await?;
        let cutoff = self.before(self.limits.upload_age);
        let mut gone = 0;
        for row in rows.iter().filter(|row| row.updated < cutoff) {
            let Ok(id) = row.id.parse::<UploadId>() else { continue };
            // Skips an upload that a request of this process uses, or whose time a request of another replica has updated.
            let Some(_turn) = self.sessions.idle(&id) else { continue };
            if self.meta.expire_upload(&id, cutoff).await? {
                self.storage.discard(&id).await?;
                self.sessions.forget(&id);
                gone += 1;
            }
        }
        let known: HashSet<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        for id in files.iter().filter(|id| !known.contains(id.as_str())) {
            self.storage.discard(id).await?;
            gone += 1;
        }
        Ok(gone)
    }

    async fn remove_untagged(&self, age: std::time::Duration) -> Result<u64, StoreError> {
        let mut gone = 0;
        let cutoff = self.before(age);
        for (repo, digest) in self.meta.untagged_manifests(cutoff).await? {
            let (Ok(repo), Ok(digest)) = (repo.parse::<RepositoryName>(), digest.parse::<Digest>()) else {
                continue;
            };
            gone += u64::from(self.manifests.remove_untagged(&repo, &digest, cutoff).await?);
        }
        Ok(gone)
    }
}
