//! The BidNode controller: bids for nodes at the auction and manages the nodes that it wins.
//!
//! ```text
//!  BidNode ─┐                                       ┌─▶ market: place, amend, cancel, release
//!  Nodes    ├─▶ observe ─▶ plan (pure) ─▶ execute ──┼─▶ Nodes: labels, taints, cordon, delete
//!  Pods     │                   └─▶ status          └─▶ Pods: evict
//!  market ──┘ (mirror, by two streams)
//! ```
//! A reconcile without steps sends no request. A reconcile with steps reads the object again first. Every command to the market
//! names the owner version that it is based on, so that two controllers, a retry or a crash never buy twice.

mod access;
mod context;
mod controller;
mod error;
mod events;
mod execute;
pub mod ids;
pub mod manifests;
mod market;
mod metrics;
pub mod observe;
pub mod plan;
pub mod settings;
pub mod status;
mod sweep;
mod times;
mod triggers;

use std::sync::Arc;

use coracle_reconcile::{Backoff, Backoffs, Election, EventRecorder, Group};
use kube::{Client, runtime::reflector::store::Writer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use access::trade_access;
pub use context::{CONTROLLER, Config};
pub use error::Error;
pub use manifests::{NAMESPACE, manifests};
pub use market::{Connect, Market, MarketAt, MarketError, TcpConnect};
pub use metrics::BidMetrics;
pub use times::Times;

pub use plan::demand;

use context::Context;
use execute::Drains;
use observe::{cluster::ClusterCache, feed, mirror::Mirror, packing, watches};
use triggers::{Guarded, Triggers};

/// Name of the Lease for leader election.
pub const LEASE: &str = "coracle-bidnode";
/// Consecutive failures after which the delay doubles.
const STEADY: u32 = 2;
/// Bit mask of the caches that must have been listed: Nodes and Pods.
const LISTED: u8 = 3;

/// Runs the controller until `stop`. Cancel-safe: the next run continues where a cancelled one stopped.
///
/// # Errors
/// Only invalid configuration: the address of the market, or the times of the election.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let group = Group {
        name: CONTROLLER,
        election: config.election.clone(),
        client: client.clone(),
        clock: config.clock.clone(),
        metrics: config.metrics.clone(),
    };
    group
        .run_with(&config, stop, |client, config, token| async move { work(client, &config, &token).await })
        .await
}

/// Watches and reconciles until `stop`.
async fn work(client: Client, config: &Config, stop: &CancellationToken) -> Result<(), Error> {
    let market = Market::new(&config.market, config.connect.clone())?;
    let recorder = EventRecorder::new(client.clone(), "bidnode", &config.identity);
    let (events, queued) = events::queue();
    let writer = Writer::<Guarded>::new(());
    let delays = Backoff { base: config.times.retry, max: config.times.retry_max };
    let cx = Arc::new(Context {
        objects: writer.as_reader(),
        events,
        market,
        mirror: Mirror::default(),
        cluster: ClusterCache::default(),
        triggers: Triggers::default(),
        backoffs: Arc::new(Backoffs::steady_for(STEADY, delays)),
        drains: Drains::default(),
        config: config.clone(),
        client,
    });
    let (listed, mut all_listed) = watch::channel(0u8);
    let controlled = async {
        // These waits fail only if a writer of a cache ended, and then this whole task ends as well.
        let _ = cx.objects.wait_until_ready().await;
        let _ = all_listed.wait_for(|bits| *bits == LISTED).await;
        controller::run(&cx, stop).await;
    };
    tokio::select! {
        () = controlled => {}
        () = watches::objects(&cx, writer) => {}
        () = watches::nodes(&cx, &listed) => {}
        () = watches::pods(&cx, &listed) => {}
        () = watches::daemons(&cx) => {}
        () = packing::run(&cx) => {}
        () = sweep::run(&cx) => {}
        () = events::publish(&recorder, queued) => {}
        () = feed::run(&cx.market, &cx.mirror, config, |change| watches::market_changed(&cx, change), stop) => {}
        () = stop.cancelled() => {}
    }
    Ok(())
}

/// Leader election with the Lease of this controller.
#[must_use]
pub fn election(namespace: &str, identity: &str) -> Election {
    Election::new(namespace, LEASE, identity)
}
