//! What every part of a host core uses: settings, drivers, instances, network, clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_hypervisor::{Accelerator, Compatibility, Drivers};
use coracle_net::Network;
use coracle_types::Clock;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::HostConfig;
use crate::instances::Instances;

/// A node as its VMs, templates and pooled clones see it.
#[derive(Debug)]
pub struct Node {
    /// Settings.
    pub config: HostConfig,
    /// Hypervisors.
    pub driver: Drivers,
    /// VMM instances.
    pub instances: Instances,
    /// How guest code runs, by name of the driver.
    pub accelerators: BTreeMap<&'static str, Accelerator>,
    /// Taps and addresses.
    pub network: Arc<dyn Network>,
    /// Wall clock.
    pub clock: Clock,
    /// Limits how many guests boot at once.
    pub boots: Semaphore,
    /// The daemon is going down; guests stay.
    pub stop: CancellationToken,
}

impl Node {
    /// How guest code of a machine runs whose driver has this name.
    pub fn accelerator(&self, driver: &str) -> Accelerator {
        self.accelerators.get(self.driver_name(driver)).copied().unwrap_or(Accelerator::Tcg)
    }

    /// Accelerator for saved memory: the one that it ran with. Every node with QEMU has TCG.
    pub fn accelerator_for(&self, driver: &str, saved: &Compatibility) -> Accelerator {
        match saved.accelerator == Accelerator::Tcg.as_str() {
            true => Accelerator::Tcg,
            false => self.accelerator(driver),
        }
    }

    /// The whole name of a driver: the default's for none.
    pub fn driver_name(&self, driver: &str) -> &'static str {
        self.driver.named(driver).map_or("unknown", |driver| driver.name())
    }
}
