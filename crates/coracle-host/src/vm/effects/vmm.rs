//! VMM of a VM: its process, vCPUs, disks and network.

use coracle_hypervisor::{Disk, Driver as _, DriverError};

use super::{Context, end_retired};
use crate::HostError;
use crate::instances::InstanceOwner;
use coracle_lifecycle::RunningVmm;

impl Context {
    fn driver_error(&self) -> impl FnOnce(DriverError) -> HostError + use<> {
        let name = self.name();
        move |source| HostError::Driver { name, source }
    }

    pub(super) async fn find(&self) -> Option<RunningVmm> {
        let instance = self.record.instance.clone()?;
        let vmm_config = self.vmm_config();
        let driver = &self.shared.node.driver;
        match driver.find(&vmm_config).await {
            Ok(found) => found.map(|process| {
                let accelerator = driver.accelerator_of(&vmm_config, process);
                RunningVmm { instance, process, accelerator }
            }),
            Err(error) => {
                tracing::error!(vm = %self.record.id, %error, "read process table failed");
                None
            }
        }
    }

    /// Connects a running VMM. After a failure no packet of its guest passes.
    pub(super) async fn restore_network(&self) -> Result<(), HostError> {
        let (network, record) = (&self.shared.node.network, &self.record);
        let Some(instance) = &record.instance else { return Ok(()) };
        let outcome = match network.lease(&record.id, record.address) {
            Ok(lease) => network.attach(instance, &record.endpoint(lease)).await.map(drop),
            Err(error) => {
                self.cut_off().await?;
                Err(error)
            }
        };
        outcome.map_err(|source| HostError::Network { name: self.name(), source })
    }

    pub(super) async fn cut_off(&self) -> Result<(), HostError> {
        let Some(instance) = &self.record.instance else { return Ok(()) };
        let cut_off = self.shared.node.network.cut_off(instance).await;
        cut_off.map_err(|source| HostError::Network { name: self.name(), source })
    }

    pub(super) async fn remove_network(&self) -> Result<(), HostError> {
        let removed = self.shared.node.network.remove(&self.record.id).await;
        removed.map_err(|source| HostError::Network { name: self.name(), source })
    }

    pub(super) async fn pause(&self) -> Result<(), HostError> {
        self.shared.node.driver.pause(&self.vmm_config()).await.map_err(self.driver_error())
    }

    pub(super) async fn resume(&self) -> Result<(), HostError> {
        self.shared.node.driver.resume(&self.vmm_config()).await.map_err(self.driver_error())
    }

    /// Ends every instance of the VM, including one that its record does not name yet, after the jobs that might still make
    /// one.
    pub(super) async fn end_vmm(&mut self) -> Result<(), HostError> {
        end_retired(&self.retired, self.ending.take()).await;
        let owner = InstanceOwner::Vm(self.record.id.clone());
        let log = self.paths.vmm_log();
        self.shared.node.instances.end_of(&owner, Some(&log)).await
    }

    pub(super) async fn attach_disk(&self, disk: &Disk, absent: &[usize]) -> Result<(), HostError> {
        let mut vmm_config = self.vmm_config();
        vmm_config.disks.retain(|disk| !absent.contains(&disk.slot));
        let attached = self.shared.node.driver.attach_disk(&vmm_config, disk).await;
        attached.map_err(self.driver_error())
    }

    pub(super) async fn detach_disk(&self, slot: usize) -> Result<(), HostError> {
        let mut vmm_config = self.vmm_config();
        vmm_config.disks.retain(|disk| disk.slot != slot);
        self.shared.node.driver.detach_disk(&vmm_config, slot).await.map_err(self.driver_error())
    }
}
