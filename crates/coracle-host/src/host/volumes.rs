//! Volumes of VMs: what a caller wants is looked at here, and carried out by the VM's task.

use coracle_types::VmId;

use super::Host;
use crate::vm::Request;
use crate::volumes::{Found, look, place};
use crate::{Fence, HostError, Record, Volume, VolumeWish, files};

impl Host {
    /// Gives a VM a disk or a folder of this node: at once when it runs, else with its next start. What fails leaves it as
    /// it was. Cancel-safe: it goes on by itself.
    ///
    /// # Errors
    /// [`HostError::Invalid`] with what is wrong; [`HostError::Refused`]; [`HostError::Fenced`];
    /// [`HostError::Driver`] and [`HostError::Guest`] of a VM that runs.
    pub async fn attach_volume(
        &self,
        vm: &str,
        wish: VolumeWish,
        fence: Option<Fence>,
    ) -> Result<Record, HostError> {
        let found = self.look_at_volume(&wish).await?;
        self.ask(vm, |reply| Request::Attach { wish, found, fence, reply }).await
    }

    /// Takes a volume out of a VM; what is on it stays. Cancel-safe: it goes on by itself.
    ///
    /// # Errors
    /// [`HostError::NoVolume`]; [`HostError::Guest`] while the guest uses it; as [`Host::attach_volume`].
    pub async fn detach_volume(
        &self,
        vm: &str,
        volume: &str,
        fence: Option<Fence>,
    ) -> Result<Record, HostError> {
        let volume = volume.to_owned();
        self.ask(vm, |reply| Request::Detach { volume, fence, reply }).await
    }

    /// The volumes of a VM that is laid out. Their files are its own from here on.
    pub(super) fn claim_volumes(
        &self,
        vm: &VmId,
        wishes: &[VolumeWish],
        found: &[Found],
    ) -> Result<Vec<Volume>, HostError> {
        let invalid = |message| HostError::Invalid { message };
        let mut volumes = Vec::new();
        for (wish, found) in wishes.iter().zip(found) {
            let volume = place(&volumes, wish, found).map_err(invalid)?;
            self.0.shared.claims.claim(vm, &volume, found).map_err(invalid)?;
            volumes.push(volume);
        }
        Ok(volumes)
    }

    pub(super) async fn look_at_volume(&self, wish: &VolumeWish) -> Result<Found, HostError> {
        let (config, wanted) = (self.config().clone(), wish.clone());
        let looked = files::blocking(move || Ok(look(&config, &wanted))).await;
        let looked =
            looked.map_err(|source| HostError::State { operation: "look at a volume".to_owned(), source })?;
        looked.map_err(|why| HostError::Invalid { message: format!("volume {}: {why}", wish.source) })
    }
}
