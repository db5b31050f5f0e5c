//! Invalid input, one table row each, and an object that cannot be decoded.

use std::time::Duration;

use coracle_api::bidnode::{BidNode, names};
use coracle_bidnode::Times;
use coracle_testkit::{cluster, cluster::Cluster, netns};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, CustomResourceExt as _, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::world::{Operator, World, install, within_limit};

fn raw_bidnode(spec: &Value) -> DynamicObject {
    let kind = ApiResource::erase::<BidNode>(&());
    DynamicObject::new("bad", &kind).data(json!({"spec": spec}))
}

/// Rows that the schema rejects: the API server answers 422 and stores nothing.
#[test]
fn object_violating_the_schema_is_refused_and_not_stored() {
    cluster::run(|cluster| async move {
        let client = cluster.client();
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        install(&client).await?;
        let ns = cluster.namespace().await?;
        let kind = ApiResource::erase::<BidNode>(&());
        let objects: Api<DynamicObject> = Api::namespaced_with(client, &ns, &kind);
        let good = json!({"instanceType": "a100-4x", "maxBid": 4.5});
        let with = |field: &str, value: Value| {
            let mut spec = good.clone();
            spec[field] = value;
            spec
        };
        let taint = |effect: &str| with("taints", json!([{"key": "k", "effect": effect}]));
        for (why, spec) in [
            ("unknown instanceType", with("instanceType", json!("v100-1x"))),
            ("unknown bidStrategy", with("bidStrategy", json!("greedy"))),
            ("unknown effect", taint("Never")),
            ("maxBid < 0.01", with("maxBid", json!(0.009))),
            ("minNodes < 0", with("minNodes", json!(-1))),
            ("maxNodes < 1", with("maxNodes", json!(0))),
            ("no instanceType", json!({"maxBid": 4.5})),
            ("no maxBid", json!({"instanceType": "a100-4x"})),
            ("a text for a number", with("maxBid", json!("4.5"))),
            ("a number for a text", with("region", json!(5))),
            ("a fraction for a count", with("minNodes", json!(1.5))),
        ] {
            let refused = objects.create(&PostParams::default(), &raw_bidnode(&spec)).await;
            let Err(kube::Error::Api(status)) = refused else { panic!("{why}: {refused:?}") };
            assert_eq!(status.code, 422, "{why}: {}", status.message);
        }
        let crossed = with("minNodes", json!(11));
        let Err(kube::Error::Api(status)) =
            objects.create(&PostParams::default(), &raw_bidnode(&crossed)).await
        else {
            panic!("minNodes above maxNodes was taken")
        };
        assert_eq!(status.code, 422);
        assert!(status.message.contains("minNodes must not exceed maxNodes"), "{}", status.message);
        let mut bare = raw_bidnode(&good);
        bare.data = json!({});
        let refused = objects.create(&PostParams::default(), &bare).await;
        assert!(matches!(&refused, Err(kube::Error::Api(s)) if s.code == 422), "no spec: {refused:?}");
        assert!(objects.list(&ListParams::default()).await?.items.is_empty(), "something was stored");
        anyhow::Ok(())
    });
}

/// Name of the object, expected field in the condition, and the invalid change.
type Row = (&'static str, &'static str, fn(&mut BidNode));

/// Rows that the schema cannot express: a condition names the field, there is one event, and no bid.
#[test]
fn invalid_spec_is_reported_and_buys_nothing() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let times = Times { poll: Duration::from_millis(300), ..World::times() };
        let operator = Operator::start(cluster.client(), w.config(times));
        let rows: [Row; 9] = [
            ("decimals", "spec.maxBid", |o| o.spec.max_bid = 1.000_000_1),
            ("million", "spec.maxBid", |o| o.spec.max_bid = 1_000_001.0),
            ("no-key", "spec.taints[0].key", |o| {
                o.spec.taints = serde_json::from_value(json!([{"effect": "NoSchedule"}])).unwrap();
            }),
            ("twice", "spec.taints[1]", |o| {
                let taint = json!({"key": "k", "effect": "NoSchedule"});
                o.spec.taints = serde_json::from_value(json!([taint, taint])).unwrap();
            }),
            ("label-key", "spec.nodeSelector", |o| {
                drop(o.spec.node_selector.insert("a b".into(), "c".into()))
            }),
            ("label-value", "spec.nodeSelector", |o| {
                drop(o.spec.node_selector.insert("a".into(), "b c".into()))
            }),
            ("reserved", "reserved", |o| {
                drop(o.spec.node_selector.insert("kubebid.io/x".into(), "y".into()))
            }),
            ("flag", "kubebid.io/paused", |o| {
                drop(o.annotations_mut().insert("kubebid.io/paused".into(), "1".into()))
            }),
            ("time", "kubebid.io/idle-after", |o| {
                drop(o.annotations_mut().insert(names::annotation::IDLE_AFTER.into(), "soon".into()));
            }),
        ];
        for (name, _, change) in rows {
            w.create(name, change).await?;
        }
        for (name, want, _) in rows {
            let told = w.until_reason(name, "Ready", "InvalidSpec").await?;
            assert!(told.contains(want), "{name}: {told}");
            assert!(w.bids(name).await.is_empty(), "{name} was bid for");
        }
        w.until_event("InvalidSpec").await?;
        // After ten polls of each object there is still one event.
        operator.wait_for_reconciles(90.0).await?;
        for (name, ..) in rows {
            assert_eq!(w.event_count(name, "InvalidSpec").await, 1, "{name}");
        }
        w.edit("decimals", json!({"spec": {"maxBid": 1.5}})).await?;
        w.until("decimals", |s| s.pending_bids == Some(2)).await?;
        operator.stop().await
    });
}

/// A valid type without a market: the BidNode bids as soon as the market exists.
#[test]
fn missing_market_is_reported_and_awaited() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let operator = w.operator();
        w.create("moon", |o| o.spec.region = Some("moon".into())).await?;
        let told = w.until_reason("moon", "Ready", "UnknownMarket").await?;
        assert!(told.contains("moon") && told.contains("a100-4x/us-west-2"), "{told}");
        w.put_market("a100-4x/moon", 2_000_000, 8_000_000, 0).await;
        w.until("moon", |s| s.pending_bids == Some(2)).await?;
        operator.stop().await
    });
}

/// A limit below the reserve price waits in the order book; the condition names the price that would win.
#[test]
fn bid_below_the_reserve_stays_open_and_is_reported() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let operator = w.operator();
        w.create("low", |o| o.spec.max_bid = 1.5).await?;
        let told = w.until_reason("low", "BidCompetitive", "BelowReserve").await?;
        assert!(told.contains("1.5000") && told.contains("2.0000"), "{told}");
        w.until("low", |s| s.pending_bids == Some(2)).await?;
        w.until_event("BidTooLow").await?;
        operator.stop().await
    });
}

/// Acceptance 18. The CRD is widened first, as an older one may have been, in a cluster of this test's own.
#[test]
fn acceptance_18_undecodable_object_stalls_no_other() {
    netns::run(|| async {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        // The cluster lives as long as the test process, like the shared one.
        let cluster: &'static Cluster = Box::leak(Box::new(Cluster::start().await?));
        let client = cluster.client();
        let mut wide = serde_json::to_value(BidNode::crd())?;
        let schema = &mut wide["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        *schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let params = PatchParams::apply("test").force();
        crds.patch("bidnodes.kubebid.io", &params, &Patch::Apply(&wide)).await?;
        let kind = ApiResource::erase::<BidNode>(&());
        let any: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &kind);
        let bad = raw_bidnode(&json!({"instanceType": "a100-4x", "maxBid": "a lot"}));
        let stored = within_limit(async || any.create(&PostParams::default(), &bad).await.ok()).await;
        anyhow::ensure!(stored.is_some(), "the bad object is not taken");
        // `World::new` installs the strict CRD; stored objects stay.
        let w = World::new(cluster).await?;
        let mut config = w.config(World::times());
        config.namespace = None;
        let operator = Operator::start(client, config);
        for n in 0..100 {
            w.create(&format!("good-{n}"), |_| {}).await?;
        }
        for n in 0..100 {
            w.until(&format!("good-{n}"), |s| s.pending_bids == Some(2)).await?;
        }
        let seen = async || {
            let count = operator.metric("coracle_bidnode_undecodable_objects");
            ((count - 1.0).abs() < 0.5).then_some(())
        };
        assert!(within_limit(seen).await.is_some(), "{}", operator.scrape());
        operator.stop().await?;
        drop(w);
        cluster.stop();
        anyhow::Ok(())
    });
}
