//! A disk image of what the command of a VM left on its disk.
//!
//! ```text
//! vCPUs held ─▶ overlay and image copied into one raw file ─▶ vCPUs run ─▶ pushed ─▶ kept under its digest
//! ```
//! The guest agent has synced the disk before it reported the end of the command, and the VMM writes its buffers when its
//! vCPUs are held: the copy is what a machine would find after a power failure at that moment.

use std::path::Path;
use std::sync::Arc;

use coracle_disk::{merged_copy, push_disk};
use coracle_hypervisor::Driver as _;
use coracle_oci::{Digest, Reference};
use tokio::task::spawn_blocking;

use super::Host;
use super::commit::origin_of;
use crate::vmm_config::{VmPaths, vmm_config};
use crate::{HostError, Record, files};

impl Host {
    /// Pushes the disk of a disk image VM that runs as `reference`, and keeps it as an image of this node. Not cancel-safe by
    /// itself: a caller that is dropped leaves the vCPUs held until the VM is adopted or stopped. Idempotent: chunks that the
    /// registry has are not sent again.
    ///
    /// # Errors
    /// [`HostError::Driver`]; [`HostError::Image`] of the disk or the registry. No image is named then.
    pub(super) async fn commit_disk(
        &self,
        record: &Record,
        reference: &Reference,
    ) -> Result<Digest, HostError> {
        let paths = VmPaths::of(self.config(), &record.id);
        let copy = paths.state.join("disks").join("commit.raw");
        let pushed = self.push_copy(record, &paths, &copy, reference).await;
        if pushed.is_err() {
            let _leave_nothing = files::remove_file(&copy);
        }
        pushed
    }

    async fn push_copy(
        &self,
        record: &Record,
        paths: &VmPaths,
        copy: &Path,
        reference: &Reference,
    ) -> Result<Digest, HostError> {
        let failed = |source| HostError::Image { reference: reference.to_string(), source };
        self.copy_disk(record, paths, copy, reference).await?;
        let options = self.disk_options(reference, origin_of(record));
        let report = push_disk(copy, reference, &options, Arc::new(|_, _| ())).await.map_err(failed)?;
        let state = |source| HostError::State { operation: "keep a disk image".to_owned(), source };
        let images = self.disk_images();
        images.prepare().map_err(state)?;
        let digest = report.digest.to_string();
        std::fs::rename(copy, images.path(&digest)).map_err(state)?;
        images.name(&digest, reference, report.disk_bytes, self.clock().now().0).map_err(state)?;
        Ok(report.digest)
    }

    /// The disk that the guest sees, in one file. The guest waits meanwhile.
    async fn copy_disk(
        &self,
        record: &Record,
        paths: &VmPaths,
        copy: &Path,
        reference: &Reference,
    ) -> Result<(), HostError> {
        let node = &self.0.shared.node;
        let accelerator = record.accelerator.unwrap_or_else(|| node.accelerator(&record.driver));
        let shape = vmm_config(&node.config, record, accelerator, None);
        let driver = |source| HostError::Driver { name: record.name.to_string(), source };
        node.driver.pause(&shape).await.map_err(driver)?;
        let (overlay, base, to) = (paths.own_disk(record), record.rootfs.clone(), copy.to_owned());
        let copied = spawn_blocking(move || merged_copy(&overlay, &base, &to, &|_, _| ())).await;
        node.driver.resume(&shape).await.map_err(driver)?;
        let lost =
            |e| HostError::State { operation: "copy a disk".to_owned(), source: std::io::Error::other(e) };
        let copied = copied.map_err(lost)?;
        copied.map(drop).map_err(|source| HostError::Image { reference: reference.to_string(), source })
    }
}
