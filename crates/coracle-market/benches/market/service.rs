//! Benchmark of the service in a separate process: intake over gRPC with replies after the write to disk. Then the process is
//! killed, and the bids in the reopened store are counted.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::market_client::MarketClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::{GetBookRequest, PlaceBidsRequest, VerifyRequest, place_bid_result};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::engine::percentile;
use crate::server::{ADMIN, CONNECTIONS, MARKET, Served, TENANTS, bid, p99_ms, tokens, with};
use crate::streams;

/// Number of concurrent calls with one bid each, as from many operators.
const CALLERS: usize = 1024;
/// Number of concurrent calls with 512 bids each.
const BATCHERS: usize = 16;
const BATCH: usize = 512;

/// Results; `None` where the store did not hold what was acknowledged.
pub(crate) struct Measurement {
    pub(crate) single: Option<f64>,
    pub(crate) batched: Option<f64>,
    pub(crate) half_p99_ms: Option<f64>,
    pub(crate) full: Full,
    pub(crate) why: String,
}

/// Measures both intakes, adds bids up to `open` open ones, and counts them in a new process.
pub(crate) async fn run(open: u64, seconds: u64, calls: usize) -> Measurement {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = dir.path().join("market.db");
    let served = Served::start(&store);
    let channels = served.channels().await;
    let tokens = Arc::new(tokens(channels[0].clone()).await);
    let (next, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));

    let single = singles(&channels, &tokens, &next, &done, Duration::from_secs(seconds)).await;
    let half_p99_ms =
        half_load(&channels, &tokens, &next, &done, single / 2.0, Duration::from_secs(seconds)).await;
    let batched = batches(&channels, &tokens, &next, &done, u64::MAX, Duration::from_secs(seconds)).await;
    let acknowledged = done.load(Ordering::Relaxed);
    served.kill();

    let (single, batched, why) = match check_reopened_store(&store, acknowledged).await {
        Ok(()) => (Some(single), Some(batched), String::new()),
        Err(why) => (None, None, why),
    };
    drop(dir);
    let full = full(open, calls).await;
    Measurement { single, batched, half_p99_ms, full, why }
}

/// Places one bid per call, from many callers.
async fn singles(
    channels: &[Channel],
    tokens: &Arc<Vec<String>>,
    next: &Arc<AtomicU64>,
    done: &Arc<AtomicU64>,
    span: Duration,
) -> f64 {
    let (before, started) = (done.load(Ordering::Relaxed), Instant::now());
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let mut client = TradingClient::new(channels[caller % CONNECTIONS].clone());
        let (tokens, next, done) = (tokens.clone(), next.clone(), done.clone());
        callers.spawn(async move {
            let mut took = Vec::new();
            while started.elapsed() < span {
                let n = next.fetch_add(1, Ordering::Relaxed);
                let one = Instant::now();
                client.place_bid(with(&tokens[caller % TENANTS], bid(n))).await.unwrap();
                took.push(one.elapsed());
                done.fetch_add(1, Ordering::Relaxed);
            }
            took
        });
    }
    let mut took = callers.join_all().await.concat();
    took.sort_unstable();
    let rate = (done.load(Ordering::Relaxed) - before) as f64 / started.elapsed().as_secs_f64();
    eprintln!(
        "  single: {} calls, {rate:.0}/s, closed loop of {CALLERS}: p50 {:?}, p99 {:?}",
        took.len(),
        percentile(&took, 500),
        percentile(&took, 990)
    );
    rate
}

/// Places one bid per call at a fixed rate, independent of the answers. Returns the p99 in milliseconds since a call was due.
async fn half_load(
    channels: &[Channel],
    tokens: &Arc<Vec<String>>,
    next: &Arc<AtomicU64>,
    done: &Arc<AtomicU64>,
    per_s: f64,
    span: Duration,
) -> Option<f64> {
    let every = Duration::from_secs_f64(1.0 / per_s.max(1.0));
    let (mut calls, mut took, mut due) = (JoinSet::new(), Vec::new(), Instant::now());
    let end = due + span;
    let mut caller = 0;
    while due < end {
        tokio::time::sleep_until(due.into()).await;
        while due <= Instant::now() {
            caller += 1;
            let mut client = TradingClient::new(channels[caller % channels.len()].clone());
            let (tokens, done, n) = (tokens.clone(), done.clone(), next.fetch_add(1, Ordering::Relaxed));
            calls.spawn(async move {
                client.place_bid(with(&tokens[caller % TENANTS], bid(n))).await.unwrap();
                done.fetch_add(1, Ordering::Relaxed);
                due.elapsed()
            });
            due += every;
        }
        while let Some(one) = calls.try_join_next() {
            took.push(one.unwrap());
        }
    }
    took.extend(calls.join_all().await);
    p99_ms(&format!("single at {per_s:.0}/s"), took)
}

/// Places 512 bids per call, until the time is over or enough are placed.
async fn batches(
    channels: &[Channel],
    tokens: &Arc<Vec<String>>,
    next: &Arc<AtomicU64>,
    done: &Arc<AtomicU64>,
    most: u64,
    span: Duration,
) -> f64 {
    let (before, started) = (done.load(Ordering::Relaxed), Instant::now());
    let mut callers = JoinSet::new();
    for caller in 0..BATCHERS {
        let mut client =
            TradingClient::new(channels[caller % CONNECTIONS].clone()).max_decoding_message_size(1 << 24);
        let (tokens, next, done) = (tokens.clone(), next.clone(), done.clone());
        callers.spawn(async move {
            let mut turn = caller;
            while started.elapsed() < span {
                let first = next.fetch_add(BATCH as u64, Ordering::Relaxed);
                if first >= most {
                    break;
                }
                let bids = (first..(first + BATCH as u64).min(most)).map(bid).collect();
                let request = with(&tokens[turn % TENANTS], PlaceBidsRequest { bids });
                turn += BATCHERS + 1;
                let results = client.place_bids(request).await.unwrap().into_inner().results;
                let placed =
                    results.iter().filter(|r| matches!(r.result, Some(place_bid_result::Result::Reply(_))));
                done.fetch_add(placed.count() as u64, Ordering::Relaxed);
            }
        });
    }
    callers.join_all().await;
    let placed = done.load(Ordering::Relaxed) - before;
    let rate = placed as f64 / started.elapsed().as_secs_f64();
    eprintln!("  batched: {placed} bids in calls of {BATCH}, {rate:.0}/s");
    rate
}

/// Checks that a new process on the same store has every acknowledged bid and a sound journal.
async fn check_reopened_store(store: &Path, acknowledged: u64) -> Result<(), String> {
    let started = Instant::now();
    let served = Served::start(store);
    let channel = served.connect().await;
    let reopened = started.elapsed();
    let book = GetBookRequest { market: MARKET.into() };
    let units =
        MarketClient::new(channel.clone()).get_book(with(ADMIN, book)).await.unwrap().into_inner().units;
    let verify = VerifyRequest { market: MARKET.into() };
    let verdict = AdminClient::new(channel).verify(with(ADMIN, verify)).await.unwrap().into_inner();
    eprintln!(
        "  killed, reopened in {reopened:?}: {units} bids of {acknowledged} acknowledged; journal of {} commands sound: {}",
        verdict.commands, verdict.sound
    );
    served.kill();
    // A bid whose reply was lost at the end of the measurement may exist as well.
    if units < acknowledged {
        return Err(format!("{acknowledged} bids were acknowledged, {units} are in the store"));
    }
    if verdict.sound { Ok(()) } else { Err(verdict.detail) }
}

/// Properties of a process with `open` open bids of one unit.
pub(crate) struct Full {
    /// Memory after 10 s without load.
    pub(crate) rss_mib: f64,
    /// Time from a call until a reader has its price.
    pub(crate) published_p99_ms: Option<f64>,
    /// Time from SIGKILL until the first answer of the next process.
    pub(crate) restart_s: f64,
}

async fn full(open: u64, calls: usize) -> Full {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = dir.path().join("market.db");
    let served = Served::start(&store);
    let channels = served.channels().await;
    let empty = served.rss_mib();
    let tokens = Arc::new(tokens(channels[0].clone()).await);
    let (next, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    batches(&channels, &tokens, &next, &done, open, Duration::from_secs(600)).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let rss_mib = served.rss_mib();
    eprintln!("  memory of the server: {empty:.1} MiB without bids, {rss_mib:.1} MiB with {open}");
    let published_p99_ms = streams::published(channels[0].clone(), &tokens[0], calls).await;
    served.kill();
    let started = Instant::now();
    let served = Served::start(&store);
    let book = GetBookRequest { market: MARKET.into() };
    let book = MarketClient::new(served.connect().await).get_book(with(ADMIN, book)).await;
    let (units, restart_s) = (book.unwrap().into_inner().units, started.elapsed().as_secs_f64());
    eprintln!("  killed; the next process answers after {restart_s:.2} s with {units} open");
    served.kill();
    Full { rss_mib, published_p99_ms, restart_s }
}
