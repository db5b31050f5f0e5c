//! Disk images of the disk of a VM, after its command has ended or while the VM is off.
//!
//! ```text
//! vCPUs paused ─▶ overlay and image copied into one raw file ─▶ vCPUs resumed ─▶ pushed ─▶ kept under its digest
//! ```
//! The guest agent has synced the disk before it reported the end of the command, and the VMM writes its buffers when the vCPUs
//! are paused: the copy is crash-consistent, as after a power failure at that moment.

use std::path::Path;
use std::sync::Arc;

use coracle_disk::{DiskImage, digest_of, merged_copy, push_disk};
use coracle_hypervisor::Driver as _;
use coracle_image::ImageError;
use coracle_oci::{Digest, Reference};
use coracle_types::Op;
use tokio::task::spawn_blocking;

use super::commit::origin_of;
use super::{Access, Host};
use crate::vmm_config::{VmPaths, vmm_config};
use crate::{HostError, Record, files};

impl Host {
    /// Pushes the disk of a running disk image VM as `reference`, and keeps it as an image of this node. Not cancel-safe: if
    /// the future is dropped, the vCPUs stay paused until the VM is adopted or stopped. Idempotent: chunks that the registry
    /// has are not sent again.
    ///
    /// # Errors
    /// [`HostError::Driver`]; [`HostError::Image`] of the disk or the registry. No image gets the name then.
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
        images.keep_parts(&digest, &report.parts).map_err(state)?;
        images.tag(&digest, reference, report.disk_bytes, self.clock().now().0).map_err(state)?;
        Ok(report.digest)
    }

    /// Makes a disk image of the disk of a VM that is off. Cancel-safe: an interrupted copy is removed at the next start of the
    /// daemon.
    ///
    /// # Errors
    /// [`HostError::Refused`] if the VM runs; [`HostError::Invalid`] if it was started meanwhile; [`HostError::Image`];
    /// [`HostError::State`].
    pub(super) async fn commit_stopped_disk(
        &self,
        vm: &str,
        reference: &Reference,
    ) -> Result<DiskImage, HostError> {
        let off = |boots: Option<u32>| {
            let record = self.find(vm, Access::Change)?.record.clone();
            let refused = |source| HostError::Refused { name: record.name.to_string(), source };
            record.state.admit(Op::CopyDisk).map_err(refused)?;
            match boots.is_some_and(|boots| boots != record.boots) {
                true => Err(HostError::Invalid {
                    message: format!("VM {vm} was started while its disk was copied"),
                }),
                false => Ok(record),
            }
        };
        let record = off(None)?;
        let images = self.disk_images();
        let state = |source| HostError::State { operation: "keep a disk image".to_owned(), source };
        images.prepare().map_err(state)?;
        let copy = images.temporary_path();
        let paths = VmPaths::of(self.config(), &record.id);
        let (overlay, base, to) = (paths.own_disk(&record), record.rootfs.clone(), copy.clone());
        let made = spawn_blocking(move || {
            let bytes = merged_copy(&overlay, &base, &to, &|_, _| ())?;
            let digest = digest_of(&to).map_err(|e| ImageError::io("read", &to, e))?;
            Ok((bytes, digest))
        });
        let failed = |source| HostError::Image { reference: reference.to_string(), source };
        let kept = match made.await.map_err(|e| state(std::io::Error::other(e)))?.map_err(failed) {
            Ok((bytes, digest)) => off(Some(record.boots)).and_then(|_| {
                std::fs::rename(&copy, images.path(&digest)).map_err(state)?;
                images.tag(&digest, reference, bytes, self.clock().now().0).map_err(state)
            }),
            Err(error) => Err(error),
        };
        if kept.is_err() {
            let _leave_nothing = files::remove_file(&copy);
        }
        kept
    }

    /// Copies the disk as the guest sees it into one file. The guest is paused meanwhile.
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
