//! The narrow trait between the host core and a hypervisor.

use std::fmt::Debug;
use std::io;

use async_trait::async_trait;
use coracle_types::InstanceId;
use tokio::net::UnixStream;

use crate::{
    Accelerator, Disk, DriverError, MachineType, ProcessId, Snapshots, Templates, VmmConfig, launch,
};

/// What a driver can do on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Version that the program reports; empty when it is not there.
    pub version: String,
    /// The accelerator that was proven to work; none: the driver is not available.
    pub accelerator: Option<Accelerator>,
    /// Why this accelerator, or why none. One line for a person.
    pub reason: String,
}

/// One kind of hypervisor. Every method may be called again after a crash of
/// the caller at any point; all are cancel-safe but [`Driver::start`].
#[async_trait]
pub trait Driver: Send + Sync + Debug {
    /// A short constant name: `qemu`, `fake`.
    fn name(&self) -> &'static str;

    /// Looks at the host, once; later calls return the same.
    async fn probe(&self) -> Probe;

    /// Starts a VMM that runs the guest. Returns when its control socket answers.
    /// The caller has made sure by [`Driver::find`] that there is none yet. When
    /// the future is dropped midway a VMM may be left, which `find` sees.
    ///
    /// # Errors
    /// [`DriverError::Spawn`], [`DriverError::Exited`] with the VMM's last words.
    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError>;

    /// The living VMM of this VM, whoever started it: [`launch::find`] of what [`launch::Launch`] started.
    ///
    /// # Errors
    /// [`DriverError::Io`] when the process table cannot be read.
    async fn find(&self, vmm_config: &VmmConfig) -> Result<Option<ProcessId>, DriverError> {
        launch::find(vmm_config)
    }

    /// The accelerator that a living VMM really uses: a driver may start one with another than its VMM config's.
    fn accelerator_of(&self, vmm_config: &VmmConfig, _process: ProcessId) -> Accelerator {
        vmm_config.accelerator
    }

    /// Resolves when the process is gone; at once when it already is.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn exited(&self, process: ProcessId) -> Result<(), DriverError>;

    /// Ends the process without telling the guest and waits until it is gone.
    /// `Ok` when it already is.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    async fn kill(&self, process: ProcessId) -> Result<(), DriverError>;

    /// Opens the byte stream to the guest agent. One user at a time.
    ///
    /// # Errors
    /// [`DriverError::Channel`] while there is no VMM or another caller is connected.
    async fn guest_channel(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError>;

    /// Opens the serial console. One user at a time.
    ///
    /// # Errors
    /// As [`Driver::guest_channel`].
    async fn console(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError>;

    /// Opens a connection to the screen, which speaks RFB (RFC 6143) without authentication. Any number of users.
    ///
    /// # Errors
    /// [`DriverError::Channel`] while there is no VMM, or for a machine without a screen.
    async fn display(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let source = io::ErrorKind::Unsupported.into();
        Err(DriverError::Channel { id: vmm_config.id.clone(), channel: "display", source })
    }

    /// Holds the guest's CPUs; `Ok` when they are held already.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError>;

    /// Resumes the vCPUs. Idempotent.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError>;

    /// Puts a disk into its slot, which is empty, of a running machine; the guest learns of it. Repeated after a crash, it may be
    /// refused because the disk is there: [`Driver::detach_disk`] first.
    ///
    /// # Errors
    /// [`DriverError::Control`], [`DriverError::Io`] when the file is not there.
    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError>;

    /// Empties a device slot of a running VM. The guest must have unmounted the disk, or loses it.
    ///
    /// # Errors
    /// [`DriverError::Control`].
    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError>;

    /// It has machines of this VMM config's kind. Every driver has the smallest.
    fn has_machine(&self, vmm_config: &VmmConfig) -> bool {
        matches!(vmm_config.machine_type, MachineType::Microvm)
    }

    /// It can give a machine a network inside the VMM, without a tap device of the host.
    fn has_user_network(&self, vmm_config: &VmmConfig) -> bool;

    /// Saving a machine whole and starting it again; `None` where the hypervisor cannot.
    fn snapshots(&self, _vmm_config: &VmmConfig) -> Option<&dyn Snapshots> {
        None
    }

    /// Starting from a saved machine instead of booting; `None` where the hypervisor cannot.
    fn templates(&self, _vmm_config: &VmmConfig) -> Option<&dyn Templates> {
        None
    }
}

/// Processes of one VM that are ended before something else is taken to start them again.
const ENDED_MAX: usize = 16;

/// Ends every VMM of this VMM config. Idempotent.
///
/// # Errors
/// [`DriverError::Io`]; also when new ones keep appearing.
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
    async fn vmm_that_is_started_again_and_again_is_an_error() {
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
