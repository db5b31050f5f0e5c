//! Several drivers behind one [`Driver`]: the VMM config of each VM names its driver.

use async_trait::async_trait;
use std::sync::Arc;

use futures_util::future::{join_all, try_join_all};
use tokio::net::UnixStream;

use crate::{Accelerator, Disk, Driver, DriverError, Probe, ProcessId, Snapshots, Templates, VmmConfig};

/// Drivers of a node. The first one is the default, for VMs that name none.
#[derive(Clone, Debug)]
pub struct Drivers {
    first: Arc<dyn Driver>,
    others: Vec<Arc<dyn Driver>>,
}

impl Drivers {
    /// Combines the default driver with others.
    #[must_use]
    pub fn new(first: Arc<dyn Driver>, others: Vec<Arc<dyn Driver>>) -> Self {
        Self { first, others }
    }

    /// Returns all drivers, the default first.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Driver>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Returns the driver of this name; empty: the default.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Arc<dyn Driver>> {
        self.all().find(|driver| name.is_empty() || driver.name() == name)
    }

    fn of(&self, vmm_config: &VmmConfig) -> Result<&Arc<dyn Driver>, DriverError> {
        self.named(&vmm_config.driver).ok_or_else(|| DriverError::Unknown { name: vmm_config.driver.clone() })
    }

    /// Returns the accelerator of the driver of this name; TCG if the driver or its accelerator is not known.
    pub async fn accelerator(&self, name: &str) -> Accelerator {
        match self.named(name) {
            Some(driver) => driver.probe().await.accelerator.unwrap_or(Accelerator::Tcg),
            None => Accelerator::Tcg,
        }
    }
}

impl<D: Driver + 'static> From<Arc<D>> for Drivers {
    fn from(first: Arc<D>) -> Self {
        Self::new(first, Vec::new())
    }
}

#[async_trait]
impl Driver for Drivers {
    fn name(&self) -> &'static str {
        self.first.name()
    }

    async fn probe(&self) -> Probe {
        self.first.probe().await
    }

    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError> {
        self.of(vmm_config)?.start(vmm_config).await
    }

    async fn find(&self, vmm_config: &VmmConfig) -> Result<Option<ProcessId>, DriverError> {
        self.of(vmm_config)?.find(vmm_config).await
    }

    fn accelerator_of(&self, vmm_config: &VmmConfig, process: ProcessId) -> Accelerator {
        self.of(vmm_config)
            .map_or(vmm_config.accelerator, |driver| driver.accelerator_of(vmm_config, process))
    }

    /// A process belongs to one driver; for the others it has ended.
    async fn exited(&self, process: ProcessId) -> Result<(), DriverError> {
        try_join_all(self.all().map(|driver| driver.exited(process))).await.map(drop)
    }

    async fn kill(&self, process: ProcessId) -> Result<(), DriverError> {
        join_all(self.all().map(|driver| driver.kill(process))).await.into_iter().collect()
    }

    async fn guest_channel(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        self.of(vmm_config)?.guest_channel(vmm_config).await
    }

    async fn console(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        self.of(vmm_config)?.console(vmm_config).await
    }

    async fn display(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        self.of(vmm_config)?.display(vmm_config).await
    }

    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.of(vmm_config)?.pause(vmm_config).await
    }

    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.of(vmm_config)?.resume(vmm_config).await
    }

    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError> {
        self.of(vmm_config)?.attach_disk(vmm_config, disk).await
    }

    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError> {
        self.of(vmm_config)?.detach_disk(vmm_config, slot).await
    }

    fn has_machine(&self, vmm_config: &VmmConfig) -> bool {
        self.of(vmm_config).is_ok_and(|driver| driver.has_machine(vmm_config))
    }

    fn has_user_network(&self, vmm_config: &VmmConfig) -> bool {
        self.of(vmm_config).is_ok_and(|driver| driver.has_user_network(vmm_config))
    }

    fn snapshots(&self, vmm_config: &VmmConfig) -> Option<&dyn Snapshots> {
        self.of(vmm_config).ok()?.snapshots(vmm_config)
    }

    fn templates(&self, vmm_config: &VmmConfig) -> Option<&dyn Templates> {
        self.of(vmm_config).ok()?.templates(vmm_config)
    }
}
