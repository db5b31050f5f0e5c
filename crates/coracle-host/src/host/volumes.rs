//! Volumes of VMs: what a caller wants is looked at here, and carried out by the VM's task.

use std::io;
use std::path::{Path, PathBuf};

use coracle_types::VmId;

use super::{Access, Host};
use crate::vm::Call;
use crate::volumes::{VolumeSource, inspect_source, plan_volume, sandbox_target};
use crate::{Fence, HostError, Record, Volume, VolumeRequest, files};
use coracle_files::{LocalUser, granted};

impl Host {
    /// Gives a VM a disk or a directory of this node: at once when it runs, else with its next start. What fails leaves it as
    /// it was. Cancel-safe: it runs to completion.
    ///
    /// # Errors
    /// [`HostError::Invalid`] with what is wrong; [`HostError::Refused`]; [`HostError::Fenced`];
    /// [`HostError::Driver`] and [`HostError::Guest`] of a VM that runs.
    pub async fn attach_volume(
        &self,
        vm: &str,
        request: VolumeRequest,
        fence: Option<Fence>,
    ) -> Result<Record, HostError> {
        self.handle(vm, Access::Change)?;
        let found = self.inspect_volume(&request).await?;
        self.ask(vm, Call::Attach { request, found, fence }).await
    }

    /// Detaches a volume from a VM; its data stays. Cancel-safe: it runs to completion.
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
        self.ask(vm, Call::Detach { volume, fence }).await
    }

    /// The volumes of a VM that is laid out. Their files are its own from here on.
    pub(super) fn claim_volumes<'a>(
        &self,
        vm: &VmId,
        is_sandbox: bool,
        wanted: impl Iterator<Item = (&'a VolumeRequest, &'a VolumeSource)>,
    ) -> Result<Vec<Volume>, HostError> {
        let invalid = |message| HostError::Invalid { message };
        let mut volumes = Vec::new();
        for (request, found) in wanted {
            let mut volume = plan_volume(&volumes, &[], request, found).map_err(invalid)?;
            if is_sandbox {
                volume.target = sandbox_target(&volume.name);
            }
            self.0.shared.claims.claim(vm, &volume, found).map_err(invalid)?;
            volumes.push(volume);
        }
        Ok(volumes)
    }

    /// A path of the node that a caller may name, with its links followed.
    ///
    /// # Errors
    /// [`HostError::Invalid`] with the reason.
    pub async fn granted_path(&self, path: &Path, user: LocalUser) -> Result<PathBuf, HostError> {
        let (wanted, allowed) = (path.to_owned(), self.config().volume_dirs.clone());
        let given = files::blocking(move || granted(&wanted, &allowed, user)).await;
        given.map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => HostError::Invalid { message: e.to_string() },
            _ => HostError::Invalid { message: format!("cannot read {}: {e}", path.display()) },
        })
    }

    pub(super) async fn inspect_volume(&self, request: &VolumeRequest) -> Result<VolumeSource, HostError> {
        let (config, wanted) = (self.config().clone(), request.clone());
        let looked = files::blocking(move || Ok(inspect_source(&config, &wanted))).await;
        let looked =
            looked.map_err(|source| HostError::State { operation: "look at a volume".to_owned(), source })?;
        looked.map_err(|why| HostError::Invalid { message: format!("volume {}: {why}", request.source) })
    }
}
