//! Metrics by the names of the original operator, and some of ours.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    operation: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Capacity {
    namespace: String,
    pool: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    namespace: String,
    pool: String,
}

/// The metrics of this group of controllers. Clones write to the same.
#[derive(Clone, Debug, Default)]
pub struct PoolMetrics {
    vms: Family<Operation, Counter>,
    isos: Family<Operation, Counter>,
    capacity: Family<Capacity, Gauge>,
    cpus: Family<Pool, Gauge>,
    memory: Family<Pool, Gauge>,
    disk: Family<Pool, Gauge>,
}

/// The states of `agent_forge_pool_capacity`.
const STATES: [&str; 10] = [
    "desired",
    "agent_machines",
    "waiting_agent_machines",
    "unready_agent_machines",
    "without_agent",
    "matching_agents",
    "bound_agents",
    "available_agents",
    "pending_owned_vms",
    "demand_deficit",
];

impl PoolMetrics {
    /// Makes them and puts them into `registry`. Once a process.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self::default();
        registry.register("agent_forge_vsphere_vm_operations", "VMs created and deleted", m.vms.clone());
        registry.register("agent_forge_iso_operations", "Work on ISO images", m.isos.clone());
        registry.register("agent_forge_pool_capacity", "Agents of a pool by state", m.capacity.clone());
        registry.register(
            "agent_forge_pool_vm_cpu_cores",
            "Processors of a pool's VMs, each",
            m.cpus.clone(),
        );
        registry.register(
            "agent_forge_pool_vm_memory_bytes",
            "Memory of a pool's VMs, each",
            m.memory.clone(),
        );
        registry.register("agent_forge_pool_vm_disk_bytes", "Disk of a pool's VMs, each", m.disk.clone());
        m
    }

    pub(crate) fn vm(&self, operation: &'static str, ok: bool) {
        let result = if ok { "success" } else { "error" };
        self.vms.get_or_create(&Operation { operation, result }).inc();
    }

    pub(crate) fn iso(&self, operation: &'static str, result: &'static str) {
        self.isos.get_or_create(&Operation { operation, result }).inc();
    }

    /// Values in the order of [`STATES`].
    pub(crate) fn pool(&self, namespace: &str, pool: &str, values: [i32; 10], size: [i64; 3]) {
        for (state, value) in STATES.into_iter().zip(values) {
            let labels = Capacity { namespace: namespace.to_owned(), pool: pool.to_owned(), state };
            self.capacity.get_or_create(&labels).set(i64::from(value));
        }
        let labels = Pool { namespace: namespace.to_owned(), pool: pool.to_owned() };
        for (family, value) in [&self.cpus, &self.memory, &self.disk].into_iter().zip(size) {
            family.get_or_create(&labels).set(value);
        }
    }

    pub(crate) fn forget(&self, namespace: &str, pool: &str) {
        for state in STATES {
            self.capacity.remove(&Capacity { namespace: namespace.to_owned(), pool: pool.to_owned(), state });
        }
        let labels = Pool { namespace: namespace.to_owned(), pool: pool.to_owned() };
        for family in [&self.cpus, &self.memory, &self.disk] {
            family.remove(&labels);
        }
    }
}
