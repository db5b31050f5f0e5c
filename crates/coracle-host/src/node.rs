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
pub(crate) struct Node {
    pub(crate) config: HostConfig,
    pub(crate) driver: Drivers,
    pub(crate) instances: Instances,
    /// How guest code runs, by name of the driver.
    pub(crate) accelerators: BTreeMap<&'static str, Accelerator>,
    pub(crate) network: Arc<dyn Network>,
    pub(crate) clock: Clock,
    /// Limits how many guests boot at once.
    pub(crate) boots: Semaphore,
    /// The daemon is going down; guests stay.
    pub(crate) stop: CancellationToken,
}

impl Node {
    /// How guest code of a machine runs whose driver has this name.
    pub(crate) fn accelerator(&self, driver: &str) -> Accelerator {
        self.accelerators.get(self.driver_name(driver)).copied().unwrap_or(Accelerator::Tcg)
    }

    /// Accelerator for saved memory: the one that it ran with. Every node with QEMU has TCG.
    pub(crate) fn accelerator_for(&self, driver: &str, saved: &Compatibility) -> Accelerator {
        match saved.accelerator == Accelerator::Tcg.as_str() {
            true => Accelerator::Tcg,
            false => self.accelerator(driver),
        }
    }

    /// The whole name of a driver: the default's for none.
    pub(crate) fn driver_name(&self, driver: &str) -> &'static str {
        self.driver.named(driver).map_or("unknown", |driver| driver.name())
    }
}
