//! Isolated failures in simulations: a failed call stops nothing that does not depend on it, and what a deleted BidNode left
//! behind is ended.

use std::sync::Arc;

use coracle_api::{BidNode, bidnode::names::annotation};
use coracle_auction::{AllocationId, AllocationState, BidRequest, Command, EndReason, Price, Reply};
use coracle_bidnode::{Config, MarketAt};
use coracle_reconcile::WallTime as _;
use coracle_testkit::{eventually, sim::Sim, world};
use http::{Method, Request, Response, StatusCode};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, CustomResourceExt as _, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    client::Body,
};
use serde_json::json;
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    sim_market::{ADDRESS, MemoryConnect, SimMarket},
    supplier::set_ready_at,
    world::{CLUSTER, World, create_in},
};

const SEED: u64 = 5;
const NS: &str = "team";
/// Long enough that no deadline ends a pod within a test.
const NOTICE_MS: u64 = 600_000;

/// Simulation with a market of a given number of slots.
struct Fixture {
    sim: Sim,
    market: SimMarket,
    tasks: JoinSet<()>,
}

impl Fixture {
    fn new(sim: &Sim, slots: u32) -> Self {
        sim.prepare(&[BidNode::crd()], NS);
        let market = SimMarket::with_notice(sim, slots, NOTICE_MS);
        let tasks = market.serve();
        Self { sim: sim.clone(), market, tasks }
    }

    /// Starts the controller with its own client.
    fn operator(&mut self, client: Client) -> AbortHandle {
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
        config.clock = self.sim.clock();
        self.tasks.spawn(async move {
            coracle_bidnode::run(client, config, CancellationToken::new()).await.unwrap();
        })
    }

    fn objects(&self) -> Api<BidNode> {
        Api::namespaced(self.sim.client(), NS)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.sim.client(), NS)
    }

    async fn create(&self, name: &str, nodes: i32) -> anyhow::Result<()> {
        let size = |object: &mut BidNode| (object.spec.min_nodes, object.spec.max_nodes) = (nodes, nodes);
        create_in(&self.sim.client(), NS, name, size).await?;
        anyhow::Ok(())
    }

    async fn until_active(&self, name: &str, n: i32) -> anyhow::Result<()> {
        let is_so = |object: Option<&BidNode>| {
            object.and_then(|object| object.status.as_ref()).is_some_and(|s| s.active_nodes == Some(n))
        };
        world::until(&self.objects(), name, &format!("active with {n} nodes"), is_so).await.map(drop)
    }

    /// Names of the Nodes, in order.
    async fn nodes(&self) -> anyhow::Result<Vec<String>> {
        let nodes: Api<Node> = Api::all(self.sim.client());
        let list = nodes.list(&ListParams::default()).await?;
        let mut names: Vec<_> = list.items.iter().map(|node| node.name_any()).collect();
        names.sort();
        Ok(names)
    }

    async fn run_pod(&self, name: &str, node: &str) -> anyhow::Result<()> {
        let pod = json!({
            "metadata": {"name": name},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "x"}]},
        });
        self.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        anyhow::Ok(())
    }

    /// Bids of another tenant above all others.
    fn outbid(&self, quantity: u32) {
        let (tenant, owner) = self.market.outsider("rival");
        let request = BidRequest {
            tenant,
            owner,
            if_owner_version: None,
            key: [0; 16],
            body: 0,
            limit: Price::micros(7_000_000),
            quantity,
            min_fill: 0,
            lease_ms: 86_400_000,
            expires_at: None,
            labels: Vec::new(),
        };
        let (reply, _) = self.market.apply(Command::Place { request: Box::new(request) }).unwrap();
        assert!(matches!(reply, Reply::Bid { .. }), "{reply:?}");
    }

    /// Number of open units and of live allocations of a BidNode.
    fn remaining_units(&self, name: &str) -> (u32, usize) {
        let is_of = |bid: &coracle_auction::Bid| bid.labels().iter().any(|(_, value)| &**value == name);
        self.market.read(|engine| {
            let bids = || engine.bids().filter(|(_, bid)| is_of(bid));
            let live = |id| {
                let all = engine.allocations_of(id);
                all.filter(|(_, row)| row.state() != AllocationState::Ended).count()
            };
            (bids().map(|(_, bid)| u32::from(bid.units().open)).sum(), bids().map(|(id, _)| live(id)).sum())
        })
    }
}

/// Client whose requests matching `fails` get a server error.
fn failing(client: Client, fails: impl Fn(&Request<Body>) -> bool + Clone + Send + Sync + 'static) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, fails) = (client.clone(), fails(&request));
        async move {
            if !fails {
                return client.send(request).await;
            }
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "This pod has more than one PodDisruptionBudget", "reason": "InternalError", "code": 500,
            });
            let answer = Response::builder().status(StatusCode::INTERNAL_SERVER_ERROR);
            answer
                .header("content-type", "application/json")
                .body(Body::from(status.to_string().into_bytes()))
                .map_err(kube::Error::HttpError)
        }
    });
    Client::new(service, "default")
}

/// kube-apiserver always answers 500 to the eviction of a pod that two disruption budgets select.
#[test]
fn failed_eviction_stops_neither_other_nodes_nor_trade() {
    Sim::run(SEED, |sim| async move {
        let mut fixture = Fixture::new(&sim, 2);
        let stuck = |request: &Request<Body>| {
            request.method() == Method::POST && request.uri().path().ends_with("/pods/stuck/eviction")
        };
        fixture.operator(failing(sim.client(), stuck));
        fixture.create("pool", 2).await?;
        fixture.until_active("pool", 2).await?;
        let nodes = fixture.nodes().await?;
        fixture.run_pod("stuck", &nodes[0]).await?;
        fixture.run_pod("evictable", &nodes[1]).await?;
        fixture.outbid(2);
        world::until(&fixture.pods(), "evictable", "gone", |pod| pod.is_none()).await?;
        assert!(fixture.pods().get_opt("stuck").await?.is_some(), "its eviction fails");
        let replaced = async || (fixture.remaining_units("pool").0 == 2).then_some(());
        eventually("two replacements are bid for", replaced).await
    });
}

/// The finalizer is patched away while no controller runs, so no controller observes the deletion.
#[test]
fn bids_allocations_and_nodes_of_a_gone_bidnode_are_ended() {
    Sim::run(SEED, |sim| async move {
        let mut fixture = Fixture::new(&sim, 3);
        let operator = fixture.operator(sim.client());
        fixture.create("kept", 1).await?;
        fixture.until_active("kept", 1).await?;
        fixture.create("gone", 3).await?;
        fixture.until_active("gone", 2).await?;
        assert_eq!(fixture.remaining_units("gone"), (1, 2), "one more node is wanted than there is");
        operator.abort();
        let without = json!({"metadata": {"finalizers": null}});
        fixture.objects().patch("gone", &PatchParams::default(), &Patch::Merge(without)).await?;
        fixture.objects().delete("gone", &DeleteParams::default()).await?;
        assert!(fixture.objects().get_opt("gone").await?.is_none());
        fixture.operator(sim.client());
        let ended = async || (fixture.remaining_units("gone") == (0, 0)).then_some(());
        eventually("bids and allocations of the gone BidNode end", ended).await?;
        let alone = async || (fixture.nodes().await.unwrap().len() == 1).then_some(());
        eventually("its Nodes are deleted", alone).await?;
        assert_eq!(fixture.remaining_units("kept"), (0, 1), "a BidNode that exists keeps what it has");
        anyhow::Ok(())
    });
}

/// A release tells the market whether the node had failed or was no longer needed.
#[test]
fn release_of_a_failed_node_names_the_failure() {
    Sim::run(SEED, |sim| async move {
        let mut fixture = Fixture::new(&sim, 3);
        fixture.operator(sim.client());
        fixture.create("pool", 3).await?;
        fixture.until_active("pool", 3).await?;
        let failed = &fixture.nodes().await?[0];
        set_ready_at(&sim.client(), failed, false, sim.clock().timestamp()).await;
        let reasons = || -> Vec<(AllocationId, EndReason)> {
            fixture.market.read(|engine| {
                engine.allocations().filter_map(|(id, row)| Some((id, row.reason()?))).collect()
            })
        };
        let ended = async || (!reasons().is_empty()).then_some(());
        eventually("the allocation of the failed node ends", ended).await?;
        assert!(matches!(reasons()[..], [(_, EndReason::NodeFailed)]), "{:?}", reasons());
        fixture.until_active("pool", 3).await
    });
}

/// A pod that fits by its requests but is refused by the scheduler for another reason buys one node and no more. An event
/// reports this.
#[test]
fn pod_still_unschedulable_after_one_node_gets_an_event() {
    Sim::run(SEED, |sim| async move {
        let mut fixture = Fixture::new(&sim, 3);
        fixture.operator(sim.client());
        let any = |object: &mut BidNode| {
            (object.spec.min_nodes, object.spec.max_nodes) = (0, 3);
            object.metadata.annotations = Some([(annotation::IDLE_AFTER.into(), "1s".into())].into());
        };
        create_in(&sim.client(), NS, "pool", any).await?;
        let pod = json!({
            "metadata": {"name": "unfit"},
            "spec": {"containers": [{"name": "c", "image": "x", "resources": {"requests": {"cpu": "1"}}}]},
        });
        fixture.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        let refused = json!({"status": {"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "lastTransitionTime": sim.clock().timestamp(),
        }]}});
        fixture.pods().patch_status("unfit", &PatchParams::default(), &Patch::Merge(refused)).await?;
        fixture.until_active("pool", 1).await?;
        let note = world::until_event(&sim.client(), NS, "unfit", "NotTriggeredScaleUp").await?;
        assert!(note.contains("BidNode team/pool"), "{note}");
        fixture.until_active("pool", 0).await
    });
}
