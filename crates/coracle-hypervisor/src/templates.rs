//! Starting a VMM from a template instead of booting it.
//!
//! A template is the saved state of a VM shape, taken while the guest agent waits to be configured: it contains no image, no
//! address and no secret. A clone finds the disks of its VM in the device slots, so it becomes a VM of any image. If the driver
//! supports it, the guest already has a fresh disk mounted, and a root on it whose image stands for that of a VM: a clone that
//! starts with a copy of that disk and an image of the same layout uses both, any other clone mounts its own.

use std::fmt::Debug;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixStream;

use crate::{DriverError, MemoryFile, ProcessId, SealedFile, VmmConfig};

/// Saved state from which clones start.
#[derive(Debug)]
pub struct Template {
    /// Guest RAM; clones map it privately.
    pub ram: SealedFile,
    /// Device and CPU state, as the VMM wrote it.
    pub state: SealedFile,
    /// Disk in the slot [`crate::Slots::premounted`], as the guest left it.
    pub disk: Option<SealedFile>,
}

/// Clone whose guest runs.
#[derive(Debug)]
pub struct Cloned {
    /// VMM process.
    pub process: ProcessId,
    /// Channel to the guest agent, which is about to say hello, if the guest must find a peer when it resumes; `None`:
    /// [`crate::Driver::guest_channel`] opens it.
    pub channel: Option<UnixStream>,
}

/// Operations of a driver that can take templates and start clones.
#[async_trait]
pub trait Templates: Send + Sync + Debug {
    /// Returns everything that distinguishes VM shapes except the content of kernel and initramfs: devices, sizes, accelerator,
    /// CPU, VMM build. Templates of different fingerprints are never mixed. Pure but for properties of the host and the
    /// program.
    async fn fingerprint(&self, vmm_config: &VmmConfig) -> String;

    /// Returns whether VMs of this driver have the slot [`crate::Slots::premounted`].
    fn premounts_disk(&self) -> bool {
        false
    }

    /// Boots a VM of this shape with empty slots and no network, its RAM in `ram` if the hypervisor can share it. Ignores all
    /// disks but the premounted one, and the backend of the NIC.
    ///
    /// # Errors
    /// Same as [`crate::Driver::start`].
    async fn boot_template(&self, vmm_config: &VmmConfig, ram: &MemoryFile)
    -> Result<ProcessId, DriverError>;

    /// Stops the guest, writes the device state to `state` and ends the VMM. `ram`, as passed to [`Templates::boot_template`],
    /// is then complete. The caller has closed the guest channel. Returns the time from the halt of the guest to its complete
    /// state.
    ///
    /// # Errors
    /// [`DriverError::Control`]; the VMM has ended in any case.
    async fn save_template(
        &self,
        vmm_config: &VmmConfig,
        process: ProcessId,
        ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError>;

    /// Starts a VMM from a template: with private RAM, the disks of the VMM config in the slots, a connected NIC and a running
    /// guest. A disk in the premounted slot is a copy of the template's disk. Like [`crate::Driver::start`], a dropped future
    /// may leave a VMM, which `find` finds.
    ///
    /// # Errors
    /// Same as [`crate::Driver::start`], and [`DriverError::Control`]; no VMM is left.
    async fn start_clone(&self, vmm_config: &VmmConfig, template: &Template) -> Result<Cloned, DriverError>;

    /// Returns whether clones can run before they are assigned to a VM.
    fn can_assign(&self) -> bool {
        false
    }

    /// Attaches the disks of the VMM config, except the premounted one, to the slots of a clone that started without them, and
    /// resumes the clone if it is paused. Not idempotent.
    ///
    /// # Errors
    /// [`DriverError::Control`], [`DriverError::Io`]; the VMM still exists, but is unusable.
    async fn fill(&self, clone: &VmmConfig, _paused: bool) -> Result<(), DriverError> {
        let source = io::Error::from(io::ErrorKind::Unsupported);
        Err(DriverError::Io { operation: format!("fill the slots of {}", clone.id), source })
    }
}
