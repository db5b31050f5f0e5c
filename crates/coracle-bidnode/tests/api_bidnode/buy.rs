//! Placing bids: the test of the article, once and not again, separately for each object.

use std::time::Duration;

use coracle_api::bidnode::{BidStrategy, names};
use coracle_bidnode::Times;
use coracle_testkit::{cluster, tools};
use kube::{Api, ResourceExt as _, api::PostParams};

use crate::world::{HERE, LIMIT, World, bind, create_in, waiting_pod, within_limit};

/// Acceptance 1, second sentence; the first is `coracle-api/tests/golden_bidnode.rs`.
#[test]
fn acceptance_01_kubectl_get_bn_shows_exactly_the_seeds_columns() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 4).await;
        let operator = w.operator();
        w.create("ml-training-node", |o| o.spec.min_nodes = 1).await?;
        w.until_active("ml-training-node", 1).await?;
        let mut command = tokio::process::Command::new(&kubectl);
        command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["get", "bn", "-n", &w.ns]);
        let output = command.output().await?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["NAME", "INSTANCE", "NODES", "PRICE", "PHASE"], "{text}");
        assert_eq!(rows[1], ["ml-training-node", "a100-4x", "1", "2", "Running"], "{text}");
        operator.stop().await
    });
}

/// Times of a test that counts many polls: a minute becomes half a second.
fn quick_times() -> Times {
    Times { poll: Duration::from_millis(500), ..World::times() }
}

/// Acceptance 2 without supply, then acceptance 3 with the same object.
#[test]
fn acceptance_02_seed_test_without_supply_leaves_one_bid() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let operator = crate::world::Operator::start(cluster.client(), w.config(quick_times()));
        w.create("test-bidnode", |_| {}).await?;
        w.until("test-bidnode", |s| s.pending_bids >= Some(2)).await?;
        operator.wait_for_reconciles(4.0).await?;
        let bids = w.bids("test-bidnode").await;
        assert_eq!(bids.len(), 1, "{bids:#?}");
        assert_eq!((bids[0].quantity, bids[0].limit_micros), (2, 2_880_000));
        assert_eq!(bids[0].labels[names::NAMESPACE], w.ns);
        let status = w.status("test-bidnode").await;
        assert_eq!((status.pending_bids, status.phase.as_deref()), (Some(2), Some("Bidding")));
        assert_eq!(status.average_price, None, "no node, no price");
        operator.stop().await
    });
}

#[test]
fn acceptance_02_seed_test_with_supply_bids_until_nodes_run() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 8).await;
        let operator = crate::world::Operator::start(cluster.client(), w.config(quick_times()));
        w.create("test-bidnode", |_| {}).await?;
        let status = w.until_active("test-bidnode", 2).await?;
        assert_eq!((status.phase.as_deref(), status.average_price), (Some("Running"), Some(2.0)));
        operator.wait_for_reconciles(4.0).await?;
        let bids = w.bids("test-bidnode").await;
        assert_eq!((bids.len(), bids[0].quantity, bids[0].active), (1, 2, 2), "{bids:#?}");
        let ready = w.until_reason("test-bidnode", "Ready", "NodesAvailable").await?;
        assert_eq!(ready, "2/2 nodes active");
        operator.stop().await
    });
}

/// Acceptance 3: ten idle polls change neither the resource version of the object nor the owner version at the market.
#[test]
fn acceptance_03_ten_quiet_polls_write_nothing_and_buy_nothing() {
    // `soak` uses the default intervals, with which the test takes ten minutes.
    let times =
        if std::env::var_os("CORACLE_CLOCK_TIME").is_some() { Times::default() } else { quick_times() };
    let ten_polls = times.poll * 10;
    cluster::run_within(LIMIT * 2 + ten_polls * 2, |cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 20).await;
        let operator = crate::world::Operator::start(cluster.client(), w.config(times));
        let names: Vec<_> = (0..10).map(|n| format!("quiet-{n}")).collect();
        for name in &names {
            w.create(name, |o| o.spec.min_nodes = 1).await?;
        }
        for name in &names {
            w.until_active(name, 1).await?;
        }
        let print = async || {
            let mut all = Vec::new();
            for name in &names {
                let object = w.objects().get(name).await.unwrap();
                let bids = w.bids(name).await;
                all.push((
                    object.resource_version(),
                    bids.iter().map(|b| (b.bid.clone(), b.seq)).collect::<Vec<_>>(),
                ));
            }
            all
        };
        // Idle: a whole poll interval changed nothing.
        let mut before = Vec::new();
        while before != print().await {
            before = print().await;
            operator.wait_for_reconciles_within(20.0, LIMIT + ten_polls).await?;
        }
        let writes = operator.metric("coracle_bidnode_status_writes_total");
        let began = std::time::Instant::now();
        operator.wait_for_reconciles_within(100.0, LIMIT + ten_polls * 2).await?;
        // Jitter shortens the time by at most a tenth; a loaded computer only takes longer.
        let took = began.elapsed();
        eprintln!("100 reconciles of ten objects took {took:?}, ten polls are {ten_polls:?}");
        assert!(took >= ten_polls * 8 / 10, "ten objects reconcile more often than they poll: {took:?}");
        assert_eq!(print().await, before, "something was written or bought");
        assert!((operator.metric("coracle_bidnode_status_writes_total") - writes).abs() < 0.5);
        operator.stop().await
    });
}

/// Acceptance 4.
#[test]
fn acceptance_04_each_strategy_bids_its_share() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        let scarce = "h100-4x/us-west-2";
        w.put_market(scarce, 2_000_000, 8_000_000, 0).await;
        w.supply(scarce, 1).await;
        w.rival(scarce, 8_000_000, 1).await;
        w.rival(scarce, 4_000_000, 1).await;
        let risen = async || (w.price(scarce).await.quote_micros == 4_000_000).then_some(());
        anyhow::ensure!(within_limit(risen).await.is_some(), "{:?}", w.price(scarce).await);
        let operator = w.operator();
        let strategies =
            [BidStrategy::CostOptimized, BidStrategy::Balanced, BidStrategy::AvailabilityOptimized];
        for (case, kind, max_bid, want) in [
            ("idle", "a100-4x", 8.0, [2_080_000, 2_880_000, 3_840_000]),
            ("scarce", "h100-4x", 8.0, [2_600_000, 3_600_000, 4_800_000]),
            ("capped", "h100-4x", 2.5, [2_500_000, 2_500_000, 2_500_000]),
        ] {
            for (strategy, want) in strategies.into_iter().zip(want) {
                let name = format!("{case}-{}", strategy.as_str());
                w.create(&name, |o| {
                    o.spec.instance_type = kind.into();
                    (o.spec.max_bid, o.spec.bid_strategy) = (max_bid, strategy);
                })
                .await?;
                let bids = w.until_bids(&name, |b| !b.is_empty()).await?;
                assert_eq!(bids[0].limit_micros, want, "{name}");
            }
        }
        operator.stop().await
    });
}

/// Acceptance 7.
#[test]
fn acceptance_07_two_of_one_name_in_two_namespaces_never_mix() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let other = cluster.namespace().await?;
        let mut second = w.config(World::times());
        second.namespace = Some(other.clone());
        let operators = [w.operator(), crate::world::Operator::start(cluster.client(), second)];
        w.create("same", |o| o.spec.min_nodes = 2).await?;
        create_in(&w.client, &other, "same", |o| (o.spec.min_nodes, o.spec.max_nodes) = (5, 5)).await?;
        w.until("same", |s| s.pending_bids == Some(2)).await?;
        let there: Api<coracle_api::BidNode> = Api::namespaced(w.client.clone(), &other);
        let five = async || {
            let status = there.get("same").await.unwrap().status.unwrap_or_default();
            (status.pending_bids == Some(5)).then_some(())
        };
        anyhow::ensure!(within_limit(five).await.is_some(), "the other one does not read 5");
        for operator in &operators {
            operator.wait_for_reconciles(3.0).await?;
        }
        let quantities =
            |bids: Vec<coracle_proto::market::Bid>| bids.iter().map(|b| b.quantity).collect::<Vec<_>>();
        assert_eq!(quantities(w.bids("same").await), [2]);
        assert_eq!(quantities(w.bids_of(&other, "same").await), [5]);
        for operator in operators {
            operator.stop().await?;
        }
        anyhow::Ok(())
    });
}

/// Acceptance 11.
#[test]
fn acceptance_11_waiting_pod_gets_node_that_goes_when_idle() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 4).await;
        let operator = w.operator();
        w.create("elastic", |o| {
            o.spec.min_nodes = 0;
            o.metadata.annotations = Some([(names::annotation::IDLE_AFTER.into(), "1s".into())].into());
        })
        .await?;
        let status = w.until("elastic", |s| s.phase.as_deref() == Some("Running")).await?;
        assert_eq!(status.active_nodes, Some(0));
        assert_eq!(w.until_reason("elastic", "Ready", "NodesAvailable").await?, "0/0 nodes active");
        waiting_pod(&w.client, &w.ns, "job", 4).await?;
        w.until_active("elastic", 1).await?;
        let node = w.nodes("elastic").await[0].name_any();
        bind(&w.client, &w.ns, "job", &node).await?;
        operator.wait_for_reconciles(3.0).await?;
        assert_eq!(w.status("elastic").await.active_nodes, Some(1), "it is in use");
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(w.client.clone(), &w.ns);
        pods.delete("job", &kube::api::DeleteParams::default().grace_period(0)).await?;
        w.until_nodes("elastic", 0).await?;
        w.until("elastic", |s| s.active_nodes == Some(0) && s.desired_nodes == Some(0)).await?;
        let quiet = w.bids("elastic").await;
        assert_eq!(quiet.iter().map(|b| b.quantity).sum::<u32>(), 1, "one node was bought, once: {quiet:#?}");
        operator.stop().await
    });
}

/// Acceptance 20: the tenant's cap at the market and the cap of the BidNode, while others outbid each other.
#[test]
fn acceptance_20_a_cap_is_never_passed_in_a_storm_of_prices() {
    cluster::run_within(LIMIT * 2, |cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 6).await;
        let cap = 9_000_000;
        let put = coracle_proto::market::PutTenantRequest {
            tenant: format!("{}/{}", crate::world::CLUSTER, w.ns),
            hourly_cap_micros: Some(cap),
            ..Default::default()
        };
        let mut admin = coracle_proto::market::admin_client::AdminClient::new(w.channel.clone());
        admin.put_tenant(crate::world::with(put)).await?;
        let operator = w.operator();
        w.create("own", |o| {
            (o.spec.min_nodes, o.spec.bid_strategy) = (3, BidStrategy::AvailabilityOptimized);
            o.metadata.annotations = Some([(names::annotation::MAX_HOURLY_COST.into(), "6.5".into())].into());
        })
        .await?;
        w.create("tenants", |o| o.spec.min_nodes = 4).await?;
        w.until_reason("own", "WithinBudget", "BudgetExceeded").await?;
        for round in 0..40i64 {
            w.rival(HERE, 2_000_000 + round * 150_000, 1).await;
            let sum = async |name: &str| {
                let bids = w.bids(name).await;
                bids.iter()
                    .filter(|b| b.hold.is_empty())
                    .map(|b| i64::from(b.open + b.matched + b.provisioning + b.active) * b.limit_micros)
                    .sum::<i64>()
            };
            let (own, tenants) = (sum("own").await, sum("tenants").await);
            assert!(own <= 6_500_000, "round {round}: {own}");
            assert!(own + tenants <= cap, "round {round}: {own} + {tenants}");
            operator.wait_for_reconciles(1.0).await?;
        }
        operator.stop().await
    });
}

/// Defaults of the API fields that the helpers above rely on.
#[test]
fn objects_without_optional_fields_get_the_seeds_defaults() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let bare = serde_json::json!({
            "apiVersion": "kubebid.io/v1", "kind": "BidNode", "metadata": {"name": "bare"},
            "spec": {"instanceType": "a100-4x", "maxBid": 4.5},
        });
        let stored = w.objects().create(&PostParams::default(), &serde_json::from_value(bare)?).await?;
        assert_eq!((stored.spec.min_nodes, stored.spec.max_nodes), (1, 10));
        assert_eq!(stored.spec.bid_strategy, BidStrategy::Balanced);
        anyhow::Ok(())
    });
}
