//! Metrics: three with published names, and more of this controller.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use coracle_api::bidnode::dollars;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::{observe::mirror::Milestone, plan::Counts};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Run {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Named {
    name: String,
    namespace: String,
    instance_type: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Class {
    class: String,
    strategy: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Market {
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Drained {
    outcome: &'static str,
}

type Nodes = Family<Class, Gauge>;

/// Contribution of one object to the sums.
#[derive(Clone, Debug, PartialEq)]
struct Share {
    named: Named,
    class: Class,
    nodes: [u32; 5],
    active: u32,
    cost_micros: i64,
}

/// Costs by class, in micro-dollars: sums of integers do not drift.
type Costs = HashMap<String, i64>;

/// Metrics of this controller. Clones share the same metrics.
#[derive(Clone, Debug)]
pub struct BidMetrics {
    runs: Family<Run, Counter>,
    seconds: Histogram,
    named: Family<Named, Gauge>,
    nodes: [Nodes; 5],
    cost: Family<Market, Gauge<f64, AtomicU64>>,
    forced: Counter,
    noop: Counter,
    writes: Counter,
    undecodable: Gauge,
    to_node: Family<StageLabel, Histogram, fn() -> Histogram>,
    drains: Family<Drained, Histogram, fn() -> Histogram>,
    lag: Histogram,
    shares: Arc<Mutex<(HashMap<String, Share>, Costs)>>,
}

/// Histogram with buckets from a quarter of a second to a little over half an hour.
fn minutes() -> Histogram {
    Histogram::new(exponential_buckets(0.25, 2.0, 14))
}

const KINDS: [&str; 5] = ["desired", "active", "pending", "provisioning", "preempting"];

impl Default for BidMetrics {
    fn default() -> Self {
        Self {
            runs: Family::default(),
            seconds: Histogram::new(exponential_buckets(0.01, 2.0, 10)),
            named: Family::default(),
            nodes: Default::default(),
            cost: Family::default(),
            forced: Counter::default(),
            noop: Counter::default(),
            writes: Counter::default(),
            undecodable: Gauge::default(),
            to_node: Family::new_with_constructor(minutes),
            drains: Family::new_with_constructor(minutes),
            lag: Histogram::new(exponential_buckets(0.001, 2.0, 14)),
            shares: Arc::default(),
        }
    }
}

impl BidMetrics {
    /// Creates the metrics and registers them. Call once in a process.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self::default();
        let r = registry;
        r.register("bidnode_reconcile", "Total number of reconciles", m.runs.clone());
        r.register("bidnode_reconcile_duration_seconds", "Time spent in reconcile", m.seconds.clone());
        r.register("bidnode_active_nodes", "Number of active nodes per BidNode", m.named.clone());
        let [desired, active, pending, provisioning, preempting] = &m.nodes;
        r.register("coracle_bidnode_desired_nodes", "Nodes that are wanted", desired.clone());
        r.register("coracle_bidnode_active_nodes", "Nodes that are Ready and stay", active.clone());
        r.register(
            "coracle_bidnode_pending_nodes",
            "Nodes that were bid for and are not active",
            pending.clone(),
        );
        r.register(
            "coracle_bidnode_provisioning_nodes",
            "Nodes that are won and not active",
            provisioning.clone(),
        );
        r.register("coracle_bidnode_preempting_nodes", "Nodes that are leaving", preempting.clone());
        r.register("coracle_bidnode_hourly_cost_dollars", "What all nodes cost, for graphs", m.cost.clone());
        r.register("coracle_bidnode_forced_pods", "Pods that were ended and not evicted", m.forced.clone());
        r.register("coracle_bidnode_noop_reconciles", "Reconciles that changed nothing", m.noop.clone());
        r.register("coracle_bidnode_status_writes", "Writes of a status", m.writes.clone());
        r.register(
            "coracle_bidnode_undecodable_objects",
            "BidNodes that cannot be read",
            m.undecodable.clone(),
        );
        r.register(
            "coracle_bidnode_time_to_node_seconds",
            "From the bid to each stage of its node",
            m.to_node.clone(),
        );
        r.register("coracle_bidnode_drain_seconds", "Time to empty a node", m.drains.clone());
        r.register(
            "coracle_bidnode_stream_lag_seconds",
            "From a change at the market to its being known here",
            m.lag.clone(),
        );
        m
    }

    /// Records the end of a reconcile.
    pub(crate) fn observe_reconcile(&self, ok: bool, took: Duration) {
        self.runs.get_or_create(&Run { result: if ok { "success" } else { "error" } }).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn count_noop(&self) {
        self.noop.inc();
    }

    pub(crate) fn count_write(&self) {
        self.writes.inc();
    }

    pub(crate) fn count_forced_deletion(&self) {
        self.forced.inc();
    }

    pub(crate) fn set_undecodable(&self, n: usize) {
        self.undecodable.set(i64::try_from(n).unwrap_or(i64::MAX));
    }

    /// Records that an allocation reached a milestone, `took` after its bid.
    pub(crate) fn observe_milestone(&self, milestone: Milestone, took: Duration) {
        self.to_node.get_or_create(&StageLabel { stage: milestone.as_str() }).observe(took.as_secs_f64());
    }

    /// Records the end of a drain: complete, or forced by the deadline.
    pub(crate) fn observe_drain(&self, forced: bool, took: Duration) {
        let outcome = if forced { "forced" } else { "drained" };
        self.drains.get_or_create(&Drained { outcome }).observe(took.as_secs_f64());
    }

    /// Records the delay between an event at the market and the arrival of its frame.
    pub(crate) fn observe_lag(&self, lag: Duration) {
        self.lag.observe(lag.as_secs_f64());
    }

    /// Sets the gauges of an object. Series of its previous type and market are reduced or removed.
    #[expect(clippy::too_many_arguments, reason = "the labels of the contract")]
    pub(crate) fn gauge(
        &self,
        uid: &str,
        namespace: &str,
        name: &str,
        instance_type: &str,
        class: String,
        strategy: &'static str,
        c: Counts,
        cost_micros: i64,
    ) {
        let named = Named {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            instance_type: instance_type.to_owned(),
        };
        let nodes = [c.desired, c.active, c.open + c.in_flight, c.in_flight, c.leaving];
        let share = Share { named, class: Class { class, strategy }, nodes, active: c.active, cost_micros };
        self.replace(uid, Some(share));
    }

    /// Removes the contribution of a deleted object.
    pub(crate) fn forget(&self, uid: &str) {
        self.replace(uid, None);
    }

    fn replace(&self, uid: &str, new: Option<Share>) {
        let mut shares = self.shares.lock();
        let (shares, costs) = &mut *shares;
        if shares.get(uid) == new.as_ref() {
            return;
        }
        if let Some(old) = shares.remove(uid) {
            self.add(&old, -1, costs);
            if new.as_ref().is_none_or(|new| new.named != old.named) {
                self.named.remove(&old.named);
            }
        }
        if let Some(new) = new {
            self.add(&new, 1, costs);
            self.named.get_or_create(&new.named).set(i64::from(new.active));
            shares.insert(uid.to_owned(), new);
        }
    }

    fn add(&self, share: &Share, sign: i64, costs: &mut Costs) {
        for (family, n) in self.nodes.iter().zip(share.nodes) {
            family.get_or_create(&share.class).inc_by(sign * i64::from(n));
        }
        let cost = costs.entry(share.class.class.clone()).or_default();
        *cost += sign * share.cost_micros;
        self.cost.get_or_create(&Market { class: share.class.class.clone() }).set(dollars(*cost));
    }

    /// Initialises every metric, for the metrics reference.
    pub fn touch(&self) {
        for ok in [true, false] {
            self.observe_reconcile(ok, Duration::ZERO);
        }
        debug_assert_eq!(KINDS.len(), self.nodes.len());
        let class = "a100-4x/local".to_owned();
        self.gauge("uid", "ns", "name", "a100-4x", class, "balanced", Counts::default(), 0);
        self.set_undecodable(0);
        for stage in [Milestone::Matched, Milestone::Launched, Milestone::Registered, Milestone::Ready] {
            self.observe_milestone(stage, Duration::ZERO);
        }
        self.observe_drain(false, Duration::ZERO);
        self.observe_drain(true, Duration::ZERO);
        self.observe_lag(Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_labels_and_help_match_the_contract() {
        let mut registry = Registry::default();
        let metrics = BidMetrics::register(&mut registry);
        metrics.touch();
        let scrape = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        let text = scrape();
        for line in [
            "# HELP bidnode_reconcile Total number of reconciles",
            "# HELP bidnode_reconcile_duration_seconds Time spent in reconcile",
            "# HELP bidnode_active_nodes Number of active nodes per BidNode",
            r#"bidnode_reconcile_total{result="success"} 1"#,
            r#"bidnode_reconcile_total{result="error"} 1"#,
            r#"bidnode_reconcile_duration_seconds_bucket{le="0.01"} 2"#,
            r#"bidnode_reconcile_duration_seconds_bucket{le="5.12"} 2"#,
            r#"bidnode_active_nodes{name="name",namespace="ns",instance_type="a100-4x"} 0"#,
            r#"coracle_bidnode_desired_nodes{class="a100-4x/local",strategy="balanced"} 0"#,
            r#"coracle_bidnode_time_to_node_seconds_count{stage="matched"} 1"#,
            r#"coracle_bidnode_time_to_node_seconds_count{stage="launched"} 1"#,
            r#"coracle_bidnode_time_to_node_seconds_count{stage="registered"} 1"#,
            r#"coracle_bidnode_time_to_node_seconds_count{stage="ready"} 1"#,
            r#"coracle_bidnode_drain_seconds_count{outcome="drained"} 1"#,
            r#"coracle_bidnode_drain_seconds_count{outcome="forced"} 1"#,
            "coracle_bidnode_stream_lag_seconds_count 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let counts = Counts { active: 2, ..Counts::default() };
        let put = |kind: &str| {
            let class = format!("{kind}/local");
            metrics.gauge("uid", "ns", "name", kind, class, "balanced", counts, 4_000_000);
        };
        put("a100-4x");
        put("h100-8x");
        let text = scrape();
        assert!(!text.contains(r#"instance_type="a100-4x""#), "the series of the old type went\n{text}");
        assert!(
            text.contains(r#"coracle_bidnode_active_nodes{class="a100-4x/local",strategy="balanced"} 0"#)
        );
        assert!(text.contains(r#"coracle_bidnode_hourly_cost_dollars{class="h100-8x/local"} 4"#), "{text}");
        metrics.forget("uid");
        assert!(!scrape().contains("instance_type="));
    }
}
