//! Volumes of VMs: requests are checked here, and carried out by the VM's task.

use std::io;
use std::path::{Path, PathBuf};

use coracle_types::VmId;

use super::{Access, Host};
use crate::vm::Call;
use crate::volumes::{VolumeSource, inspect_source, plan_volume, sandbox_target};
use crate::{Fence, HostError, Record, Volume, VolumeRequest, files};
use coracle_files::{LocalUser, granted};

impl Host {
    /// Attaches a disk or a directory of this node to a VM: at once if the VM runs, else at its next start. A failure leaves
    /// the VM unchanged. Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// [`HostError::Invalid`] with the reason; [`HostError::Refused`]; [`HostError::Fenced`]; [`HostError::Driver`] and
    /// [`HostError::Guest`] for a running VM.
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

    /// Detaches a volume from a VM; its data stay. Cancel-safe: the call runs to completion.
    ///
    /// # Errors
    /// [`HostError::NoVolume`]; [`HostError::Guest`] while the guest uses the volume; as for [`Host::attach_volume`].
    pub async fn detach_volume(
        &self,
        vm: &str,
        volume: &str,
        fence: Option<Fence>,
    ) -> Result<Record, HostError> {
        let volume = volume.to_owned();
        self.ask(vm, Call::Detach { volume, fence }).await
    }

    /// Claims the volumes of a VM that is being created: from here on only this VM may use their files.
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

    /// Resolves a path of the node, with its links followed, and checks that the caller may name it.
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
