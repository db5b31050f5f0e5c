//! Configuration of the controller, and the state that its reconciles share.

use std::{collections::BTreeSet, fmt, sync::Arc};

use coracle_api::bidnode::BidNode;
use coracle_reconcile::{Backoffs, Clock, ControllerMetrics, Election};
use kube::{Client, ResourceExt as _, runtime::reflector::Store};

use crate::{
    events::EventSender,
    execute::Drains,
    market::{Connect, Market, MarketAt, TcpConnect},
    metrics::BidMetrics,
    observe::{cluster::ClusterCache, mirror::Mirror},
    plan::demand,
    times::Times,
    triggers::{Guarded, Triggers},
};

/// Name of this controller in metrics.
pub const CONTROLLER: &str = "bidnode";

/// Configuration of the controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace that is watched; `None`: all namespaces.
    pub namespace: Option<String>,
    /// Address of the market and identity there.
    pub market: MarketAt,
    /// How connections to the market are opened.
    pub connect: Arc<dyn Connect>,
    /// Region of BidNodes without one.
    pub default_region: Option<String>,
    /// Keys of Kubernetes labels that BidNodes may set.
    pub allowed_labels: BTreeSet<String>,
    /// Capacity of a node of each instance type.
    pub shapes: demand::Shapes,
    /// Intervals and time limits.
    pub times: Times,
    /// Concurrent reconciles.
    pub workers: u16,
    /// Leader election. `None`: this process is the only instance.
    pub election: Option<Election>,
    /// Reporting instance of events.
    pub identity: String,
    /// Metrics of reconciles, shared by all controllers.
    pub metrics: ControllerMetrics,
    /// Metrics of this controller.
    pub bid_metrics: BidMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl Config {
    /// Creates a configuration with defaults for a market.
    #[must_use]
    pub fn new(market: MarketAt) -> Self {
        Self {
            namespace: None,
            market,
            connect: Arc::new(TcpConnect),
            default_region: None,
            allowed_labels: BTreeSet::new(),
            shapes: demand::default_shapes(),
            times: Times::default(),
            workers: 16,
            election: None,
            identity: "coracle-operator".into(),
            metrics: ControllerMetrics::default(),
            bid_metrics: BidMetrics::default(),
            clock: Clock::system(),
        }
    }
}

/// Shared state of all reconciles.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) objects: Store<Guarded>,
    pub(crate) market: Market,
    pub(crate) mirror: Mirror,
    pub(crate) cluster: ClusterCache,
    pub(crate) triggers: Triggers,
    pub(crate) events: EventSender,
    pub(crate) backoffs: Arc<Backoffs<String>>,
    pub(crate) drains: Drains,
    pub(crate) config: Config,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    /// Milliseconds since 1970.
    pub(crate) fn now_ms(&self) -> i64 {
        self.config.clock.now().0
    }

    /// Removes a deleted object from memory and metrics.
    pub(crate) fn forget(&self, object: &BidNode) {
        let uid = object.uid().unwrap_or_default();
        self.config.bid_metrics.forget(&uid);
        self.mirror.forget(&uid);
        self.backoffs.reset(&uid);
    }
}
