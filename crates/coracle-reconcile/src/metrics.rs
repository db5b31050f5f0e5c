//! Metrics of every controller, with the labels that controller-runtime uses.

use std::{sync::atomic::AtomicU64, time::Duration};

use jiff::Timestamp;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// Outcome of a reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ReconcileResult {
    /// Success.
    Ok,
    /// Failure; the reconcile is repeated.
    Error,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    operation: &'static str,
    result: ReconcileResult,
}

type Seconds = Family<CallLabels, Histogram, fn() -> Histogram>;

/// Metrics of one process's controllers. Clones write to the same metrics.
#[derive(Clone, Debug)]
pub struct ControllerMetrics {
    runs: Family<Labels, Counter>,
    errors: Family<Labels, Counter>,
    duration: Family<Labels, Histogram, fn() -> Histogram>,
    active: Family<Labels, Gauge>,
    queued: Family<Labels, Gauge>,
    last_success: Family<Labels, Gauge<f64, AtomicU64>>,
    leading: Family<Labels, Gauge>,
    calls: Seconds,
}

fn buckets() -> Histogram {
    Histogram::new([0.001, 0.0025, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 150.0])
}

impl Default for ControllerMetrics {
    fn default() -> Self {
        Self {
            runs: Family::default(),
            errors: Family::default(),
            duration: Family::new_with_constructor(buckets as fn() -> Histogram),
            active: Family::default(),
            queued: Family::default(),
            last_success: Family::default(),
            leading: Family::default(),
            calls: Family::new_with_constructor(buckets as fn() -> Histogram),
        }
    }
}

impl ControllerMetrics {
    /// Creates the metrics and registers them. Call once per process.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self::default();
        registry.register("coracle_controller_reconcile", "Reconciles that ended", m.runs.clone());
        registry.register("coracle_controller_reconcile_errors", "Reconciles that failed", m.errors.clone());
        let seconds = Unit::Seconds;
        let help = "Duration of a reconcile";
        registry.register_with_unit(
            "coracle_controller_reconcile_duration",
            help,
            seconds.clone(),
            m.duration.clone(),
        );
        registry.register("coracle_controller_reconcile_active", "Reconciles that run now", m.active.clone());
        registry.register(
            "coracle_controller_queue_depth",
            "Triggers that wait for the controller",
            m.queued.clone(),
        );
        let help = "Unix time of the last reconcile that succeeded";
        let (unit, name) = (seconds.clone(), "coracle_controller_last_success_timestamp");
        registry.register_with_unit(name, help, unit, m.last_success.clone());
        registry.register(
            "coracle_controller_leading",
            "1 while this process leads the group",
            m.leading.clone(),
        );
        let help = "Duration of a call to a node's agent";
        registry.register_with_unit("coracle_agent_call_duration", help, seconds, m.calls.clone());
        m
    }

    /// Counts a reconcile as active until the guard is dropped.
    #[must_use]
    pub fn begin(&self, controller: &'static str) -> Running<'_> {
        self.active.get_or_create(&Labels { controller }).inc();
        Running { metrics: self, controller }
    }

    /// Records the end of a reconcile.
    pub fn ended(&self, controller: &'static str, outcome: ReconcileResult, took: Duration, now: Timestamp) {
        let labels = Labels { controller };
        self.runs.get_or_create(&labels).inc();
        self.duration.get_or_create(&labels).observe(took.as_secs_f64());
        match outcome {
            ReconcileResult::Ok => {
                self.last_success.get_or_create(&labels).set(now.as_duration().as_secs_f64());
            }
            ReconcileResult::Error => {
                self.errors.get_or_create(&labels).inc();
            }
        }
    }

    /// Returns the number of reconciles since the start. Tests count them to show that nothing else happens meanwhile.
    #[must_use]
    pub fn reconciles(&self, controller: &'static str) -> u64 {
        self.runs.get_or_create(&Labels { controller }).get()
    }

    /// Records the length of the queue.
    pub fn queue_depth(&self, controller: &'static str, depth: usize) {
        self.queued.get_or_create(&Labels { controller }).set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    /// Records whether this process leads the group.
    pub fn leads(&self, controller: &'static str, yes: bool) {
        self.leading.get_or_create(&Labels { controller }).set(i64::from(yes));
    }

    /// Records the end of a call to an agent.
    pub fn record_call(&self, operation: &'static str, result: ReconcileResult, took: Duration) {
        self.calls.get_or_create(&CallLabels { operation, result }).observe(took.as_secs_f64());
    }
}

/// Guard of an active reconcile; dropping it, also by cancellation, lowers the gauge.
#[derive(Debug)]
pub struct Running<'a> {
    metrics: &'a ControllerMetrics,
    controller: &'static str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.metrics.active.get_or_create(&Labels { controller: self.controller }).dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_are_stable() {
        let mut registry = Registry::default();
        let metrics = ControllerMetrics::register(&mut registry);
        let running = metrics.begin("mikromvm");
        metrics.ended("mikromvm", ReconcileResult::Error, Duration::from_millis(20), Timestamp::UNIX_EPOCH);
        metrics.ended("mikromvm", ReconcileResult::Ok, Duration::from_millis(20), Timestamp::UNIX_EPOCH);
        metrics.record_call("CreateVM", ReconcileResult::Ok, Duration::from_millis(20));
        metrics.queue_depth("mikromvm", 3);
        metrics.leads("mikromvm", true);
        drop(running);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"coracle_controller_reconcile_total{controller="mikromvm"} 2"#,
            r#"coracle_controller_reconcile_errors_total{controller="mikromvm"} 1"#,
            r#"coracle_controller_reconcile_duration_seconds_count{controller="mikromvm"} 2"#,
            r#"coracle_controller_reconcile_active{controller="mikromvm"} 0"#,
            r#"coracle_controller_queue_depth{controller="mikromvm"} 3"#,
            r#"coracle_controller_last_success_timestamp_seconds{controller="mikromvm"} 0.0"#,
            r#"coracle_controller_leading{controller="mikromvm"} 1"#,
            r#"coracle_agent_call_duration_seconds_count{operation="CreateVM",result="Ok"} 1"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
