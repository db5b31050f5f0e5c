//! `cargo xtask bench bidnode`: twenty thousand pods packed; ten thousand BidNodes idle for a minute; a thousand notices.
//!
//! Operator and market are the real program in processes of their own; API server and etcd are real. The supplier registers
//! Nodes and runs no machines. The API server counts writes, the market counts calls.

#![allow(dead_code, reason = "the supplier is that of the tests, and serves more there")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark reports by panicking")]

#[path = "../../../coracle-bidnode/tests/api_bidnode/supplier.rs"]
mod supplier;

mod notices;
mod packing;

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use coracle_api::bidnode::{BidNode, BidNodeSpec};
use coracle_proto::market::{PutTenantRequest, admin_client::AdminClient};
use coracle_testkit::{
    cluster::Cluster,
    figures::{api_writes, cpu_seconds, figure, no_figure, rss_mib},
    netns,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, CustomResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
    runtime::wait::{await_condition, conditions::is_crd_established},
};
use serde_json::json;
use tokio::{task::JoinSet, time::sleep};
use tonic::{
    Request,
    transport::{Channel, Endpoint},
};

use supplier::{Lot, Supplier};

const ADMIN: &str = "bench-admin";
const OBJECTS: usize = 10_000;
/// Number of BidNodes with a Node; the others wait in the order book.
const NODES: u32 = 2_000;
const NAMESPACES: usize = 10;
/// Time limit of every step.
const LIMIT: Duration = Duration::from_secs(900);
/// Idle time before memory is read.
const IDLE: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);

const FIGURES: [(&str, &str); 7] = [
    ("bidnode.quiet_writes", "writes"),
    ("bidnode.quiet_calls", "calls"),
    ("bidnode.cores", "cores"),
    ("bidnode.rss_mib", "MiB"),
    ("bidnode.reconcile_p99_ms", "ms"),
    ("bidnode.cordon_single_p99_ms", "ms"),
    ("bidnode.cordon_1000_p99_ms", "ms"),
];

/// Number of printed figures.
static TOLD: AtomicUsize = AtomicUsize::new(0);

/// Prints the next figure.
fn print_next_figure(value: f64) {
    if let Some((name, unit)) = FIGURES.get(TOLD.fetch_add(1, Ordering::Relaxed)) {
        figure(name, value, unit);
    }
}

fn main() {
    figure("bidnode.pack_20k_ms", packing::packing_ms(), "ms");
    eprintln!("goal: 20000 pods within 2000 ms");
    no_figure("bidnode.pod_to_node_s", "the supplier starts no VMs: the provisioner does not exist yet", "s");
    eprintln!("goal: from a pod that fits nowhere to its node within 10 s");
    let _the_only_one = rustls::crypto::aws_lc_rs::default_provider().install_default();
    netns::run_within(Duration::from_secs(2400), || async {
        let dir = tempfile::tempdir().expect("a temporary directory");
        if let Err(error) = measure(dir.path()).await {
            for file in ["operator.log", "market.log"] {
                let log = std::fs::read_to_string(dir.path().join(file)).unwrap_or_default();
                let last: Vec<_> = log.lines().rev().take(20).collect();
                eprintln!("{file}:\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
            eprintln!("bidnode: {error:#}");
            for (name, unit) in FIGURES.into_iter().skip(TOLD.load(Ordering::Relaxed)) {
                no_figure(name, &format!("{error:#}"), unit);
            }
        }
    });
}

/// Process that ends with the benchmark.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(dir: &Path, log: &str, args: &[&str]) -> Result<Owned> {
    let log = std::fs::File::create(dir.join(log))?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    Ok(Owned(command.args(args).stdout(log.try_clone()?).stderr(log).spawn()?))
}

/// Returns a `host:port` that was free when it was checked.
fn free_address() -> Result<String> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.to_string())
}

fn with_token<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {ADMIN}").parse().unwrap());
    request
}

async fn measure(dir: &Path) -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.client();
    prepare(&client).await?;
    let (grpc, http, admin) = (free_address()?, free_address()?, free_address()?);
    let store = format!("sqlite:{}", dir.join("market.db").display());
    let serve =
        ["market", "serve", "--store", &store, "--grpc", &grpc, "--http", &http, "--admin-listen", &admin];
    let market =
        start(dir, "market.log", &[&serve[..], &["--region=local", "--admin-token", ADMIN]].concat())?;
    let channel = dial(&format!("http://{grpc}")).await?;
    let token = tenants(&channel).await?;
    notices::put_market(&channel, 30_000).await?;
    let supplier = Arc::new(Supplier::new(client.clone(), channel.clone(), token));
    supplier.offer(&Lot { market: "a100-4x/local".into(), units: NODES }).await;
    let mut supply = JoinSet::new();
    supply.spawn(supplier.serve());
    let kubeconfig = cluster.kubeconfig().display().to_string();
    let url = format!("http://{grpc}");
    let operator =
        ["operator", "--controllers=bidnode", "--no-election", "--kubeconfig", &kubeconfig, "--market", &url];
    let more = ["--market-token", ADMIN, "--market-cluster=bench", "--market-rate=2000", "--log=warn"];
    let scraped = free_address()?;
    let operator =
        start(dir, "operator.log", &[&operator[..], &more, &["--admin-listen", &scraped]].concat())?;
    let began = Instant::now();
    create(&client).await?;
    until_settled(&client).await?;
    eprintln!(
        "{OBJECTS} BidNodes, {NODES} with a Node, settled after {:.1} s",
        began.elapsed().as_secs_f64()
    );
    sleep(IDLE).await;
    let pid = operator.0.id();
    let passes = reconciles(&scraped).await?;
    let (cpu, writes, calls) = (cpu_seconds(pid)?, api_writes(&client).await?, calls(&admin).await?);
    sleep(MINUTE).await;
    let writes = api_writes(&client).await?.since(&writes);
    let calls = self::calls(&admin).await? - calls;
    let cores = (cpu_seconds(pid)? - cpu) / MINUTE.as_secs_f64();
    let rss = rss_mib(pid)?;
    let p99 = p99_ms(&passes, &reconciles(&scraped).await?)?;
    // Adding 0.0 turns the sum of nothing, which is -0.0, into 0.
    for value in [writes.total() + 0.0, calls, cores, rss, p99] {
        print_next_figure(value);
    }
    eprintln!("writes {writes:?}; the market has {:.0} MiB", rss_mib(market.0.id())?);
    eprintln!("goals: 0 writes, 0 calls, at most 0.25 cores and 300 MiB, reconcile p99 at most 5 ms");
    eprintln!("from a notice to its cordon, goals: p99 at most 1000 ms single, 5000 ms for 1000 at once");
    notices::measure(&client, &channel).await
}

async fn prepare(client: &Client) -> Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply("bench").force();
    crds.patch("bidnodes.kubebid.io", &params, &Patch::Apply(BidNode::crd())).await?;
    await_condition(crds, "bidnodes.kubebid.io", is_crd_established()).await?;
    for n in 0..NAMESPACES {
        let namespace: Namespace =
            serde_json::from_value(json!({"metadata": {"name": format!("bench-{n}")}}))?;
        Api::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    }
    Ok(())
}

async fn dial(url: &str) -> Result<Channel> {
    let began = Instant::now();
    loop {
        match Endpoint::from_shared(url.to_owned())?.connect().await {
            Ok(channel) => return Ok(channel),
            Err(error) if began.elapsed() > Duration::from_secs(30) => {
                return Err(error).context("the market");
            }
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Makes tenants without a limit on the operator's rate of bids, and returns the supplier's token.
async fn tenants(channel: &Channel) -> Result<String> {
    let mut admin = AdminClient::new(channel.clone());
    for n in 0..NAMESPACES {
        let tenant = format!("bench/bench-{n}");
        admin
            .put_tenant(with_token(PutTenantRequest { tenant, rate: 100_000, ..Default::default() }))
            .await?;
    }
    let host =
        PutTenantRequest { tenant: "host".into(), scopes: vec!["supply".into()], ..Default::default() };
    Ok(admin.put_tenant(with_token(host)).await?.into_inner().token)
}

async fn create(client: &Client) -> Result<()> {
    let one = |n: usize| {
        let spec = BidNodeSpec {
            instance_type: "a100-4x".into(),
            region: Some("local".into()),
            max_bid: 4.5,
            min_nodes: 1,
            max_nodes: 10,
            node_selector: [("workload".to_owned(), format!("training-{n}"))].into(),
            ..BidNodeSpec::default()
        };
        let mut object = BidNode::new(&format!("ml-training-{n}"), spec);
        object.metadata.labels =
            Some([("app.kubernetes.io/part-of".to_owned(), "training".to_owned())].into());
        let api: Api<BidNode> = Api::namespaced(client.clone(), &format!("bench-{}", n % NAMESPACES));
        async move { api.create(&PostParams::default(), &object).await.map(drop) }
    };
    stream::iter((0..OBJECTS).map(one)).buffer_unordered(16).try_collect::<Vec<_>>().await?;
    Ok(())
}

/// Waits until every object has its node or its bid, and there was no write for ten seconds.
async fn until_settled(client: &Client) -> Result<()> {
    let api: Api<BidNode> = Api::all(client.clone());
    let began = Instant::now();
    loop {
        let mut list = ListParams::default().limit(1000);
        let (mut active, mut pending) = (0, 0);
        loop {
            let page = api.list(&list).await?;
            for status in page.items.iter().filter_map(|o| o.status.as_ref()) {
                active += status.active_nodes.unwrap_or(0);
                pending += status.pending_bids.unwrap_or(0);
            }
            match page.metadata.continue_.filter(|t| !t.is_empty()) {
                Some(token) => list = list.continue_token(&token),
                None => break,
            }
        }
        let nodes = i32::try_from(NODES)?;
        if active == nodes && active + pending == i32::try_from(OBJECTS)? {
            let before = api_writes(client).await?;
            sleep(Duration::from_secs(10)).await;
            if api_writes(client).await?.since(&before).total() < 0.5 {
                return Ok(());
            }
        }
        ensure!(began.elapsed() < LIMIT, "{active} active and {pending} pending within {LIMIT:?}");
        sleep(Duration::from_secs(5)).await;
    }
}

/// Returns the number of calls that the market has answered for tenants: reads and trades, without open streams.
async fn calls(admin: &str) -> Result<f64> {
    let text = reqwest::get(format!("http://{admin}/metrics")).await?.text().await?;
    let lines = text.lines().filter(|l| l.starts_with("coracle_market_calls_total{"));
    let ours: Vec<_> = lines.filter(|l| l.contains("\"read\"") || l.contains("\"trade\"")).collect();
    if ours.is_empty() {
        bail!("the market does not count its calls");
    }
    Ok(ours.iter().filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

/// Returns the cumulative histogram of the durations of BidNode reconciles in seconds, from the operator's metrics, because no
/// other process knows when they begin.
async fn reconciles(admin: &str) -> Result<Vec<(f64, f64)>> {
    const SERIES: &str = "coracle_controller_reconcile_duration_seconds_bucket{";
    let text = reqwest::get(format!("http://{admin}/metrics")).await?.text().await?;
    let ours = text.lines().filter(|l| l.starts_with(SERIES) && l.contains("controller=\"bidnode\""));
    let bucket = |line: &str| {
        let edge = line.split_once("le=\"")?.1.split('"').next()?;
        let edge = if edge == "+Inf" { f64::INFINITY } else { edge.parse().ok()? };
        Some((edge, line.rsplit(' ').next()?.parse().ok()?))
    };
    let buckets: Option<Vec<_>> = ours.map(bucket).collect();
    buckets.filter(|buckets| !buckets.is_empty()).context("the operator does not count its reconciles")
}

/// Returns the 99th percentile of reconciles between two histograms: the edge of the bucket, in milliseconds.
fn p99_ms(before: &[(f64, f64)], after: &[(f64, f64)]) -> Result<f64> {
    let counts: Vec<_> = before.iter().zip(after).map(|((edge, old), (_, new))| (*edge, new - old)).collect();
    let all = counts.last().map_or(0.0, |(_, count)| *count);
    ensure!(all > 0.0, "nothing was reconciled");
    eprintln!("  {all} reconciles in the quiet minute, by seconds at most: {counts:?}");
    let edge = counts.iter().find(|(_, count)| *count >= all * 0.99).map_or(f64::INFINITY, |(edge, _)| *edge);
    ensure!(edge.is_finite(), "more than one reconcile in a hundred took longer than any edge");
    Ok(edge * 1000.0)
}
