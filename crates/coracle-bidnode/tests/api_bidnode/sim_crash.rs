//! Kills the controller after each of its calls in turn. The next instance completes the work: each node is bought once, and
//! nothing is left over.

use std::sync::Arc;

use coracle_api::{BidNode, bidnode::names::annotation};
use coracle_bidnode::{Config, MarketAt};
use coracle_reconcile::ControllerMetrics;
use coracle_testkit::{
    sim::{Scenario, Sim, crash_after_each_call},
    world,
};
use futures_util::future::BoxFuture;
use kube::{
    Api, Client, CustomResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    sim_market::{ADDRESS, MemoryConnect, SimMarket},
    world::{CLUSTER, World, create_in},
};

const SEED: u64 = 21;
const NS: &str = "team";
/// Consecutive reconciles that must write nothing.
const QUIET: u64 = 3;

/// Life of one BidNode that buys two nodes, releases one, and is deleted.
struct Life {
    sim: Sim,
    market: SimMarket,
    metrics: ControllerMetrics,
    _tasks: JoinSet<()>,
    /// Also wait until nothing changes, which takes most of the time.
    rests: bool,
}

impl Life {
    async fn new(sim: Sim, forgets: bool) -> anyhow::Result<Self> {
        sim.prepare(&[BidNode::crd()], NS);
        let market = SimMarket::new(&sim, 10);
        if forgets {
            market.forget();
        }
        let tasks = market.serve();
        Ok(Self { sim, market, metrics: ControllerMetrics::default(), _tasks: tasks, rests: false })
    }

    fn objects(&self) -> Api<BidNode> {
        Api::namespaced(self.sim.client(), NS)
    }

    /// Waits until `n` nodes are active.
    async fn until_active(&self, n: i32) -> anyhow::Result<()> {
        let is_so = |object: Option<&BidNode>| {
            object.and_then(|object| object.status.as_ref()).is_some_and(|status| {
                (status.active_nodes, status.pending_bids, status.preempting_nodes.unwrap_or(0))
                    == (Some(n), Some(0), 0)
            })
        };
        world::until(&self.objects(), "pool", &format!("active with {n} nodes"), is_so).await?;
        if !self.rests {
            return Ok(());
        }
        let passes = || self.metrics.reconciles(coracle_bidnode::CONTROLLER);
        self.sim.stays_quiet(QUIET, passes).await
    }
}

impl Scenario for Life {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let mut config = Config::new(MarketAt {
            url: format!("http://{ADDRESS}"),
            token: "token".into(),
            ca: None,
            token_file: None,
            cluster: CLUSTER.into(),
            rate: 1000,
        });
        config.connect = Arc::new(MemoryConnect(self.sim.clone()));
        config.times = World::times();
        (config.clock, config.metrics) = (self.sim.clock(), self.metrics.clone());
        Box::pin(async move { coracle_bidnode::run(client, config, CancellationToken::new()).await.unwrap() })
    }

    async fn script(&self) -> anyhow::Result<()> {
        create_in(&self.sim.client(), NS, "pool", |_| {}).await?;
        self.until_active(2).await?;
        let smaller = json!({
            "metadata": {"annotations": {annotation::IDLE_AFTER: "1s"}}, "spec": {"minNodes": 1},
        });
        self.objects().patch("pool", &PatchParams::default(), &Patch::Merge(smaller)).await?;
        self.until_active(1).await?;
        self.objects().delete("pool", &DeleteParams::default()).await?;
        world::until(&self.objects(), "pool", "gone", |object| object.is_none()).await?;
        Ok(())
    }

    fn facts(&self) -> Vec<String> {
        self.market.facts()
    }
}

#[test]
fn bidnode_at_rest_writes_nothing() {
    Sim::run(SEED, |sim| async move {
        let life = Life { rests: true, ..Life::new(sim.clone(), false).await? };
        let mut controller = JoinSet::new();
        controller.spawn(life.controller(sim.client()));
        life.script().await
    });
}

#[test]
fn bidnode_converges_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| Life::new(sim, false)).unwrap();
    eprintln!("crash points: {calls}");
    assert!(calls >= 20, "finalizer, bid, Nodes, release, status, and reads between: {calls}");
}

/// Mutation test: with a market that forgets bids, a crash after PlaceBid must show as a second bid. Otherwise the test above
/// proves nothing.
#[test]
fn crash_test_finds_a_second_bid() {
    let error = crash_after_each_call(SEED, |sim| Life::new(sim, true)).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("PlaceBid") && error.contains("bids placed: [2, 2]"), "{error}");
}
