//! Latency from a notice to the cordon of its node: one at a time, then a thousand at once. A watch of the API server yields
//! the time of the cordon, the market that of the notice.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use coracle_api::bidnode::names;
use coracle_proto::market::{
    ListAllocationsRequest, PlaceBidRequest, PutMarketRequest, admin_client::AdminClient,
    trading_client::TradingClient,
};
use coracle_testkit::figures::percentile;
use coracle_types::Clock;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{task::JoinSet, time::sleep};
use tonic::transport::Channel;

use crate::{NAMESPACES, print_next_figure, with_token};

pub(crate) const MARKET: &str = "a100-4x/local";
/// Notice period that the supplier's lots promise; that of the market is at least as long.
const NOTICE_MS: i64 = 10_000;
const SINGLES: usize = 20;
const AT_ONCE: usize = 1_000;
const LIMIT: Duration = Duration::from_secs(60);

/// Times at which the Node of each allocation was first seen cordoned, in milliseconds since 1970.
type Cordons = Arc<Mutex<BTreeMap<String, i64>>>;

/// Configures the market: allocations are not protected, and calls have the given interval.
pub(crate) async fn put_market(channel: &Channel, call_interval_ms: i64) -> Result<()> {
    let market = PutMarketRequest {
        market: MARKET.into(),
        reserve_micros: 2_000_000,
        cap_micros: 8_000_000,
        call_interval_ms,
        min_runtime_ms: Some(0),
        notice_ms: 120_000,
        effective_at_ms: 1,
        ..PutMarketRequest::default()
    };
    AdminClient::new(channel.clone()).put_market(with_token(market)).await?;
    Ok(())
}

/// Measures and prints both figures.
pub(crate) async fn measure(client: &Client, channel: &Channel) -> Result<()> {
    let cordons = Cordons::default();
    let mut watching = JoinSet::new();
    watching.spawn(watch(client.clone(), cordons.clone()));
    let known = || cordons.lock().unwrap().len();
    put_market(channel, 1_000).await?;
    for n in 0..SINGLES {
        let before = known();
        outbid(channel, &format!("one-{n}"), 1).await?;
        wait_until(|| known() > before, "a single notice is obeyed").await?;
    }
    let single = latencies(channel, &cordons, &BTreeMap::new()).await?;
    report("single", &single, SINGLES)?;
    let told = cordons.lock().unwrap().clone();
    outbid(channel, "many", AT_ONCE).await?;
    let before = told.len();
    let obeyed = wait_until(|| known() >= before + AT_ONCE, "a thousand notices are obeyed").await;
    obeyed.with_context(|| format!("{} of {AT_ONCE} nodes were cordoned", known() - before))?;
    let many = latencies(channel, &cordons, &told).await?;
    report("a thousand at once", &many, AT_ONCE)
}

fn report(what: &str, took: &[f64], least: usize) -> Result<()> {
    ensure!(took.len() >= least, "{what}: {} cordons of {least}", took.len());
    let [p50, p99, most] = [50, 99, 100].map(|p| percentile(took, p));
    eprintln!(
        "  notice to cordon, {what}: {} nodes, p50 {p50:.0} ms, p99 {p99:.0} ms, max {most:.0} ms",
        took.len()
    );
    print_next_figure(p99);
    Ok(())
}

/// Follows Nodes and records when each was cordoned.
async fn watch(client: Client, cordons: Cordons) {
    let nodes: Api<Node> = Api::all(client);
    let events = watcher(nodes, watcher::Config::default().labels(names::BIDNODE)).default_backoff();
    let mut events = std::pin::pin!(events.applied_objects());
    while let Some(event) = events.next().await {
        let Ok(node) = event else { continue };
        let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
        if let Some(allocation) = node.labels().get(names::ALLOCATION).filter(|_| cordoned) {
            let now = Clock::system().now().0;
            cordons.lock().unwrap().entry(allocation.clone()).or_insert(now);
        }
    }
}

/// Places a bid for `units` slots above all others.
async fn outbid(channel: &Channel, owner: &str, units: usize) -> Result<()> {
    let bid = PlaceBidRequest {
        market: MARKET.into(),
        limit_micros: 7_900_000,
        quantity: u32::try_from(units)?,
        owner_uid: owner.into(),
        tenant: "rival".into(),
        ..PlaceBidRequest::default()
    };
    TradingClient::new(channel.clone()).place_bid(with_token(bid)).await?;
    Ok(())
}

async fn wait_until(is_so: impl Fn() -> bool, what: &str) -> Result<()> {
    let began = Instant::now();
    while !is_so() {
        ensure!(began.elapsed() < LIMIT, "{what} within {LIMIT:?}");
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Returns the milliseconds from notice to cordon of the nodes that are not in `told`.
async fn latencies(channel: &Channel, cordons: &Cordons, told: &BTreeMap<String, i64>) -> Result<Vec<f64>> {
    let mut noticed = BTreeMap::new();
    for n in 0..NAMESPACES {
        let request = ListAllocationsRequest {
            tenant: format!("bench/bench-{n}"),
            include_ended: true,
            ..ListAllocationsRequest::default()
        };
        let all = TradingClient::new(channel.clone()).max_decoding_message_size(1 << 26);
        let all = { all }.list_allocations(with_token(request)).await.context("list units")?.into_inner();
        let under_notice = all.allocations.into_iter().filter(|unit| unit.preempt_at_ms > 0);
        noticed.extend(under_notice.map(|unit| (unit.allocation, unit.preempt_at_ms - NOTICE_MS)));
    }
    let cordons = cordons.lock().unwrap().clone();
    let new = cordons.into_iter().filter(|(allocation, _)| !told.contains_key(allocation));
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of a minute")]
    let took = |(allocation, at): (String, i64)| Some((at - noticed.get(&allocation)?) as f64);
    Ok(new.filter_map(took).collect())
}
