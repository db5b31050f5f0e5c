//! Metrics of the registry.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: &'static str,
}

/// Metrics of the registry.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<Request, Counter>,
    duration: Family<Route, Histogram>,
    uploaded: Counter,
    downloaded: Counter,
    swept: Counter,
    connections: Gauge,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let m = Self {
            requests: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.001, 4.0, 9))),
            uploaded: Counter::default(),
            downloaded: Counter::default(),
            swept: Counter::default(),
            connections: Gauge::default(),
        };
        registry.register("coracle_registry_requests", "Requests by route and status", m.requests.clone());
        registry.register(
            "coracle_registry_request_duration_seconds",
            "Time to the head of the answer",
            m.duration.clone(),
        );
        registry.register("coracle_registry_uploaded_bytes", "Bytes of finished uploads", m.uploaded.clone());
        registry.register(
            "coracle_registry_downloaded_bytes",
            "Bytes of blobs asked for",
            m.downloaded.clone(),
        );
        registry.register(
            "coracle_registry_swept_bytes",
            "Bytes that garbage collection freed",
            m.swept.clone(),
        );
        registry.register("coracle_registry_connections", "Connections that are open", m.connections.clone());
        m
    }

    /// Counts a response.
    pub fn answered(&self, route: &'static str, status: u16, took: Duration) {
        self.requests.get_or_create(&Request { route, status }).inc();
        self.duration.get_or_create(&Route { route }).observe(took.as_secs_f64());
    }

    pub(crate) fn count_uploaded(&self, bytes: u64) {
        self.uploaded.inc_by(bytes);
    }

    pub(crate) fn count_downloaded(&self, bytes: u64) {
        self.downloaded.inc_by(bytes);
    }

    pub(crate) fn count_swept(&self, bytes: u64) {
        self.swept.inc_by(bytes);
    }

    pub(crate) fn track_connection(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }
}

/// Open connection, counted until dropped.
#[derive(Debug)]
pub(crate) struct Connected(Gauge);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}
