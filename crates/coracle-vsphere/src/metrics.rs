//! Metrics of calls to a vCenter.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    method: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Method {
    method: &'static str,
}

/// Metrics of calls, their duration, sessions, and uploaded bytes of ISO images. Clones share the same metrics.
#[derive(Clone, Debug)]
pub struct VsphereMetrics {
    calls: Family<Call, Counter>,
    seconds: Family<Method, Histogram, fn() -> Histogram>,
    sessions: Gauge,
    iso_bytes: Counter,
}

fn buckets() -> Histogram {
    Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 120.0])
}

impl Default for VsphereMetrics {
    fn default() -> Self {
        Self {
            calls: Family::default(),
            seconds: Family::new_with_constructor(buckets as fn() -> Histogram),
            sessions: Gauge::default(),
            iso_bytes: Counter::default(),
        }
    }
}

impl VsphereMetrics {
    /// Creates the metrics and registers them. Call once in a process.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self::default();
        registry.register("coracle_vsphere_calls", "Calls to a vCenter that ended", m.calls.clone());
        registry.register_with_unit(
            "coracle_vsphere_call",
            "Duration of a call",
            Unit::Seconds,
            m.seconds.clone(),
        );
        registry.register("coracle_vsphere_sessions", "Sessions that are open", m.sessions.clone());
        registry.register_with_unit(
            "coracle_iso",
            "Bytes of ISO images that were uploaded",
            Unit::Bytes,
            m.iso_bytes.clone(),
        );
        m
    }

    /// Initialises each metric, so that a scrape shows all of them.
    pub fn touch(&self) {
        self.record_call("RetrieveServiceContent", true, Duration::ZERO);
        self.record_upload(0);
    }

    pub(crate) fn record_call(&self, method: &'static str, ok: bool, took: Duration) {
        let result = if ok { "success" } else { "error" };
        self.calls.get_or_create(&Call { method, result }).inc();
        self.seconds.get_or_create(&Method { method }).observe(took.as_secs_f64());
    }

    pub(crate) fn session(&self, opened: bool) {
        if opened {
            self.sessions.inc();
        } else {
            self.sessions.dec();
        }
    }

    pub(crate) fn record_upload(&self, bytes: u64) {
        self.iso_bytes.inc_by(bytes);
    }
}
