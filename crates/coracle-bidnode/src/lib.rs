//! The BidNode controller: bids for nodes at the auction, and looks after those that it won.
//!
//! ```text
//!  BidNode ─┐                                       ┌─▶ market: place, amend, cancel, release
//!  Nodes    ├─▶ observed ─▶ plan (pure) ─▶ steps ───┼─▶ Nodes: labels, taints, cordon, delete
//!  Pods     │                   └─▶ status          └─▶ Pods: evict
//!  market ──┘ (mirror, by two streams)
//! ```
//! A pass at rest asks nobody anything. A pass that acts reads the object again first, and every change in the market
//! names the version of the owner that it is based on, so two controllers, a retry and a crash never buy twice.

mod bins;
pub mod demand;
mod drains;
mod error;
mod execute;
pub mod facts;
mod manifests;
mod market;
mod metrics;
pub mod mirror;
mod pack;
pub mod plan;
mod reconcile;
pub mod settings;
pub mod status;
mod tell;
mod times;
mod watches;
mod world;

use std::{fmt, sync::Arc};

use coracle_api::bidnode::BidNode;
use coracle_reconcile::{Clock, ControllerMetrics, Election, EventRecorder, SystemClock};
use kube::{
    Client, ResourceExt as _,
    runtime::reflector::{Store, store::Writer},
};
use tokio::sync::{mpsc::unbounded_channel, watch};
use tokio_util::sync::CancellationToken;

pub use error::Error;
pub use manifests::{NAMESPACE, manifests};
pub use market::{Market, MarketAt, MarketError};
pub use metrics::BidMetrics;
pub use times::Times;

use mirror::Mirror;
use watches::{Guarded, Triggers};
use world::World;

/// Name of this group in metrics.
pub const CONTROLLER: &str = "bidnode";
/// The Lease.
pub const LEASE: &str = "coracle-bidnode";
/// Both of Nodes and Pods were listed.
const LISTED: u8 = 3;

/// What the controller is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Only objects of this namespace; `None`: of all.
    pub namespace: Option<String>,
    /// Where the market is, and who we are there.
    pub market: MarketAt,
    /// Region of BidNodes that name none.
    pub default_region: Option<String>,
    /// What a node of each type can hold.
    pub shapes: demand::Shapes,
    /// Times.
    pub times: Times,
    /// Objects that are looked at at once.
    pub workers: u16,
    /// Leader election. `None`: this process is the only one.
    pub election: Option<Election>,
    /// Who we are, in events.
    pub identity: String,
    /// Where to count reconciles, as every controller does.
    pub metrics: ControllerMetrics,
    /// Where to count the rest.
    pub bid_metrics: BidMetrics,
    /// The wall clock.
    pub clock: Arc<dyn Clock>,
}

impl Config {
    /// The defaults, with that market.
    #[must_use]
    pub fn new(market: MarketAt) -> Self {
        Self {
            namespace: None,
            market,
            default_region: None,
            shapes: demand::default_shapes(),
            times: Times::default(),
            workers: 16,
            election: None,
            identity: "coracle-operator".into(),
            metrics: ControllerMetrics::default(),
            bid_metrics: BidMetrics::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// Runs the controller until `stop`. Cancel-safe: what is cut off is finished by the next one.
///
/// # Errors
/// Only what cannot be put right by trying again: an address that is none, times of an election that do not fit.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let lead = |token: CancellationToken| {
        let (client, config) = (client.clone(), config.clone());
        async move {
            config.metrics.leads(CONTROLLER, true);
            let result = Box::pin(work(client, &config, &token)).await;
            config.metrics.leads(CONTROLLER, false);
            result
        }
    };
    match &config.election {
        Some(election) => Box::pin(election.run(&client, &config.clock, &stop, lead)).await,
        None => Box::pin(lead(stop)).await,
    }
}

/// Watches and reconciles until `stop`.
async fn work(client: Client, config: &Config, stop: &CancellationToken) -> Result<(), Error> {
    let market = Market::new(&config.market)?;
    let recorder = EventRecorder::new(client.clone(), "bidnode", &config.identity);
    let (events, told) = tell::queue();
    let writer = Writer::<Guarded>::new(());
    let (urgent, queue) = unbounded_channel();
    let (soon, coming) = unbounded_channel();
    let cx = Arc::new(Context {
        objects: writer.as_reader(),
        events,
        market,
        mirror: Mirror::default(),
        world: World::default(),
        triggers: Triggers::new(urgent.clone(), soon),
        failures: reconcile::Failures::default(),
        drains: drains::Drains::default(),
        config: config.clone(),
        client,
    });
    let (listed, mut all_listed) = watch::channel(0u8);
    let controlled = async {
        // Without its writers nothing is ever ready: then the whole work has ended.
        let _ = cx.objects.wait_until_ready().await;
        let _ = all_listed.wait_for(|bits| *bits == LISTED).await;
        reconcile::control(&cx, queue, stop).await;
    };
    tokio::select! {
        () = controlled => {}
        () = watches::objects(&cx, writer) => {}
        () = watches::nodes(&cx, &listed) => {}
        () = watches::pods(&cx, &listed) => {}
        () = watches::coalesce(coming, urgent, config.times.debounce) => {}
        () = pack::keep(&cx) => {}
        () = tell::keep(&recorder, told) => {}
        () = market::feed(&cx.market, &cx.mirror, config, |change| watches::market_changed(&cx, change), stop) => {}
        () = stop.cancelled() => {}
    }
    Ok(())
}

/// What every reconcile has at hand.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) objects: Store<Guarded>,
    pub(crate) market: Market,
    pub(crate) mirror: Mirror,
    pub(crate) world: World,
    pub(crate) triggers: Triggers,
    pub(crate) events: tell::Teller,
    pub(crate) failures: reconcile::Failures,
    pub(crate) drains: drains::Drains,
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
        self.config.clock.now().as_millisecond()
    }

    /// An object is gone: nothing of it stays in memory or in a scrape.
    pub(crate) fn forget(&self, object: &BidNode) {
        let uid = object.uid().unwrap_or_default();
        self.config.bid_metrics.forget(&uid);
        self.mirror.forget(&uid);
        self.failures.reset(&uid);
    }
}

/// Leader election under our Lease.
#[must_use]
pub fn election(namespace: &str, identity: &str) -> Election {
    Election::new(namespace, LEASE, identity)
}
