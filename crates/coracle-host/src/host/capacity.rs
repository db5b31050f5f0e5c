//! What the host has, and what VMs have declared of it.

use coracle_types::VmState;

use super::Host;
use coracle_instance::memory::memory_mib;

/// What the host has and what VMs have declared of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// CPUs of the host.
    pub cpus: usize,
    /// Memory of the host, MiB.
    pub memory_mib: u64,
    /// Memory that is free or can be freed, MiB.
    pub memory_available_mib: u64,
    /// What VMs may declare together, MiB.
    pub memory_allowed_mib: u64,
    /// CPUs that VMs have declared.
    pub vcpus_declared: u32,
    /// Memory that VMs have declared, MiB.
    pub memory_declared_mib: u64,
    /// VMs that exist.
    pub vms: usize,
    /// VMs that run.
    pub vms_running: usize,
}

impl Host {
    /// What is there and what is declared. Never waits.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        let memory = memory_mib();
        let directory = self.0.directory();
        let (memory_declared_mib, vcpus_declared) = directory.declared();
        let running = directory.live().filter(|h| h.view.borrow().record.state == VmState::Running).count();
        Capacity {
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_mib: memory.0,
            memory_available_mib: memory.1,
            memory_allowed_mib: allowed(memory.0, self.config().memory_overcommit),
            vcpus_declared,
            memory_declared_mib,
            vms: directory.len(),
            vms_running: running,
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an overcommit factor is not exact"
)]
fn allowed(memory_mib: u64, overcommit: f64) -> u64 {
    (memory_mib as f64 * overcommit.max(0.0)) as u64
}
