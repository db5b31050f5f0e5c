//! Nodes: scale-down, repair, and replacement after the instance type changed.

use coracle_api::bidnode::names::{self, annotation};
use coracle_proto::market::AllocationState;
use coracle_testkit::cluster;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::DeleteParams};
use serde_json::json;

use crate::{
    supplier::set_ready,
    world::{HERE, LIMIT, World, bind, waiting_pod, within_limit},
};

fn annotated(pairs: &[(&str, &str)]) -> Option<std::collections::BTreeMap<String, String>> {
    Some(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
}

/// Acceptance 13, first half: of three nodes in use, the one whose pod ends is released.
#[test]
fn acceptance_13_scale_down_picks_the_idle_node() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 4).await;
        let operator = w.operator();
        w.create("pool", |o| {
            o.spec.min_nodes = 0;
            o.metadata.annotations = annotated(&[(annotation::IDLE_AFTER, "1s")]);
        })
        .await?;
        for pod in ["a", "b", "c"] {
            waiting_pod(&w.client, &w.ns, pod, 4).await?;
        }
        w.until_active("pool", 3).await?;
        let mut on = Vec::new();
        for (pod, node) in ["a", "b", "c"].iter().zip(w.nodes("pool").await) {
            bind(&w.client, &w.ns, pod, &node.name_any()).await?;
            on.push(node.name_any());
        }
        operator.wait_for_reconciles(3.0).await?;
        let pods: Api<Pod> = Api::namespaced(w.client.clone(), &w.ns);
        pods.delete("b", &DeleteParams::default().grace_period(0)).await?;
        let left = w.until_nodes("pool", 2).await?;
        let left: Vec<_> = left.iter().map(|n| n.name_any()).collect();
        assert!(!left.contains(&on[1]), "{} was idle; {left:?} stayed", on[1]);
        w.until_active("pool", 2).await?;
        operator.stop().await
    });
}

/// Acceptance 13, second half: of idle nodes, the most expensive one is released.
#[test]
fn acceptance_13_among_idle_nodes_the_most_expensive_goes() {
    cluster::run_within(LIMIT * 2, |cluster| async move {
        let mut w = World::new(cluster).await?;
        w.put_market("a100-4x/eu-north-1", 3_000_000, 8_000_000, 0).await;
        w.supply(HERE, 1).await;
        w.supply("a100-4x/eu-north-1", 1).await;
        let operator = w.operator();
        // Without a region, the free unit of the cheaper market is bought first, then that of the other one.
        w.create("pool", |o| {
            o.spec.region = None;
            o.spec.min_nodes = 1;
            o.metadata.annotations = annotated(&[(annotation::IDLE_AFTER, "0s")]);
        })
        .await?;
        w.until_active("pool", 1).await?;
        w.edit("pool", json!({"spec": {"minNodes": 2}})).await?;
        w.until_active("pool", 2).await?;
        let prices: Vec<_> = w.allocations("pool").await.iter().map(|u| u.price_micros).collect();
        assert_eq!(prices.iter().max(), Some(&3_000_000), "{prices:?}");
        w.edit("pool", json!({"spec": {"minNodes": 1}})).await?;
        w.until_nodes("pool", 1).await?;
        w.until_active("pool", 1).await?;
        let left: Vec<_> = w.allocations("pool").await.iter().map(|u| u.price_micros).collect();
        assert_eq!(left, [2_000_000]);
        operator.stop().await
    });
}

/// Acceptance 16: a twentieth of three minutes, plus the boot of the replacement.
#[test]
fn acceptance_16_a_node_that_is_not_ready_is_replaced() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 8).await;
        let operator = w.operator();
        w.create("pool", |o| o.spec.min_nodes = 2).await?;
        w.until_active("pool", 2).await?;
        let ill = w.nodes("pool").await[0].name_any();
        set_ready(&w.client, &ill, false).await;
        let replaced = async || {
            let nodes = w.nodes("pool").await;
            let status = w.status("pool").await;
            (status.active_nodes == Some(2) && nodes.len() == 2 && nodes.iter().all(|n| n.name_any() != ill))
                .then_some(())
        };
        anyhow::ensure!(within_limit(replaced).await.is_some(), "{:#?}", w.status("pool").await);
        w.until_event("NodeFailed").await?;
        operator.stop().await
    });
}

/// Acceptance 16.
#[test]
fn acceptance_16_many_not_ready_at_once_are_held() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 8).await;
        let operator = w.operator();
        w.create("pool", |o| o.spec.min_nodes = 3).await?;
        w.until_active("pool", 3).await?;
        for node in &w.nodes("pool").await[..2] {
            set_ready(&w.client, &node.name_any(), false).await;
        }
        w.until_reason("pool", "Degraded", "TooManyUnhealthy").await?;
        operator.wait_for_reconciles(4.0).await?;
        assert_eq!(w.bids("pool").await.iter().map(|b| b.quantity).sum::<u32>(), 3, "nothing was bought");
        assert_eq!(w.nodes("pool").await.len(), 3, "nothing was given up");
        for node in w.nodes("pool").await {
            set_ready(&w.client, &node.name_any(), true).await;
        }
        w.until_reason("pool", "Degraded", "Healthy").await?;
        w.until_active("pool", 3).await?;
        operator.stop().await
    });
}

/// Acceptance 17.
#[test]
fn acceptance_17_new_type_replaces_nodes_above_minimum() {
    cluster::run_within(LIMIT * 2, |cluster| async move {
        let mut w = World::new(cluster).await?;
        let other = "l40s-4x/us-west-2";
        w.put_market(other, 1_250_000, 5_000_000, 0).await;
        w.supply(HERE, 4).await;
        w.supply(other, 4).await;
        let operator = w.operator();
        w.create("drift", |o| (o.spec.min_nodes, o.spec.max_nodes) = (3, 3)).await?;
        w.until_active("drift", 3).await?;
        w.edit("drift", json!({"spec": {"instanceType": "l40s-4x"}})).await?;
        let mut fewest = i32::MAX;
        let replaced = within_limit(async || {
            let status = w.status("drift").await;
            fewest = fewest.min(status.active_nodes.unwrap_or(0));
            let allocations = w.allocations("drift").await;
            let all_new =
                allocations.iter().all(|u| u.market == other && u.state() == AllocationState::Active);
            (allocations.len() == 3 && all_new && status.active_nodes == Some(3)).then_some(())
        })
        .await;
        anyhow::ensure!(
            replaced.is_some(),
            "{:#?} {:#?}",
            w.status("drift").await,
            w.allocations("drift").await
        );
        assert!(fewest >= 3, "there were {fewest} nodes once");
        let kinds = w.until_nodes("drift", 3).await?;
        assert!(kinds.iter().all(|n| n.labels().get(names::INSTANCE_TYPE).is_some_and(|k| k == "l40s-4x")));
        operator.stop().await
    });
}

/// Labels and taints of the specification are added, changed and removed in place; those of other writers stay.
#[test]
fn labels_and_taints_are_patched_in_place() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.supply(HERE, 2).await;
        let operator = w.operator();
        w.create("pool", |o| {
            o.spec.min_nodes = 1;
            o.spec.node_selector.insert("workload".into(), "ml".into());
            o.spec.taints =
                serde_json::from_value(json!([{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]))
                    .unwrap();
        })
        .await?;
        let shaped = async |label: Option<&str>, taints: &[&str]| {
            within_limit(async || {
                let node = w.nodes("pool").await.into_iter().next()?;
                let has = node.labels().get("workload").map(String::as_str) == label;
                let spec = node.spec.clone()?;
                let mut keys: Vec<_> = spec.taints.unwrap_or_default().into_iter().map(|t| t.key).collect();
                // The API server adds these taints; in a full cluster the node controller removes them.
                keys.retain(|key| !key.starts_with("node.kubernetes.io/"));
                keys.sort();
                (has && keys == taints).then_some(node)
            })
            .await
        };
        let node = shaped(Some("ml"), &["dedicated"]).await;
        anyhow::ensure!(node.is_some(), "{:#?}", w.nodes("pool").await);
        let node = node.unwrap();
        assert_eq!(node.labels()[names::CAPACITY_TYPE], "auction");
        assert_eq!(node.labels()[names::REGION], "us-west-2");
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(w.client.clone());
        let foreign = json!({"spec": {"taints": [
            {"key": "dedicated", "value": "ml", "effect": "NoSchedule"},
            {"key": "others", "effect": "NoSchedule"},
        ]}});
        let merge = kube::api::Patch::Merge(&foreign);
        nodes.patch(&node.name_any(), &kube::api::PatchParams::default(), &merge).await?;
        w.edit("pool", json!({"spec": {"nodeSelector": null, "taints": null}})).await?;
        anyhow::ensure!(shaped(None, &["others"]).await.is_some(), "{:#?}", w.nodes("pool").await);
        assert_eq!(w.nodes("pool").await[0].uid(), node.uid(), "the same Node");
        operator.stop().await
    });
}
