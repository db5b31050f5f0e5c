//! Deletion of BidNodes: nothing is left behind.

use std::time::Duration;

use coracle_api::bidnode::names::{self, annotation};
use coracle_proto::market::{PlaceBidRequest, trading_client::TradingClient};
use coracle_testkit::cluster;
use coracle_types::Clock;
use kube::{Api, ResourceExt as _, api::DeleteParams};

use crate::world::{HERE, World, bind, waiting_pod, with, within_limit};

async fn until_gone(w: &World, name: &str) -> anyhow::Result<()> {
    let gone = async || w.objects().get_opt(name).await.unwrap().is_none().then_some(());
    anyhow::ensure!(within_limit(gone).await.is_some(), "{name} is still there: {:#?}", w.status(name).await);
    Ok(())
}

/// Acceptance 15.
#[test]
fn acceptance_15_deletion_leaves_no_node_bid_unit_pod_or_series() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 2).await;
        let operator = w.operator();
        w.create("doomed", |o| o.spec.min_nodes = 3).await?;
        w.until("doomed", |s| s.active_nodes == Some(2) && s.pending_bids == Some(1)).await?;
        let object = w.objects().get("doomed").await?;
        assert_eq!(object.finalizers(), [names::FINALIZER]);
        assert!(operator.scrape().contains(r#"name="doomed""#));
        waiting_pod(&w.client, &w.ns, "work", 1).await?;
        let node = w.nodes("doomed").await[0].name_any();
        bind(&w.client, &w.ns, "work", &node).await?;
        operator.wait_for_reconciles(2.0).await?;
        w.objects().delete("doomed", &DeleteParams::default()).await?;
        until_gone(&w, "doomed").await?;
        assert!(w.nodes("doomed").await.is_empty());
        let bids = w.bids("doomed").await;
        let left: u32 =
            bids.iter().map(|b| b.open + b.matched + b.provisioning + b.active + b.preempting).sum();
        assert_eq!(left, 0, "{bids:#?}");
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(w.client.clone(), &w.ns);
        let evicted = async || {
            let pod = pods.get_opt("work").await.unwrap();
            pod.is_none_or(|p| p.metadata.deletion_timestamp.is_some()).then_some(())
        };
        assert!(within_limit(evicted).await.is_some(), "the pod was not evicted");
        assert!(!operator.scrape().contains(r#"name="doomed""#), "{}", operator.scrape());
        // Two nodes were matched, started and drained: each is in the histograms once.
        let stage = |stage: &str| {
            let line = format!(r#"coracle_bidnode_time_to_node_seconds_count{{stage="{stage}"}} 2"#);
            assert!(operator.scrape().contains(&line), "{stage}\n{}", operator.scrape());
        };
        stage("ready");
        let drained = operator.metric("coracle_bidnode_drain_seconds_count");
        assert!((1.0..=2.0).contains(&drained), "{drained} drains of two nodes");
        let heard =
            async || (operator.metric("coracle_bidnode_stream_lag_seconds_count") > 0.0).then_some(());
        assert!(within_limit(heard).await.is_some(), "no price of a call came");
        operator.stop().await
    });
}

/// Acceptance 15: the finalizer waits for an unavailable market.
#[test]
fn acceptance_15_deletion_waits_for_a_market_that_is_away() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let operator = w.operator();
        w.create("waits", |_| {}).await?;
        w.until("waits", |s| s.pending_bids == Some(2)).await?;
        w.market_down().await;
        w.until_reason("waits", "MarketReachable", "MarketUnreachable").await?;
        w.objects().delete("waits", &DeleteParams::default()).await?;
        w.until_reason("waits", "Terminating", "MarketUnreachable").await?;
        operator.wait_for_reconciles(3.0).await?;
        assert_eq!(w.objects().get("waits").await?.finalizers(), [names::FINALIZER]);
        w.market_up().await?;
        until_gone(&w, "waits").await?;
        assert!(w.bids("waits").await.iter().all(|b| b.open == 0));
        operator.stop().await
    });
}

/// Acceptance 15: without an operator, open bids end when their lease expires, and not before. The test moves the market's
/// clock.
#[test]
fn acceptance_15_lease_expiry_frees_bids_of_dead_operator() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let operator = w.operator();
        w.create("left", |_| {}).await?;
        w.until("left", |s| s.pending_bids == Some(2)).await?;
        operator.kill().await;
        w.market_down().await;
        let clock = Clock::fixed(Clock::system().now());
        w.market_up_by(clock.clone()).await?;
        let began_ms = clock.now().0;
        // Steps are short enough not to count as a gap in the service, each with a command of another tenant. After a gap all
        // leases would start again.
        let passed = async |w: &World, by: Duration| {
            for _ in 0..by.as_secs() / 4 {
                clock.advance(Duration::from_secs(4));
                let other = PlaceBidRequest {
                    market: HERE.into(),
                    limit_micros: 1_000_000,
                    quantity: 1,
                    owner_uid: "other".into(),
                    ..PlaceBidRequest::default()
                };
                TradingClient::new(w.channel.clone()).place_bid(with(other)).await?;
            }
            anyhow::Ok(())
        };
        passed(&w, Duration::from_secs(14 * 60)).await?;
        let bids = w.bids("left").await;
        assert_eq!((bids[0].open, bids[0].expired), (2, 0), "within the lease: {bids:#?}");
        passed(&w, Duration::from_secs(2 * 60)).await?;
        let bids = w.bids("left").await;
        let after_s = (clock.now().0 - began_ms) / 1000;
        assert_eq!((bids[0].open, bids[0].expired), (0, 2), "{after_s} s without a word: {bids:#?}");
        anyhow::Ok(())
    });
}

/// Acceptance 15: force-delete removes the finalizer without the market.
#[test]
fn acceptance_15_force_delete_lets_go_without_the_market() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 1).await;
        let operator = w.operator();
        w.create("forced", |o| {
            o.spec.min_nodes = 1;
            o.metadata.annotations = Some([(annotation::FORCE_DELETE.into(), "true".into())].into());
        })
        .await?;
        w.until_active("forced", 1).await?;
        w.market_down().await;
        w.until_reason("forced", "MarketReachable", "MarketUnreachable").await?;
        w.objects().delete("forced", &DeleteParams::default()).await?;
        until_gone(&w, "forced").await?;
        w.until_nodes("forced", 0).await?;
        operator.stop().await
    });
}
