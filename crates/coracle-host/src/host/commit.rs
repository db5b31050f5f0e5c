//! Images made of VMs: on request, and automatically when a workload exits with 0 and the VM's metadata name an image. The
//! latter allows a Pod to build an image: it runs commands on a base image, and an annotation names the result.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use coracle_disk::DiskImage;
use coracle_guest_client::GuestError;
use coracle_image::{Image, PushOptions, RootKind, VmRoot};
use coracle_oci::{Digest, NoProgress, PullOrigin, Reference};
use coracle_types::Op;
use futures_util::TryStreamExt;
use tokio::time::timeout;
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::{Access, Host};
use crate::vm::Commit;
use crate::{Exit, GuestClient, HostError, Record, View};

/// Time that a call to a guest waits for a session.
const SESSION_WAIT: Duration = Duration::from_secs(5);

/// Image that [`Host::commit`] made.
#[derive(Clone, Debug)]
pub enum CommittedImage {
    /// A container image.
    Container(Box<Image>),
    /// A disk image.
    Disk(DiskImage),
}

impl Host {
    /// Returns the session with the guest of a running VM, by exact name or id. Waits at most five seconds for a session that
    /// is being opened, as after a restart of the daemon. Cancel-safe.
    ///
    /// # Errors
    /// [`HostError::NotFound`]; [`HostError::Refused`] in other states; [`HostError::Guest`] without a session.
    pub async fn guest(&self, vm: &str) -> Result<GuestClient, HostError> {
        let mut changes = self.handle(vm, Access::Change)?.view;
        let decided = |view: &Arc<View>| view.guest.is_some() || view.record.state.admit(Op::Guest).is_err();
        // On a timeout, or if the VM is gone, the last state tells the reason.
        drop(timeout(SESSION_WAIT, changes.wait_for(decided)).await);
        let view = changes.borrow().clone();
        let name = || view.record.name.to_string();
        view.record.state.admit(Op::Guest).map_err(|source| HostError::Refused { name: name(), source })?;
        view.guest.clone().ok_or_else(|| {
            let source = GuestError::unavailable("the guest agent is not connected");
            HostError::Guest { name: name(), operation: "open a session", source }
        })
    }

    /// Makes an image of a VM: of the file system that the workload of a running VM sees, or of the disk of a disk image VM
    /// that is off. On failure no image gets the name. Cancel-safe.
    ///
    /// # Errors
    /// [`HostError::NotFound`]; [`HostError::Refused`] in other states; [`HostError::Guest`] without a session;
    /// [`HostError::Image`].
    pub async fn commit(&self, vm: &str, reference: &Reference) -> Result<CommittedImage, HostError> {
        if self.find(vm, Access::Change)?.record.disk_image_vm.is_some() {
            return self.commit_stopped_disk(vm, reference).await.map(CommittedImage::Disk);
        }
        self.commit_container(vm, reference).await.map(|image| CommittedImage::Container(Box::new(image)))
    }

    /// Makes an image of the file system that the workload of a running VM sees: the layers of the VM's image, and one layer
    /// with the changes. On failure no image gets the name.
    ///
    /// # Errors
    /// Like [`Host::guest`]; [`HostError::Image`].
    async fn commit_container(&self, vm: &str, reference: &Reference) -> Result<Image, HostError> {
        let guest = self.guest(vm).await?;
        let record = self.find(vm, Access::Change)?.record.clone();
        let failed = |source| HostError::Guest { name: vm.to_owned(), operation: "read the root", source };
        let (tar, kind) = match guest.changes().await.map_err(failed)? {
            Some(changes) => (changes, RootKind::Changes),
            None => (guest.copy_out("/").await.map_err(failed)?, RootKind::Whole),
        };
        let tar = SyncIoBridge::new(StreamReader::new(tar.map_err(io::Error::other)));
        let base = record.image_digest.parse();
        let base = base.map_err(|_| HostError::Invalid { message: format!("VM {vm} has no image") })?;
        let mounts = record.volumes.iter().map(|volume| volume.target.clone().into()).collect();
        let committed =
            self.images().commit(&base, VmRoot { tar, kind, mounts }, reference, self.clock().now().0).await;
        committed.map_err(|source| HostError::Image { reference: reference.to_string(), source })
    }

    /// Job by which the task of a VM commits it when its workload has ended.
    pub(crate) fn commit_job(&self) -> Commit {
        let host = self.downgrade();
        Box::new(move |vm, exit, reference| {
            let host = host.clone();
            Box::pin(async move {
                let host = host.upgrade().ok_or("the node is stopping")?;
                let made = host.commit_finished(vm.as_str(), &exit, &reference).await;
                made.map_err(|error| error.chain())
            })
        })
    }

    /// Commits `vm`, or its disk, if its workload exited with 0, and pushes the image as `reference`. Returns the digest of the
    /// manifest; `None` after another exit code. The VM must still run. Idempotent: blobs that the registry has are not sent
    /// again.
    ///
    /// # Errors
    /// Errors of the image or the registry. After a failed push a container image stays on this node under the name; a disk
    /// image does not.
    pub async fn commit_finished(
        &self,
        vm: &str,
        exit: &Exit,
        reference: &Reference,
    ) -> Result<Option<Digest>, HostError> {
        if !exit.success() {
            return Ok(None);
        }
        let record = self.find(vm, Access::Change)?.record.clone();
        if record.disk_image_vm.is_some() {
            return self.commit_disk(&record, reference).await.map(Some);
        }
        self.commit_container(vm, reference).await?;
        let origin = self.get(vm).map(|view| origin_of(&view.record)).unwrap_or_default();
        let options = PushOptions { origin, ..PushOptions::default() };
        let pushed = self.images().push(reference, reference, &options, Arc::new(NoProgress)).await;
        let failed = |source| HostError::Image { reference: reference.to_string(), source };
        pushed.map(|report| Some(report.digest)).map_err(failed)
    }
}

/// Origin of the push of a VM's image. Records of older versions have no origin, only an owner.
pub(super) fn origin_of(record: &Record) -> PullOrigin {
    if record.owner.uid.is_empty() { record.origin } else { PullOrigin::Cluster }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_of_an_owned_vm_is_its_cluster() {
        let mut record = coracle_record::example("web", coracle_types::VmState::Running);
        assert_eq!(origin_of(&record), PullOrigin::Local);
        record.owner.uid = "1".to_owned();
        assert_eq!(origin_of(&record), PullOrigin::Cluster);
        record.owner.uid.clear();
        record.origin = PullOrigin::Cluster;
        assert_eq!(origin_of(&record), PullOrigin::Cluster);
    }

    #[test]
    fn success_table() {
        for (why, code, signal, error, want) in [
            ("it ended well", 0, 0, "", true),
            ("a code", 3, 0, "", false),
            ("a signal", 137, 9, "", false),
            ("it never ran", 0, 0, "no such file", false),
        ] {
            assert_eq!(Exit { code, signal, error: error.to_owned() }.success(), want, "{why}");
        }
    }
}
