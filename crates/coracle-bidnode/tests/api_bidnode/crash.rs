//! Killed operators, two concurrent operators, and an unavailable market.

use coracle_testkit::cluster;
use kube::ResourceExt;

use crate::world::{HERE, LIMIT, Operator, World, within_limit};

/// Acceptance 5: `test` kills it ten times, `soak` two hundred times.
const KILLS: usize = 10;

fn kills() -> usize {
    std::env::var("CORACLE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(KILLS)
}

/// Acceptance 5.
#[test]
fn acceptance_05_operator_killed_after_bid_never_bids_twice() {
    let deadline = LIMIT * u32::try_from(kills().div_ceil(KILLS)).unwrap();
    cluster::run_within(deadline, |cluster| async move {
        let w = World::new(cluster).await?;
        let mut before_status = 0;
        for n in 0..kills() {
            let name = format!("killed-{n}");
            let operator = w.operator();
            w.create(&name, |_| {}).await?;
            let placed = within_limit(async || Some(w.bids(&name).await).filter(|b| !b.is_empty())).await;
            operator.kill().await;
            anyhow::ensure!(placed.is_some(), "kill {n}: no bid");
            before_status += usize::from(w.status(&name).await.pending_bids != Some(2));
        }
        let operator = w.operator();
        for n in 0..kills() {
            let name = format!("killed-{n}");
            w.until(&name, |s| s.pending_bids == Some(2)).await?;
        }
        operator.wait_for_reconciles(f64::from(u32::try_from(kills()).unwrap())).await?;
        for n in 0..kills() {
            let bids = w.bids(&format!("killed-{n}")).await;
            assert_eq!((bids.len(), bids[0].quantity), (1, 2), "kill {n}: {bids:#?}");
        }
        eprintln!("{} kills, {before_status} of them before the status was written", kills());
        operator.stop().await
    });
}

/// Acceptance 6.
#[test]
fn acceptance_06_two_operators_without_election_never_bid_twice() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 10).await;
        let operators = [w.operator(), w.operator(), w.operator()];
        let names: Vec<_> = (0..10).map(|n| format!("shared-{n}")).collect();
        for name in &names {
            w.create(name, |o| (o.spec.min_nodes, o.spec.max_nodes) = (2, 2)).await?;
        }
        for name in &names {
            w.until(name, |s| s.pending_bids.unwrap_or(0) + s.active_nodes.unwrap_or(0) == 2).await?;
        }
        for operator in &operators {
            operator.wait_for_reconciles(10.0).await?;
        }
        for name in &names {
            let bids = w.bids(name).await;
            let units: u32 = bids.iter().map(|b| b.open + b.matched + b.provisioning + b.active).sum();
            assert_eq!(units, 2, "{name}: {bids:#?}");
            assert_eq!(
                bids.iter().map(|b| b.quantity).sum::<u32>(),
                2,
                "{name} bought more at times: {bids:#?}"
            );
        }
        for operator in operators {
            operator.stop().await?;
        }
        anyhow::Ok(())
    });
}

/// Acceptance 14: ten polls without a market.
#[test]
fn acceptance_14_market_outage_loses_and_buys_no_node() {
    cluster::run_within(LIMIT * 2, |cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 2).await;
        let times = coracle_bidnode::Times { poll: std::time::Duration::from_millis(300), ..World::times() };
        let operator = Operator::start(cluster.client(), w.config(times));
        w.create("pool", |o| o.spec.min_nodes = 2).await?;
        w.until_active("pool", 2).await?;
        // Created after the first BidNode has its nodes, because there are only two units.
        w.create("waits", |o| o.spec.min_nodes = 1).await?;
        w.until("waits", |s| s.pending_bids == Some(1)).await?;
        let print = async || {
            let bids = [w.bids("pool").await, w.bids("waits").await].concat();
            bids.into_iter().map(|b| (b.bid, b.quantity, b.limit_micros)).collect::<Vec<_>>()
        };
        let before = print().await;
        w.market_down().await;
        w.until_reason("pool", "MarketReachable", "MarketUnreachable").await?;
        operator.wait_for_reconciles(20.0).await?;
        let status = w.status("pool").await;
        assert_eq!((status.active_nodes, status.phase.as_deref()), (Some(2), Some("Running")));
        assert_eq!(w.nodes("pool").await.len(), 2);
        assert_eq!(w.status("waits").await.pending_bids, Some(1), "what was known is shown");
        let gone = w.nodes("pool").await;
        assert!(gone.iter().all(|n| n.metadata.deletion_timestamp.is_none()));
        w.market_up().await?;
        w.until_reason("pool", "MarketReachable", "Reachable").await?;
        operator.wait_for_reconciles(6.0).await?;
        let print = async || {
            let bids = [w.bids("pool").await, w.bids("waits").await].concat();
            bids.into_iter().map(|b| (b.bid, b.quantity, b.limit_micros)).collect::<Vec<_>>()
        };
        assert_eq!(print().await, before, "the return of the market bought or changed something");
        assert_eq!(w.nodes("pool").await.iter().map(ResourceExt::name_any).count(), 2);
        operator.stop().await
    });
}

/// An operator that starts while the market is unavailable reports what the cluster shows, and changes nothing.
#[test]
fn operator_started_without_market_reports_state_and_waits() {
    cluster::run_within(LIMIT * 2, |cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 1).await;
        let operator = w.operator();
        w.create("pool", |o| o.spec.min_nodes = 1).await?;
        w.until_active("pool", 1).await?;
        operator.stop().await?;
        w.market_down().await;
        let operator = w.operator();
        w.until_reason("pool", "MarketReachable", "MarketUnreachable").await?;
        operator.wait_for_reconciles(3.0).await?;
        assert_eq!(w.status("pool").await.active_nodes, Some(1));
        w.market_up().await?;
        w.until_reason("pool", "MarketReachable", "Reachable").await?;
        assert_eq!(w.bids("pool").await.len(), 1);
        operator.stop().await
    });
}
