//! Volumes that come and go, also while the guest runs.
//!
//! ```text
//! attach   record Coming ─▶ slot ─▶ mount ─▶ record There
//! detach   record Going ─▶ unmount ─▶ empty the slot ─▶ record without it
//! ```
//! Cut off anywhere, or failed, a volume that is not There goes ([`Actor::settle_volumes`]): nobody was told of it.

use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::Driver as _;
use coracle_proto::guest as pb;
use coracle_types::VmState;

use super::Actor;
use crate::events::EventKind;
use crate::files::blocking;
use crate::folders::{FolderServer, FolderSpec};
use crate::guest::within;
use crate::vm::folders;
use crate::volumes::{Found, VolumeWish, place};
use crate::{GuestClient, HostError, Volume, VolumeKind, VolumePhase};

/// Limit for a guest to mount a volume.
const MOUNT_LIMIT: Duration = Duration::from_secs(10);
/// Limit for a guest to write what it holds of a volume, and to leave it.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(25);

impl Actor {
    pub(super) async fn attach_volume(&mut self, wish: &VolumeWish, found: &Found) -> Result<(), HostError> {
        let invalid = |message| HostError::Invalid { message };
        let mut volume = place(&self.record.volumes, wish, found).map_err(invalid)?;
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

    fn serve_folder(&mut self, volume: &Volume, guest: &GuestClient) {
        match self.folder(volume) {
            Ok(server) => {
                self.jobs.spawn(folders::serve(guest.clone(), volume.name.clone(), server));
            }
            Err(error) => {
                tracing::error!(vm = %self.record.id, volume = volume.name, %error, "folder not served");
            }
        }
    }

    fn folder(&mut self, volume: &Volume) -> Result<Arc<FolderServer>, HostError> {
        if let Some(server) = self.folders.get(&volume.name) {
            return Ok(server.clone());
        }
        let table = self.paths.folder_table(&volume.name);
        let open = || {
            table.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            let (root, read_only) = (volume.source.clone(), volume.read_only);
            FolderServer::open(FolderSpec { root, read_only, table: table.clone() })
        };
        let server = Arc::new(open().map_err(self.files_failed("open a folder"))?);
        self.folders.insert(volume.name.clone(), server.clone());
        Ok(server)
    }

    async fn put_in(&mut self, volume: &Volume) -> Result<(), HostError> {
        let guest = self.present_guest("mount a volume")?;
        if let Some(disk) = volume.disk() {
            let driver = self.shared.driver.insert_disk(&self.recipe_without(volume), &disk).await;
            driver.map_err(|source| HostError::Driver { name: self.record.name.to_string(), source })?;
        } else {
            self.folder(volume)?;
        }
        self.mount(volume, &guest).await
    }

    /// Has the guest mount it, which it may have done, and serves it. Idempotent in one session.
    async fn mount(&mut self, volume: &Volume, guest: &GuestClient) -> Result<(), HostError> {
        let mounted = within(MOUNT_LIMIT, guest.rpc().mount(volume.request())).await;
        mounted.map_err(|status| self.guest_failed("mount a volume", status))?;
        if volume.kind == VolumeKind::Folder {
            self.serve_folder(volume, guest);
        }
        Ok(())
    }

    /// The guest lets go of the volume.
    async fn leave(&self, volume: &Volume) -> Result<(), HostError> {
        let guest = self.present_guest("unmount a volume")?;
        let request = pb::UnmountRequest { name: volume.name.clone() };
        let left = within(UNMOUNT_LIMIT, guest.rpc().unmount(request)).await;
        left.map(drop).map_err(|status| self.guest_failed("unmount a volume", status))
    }

    /// Whatever is left of it in the machine goes, then it is forgotten.
    async fn finish_volume(&mut self, volume: &Volume) -> Result<(), HostError> {
        if self.record.state == VmState::Running {
            if let Err(error) = self.leave(volume).await {
                tracing::debug!(vm = %self.record.id, volume = volume.name, %error, "not unmounted");
            }
            if let Some(slot) = volume.slot() {
                let ejected = self.shared.driver.eject_disk(&self.recipe_without(volume), slot).await;
                ejected.map_err(|source| HostError::Driver { name: self.record.name.to_string(), source })?;
            }
        }
        self.forget_volume(&volume.name);
        let table = self.paths.folder_table(&volume.name);
        let removed = blocking(move || crate::files::remove_file(&table)).await;
        removed.map_err(self.files_failed("remove the table of a folder"))?;
        self.save().await?;
        self.publish(EventKind::Updated);
        Ok(())
    }

    fn forget_volume(&mut self, name: &str) {
        self.record.volumes.retain(|volume| volume.name != name);
        self.folders.remove(name);
        self.shared.claims.release(&self.record.id, name);
    }

    fn set_phase(&mut self, name: &str, phase: VolumePhase) {
        if let Some(volume) = self.record.volumes.iter_mut().find(|volume| volume.name == name) {
            volume.phase = phase;
        }
    }

    /// The machine as it is without the volume.
    fn recipe_without(&self, volume: &Volume) -> coracle_hypervisor::VmRecipe {
        let mut recipe = self.recipe();
        recipe.disks.retain(|disk| Some(disk.slot) != volume.slot());
        recipe
    }

    fn present_guest(&self, operation: &'static str) -> Result<GuestClient, HostError> {
        let absent = || self.guest_failed(operation, tonic::Status::unavailable("the agent does not answer"));
        self.guest.clone().ok_or_else(absent)
    }

    fn guest_failed(&self, operation: &'static str, status: tonic::Status) -> HostError {
        HostError::Guest { name: self.record.name.to_string(), operation, source: Box::new(status) }
    }
}
