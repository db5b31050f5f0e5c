//! Snapshots and images between this host and registries.

use std::sync::Arc;

use coracle_image::{
    DiskOptions, DiskProgress, DiskReport, Image, ImageError, MachineRoot, Reference, SnapshotBase,
    find_snapshot, push_snapshot,
};

use super::Host;
use crate::snapshots::{Part, remote};
use crate::{HostError, SnapshotInfo, SnapshotName, files};

impl Host {
    /// Sends a snapshot to a registry, in windows. Those that the tag had before are not sent again. Idempotent;
    /// cancel-safe: windows that arrived are found by the next call.
    ///
    /// # Errors
    /// As [`Host::snapshot`]; [`HostError::Image`] with what the registry said.
    pub async fn push_snapshot(
        &self,
        name: &str,
        reference: &Reference,
        progress: DiskProgress,
    ) -> Result<DiskReport, HostError> {
        let info = self.snapshot(name).await?;
        let about = remote::about(&info).map_err(|source| HostError::Archive { source })?;
        let sources = remote::files(&self.snapshot_store(), &info);
        // The file of a disk image has a digest and no manifest.
        let manifest = info.image_digest.parse().ok().and_then(|digest| self.images().descriptor(&digest));
        let base = SnapshotBase { name: info.image, digest: info.image_digest, manifest };
        let options = DiskOptions::default();
        let pushed = push_snapshot(&sources, &about, &base, reference, &options, progress).await;
        pushed.map_err(failed(reference))
    }

    /// Takes a snapshot from a registry, under `name`. It is judged before its bytes are moved. When the registry goes
    /// away, or the caller does, what has arrived stays for a week, and the next call under that name moves the rest;
    /// after any other failure nothing is left. Cancel-safe.
    ///
    /// # Errors
    /// [`HostError::SnapshotExists`]; [`HostError::Archive`] with what is wrong with it; [`HostError::Image`] with what
    /// the registry said.
    pub async fn pull_snapshot(
        &self,
        reference: &Reference,
        name: SnapshotName,
        progress: DiskProgress,
    ) -> Result<SnapshotInfo, HostError> {
        let taken = || HostError::SnapshotExists { name: name.to_string() };
        let part = self.snapshot_store().begin_pull(name.clone()).ok_or_else(taken)?;
        match fill(&part, reference, progress).await {
            Ok(info) => {
                let sealed = files::blocking(move || part.seal(&info).map(|()| info));
                sealed.await.map_err(|source| HostError::Archive { source })
            }
            // What a later call finds is checked again, window by window.
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

    /// Makes an image of what the workload of a running VM sees: the layers of the VM's image, and one more with what
    /// differs. `root` is its root as a tar stream. When it fails nothing is named.
    ///
    /// # Errors
    /// [`HostError::Image`].
    pub async fn commit(
        &self,
        vm: &str,
        reference: &Reference,
        root: impl std::io::Read + Send + 'static,
    ) -> Result<Image, HostError> {
        let record = self.get(vm)?.record.clone();
        if record.system.is_some() {
            let message =
                format!("VM {vm} is a system of its own: only what runs a container image can be committed");
            return Err(HostError::Invalid { message });
        }
        let failed = failed(reference);
        let base = record.image_digest.parse();
        let base = base.map_err(|_| HostError::Invalid { message: format!("VM {vm} has no image") })?;
        let created_ms = self.clock().now().0;
        let mounts = record.volumes.iter().map(|volume| volume.target.clone().into()).collect();
        let root = MachineRoot { tar: root, mounts };
        self.images().commit(&base, root, reference, created_ms).await.map_err(failed)
    }
}

/// Brings a snapshot's files into its part.
async fn fill(part: &Part, reference: &Reference, progress: DiskProgress) -> Result<SnapshotInfo, HostError> {
    let found = find_snapshot(reference, &DiskOptions::default()).await.map_err(failed(reference))?;
    let info = remote::read(&found, part).map_err(|source| HostError::Archive { source })?;
    let dir = part.dir().to_owned();
    let made = files::blocking(move || std::fs::create_dir_all(dir)).await;
    made.map_err(|source| HostError::Archive { source })?;
    found.fetch(&remote::FILES, part.dir(), progress).await.map_err(failed(reference))?;
    Ok(info)
}

fn failed(reference: &Reference) -> impl FnOnce(ImageError) -> HostError + use<> {
    let reference = reference.to_string();
    move |source| HostError::Image { reference, source }
}

/// Progress of windows, told as progress of an image.
pub(crate) fn windows(step: coracle_image::Step, progress: Arc<dyn coracle_image::Progress>) -> DiskProgress {
    Arc::new(move |done_bytes, total_bytes| {
        progress.event(coracle_image::ProgressEvent { step, item: None, done_bytes, total_bytes });
    })
}
