//! Metrics of the controllers, under the names of the original.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Set {
    namespace: String,
    cocoonset: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Placement {
    placement: &'static str,
}

type Seconds = Family<Ended, Histogram, fn() -> Histogram>;

/// Metrics of one process. Clones write to the same metrics.
#[derive(Clone, Debug)]
pub struct CocoonMetrics {
    rebuilds: Family<Set, Counter>,
    dead_letters: Family<Set, Counter>,
    hibernate: Seconds,
    wake: Seconds,
    failed_states: Family<Phase, Counter>,
    released_pods: Counter,
    released_wakes: Family<Placement, Counter>,
    unschedulable: Counter,
}

fn buckets() -> Histogram {
    Histogram::new([10.0, 30.0, 60.0, 180.0, 600.0, 1800.0])
}

impl Default for CocoonMetrics {
    fn default() -> Self {
        Self {
            rebuilds: Family::default(),
            dead_letters: Family::default(),
            hibernate: Family::new_with_constructor(buckets as fn() -> Histogram),
            wake: Family::new_with_constructor(buckets as fn() -> Histogram),
            failed_states: Family::default(),
            released_pods: Counter::default(),
            released_wakes: Family::default(),
            unschedulable: Counter::default(),
        }
    }
}

impl CocoonMetrics {
    /// Creates the metrics and registers them. Call once per process.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self::default();
        registry.register(
            "cocoon_operator_subagent_rebuild",
            "Sub-agents that were rebuilt",
            m.rebuilds.clone(),
        );
        let help = "Sub-agents that failed too often to be rebuilt";
        registry.register("cocoon_operator_subagent_dead_letter", help, m.dead_letters.clone());
        let (help, name) = ("Duration of a hibernation", "cocoon_operator_hibernate_phase_duration");
        registry.register_with_unit(name, help, Unit::Seconds, m.hibernate.clone());
        let (help, name) = ("Duration of a wake", "cocoon_operator_wake_phase_duration");
        registry.register_with_unit(name, help, Unit::Seconds, m.wake.clone());
        let (help, name) = (
            "Passes that found a VM failed, as its node reports",
            "cocoon_operator_lifecycle_state_failed_observed",
        );
        registry.register(name, help, m.failed_states.clone());
        let help = "Pods of suspended sets that gave their place up";
        registry.register("cocoon_operator_slot_release_pods_deleted", help, m.released_pods.clone());
        let help = "Main agents that continue after they gave their place up";
        registry.register("cocoon_operator_slot_release_wake", help, m.released_wakes.clone());
        let help = "Passes that found such a main agent without a node";
        registry.register("cocoon_operator_slot_release_wake_unschedulable", help, m.unschedulable.clone());
        m
    }

    /// Writes every series once, for the metrics reference.
    pub fn touch(&self) {
        self.count_rebuild("prod".into(), "demo".into());
        self.count_dead_letter("prod".into(), "demo".into());
        self.observe_hibernate(true, Duration::from_secs(20));
        self.observe_wake(false, Duration::from_secs(20));
        self.count_failed_state("Pending");
        self.count_released_pod();
        self.count_released_wake(true);
        self.count_unschedulable_wake();
    }

    pub(crate) fn count_rebuild(&self, namespace: String, cocoonset: String) {
        self.rebuilds.get_or_create(&Set { namespace, cocoonset }).inc();
    }

    pub(crate) fn count_dead_letter(&self, namespace: String, cocoonset: String) {
        self.dead_letters.get_or_create(&Set { namespace, cocoonset }).inc();
    }

    pub(crate) fn count_failed_state(&self, phase: &'static str) {
        self.failed_states.get_or_create(&Phase { phase }).inc();
    }

    pub(crate) fn observe_hibernate(&self, is_ok: bool, took: Duration) {
        self.hibernate.get_or_create(&Ended { result: result(is_ok) }).observe(took.as_secs_f64());
    }

    pub(crate) fn observe_wake(&self, is_ok: bool, took: Duration) {
        self.wake.get_or_create(&Ended { result: result(is_ok) }).observe(took.as_secs_f64());
    }

    pub(crate) fn count_released_pod(&self) {
        self.released_pods.inc();
    }

    pub(crate) fn count_released_wake(&self, has_hint: bool) {
        let placement = if has_hint { "hint-node" } else { "pool" };
        self.released_wakes.get_or_create(&Placement { placement }).inc();
    }

    pub(crate) fn count_unschedulable_wake(&self) {
        self.unschedulable.inc();
    }
}

fn result(is_ok: bool) -> &'static str {
    if is_ok { "ok" } else { "timeout" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_are_those_of_the_original() {
        let mut registry = Registry::default();
        let metrics = CocoonMetrics::register(&mut registry);
        metrics.touch();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"cocoon_operator_subagent_rebuild_total{namespace="prod",cocoonset="demo"} 1"#,
            r#"cocoon_operator_subagent_dead_letter_total{namespace="prod",cocoonset="demo"} 1"#,
            r#"cocoon_operator_hibernate_phase_duration_seconds_bucket{le="30.0",result="ok"} 1"#,
            r#"cocoon_operator_wake_phase_duration_seconds_count{result="timeout"} 1"#,
            r#"cocoon_operator_lifecycle_state_failed_observed_total{phase="Pending"} 1"#,
            "cocoon_operator_slot_release_pods_deleted_total 1",
            r#"cocoon_operator_slot_release_wake_total{placement="hint-node"} 1"#,
            "cocoon_operator_slot_release_wake_unschedulable_total 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
