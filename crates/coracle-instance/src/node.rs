//! Shared parts of a host core: settings, drivers, instances, network, clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_hypervisor::{Accelerator, Compatibility, Drivers};
use coracle_net::Network;
use coracle_types::Clock;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::HostConfig;
use crate::instances::Instances;

/// Node as seen by its VMs, templates and pooled clones.
#[derive(Debug)]
pub struct Node {
    /// Settings.
    pub config: HostConfig,
    /// Hypervisors.
    pub driver: Drivers,
    /// VMM instances.
    pub instances: Instances,
    /// Accelerator by name of the driver.
    pub accelerators: BTreeMap<&'static str, Accelerator>,
    /// Taps and addresses.
    pub network: Arc<dyn Network>,
    /// Wall clock.
    pub clock: Clock,
    /// Permits for guests that boot at the same time.
    pub boots: Semaphore,
    /// Cancelled when the daemon stops; guests keep running.
    pub stop: CancellationToken,
}

impl Node {
    /// Returns the accelerator of the driver of this name.
    pub fn accelerator(&self, driver: &str) -> Accelerator {
        self.accelerators.get(self.driver_name(driver)).copied().unwrap_or(Accelerator::Tcg)
    }

    /// Returns the accelerator for saved memory: the one that the guest ran with. Every node with QEMU has TCG.
    pub fn accelerator_for(&self, driver: &str, saved: &Compatibility) -> Accelerator {
        match saved.accelerator == Accelerator::Tcg.as_str() {
            true => Accelerator::Tcg,
            false => self.accelerator(driver),
        }
    }

    /// Returns the full name of a driver; for an empty name, that of the default.
    pub fn driver_name(&self, driver: &str) -> &'static str {
        self.driver.named(driver).map_or("unknown", |driver| driver.name())
    }
}
