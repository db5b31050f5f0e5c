//! Metrics of pods that are VMs, under the names that existing dashboards use.

use std::time::Duration;

use coracle_api::cocoon::Mode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Histogram bounds, in seconds.
const SECONDS: [f64; 9] = [0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Lifecycle {
    op: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Done {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Boot {
    mode: &'static str,
}

type Times<L> = Family<L, Histogram, fn() -> Histogram>;

fn times() -> Histogram {
    Histogram::new(SECONDS)
}

/// The metrics. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    lifecycle: Family<Lifecycle, Counter>,
    pulls: Family<Done, Counter>,
    pushes: Family<Done, Counter>,
    saves: Family<Done, Counter>,
    table: Gauge,
    orphans: Counter,
    adopted_by_name: Counter,
    boot: Times<Boot>,
    save: Histogram,
    push: Histogram,
    pull: Histogram,
    probe: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            lifecycle: Family::default(),
            pulls: Family::default(),
            pushes: Family::default(),
            saves: Family::default(),
            table: Gauge::default(),
            orphans: Counter::default(),
            adopted_by_name: Counter::default(),
            boot: Times::new_with_constructor(times),
            save: times(),
            push: times(),
            pull: times(),
            probe: times(),
        }
    }
}

/// Counted event of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodOperation {
    /// The VM was created.
    Created,
    /// The pod adopted an existing VM.
    Adopted,
    /// The VM could not be created.
    CreateFailed,
    /// The pod names no VM.
    NameMissing,
    /// The pod and its VM were removed.
    Deleted,
    /// The pod was removed and had no VM.
    DeletedWithoutVm,
    /// The VM could not be removed or saved.
    DeleteFailed,
    /// The VM was saved and removed.
    Hibernated,
    /// The VM could not be hibernated.
    HibernateFailed,
    /// The VM was woken.
    Woken,
    /// The VM could not be woken.
    WakeFailed,
    /// The object changed in a way that does not concern the VM.
    Unchanged,
}

impl PodOperation {
    const ALL: [Self; 12] = [
        Self::Created,
        Self::Adopted,
        Self::CreateFailed,
        Self::NameMissing,
        Self::Deleted,
        Self::DeletedWithoutVm,
        Self::DeleteFailed,
        Self::Hibernated,
        Self::HibernateFailed,
        Self::Woken,
        Self::WakeFailed,
        Self::Unchanged,
    ];

    fn labels(self) -> Lifecycle {
        let (op, result) = match self {
            Self::Created => ("create", "ok"),
            Self::Adopted => ("create", "adopted"),
            Self::CreateFailed => ("create", "failed"),
            Self::NameMissing => ("create", "missing_vmname"),
            Self::Deleted => ("delete", "ok"),
            Self::DeletedWithoutVm => ("delete", "no_vm"),
            Self::DeleteFailed => ("delete", "failed"),
            Self::Hibernated => ("update", "hibernated"),
            Self::HibernateFailed => ("update", "hibernate_failed"),
            Self::Woken => ("update", "woken"),
            Self::WakeFailed => ("update", "wake_failed"),
            Self::Unchanged => ("update", "noop"),
        };
        Lifecycle { op, result }
    }
}

fn result_label(ok: bool) -> Done {
    Done { result: if ok { "ok" } else { "failed" } }
}

impl Metrics {
    /// Registers the metrics with the prefix `vk_cocoon`.
    pub fn registered(registry: &mut Registry) -> Self {
        let all = Self::default();
        let registry = registry.sub_registry_with_prefix("vk_cocoon");
        registry.register("pod_lifecycle", "Operations on pods, by result", all.lifecycle.clone());
        registry.register("snapshot_pull", "Snapshots pulled", all.pulls.clone());
        registry.register("snapshot_push", "Snapshots pushed", all.pushes.clone());
        registry.register("snapshot_save", "Snapshots saved on the node", all.saves.clone());
        registry.register("vm_table_size", "Pods with a VM", all.table.clone());
        registry.register("orphan_vm", "VMs of pods that are gone", all.orphans.clone());
        let by_name = all.adopted_by_name.clone();
        registry.register("reconcile_adopt_by_name", "VMs adopted by their names at start", by_name);
        registry.register("vm_boot_duration_seconds", "Time until a VM runs", all.boot.clone());
        registry.register("snapshot_save_duration_seconds", "Time to save a VM", all.save.clone());
        registry.register("snapshot_push_duration_seconds", "Time to push a snapshot", all.push.clone());
        registry.register("snapshot_pull_duration_seconds", "Time to pull a snapshot", all.pull.clone());
        registry.register("probe_duration_seconds", "Time of a readiness probe", all.probe.clone());
        // Series begin at 0, so that rates include the first change.
        for happened in PodOperation::ALL {
            drop(all.lifecycle.get_or_create(&happened.labels()));
        }
        for mode in Mode::ALL {
            drop(all.boot.get_or_create(&Boot { mode: mode.as_str() }));
        }
        for (family, ok) in
            [&all.pulls, &all.pushes, &all.saves].into_iter().flat_map(|f| [(f, true), (f, false)])
        {
            drop(family.get_or_create(&result_label(ok)));
        }
        all
    }

    /// Counts an event of a pod.
    pub fn count(&self, happened: PodOperation) {
        self.lifecycle.get_or_create(&happened.labels()).inc();
    }

    /// Counts VMs whose pods are gone.
    pub fn count_orphans(&self, count: u64) {
        self.orphans.inc_by(count);
    }

    /// Counts a VM that a pod adopted by its name.
    pub fn count_adopted_by_name(&self) {
        self.adopted_by_name.inc();
    }

    /// Sets the number of pods with a VM.
    pub fn set_table_size(&self, count: usize) {
        self.table.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn observe_boot(&self, mode: Mode, took: Duration) {
        self.boot.get_or_create(&Boot { mode: mode.as_str() }).observe(took.as_secs_f64());
    }

    pub(crate) fn observe_save(&self, ok: bool, took: Duration) {
        self.saves.get_or_create(&result_label(ok)).inc();
        self.save.observe(took.as_secs_f64());
    }

    pub(crate) fn observe_push(&self, ok: bool, took: Duration) {
        self.pushes.get_or_create(&result_label(ok)).inc();
        self.push.observe(took.as_secs_f64());
    }

    pub(crate) fn observe_pull(&self, ok: bool, took: Duration) {
        self.pulls.get_or_create(&result_label(ok)).inc();
        self.pull.observe(took.as_secs_f64());
    }

    pub(crate) fn observe_probe(&self, took: Duration) {
        self.probe.observe(took.as_secs_f64());
    }
}
