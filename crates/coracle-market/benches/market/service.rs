//! The service in a process of its own: intake over gRPC, replies after the disk, then the process
//! is killed, the store reopened and counted.

use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coracle_proto::market::admin_client::AdminClient;
use coracle_proto::market::market_client::MarketClient;
use coracle_proto::market::trading_client::TradingClient;
use coracle_proto::market::{
    GetBookRequest, PlaceBidRequest, PlaceBidsRequest, PutTenantRequest, VerifyRequest, place_bid_result,
};
use tokio::task::JoinSet;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use crate::engine::percentile;

const ADMIN: &str = "bench-admin";
const MARKET: &str = "a100-4x/local";
const TENANTS: usize = 100;
const CONNECTIONS: usize = 4;
const CALLERS: usize = 256;
const BATCHERS: usize = 8;
const BATCH: usize = 512;

/// What was measured; nothing where the store did not hold what was acknowledged.
pub(crate) struct Outcome {
    pub(crate) single: Option<f64>,
    pub(crate) batched: Option<f64>,
    pub(crate) rss_mib: Option<f64>,
    pub(crate) why: String,
}

struct Served {
    child: Child,
    _alive: ChildStdin,
    grpc: String,
}

impl Served {
    fn start(store: &Path) -> Self {
        use std::io::BufRead;
        let mut child = Command::new(env!("CARGO_BIN_EXE_coracle-market-server"))
            .arg(format!("sqlite:{}", store.display()))
            .arg(ADMIN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let grpc = format!("http://{}", lines.next().unwrap().unwrap());
        let alive = child.stdin.take().unwrap();
        Self { child, _alive: alive, grpc }
    }

    async fn connect(&self) -> Channel {
        Endpoint::from_shared(self.grpc.clone()).unwrap().tcp_nodelay(true).connect().await.unwrap()
    }

    fn rss_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn with<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

/// The n-th bid: owners, keys and labels of the size that the operator's have.
fn bid(n: u64) -> PlaceBidRequest {
    let owner = n / 64 % 1000;
    let spread = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    PlaceBidRequest {
        market: MARKET.into(),
        limit_micros: 2_000_000 + i64::try_from(spread % 59_000).unwrap() * 100,
        quantity: 1,
        owner_uid: format!("6f9619ff-8b86-d011-b42d-{owner:012x}"),
        idempotency_key: format!("6f9619ff-8b86-d011-b42d-{owner:012x}/{n}"),
        ..PlaceBidRequest::default()
    }
}

async fn tokens(channel: Channel) -> Vec<String> {
    let mut admin = AdminClient::new(channel);
    let mut tokens = Vec::new();
    for n in 0..TENANTS {
        let tenant = PutTenantRequest {
            tenant: format!("bench/ns-{n}"),
            rate: 100_000_000,
            scopes: vec!["trade".into(), "read".into()],
            ..PutTenantRequest::default()
        };
        tokens.push(admin.put_tenant(with(ADMIN, tenant)).await.unwrap().into_inner().token);
    }
    tokens
}

/// Runs both intakes, fills up to `open` open bids, and counts them in a new process.
pub(crate) async fn run(open: u64, seconds: u64) -> Outcome {
    let dir = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
    let store = dir.path().join("market.db");
    let served = Served::start(&store);
    let mut channels = Vec::new();
    for _ in 0..CONNECTIONS {
        channels.push(served.connect().await);
    }
    let tokens = Arc::new(tokens(channels[0].clone()).await);
    let (next, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));

    let single = singles(&channels, &tokens, &next, &done, Duration::from_secs(seconds)).await;
    let batched = batches(&channels, &tokens, &next, &done, u64::MAX, Duration::from_secs(seconds)).await;
    let acknowledged = done.load(Ordering::Relaxed);
    served.kill();

    let (single, batched, why) = match counted(&store, acknowledged).await {
        Ok(()) => (Some(single), Some(batched), String::new()),
        Err(why) => (None, None, why),
    };
    drop(dir);
    let rss_mib = Some(rss(open).await);
    Outcome { single, batched, rss_mib, why }
}

/// One bid a call, many callers.
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

/// 512 bids a call, until the time is over or so many are placed.
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

/// A new process on the same store has every acknowledged bid, and its journal is sound.
async fn counted(store: &Path, acknowledged: u64) -> Result<(), String> {
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
    // A bid whose reply was cut off by the end of the measurement may be there too.
    if units < acknowledged {
        return Err(format!("{acknowledged} bids were acknowledged, {units} are in the store"));
    }
    if verdict.sound { Ok(()) } else { Err(verdict.detail) }
}

/// Memory of a process that took `open` bids of one unit and was idle for 10 s since.
async fn rss(open: u64) -> f64 {
    let dir = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
    let served = Served::start(&dir.path().join("market.db"));
    let mut channels = Vec::new();
    for _ in 0..CONNECTIONS {
        channels.push(served.connect().await);
    }
    let empty = served.rss_mib();
    let tokens = Arc::new(tokens(channels[0].clone()).await);
    let (next, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    batches(&channels, &tokens, &next, &done, open, Duration::from_secs(600)).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let full = served.rss_mib();
    let book = GetBookRequest { market: MARKET.into() };
    let units =
        MarketClient::new(channels[0].clone()).get_book(with(ADMIN, book)).await.unwrap().into_inner().units;
    eprintln!("  memory of the server: {empty:.1} MiB without bids, {full:.1} MiB with {units}");
    served.kill();
    full
}
