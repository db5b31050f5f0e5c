//! Transfers of snapshots and images between this host and registries.

use std::sync::Arc;

use coracle_disk::{
    DiskOptions, DiskProgress, DiskReport, SnapshotBase, delete_snapshot, find_snapshot, push_snapshot,
};
use coracle_image::ImageError;
use coracle_oci::{OciError, PullOrigin, Reference};

use super::Host;
use crate::{HostConfig, HostError, SnapshotInfo, SnapshotName, files};
use coracle_snapshot::{Part, remote};

impl Host {
    /// Options for transfers of disks and snapshots.
    pub(super) fn disk_options(&self, reference: &Reference, origin: PullOrigin) -> DiskOptions {
        let HostConfig { registries, credentials, .. } = self.config();
        let credentials = credentials.get(reference.registry()).cloned().unwrap_or_default();
        let local = Arc::new(self.disk_images().local_parts());
        DiskOptions { registries: registries.clone(), credentials, origin, local, ..DiskOptions::default() }
    }

    /// Pushes a snapshot to a registry, in chunks. Chunks that the tag had before are not sent again. Idempotent; cancel-safe:
    /// the next call finds the chunks that have arrived.
    ///
    /// # Errors
    /// Like [`Host::snapshot`]; [`HostError::Image`] with the registry's error.
    pub async fn push_snapshot(
        &self,
        name: &str,
        reference: &Reference,
        progress: DiskProgress,
    ) -> Result<DiskReport, HostError> {
        let info = self.snapshot(name).await?;
        let about = remote::about(&info).map_err(|source| HostError::Archive { source })?;
        let sources = remote::files(&self.snapshot_store(), &info);
        // A disk image has the digest of its file and no manifest.
        let manifest = info.image_digest.parse().ok().and_then(|digest| self.images().descriptor(&digest));
        let base = SnapshotBase { name: info.image, digest: info.image_digest, manifest };
        let options = self.disk_options(reference, PullOrigin::Local);
        let pushed = push_snapshot(&sources, &about, &base, reference, &options, progress).await;
        pushed.map_err(registry_error(reference))
    }

    /// Pulls a snapshot from a registry, under `name`. The snapshot is checked before its data are transferred. If the
    /// connection fails, or the future is dropped, the data that have arrived stay for a week, and the next call under that
    /// name transfers the rest. After any other failure nothing is left. Cancel-safe.
    ///
    /// # Errors
    /// [`HostError::SnapshotExists`]; [`HostError::Archive`] with the defect of the snapshot; [`HostError::Image`] with the
    /// registry's error.
    pub async fn pull_snapshot(
        &self,
        reference: &Reference,
        name: SnapshotName,
        progress: DiskProgress,
    ) -> Result<SnapshotInfo, HostError> {
        let taken = || HostError::SnapshotExists { name: name.to_string() };
        let part = self.snapshot_store().begin_pull(name.clone()).ok_or_else(taken)?;
        let options = self.disk_options(reference, PullOrigin::Local);
        match fill(&part, reference, &options, progress).await {
            Ok(info) => {
                let sealed = files::blocking(move || part.seal(&info).map(|()| info));
                sealed.await.map_err(|source| HostError::Archive { source })
            }
            // The next call verifies the remaining data again, chunk by chunk.
            Err(HostError::Image { reference, source }) if source.is_transient() => {
                Err(HostError::Image { reference, source })
            }
            Err(error) => {
                if let Err(left) = files::blocking(move || part.discard()).await {
                    tracing::warn!(%left, "part of a snapshot not removed");
                }
                Err(error)
            }
        }
    }
}

impl Host {
    /// Describes a snapshot in a registry, without its owner; `None` if it does not exist. Transfers no data.
    ///
    /// # Errors
    /// [`HostError::Archive`] with the defect of the snapshot; [`HostError::Image`] with the registry's error.
    pub async fn remote_snapshot(&self, reference: &Reference) -> Result<Option<SnapshotInfo>, HostError> {
        let options = self.disk_options(reference, PullOrigin::Local);
        match find_snapshot(reference, &options).await {
            Ok(found) => {
                let name = SnapshotName::made_of(reference.repository(), reference.tag().unwrap_or("latest"));
                let info = remote::inspect(&found, name).map_err(|source| HostError::Archive { source })?;
                Ok(Some(info))
            }
            Err(ImageError::Oci(OciError::NotFound { .. })) => Ok(None),
            Err(error) => Err(registry_error(reference)(error)),
        }
    }

    /// Removes the tag of a snapshot of any VM from a registry. Idempotent.
    ///
    /// # Errors
    /// [`HostError::Image`] with the registry's error.
    pub async fn delete_remote_snapshot(&self, reference: &Reference) -> Result<(), HostError> {
        let options = self.disk_options(reference, PullOrigin::Local);
        delete_snapshot(reference, &options).await.map_err(registry_error(reference))
    }
}

/// Fetches the files of a snapshot into its part.
async fn fill(
    part: &Part,
    reference: &Reference,
    options: &DiskOptions,
    progress: DiskProgress,
) -> Result<SnapshotInfo, HostError> {
    let found = find_snapshot(reference, options).await.map_err(registry_error(reference))?;
    let info = remote::read(&found, part).map_err(|source| HostError::Archive { source })?;
    let dir = part.dir().to_owned();
    let made = files::blocking(move || std::fs::create_dir_all(dir)).await;
    made.map_err(|source| HostError::Archive { source })?;
    found.fetch(&remote::FILES, part.dir(), progress).await.map_err(registry_error(reference))?;
    Ok(info)
}

fn registry_error(reference: &Reference) -> impl FnOnce(ImageError) -> HostError + use<> {
    let reference = reference.to_string();
    move |source| HostError::Image { reference, source }
}

/// Reports the progress of chunks as the progress of an image.
pub fn chunk_progress(step: coracle_oci::Step, progress: Arc<dyn coracle_oci::Progress>) -> DiskProgress {
    Arc::new(move |done_bytes, total_bytes| {
        progress.event(coracle_oci::ProgressEvent { step, item: None, done_bytes, total_bytes });
    })
}
