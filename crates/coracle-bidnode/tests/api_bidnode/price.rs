//! Rising prices and lowered limits.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Context as _;
use coracle_api::bidnode::{
    BidStrategy,
    names::{self, annotation},
};
use coracle_bidnode::Times;
use coracle_proto::market::AllocationState;
use coracle_testkit::cluster;
use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde_json::json;

use crate::world::{HERE, LIMIT, Operator, World, within_limit};

/// Market with a long interval between its calls.
const SLOW: &str = "a100-4x/slow";

/// Creates a world with one running node of the strategy and one unit in total.
async fn running(
    cluster: &'static coracle_testkit::cluster::Cluster,
    strategy: BidStrategy,
    defend: bool,
) -> anyhow::Result<(World, crate::world::Operator)> {
    let mut w = World::new(cluster).await?;
    // Risk signals come every five seconds, so the next call must come later.
    w.put_market_every(SLOW, 2_000_000, 8_000_000, 0, 12_000).await;
    let market = if strategy == BidStrategy::Balanced { SLOW } else { HERE };
    w.supply(market, 1).await;
    let operator = w.operator();
    w.create("node", |o| {
        o.spec.region = market.split_once('/').map(|(_, region)| region.to_owned());
        (o.spec.min_nodes, o.spec.bid_strategy) = (1, strategy);
        if !defend {
            o.metadata.annotations = Some([(annotation::DEFEND.into(), "false".into())].into());
        }
    })
    .await?;
    w.until_active("node", 1).await?;
    Ok((w, operator))
}

/// Returns the first allocation; `None` if it no longer runs.
async fn first(w: &World) -> Option<coracle_proto::market::Allocation> {
    w.allocations("node")
        .await
        .into_iter()
        .find(|u| matches!(u.state(), AllocationState::Active | AllocationState::Preempting))
}

/// Acceptance 9.
#[test]
fn acceptance_09_cost_optimized_loses_node_when_price_rises() {
    cluster::run(|cluster| async move {
        let (w, operator) = running(cluster, BidStrategy::CostOptimized, true).await?;
        // The node is idle, so it is released right after the notice; only the event remains.
        let name = w.until_nodes("node", 1).await?[0].name_any();
        w.rival(HERE, 2_500_000, 1).await;
        let event = w.until_event("NodePreempted").await?;
        assert_eq!(
            event.note.as_deref(),
            Some(format!("Node {name} pre-empted due to price increase").as_str())
        );
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        w.until("node", |s| s.active_nodes == Some(0)).await?;
        operator.stop().await
    });
}

/// Acceptance 9.
#[test]
fn acceptance_09_balanced_raises_limit_to_keep_node() {
    cluster::run(|cluster| async move {
        let (w, operator) = running(cluster, BidStrategy::Balanced, true).await?;
        // Above the limit of 2.88 and below the resulting quote.
        w.rival(SLOW, 3_000_000, 1).await;
        let raised = async || first(&w).await.filter(|u| u.limit_micros >= 3_000_000);
        let allocation = within_limit(raised).await;
        let Some(allocation) = allocation else {
            anyhow::bail!("not defended: {:?} {:#?}", w.allocations("node").await, w.status("node").await)
        };
        assert_eq!(allocation.state(), AllocationState::Active);
        assert!(allocation.limit_micros <= 3_200_000, "no more than the quote: {}", allocation.limit_micros);
        operator.wait_for_reconciles(2.0).await?;
        assert_eq!(w.status("node").await.active_nodes, Some(1));
        operator.stop().await
    });
}

/// Acceptance 9.
#[test]
fn acceptance_09_availability_optimized_bids_max_once_active() {
    cluster::run(|cluster| async move {
        let (w, operator) = running(cluster, BidStrategy::AvailabilityOptimized, true).await?;
        let raised = async || first(&w).await.filter(|u| u.limit_micros == 5_000_000);
        let allocation = within_limit(raised).await;
        anyhow::ensure!(
            allocation.is_some_and(|u| u.price_micros == 2_000_000),
            "{:?}",
            w.allocations("node").await
        );
        w.rival(HERE, 4_500_000, 1).await;
        let paid = async || first(&w).await.filter(|u| u.price_micros == 4_500_000);
        let allocation = within_limit(paid).await;
        anyhow::ensure!(
            allocation.is_some_and(|u| u.state() == AllocationState::Active),
            "{:?}",
            w.allocations("node").await
        );
        operator.stop().await
    });
}

/// Acceptance 9: without defence, the strategy of the article, which never changes a limit.
#[test]
fn acceptance_09_defend_false_is_seed_literal() {
    cluster::run(|cluster| async move {
        let (w, operator) = running(cluster, BidStrategy::Balanced, false).await?;
        w.rival(SLOW, 3_000_000, 1).await;
        w.until_event("NodePreempted").await?;
        let allocations = w.allocations_ever("node").await;
        assert_eq!(allocations.iter().map(|u| u.limit_micros).collect::<Vec<_>>(), [2_880_000]);
        assert!(
            matches!(allocations[0].state(), AllocationState::Preempting | AllocationState::Ended),
            "{allocations:?}"
        );
        operator.stop().await
    });
}

/// Acceptance 8 without the pods: cordon, event, one replacement, and a charge that never exceeds the limit.
#[test]
fn acceptance_08_notice_cordons_and_buys_one_replacement() {
    cluster::run_within(LIMIT * 2, |cluster| async move {
        let (mut w, operator) = running(cluster, BidStrategy::CostOptimized, true).await?;
        let old = first(&w).await.unwrap().allocation;
        w.rival(HERE, 2_500_000, 1).await;
        // The test watches from the start, because the node is gone when its notice is over.
        let cordoned = async || {
            let nodes = w.nodes("node").await;
            let spec = nodes.first()?.spec.clone()?;
            let tainted = spec.taints.unwrap_or_default().iter().any(|t| t.key == "kubebid.io/preempting");
            (spec.unschedulable == Some(true) && tainted).then_some(())
        };
        anyhow::ensure!(within_limit(cordoned).await.is_some(), "not cordoned: {:#?}", w.nodes("node").await);
        w.until_event("NodePreempted").await?;
        let bids = w.until_bids("node", |b| b.len() == 2).await?;
        assert_eq!(bids[1].quantity, 1, "one node left, one is bought");
        w.supply(HERE, 4).await;
        // The status may still show the old node as active.
        let replacement = async || {
            let active =
                w.allocations("node").await.into_iter().filter(|u| u.state() == AllocationState::Active);
            active.collect::<Vec<_>>().pop().filter(|u| u.allocation != old)
        };
        let new = within_limit(replacement).await.context("no replacement")?;
        assert!(new.price_micros <= new.limit_micros);
        w.until_active("node", 1).await?;
        w.until_nodes("node", 1).await?;
        operator.wait_for_reconciles(2.0).await?;
        assert_eq!(w.bids("node").await.len(), 2, "no second replacement");
        operator.stop().await
    });
}

/// Of many simultaneous notices, each is handled before any status is written: a Node has only seconds, a status has time.
#[test]
fn notices_are_handled_before_any_status_is_written() {
    const NODES: usize = 8;
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, u32::try_from(NODES)?).await;
        // Other triggers wait for a second, and the order of one worker is that of its queue.
        let second = Duration::from_secs(1);
        let mut config = w.config(Times { debounce: second, wait: second, ..World::times() });
        config.workers = 1;
        let operator = Operator::start(cluster.client(), config);
        for n in 0..NODES {
            w.create(&format!("node-{n}"), |o| {
                (o.spec.min_nodes, o.spec.bid_strategy) = (1, BidStrategy::CostOptimized);
            })
            .await?;
        }
        for n in 0..NODES {
            w.until_active(&format!("node-{n}"), 1).await?;
        }
        let version = w.objects().list(&ListParams::default()).await?.metadata.resource_version;
        let version = version.context("a version")?;
        let nodes: Api<Node> = Api::all(cluster.client());
        let of_nodes = WatchParams::default().labels(&format!("{}={}", names::NAMESPACE, w.ns));
        let mut nodes = std::pin::pin!(nodes.watch(&of_nodes, &version).await?);
        let objects = w.objects();
        let mut objects = std::pin::pin!(objects.watch(&WatchParams::default(), &version).await?);
        w.rival(HERE, 4_900_000, u32::try_from(NODES)?).await;

        let number = |version: Option<String>| version.and_then(|v| v.parse::<u64>().ok()).unwrap_or(0);
        let (mut cordons, mut written) = (BTreeMap::new(), Vec::new());
        // Writes before the first notice do not count.
        let first = |cordons: &BTreeMap<_, u64>| cordons.values().min().copied().unwrap_or(u64::MAX);
        let both = async {
            while cordons.len() < NODES || !written.iter().any(|at| *at > first(&cordons)) {
                tokio::select! {
                    event = nodes.try_next() => if let Some(WatchEvent::Modified(node)) = event?
                        && node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true)
                    {
                        cordons.entry(node.name_any()).or_insert(number(node.resource_version()));
                    },
                    event = objects.try_next() => if let Some(WatchEvent::Modified(object)) = event? {
                        written.push(number(object.resource_version()));
                    },
                }
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(LIMIT, both).await.context("they were not all obeyed")??;
        written.retain(|at| *at > first(&cordons));
        anyhow::ensure!(
            cordons.values().max() < written.iter().min(),
            "cordons {cordons:?}, statuses {written:?}"
        );
        operator.stop().await
    });
}

/// Acceptance 10.
#[test]
fn acceptance_10_lowered_max_bid_lowers_running_limits() {
    cluster::run(|cluster| async move {
        let (w, operator) = running(cluster, BidStrategy::Balanced, true).await?;
        w.edit("node", json!({"spec": {"maxBid": 2.5}})).await?;
        let lowered = async || first(&w).await.filter(|u| u.limit_micros == 2_500_000);
        anyhow::ensure!(within_limit(lowered).await.is_some(), "{:?}", w.allocations("node").await);
        assert_eq!(w.status("node").await.active_nodes, Some(1), "it is kept, cheaper");
        operator.stop().await
    });
}
