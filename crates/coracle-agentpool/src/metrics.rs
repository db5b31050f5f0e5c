//! Metrics with the names of the original operator, and more of this one.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Run {
    controller: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Controller {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Queue {
    controller: &'static str,
    name: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Stage {
    stage: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InPool {
    pool: String,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

fn reconciles() -> Histogram {
    Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0])
}

fn stages() -> Histogram {
    Histogram::new([0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0])
}

/// Metrics of this group of controllers. Clones share the same metrics.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    runs: Family<Run, Counter>,
    errors: Family<Controller, Counter>,
    seconds: Histograms<Controller>,
    depth: Family<Queue, Gauge>,
    stages: Histograms<Stage>,
    unowned: Family<InPool, Gauge>,
    vms: Family<Operation, Counter>,
    isos: Family<Operation, Counter>,
    capacity: Family<Capacity, Gauge>,
    cpus: Family<Pool, Gauge>,
    memory: Family<Pool, Gauge>,
    disk: Family<Pool, Gauge>,
}

impl Default for PoolMetrics {
    fn default() -> Self {
        Self {
            runs: Family::default(),
            errors: Family::default(),
            seconds: Family::new_with_constructor(reconciles as fn() -> Histogram),
            depth: Family::default(),
            stages: Family::new_with_constructor(stages as fn() -> Histogram),
            unowned: Family::default(),
            vms: Family::default(),
            isos: Family::default(),
            capacity: Family::default(),
            cpus: Family::default(),
            memory: Family::default(),
            disk: Family::default(),
        }
    }
}

/// States in `agent_forge_pool_capacity`.
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
    /// Creates the metrics and registers them. Call once in a process.
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
        m.register_own(registry);
        m
    }

    /// Registers the metrics that dashboards of the original's framework read, and those of this operator.
    fn register_own(&self, registry: &mut Registry) {
        let help = "Reconciles by controller and result";
        registry.register("controller_runtime_reconcile", help, self.runs.clone());
        let help = "Reconciles that failed, by controller";
        registry.register("controller_runtime_reconcile_errors", help, self.errors.clone());
        let (help, seconds) = ("Time of a reconcile by controller", self.seconds.clone());
        registry.register_with_unit("controller_runtime_reconcile_time", help, Unit::Seconds, seconds);
        registry.register("workqueue_depth", "Objects that wait for their reconcile", self.depth.clone());
        let (help, stages) = ("From a VsphereAgent to a stage of its VM's life", self.stages.clone());
        registry.register_with_unit("coracle_agentpool_stage", help, Unit::Seconds, stages);
        let help = "VMs with our notes and no VsphereAgent, by pool";
        registry.register("coracle_agentpool_unowned_vms", help, self.unowned.clone());
    }

    /// Initialises each metric, so that a scrape shows all of them.
    pub fn touch(&self) {
        self.record_reconcile("vsphereagentpool", true, Duration::ZERO);
        self.set_queue_depth("vsphereagentpool", 0);
        self.stage("placed", Duration::ZERO);
        self.set_unowned("ns", "pool", 0);
        self.vm("create", true);
        self.iso("ensure", "success");
        self.pool("ns", "pool", [0; 10], [0; 3]);
    }

    pub(crate) fn record_reconcile(&self, controller: &'static str, ok: bool, took: Duration) {
        let result = if ok { "success" } else { "error" };
        self.runs.get_or_create(&Run { controller, result }).inc();
        let errors = self.errors.get_or_create(&Controller { controller });
        errors.inc_by(u64::from(!ok));
        drop(errors);
        self.seconds.get_or_create(&Controller { controller }).observe(took.as_secs_f64());
    }

    pub(crate) fn set_queue_depth(&self, controller: &'static str, count: usize) {
        let labels = Queue { controller, name: controller };
        self.depth.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Records that a VM reached a stage, `after` the creation of its VsphereAgent.
    pub(crate) fn stage(&self, stage: &'static str, after: Duration) {
        self.stages.get_or_create(&Stage { stage }).observe(after.as_secs_f64());
    }

    pub(crate) fn set_unowned(&self, namespace: &str, pool: &str, count: usize) {
        let labels = InPool { pool: format!("{namespace}/{pool}") };
        self.unowned.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn vm(&self, operation: &'static str, ok: bool) {
        let result = if ok { "success" } else { "error" };
        self.vms.get_or_create(&Operation { operation, result }).inc();
    }

    pub(crate) fn iso(&self, operation: &'static str, result: &'static str) {
        self.isos.get_or_create(&Operation { operation, result }).inc();
    }

    /// Sets the gauges of a pool; `values` are in the order of [`STATES`].
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
        self.unowned.remove(&InPool { pool: format!("{namespace}/{pool}") });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_and_labels_match_the_contract() {
        let mut registry = Registry::default();
        let metrics = PoolMetrics::register(&mut registry);
        metrics.touch();
        metrics.record_reconcile("vsphereagent", false, Duration::ZERO);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"agent_forge_vsphere_vm_operations_total{operation="create",result="success"} 1"#,
            r#"agent_forge_iso_operations_total{operation="ensure",result="success"} 1"#,
            r#"agent_forge_pool_capacity{namespace="ns",pool="pool",state="pending_owned_vms"} 0"#,
            r#"agent_forge_pool_vm_cpu_cores{namespace="ns",pool="pool"} 0"#,
            r#"agent_forge_pool_vm_memory_bytes{namespace="ns",pool="pool"} 0"#,
            r#"agent_forge_pool_vm_disk_bytes{namespace="ns",pool="pool"} 0"#,
            r#"controller_runtime_reconcile_total{controller="vsphereagentpool",result="success"} 1"#,
            r#"controller_runtime_reconcile_errors_total{controller="vsphereagentpool"} 0"#,
            r#"controller_runtime_reconcile_errors_total{controller="vsphereagent"} 1"#,
            r#"controller_runtime_reconcile_time_seconds_count{controller="vsphereagent"} 1"#,
            r#"workqueue_depth{controller="vsphereagentpool",name="vsphereagentpool"} 0"#,
            r#"coracle_agentpool_stage_seconds_count{stage="placed"} 1"#,
            r#"coracle_agentpool_unowned_vms{pool="ns/pool"} 0"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        metrics.forget("ns", "pool");
        text.clear();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(!text.contains("pool=\"pool\"") && !text.contains("ns/pool"), "{text}");
    }
}
