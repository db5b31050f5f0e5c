//! Capacity of the host, and the share that VMs have declared.

use coracle_types::VmState;

use super::Host;
use coracle_instance::memory::memory_mib;

/// Capacity of the host, and the share that VMs have declared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// CPUs of the host.
    pub cpus: usize,
    /// Memory of the host, MiB.
    pub memory_mib: u64,
    /// Memory that is free or can be freed, MiB.
    pub memory_available_mib: u64,
    /// Memory that all VMs together may declare, MiB.
    pub memory_allowed_mib: u64,
    /// CPUs that VMs have declared.
    pub vcpus_declared: u32,
    /// Memory that VMs have declared, MiB.
    pub memory_declared_mib: u64,
    /// Number of VMs.
    pub vms: usize,
    /// Number of running VMs.
    pub vms_running: usize,
}

impl Host {
    /// Returns capacity and declared resources. Never waits.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        let memory = memory_mib();
        let directory = self.0.directory();
        let (memory_declared_mib, vcpus_declared) = directory.declared();
        let running = directory.live().filter(|h| h.view.borrow().record.state == VmState::Running).count();
        let (cpus, memory_allowed_mib) = self.limits_of(memory.0);
        Capacity {
            cpus,
            memory_mib: memory.0,
            memory_available_mib: memory.1,
            memory_allowed_mib,
            vcpus_declared,
            memory_declared_mib,
            vms: directory.len(),
            vms_running: running,
        }
    }

    /// CPUs of the host, and memory that all VMs together may declare, MiB.
    pub(super) fn limits(&self) -> (usize, u64) {
        self.limits_of(memory_mib().0)
    }

    fn limits_of(&self, memory_mib: u64) -> (usize, u64) {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (cpus, overcommitted_memory(memory_mib, self.config().memory_overcommit))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an overcommit factor is not exact"
)]
fn overcommitted_memory(memory_mib: u64, overcommit: f64) -> u64 {
    (memory_mib as f64 * overcommit.max(0.0)) as u64
}
