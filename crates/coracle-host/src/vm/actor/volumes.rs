//! Volumes that come and go, also while the guest runs.
//!
//! ```text
//! attach   record Coming ─▶ slot ─▶ mount ─▶ record There
//! detach   record Going ─▶ unmount ─▶ empty the slot ─▶ record without it
//! ```
//! Cut off anywhere, or failed, a volume that is not `There` is removed ([`Actor::settle_volumes`]): it was never acknowledged.

use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::Driver as _;
use coracle_types::VmState;

use super::Actor;
use crate::events::EventKind;
use crate::files::blocking;
use crate::vm::shared_dirs;
use crate::vmm_config::{mount_request, volume_disk};
use crate::volumes::{VolumeRequest, VolumeSource, plan_volume, sandbox_target};
use crate::{GuestClient, HostError, Volume, VolumeKind, VolumePhase};
use coracle_guest_client::GuestError;
use coracle_share::{SharedDirServer, SharedDirSpec};

/// Limit for a guest to mount a volume.
const MOUNT_LIMIT: Duration = Duration::from_secs(10);
/// Limit for a guest to write what it holds of a volume, and to leave it.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(25);

impl Actor {
    pub(super) async fn attach_volume(
        &mut self,
        request: &VolumeRequest,
        found: &VolumeSource,
    ) -> Result<(), HostError> {
        let invalid = |message| HostError::Invalid { message };
        let mut volume =
            plan_volume(&self.record.volumes, &self.record.images, request, found).map_err(invalid)?;
        if self.record.sandbox.is_some() {
            volume.target = sandbox_target(&volume.name);
        }
        self.shared.claims.claim(&self.record.id, &volume, found).map_err(invalid)?;
        let name = volume.name.clone();
        let runs = self.record.state == VmState::Running;
        if runs {
            volume.phase = VolumePhase::Coming;
        }
        self.record.volumes.push(volume.clone());
        if let Err(error) = self.save().await {
            self.forget_volume(&name);
            return Err(error);
        }
        if runs {
            if let Err(error) = self.put_in(&volume).await {
                self.set_phase(&name, VolumePhase::Going);
                if let Err(left) = self.finish_volume(&volume).await {
                    tracing::warn!(vm = %self.record.id, volume = name, error = %left, "volume not taken back");
                }
                return Err(error);
            }
            self.set_phase(&name, VolumePhase::There);
            self.save().await?;
        }
        self.publish(EventKind::Updated);
        Ok(())
    }

    pub(super) async fn detach_volume(&mut self, name: &str) -> Result<(), HostError> {
        let missing = || HostError::NoVolume { vm: self.record.name.to_string(), name: name.to_owned() };
        let volume = self.record.volumes.iter().find(|v| v.name == name).cloned().ok_or_else(missing)?;
        if self.record.state == VmState::Running {
            // Refused while it is in use: then it stays.
            self.leave(&volume).await?;
        }
        self.set_phase(name, VolumePhase::Going);
        self.save().await?;
        self.finish_volume(&volume).await
    }

    /// With a new session, what the guest has becomes what the record says: a daemon that was killed may have left a
    /// volume half way. A guest that does not answer is asked once.
    pub(super) async fn settle_volumes(&mut self, guest: &GuestClient) {
        for volume in self.record.volumes.clone() {
            let settled = match volume.phase {
                VolumePhase::There => self.mount(&volume, guest).await,
                VolumePhase::Coming | VolumePhase::Going => self.finish_volume(&volume).await,
            };
            if let Err(error) = settled {
                tracing::warn!(vm = %self.record.id, volume = volume.name, %error, "volumes not settled");
                return;
            }
        }
    }

    /// A machine that is about to be built has no remains.
    pub(super) fn drop_half_volumes(&mut self) {
        let half = self.record.volumes.iter().filter(|v| v.phase != VolumePhase::There);
        for name in half.map(|v| v.name.clone()).collect::<Vec<_>>() {
            self.forget_volume(&name);
        }
    }

    fn serve_shared_dir(&mut self, volume: &Volume, guest: &GuestClient) {
        match self.shared_dir(volume) {
            Ok(server) => {
                self.jobs.spawn(shared_dirs::serve(guest.clone(), volume.name.clone(), server));
            }
            Err(error) => {
                tracing::error!(vm = %self.record.id, volume = volume.name, %error, "serve shared directory failed");
            }
        }
    }

    fn shared_dir(&mut self, volume: &Volume) -> Result<Arc<SharedDirServer>, HostError> {
        if let Some(server) = self.shared_dirs.get(&volume.name) {
            return Ok(server.clone());
        }
        let table = self.paths.folder_table(&volume.name);
        let open = || {
            table.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            let (root, read_only) = (volume.source.clone(), volume.read_only);
            SharedDirServer::open(SharedDirSpec { root, read_only, table: table.clone() })
        };
        let server = Arc::new(open().map_err(self.files_failed("open a shared directory"))?);
        self.shared_dirs.insert(volume.name.clone(), server.clone());
        Ok(server)
    }

    async fn put_in(&mut self, volume: &Volume) -> Result<(), HostError> {
        let guest = self.present_guest("mount a volume")?;
        if let Some(disk) = volume_disk(volume) {
            let driver = self.shared.node.driver.attach_disk(&self.vmm_config_without(volume), &disk).await;
            driver.map_err(|source| HostError::Driver { name: self.record.name.to_string(), source })?;
        } else {
            self.shared_dir(volume)?;
        }
        self.mount(volume, &guest).await
    }

    /// Has the guest mount it, which it may have done, and serves it. Idempotent in one session.
    async fn mount(&mut self, volume: &Volume, guest: &GuestClient) -> Result<(), HostError> {
        let mounted = guest.mount(mount_request(volume), MOUNT_LIMIT).await;
        mounted.map_err(|error| self.guest_failed("mount a volume", error))?;
        if volume.kind == VolumeKind::SharedDir {
            self.serve_shared_dir(volume, guest);
        }
        Ok(())
    }

    /// Has the guest unmount the volume.
    async fn leave(&self, volume: &Volume) -> Result<(), HostError> {
        let guest = self.present_guest("unmount a volume")?;
        let unmounted = guest.unmount(&volume.name, UNMOUNT_LIMIT).await;
        unmounted.map_err(|error| self.guest_failed("unmount a volume", error))
    }

    /// Removes what is left of the volume in the VM, then from the record.
    async fn finish_volume(&mut self, volume: &Volume) -> Result<(), HostError> {
        if self.record.state == VmState::Running {
            if let Err(error) = self.leave(volume).await {
                tracing::debug!(vm = %self.record.id, volume = volume.name, %error, "not unmounted");
            }
            if let Some(slot) = volume.slot() {
                let ejected =
                    self.shared.node.driver.detach_disk(&self.vmm_config_without(volume), slot).await;
                ejected.map_err(|source| HostError::Driver { name: self.record.name.to_string(), source })?;
            }
        }
        self.forget_volume(&volume.name);
        let table = self.paths.folder_table(&volume.name);
        let removed = blocking(move || crate::files::remove_file(&table)).await;
        removed.map_err(self.files_failed("remove the node table of a shared directory"))?;
        self.save().await?;
        self.publish(EventKind::Updated);
        Ok(())
    }

    fn forget_volume(&mut self, name: &str) {
        self.record.volumes.retain(|volume| volume.name != name);
        self.shared_dirs.remove(name);
        self.shared.claims.release(&self.record.id, name);
    }

    fn set_phase(&mut self, name: &str, phase: VolumePhase) {
        if let Some(volume) = self.record.volumes.iter_mut().find(|volume| volume.name == name) {
            volume.phase = phase;
        }
    }

    /// The machine as it is without the volume.
    fn vmm_config_without(&self, volume: &Volume) -> coracle_hypervisor::VmmConfig {
        let mut vmm_config = self.vmm_config();
        vmm_config.disks.retain(|disk| Some(disk.slot) != volume.slot());
        vmm_config
    }

    pub(super) fn present_guest(&self, operation: &'static str) -> Result<GuestClient, HostError> {
        let absent =
            || self.guest_failed(operation, GuestError::unavailable("the guest agent is not connected"));
        self.guest.clone().ok_or_else(absent)
    }

    pub(super) fn guest_failed(&self, operation: &'static str, source: GuestError) -> HostError {
        HostError::Guest { name: self.record.name.to_string(), operation, source }
    }
}
