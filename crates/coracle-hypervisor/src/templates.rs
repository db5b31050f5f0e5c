//! Starting a machine from a saved one instead of booting it.
//!
//! A template is a machine of some shape, saved while its agent waits to be configured: no image is in it, no
//! address, no secret. Its slots are empty, so a clone of it becomes a VM of any image. Where the driver can, its guest has
//! a fresh disk mounted already: a clone that starts with a copy of that disk uses it, any other ignores it.

use std::fmt::Debug;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UnixStream;

use crate::{DriverError, MemoryFile, ProcessId, SealedFile, VmmConfig};

/// What a clone starts from.
#[derive(Debug)]
pub struct Template {
    /// The RAM; clones map it privately.
    pub ram: SealedFile,
    /// The state of the devices and CPUs, as the VMM wrote it.
    pub state: SealedFile,
    /// The disk in the slot [`crate::Slots::premounted`] as the guest left it.
    pub disk: Option<SealedFile>,
}

/// A clone whose guest runs.
#[derive(Debug)]
pub struct Cloned {
    /// Its VMM.
    pub process: ProcessId,
    /// The channel to its agent, which is about to say hello, where the guest must find a host when it wakes; `None`:
    /// [`crate::Driver::guest_channel`] opens it.
    pub channel: Option<UnixStream>,
}

/// A driver's power to take templates and start clones of them.
#[async_trait]
pub trait Templates: Send + Sync + Debug {
    /// All that makes one machine differ from another but the content of kernel and initramfs: devices, sizes,
    /// accelerator, CPU, VMM build. Templates of different fingerprints are never mixed. Pure but for what the host
    /// and the program are.
    async fn fingerprint(&self, vmm_config: &VmmConfig) -> String;

    /// Its machines have the slot [`crate::Slots::premounted`].
    fn premounts_disk(&self) -> bool {
        false
    }

    /// Boots a machine of this shape with empty slots and no network, its RAM in `ram` where the hypervisor can share
    /// it. Disks but the prepared one, and the other end of the NIC, are not looked at.
    ///
    /// # Errors
    /// As [`crate::Driver::start`].
    async fn boot_template(&self, vmm_config: &VmmConfig, ram: &MemoryFile)
    -> Result<ProcessId, DriverError>;

    /// Stops the guest, writes the state of its devices to `state` and ends the VMM: `ram`, that of
    /// [`Templates::boot_template`], is complete then. The caller has closed the guest channel. Returns how long it took
    /// from the halt of the guest to its whole state.
    ///
    /// # Errors
    /// [`DriverError::Control`]; the VMM is gone in any case.
    async fn save_template(
        &self,
        vmm_config: &VmmConfig,
        process: ProcessId,
        ram: &MemoryFile,
        state: &MemoryFile,
    ) -> Result<Duration, DriverError>;

    /// Starts a VMM from a template: RAM private to it, the VMM config's disks in the slots, its NIC connected, the guest
    /// running. A disk in the prepared slot is a copy of the template's. As [`crate::Driver::start`], a dropped future may leave a VMM, which `find` sees.
    ///
    /// # Errors
    /// As [`crate::Driver::start`], and [`DriverError::Control`]; no VMM is left.
    async fn start_clone(&self, vmm_config: &VmmConfig, template: &Template) -> Result<Cloned, DriverError>;

    /// Its clones can run before they are any VM's.
    fn can_assign(&self) -> bool {
        false
    }

    /// Puts the disks of the VMM config into the slots of a clone that started without them, but the premounted one, and resumes
    /// it if it is paused. Not idempotent.
    ///
    /// # Errors
    /// [`DriverError::Control`], [`DriverError::Io`]; the VMM is still there, and of no use.
    async fn fill(&self, clone: &VmmConfig, _paused: bool) -> Result<(), DriverError> {
        let source = io::Error::from(io::ErrorKind::Unsupported);
        Err(DriverError::Io { operation: format!("fill the slots of {}", clone.id), source })
    }
}
