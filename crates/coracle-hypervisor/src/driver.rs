//! Port between the host core and a hypervisor.

use std::fmt::Debug;
use std::io;

use async_trait::async_trait;
use coracle_types::InstanceId;
use tokio::net::UnixStream;

use crate::{
    Accelerator, Disk, DriverError, MachineType, ProcessId, Snapshots, Templates, VmmConfig, launch,
};

/// Capabilities of a driver on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Version of the program; empty when the program is not installed.
    pub version: String,
    /// Accelerator that was proven to work; `None`: the driver is not available.
    pub accelerator: Option<Accelerator>,
    /// Reason for the accelerator, or for its absence. One line, for people.
    pub reason: String,
}

/// Driver of one hypervisor. Every method may be called again after a crash of the caller at any point. All methods but
/// [`Driver::start`] are cancel-safe.
#[async_trait]
pub trait Driver: Send + Sync + Debug {
    /// Short constant name: `qemu`, `fake`.
    fn name(&self) -> &'static str;

    /// Probes the host once; later calls return the same result.
    async fn probe(&self) -> Probe;

    /// Starts a VMM that runs the guest. Returns when the control socket answers. The caller has verified with [`Driver::find`]
    /// that no VMM exists yet. A future that is dropped midway may leave a VMM, which `find` finds.
    ///
    /// # Errors
    /// [`DriverError::Spawn`], [`DriverError::Exited`] with the end of the VMM's log.
    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError>;

    /// Finds the living VMM of this VM, regardless of the daemon that started it: [`launch::find`] for VMMs that
    /// [`launch::Launch`] started.
    ///
    /// # Errors
    /// [`DriverError::Io`] when the process table cannot be read.
    async fn find(&self, vmm_config: &VmmConfig) -> Result<Option<ProcessId>, DriverError> {
        launch::find(vmm_config)
    }

    /// Returns the accelerator that a living VMM uses; it may differ from the one of the VMM config.
    fn accelerator_of(&self, vmm_config: &VmmConfig, _process: ProcessId) -> Accelerator {
        vmm_config.accelerator
    }

    /// Resolves when the process has ended; at once if it already has.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn exited(&self, process: ProcessId) -> Result<(), DriverError>;

    /// Kills the process without notice to the guest, and waits until it has ended. Returns `Ok` if it already has.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn kill(&self, process: ProcessId) -> Result<(), DriverError>;

    /// Opens the guest channel. One user at a time.
    ///
    /// # Errors
    /// [`DriverError::Channel`] while there is no VMM or another caller is connected.
    async fn guest_channel(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError>;

    /// Opens the serial console. One user at a time.
    ///
    /// # Errors
    /// Same as [`Driver::guest_channel`].
    async fn console(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError>;

    /// Connects to the display, which speaks RFB (RFC 6143) without authentication. Any number of users.
    ///
    /// # Errors
    /// [`DriverError::Channel`] while there is no VMM, or for a VM without a display.
    async fn display(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let source = io::ErrorKind::Unsupported.into();
        Err(DriverError::Channel { id: vmm_config.id.clone(), channel: "display", source })
    }

    /// Pauses the vCPUs. Idempotent.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError>;

    /// Resumes the vCPUs. Idempotent.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError>;

    /// Attaches a disk to its empty device slot of a running VM, and notifies the guest. A call that is repeated after a crash
    /// may be refused because the disk is already attached: call [`Driver::detach_disk`] first.
    ///
    /// # Errors
    /// [`DriverError::Control`], [`DriverError::Io`] when the file does not exist.
    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError>;

    /// Empties a device slot of a running VM. The guest must have unmounted the disk, or loses it.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError>;

    /// Returns whether the driver supports the machine type of this VMM config. Every driver supports the smallest.
    fn has_machine(&self, vmm_config: &VmmConfig) -> bool {
        matches!(vmm_config.machine_type, MachineType::Microvm)
    }

    /// Returns whether the driver supports user-mode networking, a network inside the VMM without a tap device of the host.
    fn has_user_network(&self, vmm_config: &VmmConfig) -> bool;

    /// Returns the snapshot operations; `None` if the hypervisor has none.
    fn snapshots(&self, _vmm_config: &VmmConfig) -> Option<&dyn Snapshots> {
        None
    }

    /// Returns the template operations; `None` if the hypervisor has none.
    fn templates(&self, _vmm_config: &VmmConfig) -> Option<&dyn Templates> {
        None
    }
}

/// Maximum number of VMMs of one VM that are ended before the driver assumes that something restarts them.
const ENDED_MAX: usize = 16;

/// Ends every VMM of this VMM config. Idempotent.
///
/// # Errors
/// [`DriverError::Io`]; also when new VMMs keep appearing.
pub async fn end_vmms(driver: &dyn Driver, vmm_config: &VmmConfig) -> Result<(), DriverError> {
    end_all(&vmm_config.id, || driver.find(vmm_config), |vmm| driver.kill(vmm)).await
}

async fn end_all<F, K>(
    id: &InstanceId,
    find: impl Fn() -> F,
    kill: impl Fn(ProcessId) -> K,
) -> Result<(), DriverError>
where
    F: Future<Output = Result<Option<ProcessId>, DriverError>>,
    K: Future<Output = Result<(), DriverError>>,
{
    for _ in 0..ENDED_MAX {
        match find().await? {
            Some(vmm) => kill(vmm).await?,
            None => return Ok(()),
        }
    }
    let source = io::Error::other(format!("{ENDED_MAX} were ended, and there is another"));
    Err(DriverError::Io { operation: format!("end the VMMs of instance {id}"), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn respawning_vmm_is_an_error_after_the_limit() {
        let id = InstanceId::new("web", 1);
        let vmm = ProcessId { pid: 1, start_ticks: 1 };
        let ended = std::cell::Cell::new(0);
        let kill = |_| {
            ended.set(ended.get() + 1);
            std::future::ready(Ok(()))
        };
        let outcome = end_all(&id, || std::future::ready(Ok(Some(vmm))), kill).await;
        assert!(matches!(outcome, Err(DriverError::Io { .. })) && ended.get() == ENDED_MAX);
        let left = std::cell::Cell::new(2);
        let find = || {
            left.set(left.get() - 1);
            std::future::ready(Ok((left.get() > 0).then_some(vmm)))
        };
        end_all(&id, find, |_| std::future::ready(Ok(()))).await.unwrap();
    }
}
