//! Environment of one test: a namespace of the cluster, and a market of its own.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use coracle_api::bidnode::{BidNode, BidNodeSpec, BidNodeStatus, names};
use coracle_bidnode::{BidMetrics, Config, MarketAt, Times};
use coracle_market::Accounts;
use coracle_proto::market::{
    self as pb, admin_client::AdminClient, market_client::MarketClient, trading_client::TradingClient,
};
use coracle_reconcile::find;
use coracle_testkit::{
    cluster::Cluster,
    eventually_within,
    world::{self, Process},
};
use coracle_types::Clock;
use k8s_openapi::api::{core::v1::Node, events::v1::Event};
use kube::{
    Api, Client, CustomResourceExt as _, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::{sync::oneshot, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request,
    transport::{Channel, Endpoint},
};

use crate::supplier::{Lot, Supplier};

/// Longest wait for an expected state.
pub(crate) const LIMIT: Duration = Duration::from_secs(50);
pub(crate) const ADMIN: &str = "test-admin";
/// Name of the cluster at the market.
pub(crate) const CLUSTER: &str = "test";
pub(crate) const HERE: &str = "a100-4x/us-west-2";

/// Market that runs in this process.
pub(crate) struct Served {
    stop: CancellationToken,
    task: JoinSet<()>,
    pub(crate) grpc: SocketAddr,
}

impl Served {
    /// Stops the market and waits until all its tasks have ended.
    pub(crate) async fn end(mut self) {
        self.stop.cancel();
        while self.task.join_next().await.is_some() {}
    }
}

pub(crate) async fn serve(
    store: &std::path::Path,
    grpc: SocketAddr,
    clock: Clock,
    accounts: Option<Accounts>,
) -> anyhow::Result<Served> {
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    let config = coracle_market::Config {
        store: format!("sqlite:{}", store.display()).parse()?,
        grpc,
        http: any,
        tls: None,
        plaintext: false,
        admin: None,
        regions: Vec::new(),
        default_region: None,
        admin_token: Some(ADMIN.into()),
        lease: Duration::from_secs(10),
        advertise: None,
        accounts,
        clock,
    };
    let (tell, told) = oneshot::channel();
    let (stop, mut task) = (CancellationToken::new(), JoinSet::new());
    let inner = stop.clone();
    task.spawn(async move {
        let ready = |at: coracle_market::Server| tell.send(at.grpc).unwrap();
        Box::pin(coracle_market::serve(config, inner, ready)).await.unwrap();
    });
    let grpc = told.await.context("the market serves")?;
    Ok(Served { stop, task, grpc })
}

pub(crate) struct World {
    pub(crate) cluster: &'static Cluster,
    pub(crate) client: Client,
    pub(crate) ns: String,
    pub(crate) channel: Channel,
    dir: tempfile::TempDir,
    market: Option<Served>,
    at: SocketAddr,
    supplier: Option<Arc<Supplier>>,
    tasks: JoinSet<()>,
}

pub(crate) fn with<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {ADMIN}").parse().unwrap());
    request
}

/// Installs the CRD. Idempotent.
pub(crate) async fn install(client: &Client) -> anyhow::Result<()> {
    world::install(client, &[BidNode::crd()]).await
}

impl World {
    /// Creates a world with the market of the article, without supply.
    pub(crate) async fn new(cluster: &'static Cluster) -> anyhow::Result<Self> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let client = cluster.client();
        install(&client).await?;
        let ns = cluster.namespace().await?;
        let dir = tempfile::tempdir()?;
        let market =
            serve(&dir.path().join("market.db"), ([127, 0, 0, 1], 0).into(), Clock::system(), None).await?;
        let at = market.grpc;
        let channel = Endpoint::from_shared(format!("http://{at}"))?.connect_lazy();
        let (market, supplier, tasks) = (Some(market), None, JoinSet::new());
        let world = Self { cluster, client, ns, channel, dir, market, at, supplier, tasks };
        world.put_market(HERE, 2_000_000, 8_000_000, 0).await;
        Ok(world)
    }

    pub(crate) async fn put_market(&self, market: &str, reserve: i64, cap: i64, min_runtime_ms: i64) {
        self.put_market_every(market, reserve, cap, min_runtime_ms, 1500).await;
    }

    /// Creates a market whose calls have an interval, in milliseconds.
    pub(crate) async fn put_market_every(
        &self,
        market: &str,
        reserve: i64,
        cap: i64,
        min_runtime_ms: i64,
        call_interval_ms: i64,
    ) {
        let put = pb::PutMarketRequest {
            market: market.into(),
            reserve_micros: reserve,
            cap_micros: cap,
            call_interval_ms,
            min_runtime_ms: Some(min_runtime_ms),
            notice_ms: 10_000,
            ..pb::PutMarketRequest::default()
        };
        AdminClient::new(self.channel.clone()).put_market(with(put)).await.unwrap();
    }

    /// Stops the market without notice to its clients.
    pub(crate) async fn market_down(&mut self) {
        self.market.take().unwrap().end().await;
    }

    /// Starts the market again with its stored state.
    pub(crate) async fn market_up(&mut self) -> anyhow::Result<()> {
        self.market_up_by(Clock::system()).await
    }

    /// Starts the market again with another clock.
    pub(crate) async fn market_up_by(&mut self, clock: Clock) -> anyhow::Result<()> {
        self.market = Some(serve(&self.store(), self.at, clock, None).await?);
        self.resupply();
        anyhow::Ok(())
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.dir.path().join("market.db")
    }

    /// Sets the number of units that are supplied in a market.
    pub(crate) async fn supply(&mut self, market: &str, units: u32) {
        if self.supplier.is_none() {
            let put = pb::PutTenantRequest {
                tenant: "host".into(),
                scopes: vec!["supply".into()],
                ..Default::default()
            };
            let told =
                AdminClient::new(self.channel.clone()).put_tenant(with(put)).await.unwrap().into_inner();
            let supplier = Supplier::new(self.client.clone(), self.channel.clone(), told.token);
            self.supplier = Some(Arc::new(supplier));
            self.resupply();
        }
        let supplier = self.supplier.clone().unwrap();
        supplier.offer(&Lot { market: market.into(), units }).await;
    }

    fn resupply(&mut self) {
        if let Some(supplier) = self.supplier.clone() {
            self.tasks.spawn(supplier.serve());
        }
    }

    pub(crate) fn times() -> Times {
        Times::default().divide(20)
    }

    pub(crate) fn config(&self, times: Times) -> Config {
        let market = MarketAt {
            url: format!("http://{}", self.at),
            token: ADMIN.into(),
            ca: None,
            token_file: None,
            cluster: CLUSTER.into(),
            rate: 1000,
        };
        let mut config = Config::new(market);
        config.namespace = Some(self.ns.clone());
        config.times = times;
        config
    }

    pub(crate) fn operator(&self) -> Operator {
        Operator::start(self.cluster.client(), self.config(Self::times()))
    }

    pub(crate) fn objects(&self) -> Api<BidNode> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    /// Creates the BidNode of the article, with a change.
    pub(crate) async fn create(
        &self,
        name: &str,
        change: impl FnOnce(&mut BidNode),
    ) -> anyhow::Result<BidNode> {
        create_in(&self.client, &self.ns, name, change).await
    }

    pub(crate) async fn edit(&self, name: &str, patch: Value) -> anyhow::Result<()> {
        self.objects().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        anyhow::Ok(())
    }

    pub(crate) async fn status(&self, name: &str) -> BidNodeStatus {
        self.objects().get_opt(name).await.unwrap().and_then(|o| o.status).unwrap_or_default()
    }

    /// Waits until the status matches.
    pub(crate) async fn until(
        &self,
        name: &str,
        is_so: impl Fn(&BidNodeStatus) -> bool,
    ) -> anyhow::Result<BidNodeStatus> {
        let found = within_limit(async || Some(self.status(name).await).filter(|s| is_so(s))).await;
        match found {
            Some(status) => Ok(status),
            None => anyhow::bail!(
                "{name} is not as wanted: {:#?}\n{:?}\n{:?}",
                self.status(name).await,
                self.bids(name).await,
                self.nodes(name).await.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
            ),
        }
    }

    pub(crate) async fn until_active(&self, name: &str, n: i32) -> anyhow::Result<BidNodeStatus> {
        self.until(name, |s| s.active_nodes == Some(n)).await
    }

    pub(crate) async fn until_reason(&self, name: &str, kind: &str, reason: &str) -> anyhow::Result<String> {
        let status =
            self.until(name, |s| find(&s.conditions, kind).is_some_and(|c| c.reason == reason)).await?;
        Ok(find(&status.conditions, kind).map(|c| c.message.clone()).unwrap_or_default())
    }

    pub(crate) async fn until_event(&self, reason: &str) -> anyhow::Result<Event> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.ns);
        let found = within_limit(async || {
            let all = api.list(&ListParams::default()).await.unwrap();
            all.into_iter().find(|e| e.reason.as_deref() == Some(reason))
        });
        found.await.ok_or_else(|| anyhow::anyhow!("no event {reason}"))
    }

    /// Number of times that an event about an object was emitted.
    pub(crate) async fn event_count(&self, name: &str, reason: &str) -> i32 {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.ns);
        let all = api.list(&ListParams::default()).await.unwrap().items;
        let of = |e: &&Event| {
            let object = e.regarding.as_ref().and_then(|o| o.name.as_deref());
            e.reason.as_deref() == Some(reason) && object == Some(name)
        };
        all.iter().filter(of).map(|e| e.series.as_ref().map_or(1, |series| series.count)).sum()
    }

    /// All bids that a BidNode ever placed, from the market.
    pub(crate) async fn bids(&self, name: &str) -> Vec<pb::Bid> {
        self.bids_of(&self.ns, name).await
    }

    pub(crate) async fn bids_of(&self, ns: &str, name: &str) -> Vec<pb::Bid> {
        let request = pb::GetPendingBidsRequest {
            tenant: format!("{CLUSTER}/{ns}"),
            include_ended: true,
            ..pb::GetPendingBidsRequest::default()
        };
        let reply = TradingClient::new(self.channel.clone()).get_pending_bids(with(request)).await.unwrap();
        let mut bids = reply.into_inner().bids;
        bids.retain(|b| b.labels.get(names::BIDNODE).is_some_and(|n| n == name));
        bids
    }

    pub(crate) async fn until_bids(
        &self,
        name: &str,
        is_so: impl Fn(&[pb::Bid]) -> bool,
    ) -> anyhow::Result<Vec<pb::Bid>> {
        let found = within_limit(async || Some(self.bids(name).await).filter(|b| is_so(b))).await;
        match found {
            Some(bids) => Ok(bids),
            None => anyhow::bail!(
                "bids are not as wanted: {:#?}\n{:#?}",
                self.bids(name).await,
                self.status(name).await
            ),
        }
    }

    /// Allocations of a BidNode that have not ended.
    pub(crate) async fn allocations(&self, name: &str) -> Vec<pb::Allocation> {
        self.allocations_of(name, false).await
    }

    /// All allocations that a BidNode ever had.
    pub(crate) async fn allocations_ever(&self, name: &str) -> Vec<pb::Allocation> {
        self.allocations_of(name, true).await
    }

    async fn allocations_of(&self, name: &str, include_ended: bool) -> Vec<pb::Allocation> {
        let uid = self.objects().get(name).await.unwrap().uid().unwrap();
        let request = pb::ListAllocationsRequest {
            owner_uid: uid,
            tenant: format!("{CLUSTER}/{}", self.ns),
            include_ended,
        };
        let reply = TradingClient::new(self.channel.clone()).list_allocations(with(request)).await.unwrap();
        reply.into_inner().allocations
    }

    /// Places a bid of another tenant.
    pub(crate) async fn rival(&self, market: &str, limit_micros: i64, quantity: u32) -> String {
        let request = pb::PlaceBidRequest {
            market: market.into(),
            limit_micros,
            quantity,
            tenant: "rival".into(),
            owner_uid: format!("rival-{limit_micros}"),
            ..pb::PlaceBidRequest::default()
        };
        let reply = TradingClient::new(self.channel.clone()).place_bid(with(request)).await.unwrap();
        reply.into_inner().bid
    }

    pub(crate) async fn price(&self, market: &str) -> pb::MarketPrice {
        let (kind, region) = market.split_once('/').unwrap();
        let request = pb::GetMarketPriceRequest { instance_type: kind.into(), region: region.into() };
        MarketClient::new(self.channel.clone()).get_market_price(with(request)).await.unwrap().into_inner()
    }

    /// Nodes of a BidNode.
    pub(crate) async fn nodes(&self, name: &str) -> Vec<Node> {
        let labels = format!("{}={name},{}={}", names::BIDNODE, names::NAMESPACE, self.ns);
        Api::all(self.client.clone()).list(&ListParams::default().labels(&labels)).await.unwrap().items
    }

    pub(crate) async fn until_nodes(&self, name: &str, n: usize) -> anyhow::Result<Vec<Node>> {
        let found =
            within_limit(async || Some(self.nodes(name).await).filter(|nodes| nodes.len() == n)).await;
        found.with_context(|| format!("not {n} Nodes of {name}"))
    }
}

pub(crate) async fn create_in(
    client: &Client,
    ns: &str,
    name: &str,
    change: impl FnOnce(&mut BidNode),
) -> anyhow::Result<BidNode> {
    let spec = BidNodeSpec {
        instance_type: "a100-4x".into(),
        region: Some("us-west-2".into()),
        max_bid: 5.0,
        min_nodes: 2,
        max_nodes: 5,
        ..BidNodeSpec::default()
    };
    let mut object = BidNode::new(name, spec);
    change(&mut object);
    Ok(Api::namespaced(client.clone(), ns).create(&PostParams::default(), &object).await?)
}

/// Creates a pod that no node has room for, with the conditions that the scheduler sets.
pub(crate) async fn waiting_pod(client: &Client, ns: &str, name: &str, gpus: u32) -> anyhow::Result<()> {
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(client.clone(), ns);
    let pod = json!({
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "x", "resources": {
                "requests": {"cpu": "1", "nvidia.com/gpu": gpus.to_string()},
                "limits": {"nvidia.com/gpu": gpus.to_string()},
            }}],
        },
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    let status = json!({"status": {"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
    ]}});
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
    Ok(())
}

/// Binds a pod to a node, as the scheduler would.
pub(crate) async fn bind(client: &Client, ns: &str, pod: &str, node: &str) -> anyhow::Result<()> {
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let request = http_post(&format!("/api/v1/namespaces/{ns}/pods/{pod}/binding"), &binding)?;
    client.request_text(request).await?;
    Ok(())
}

fn http_post(path: &str, body: &Value) -> anyhow::Result<http::Request<Vec<u8>>> {
    let request = http::Request::post(path).header("content-type", "application/json");
    Ok(request.body(serde_json::to_vec(body)?)?)
}

/// Polls `ask` until it returns a value, for at most [`LIMIT`].
pub(crate) async fn within_limit<T>(ask: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    eventually_within(LIMIT, "", ask).await.ok()
}

/// Running operator. Dropping it kills it at once.
pub(crate) struct Operator {
    process: Process<coracle_bidnode::Error>,
    registry: Registry,
}

impl Operator {
    pub(crate) fn start(client: Client, mut config: Config) -> Self {
        let mut registry = Registry::default();
        config.bid_metrics = BidMetrics::register(&mut registry);
        Self { process: Process::start(|stop| coracle_bidnode::run(client, config, stop)), registry }
    }

    /// Text of a metrics scrape.
    pub(crate) fn scrape(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }

    /// Value of a counter or gauge, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.scrape();
        let lines = text.lines().filter(|l| {
            l.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' '))
        });
        lines.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until `n` more reconciles have ended.
    pub(crate) async fn wait_for_reconciles(&self, n: f64) -> anyhow::Result<()> {
        self.wait_for_reconciles_within(n, LIMIT).await
    }

    /// Like [`Self::wait_for_reconciles`], with another deadline.
    pub(crate) async fn wait_for_reconciles_within(&self, n: f64, limit: Duration) -> anyhow::Result<()> {
        let passes = || self.metric("bidnode_reconcile_total");
        let enough = passes() + n;
        eventually_within(limit, "more reconciles", async || (passes() >= enough).then_some(())).await
    }

    /// Requests a stop and waits until the operator has ended.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.process.stop().await
    }

    /// Kills the operator at once, and waits until all its tasks have ended.
    pub(crate) async fn kill(self) {
        self.process.kill().await;
    }
}
