//! Metrics of the original agent, under its names. `running` is read from the host core at each scrape, so it cannot drift.

use std::sync::Arc;

use coracle_host::{Host, View};
use coracle_proto::firecracker as pb;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::ErrorStyle;
use super::convert::state;

/// Default buckets of the original agent's client library, seconds.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Operation {
    operation: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    method: &'static str,
    status: &'static str,
}

/// Metrics of the agent service. Clones share the counters.
#[derive(Clone, Debug)]
pub struct AgentMetrics {
    created: Counter,
    durations: Family<Operation, Histogram, fn() -> Histogram>,
    calls: Family<Call, Counter>,
}

impl AgentMetrics {
    /// Registers the series.
    #[must_use]
    pub fn new(registry: &mut Registry, host: &Host) -> Self {
        let metrics = Self {
            created: Counter::default(),
            durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            calls: Family::default(),
        };
        registry.register("firecracker_vms_created", "VMs created", metrics.created.clone());
        registry.register(
            "firecracker_vm_operation_duration_seconds",
            "Duration of gRPC operations",
            metrics.durations.clone(),
        );
        registry.register("firecracker_grpc_requests", "gRPC requests", metrics.calls.clone());
        registry.register_collector(Box::new(Running(host.clone())));
        metrics
    }

    pub(crate) fn record_creation(&self) {
        self.created.inc();
    }

    pub(crate) fn call(&self, method: &'static str, ok: bool, seconds: f64) {
        self.durations.get_or_create(&Operation { operation: method }).observe(seconds);
        let status = if ok { "ok" } else { "error" };
        self.calls.get_or_create(&Call { method, status }).inc();
    }
}

/// Collector that counts running VMs at each scrape.
#[derive(Debug)]
struct Running(Host);

impl Collector for Running {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let is_running = |view: &Arc<View>| state(&view.record, ErrorStyle::Status) == pb::VmState::Running;
        let running = self.0.list().iter().filter(|view| is_running(view)).count();
        let gauge = ConstGauge::new(i64::try_from(running).unwrap_or(i64::MAX));
        let metric = encoder.encode_descriptor(
            "firecracker_vms_running",
            "VMs that run",
            None,
            gauge.metric_type(),
        )?;
        gauge.encode(metric)
    }
}

/// Metrics that the service and the tests share.
pub(crate) type Metrics = Arc<AgentMetrics>;
