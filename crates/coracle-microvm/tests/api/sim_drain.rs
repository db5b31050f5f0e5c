//! Drains a cordoned node: its VM moves to another node, hibernates or stops, also when processes die meanwhile.

use coracle_api::MikromVMSpec;
use coracle_testkit::sim::{Scenario, Sim, crash_after_each_call};
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    moving_nodes::MovingNodes,
    pki::Pki,
    world::{Operator, World, eventually, ready},
};

const SEED: u64 = 21;

/// A VM on node `a`, and an empty node `b`.
struct Drained {
    w: World,
    nodes: MovingNodes,
    on_drain: &'static str,
}

impl Drained {
    async fn new(sim: Sim, on_drain: &'static str) -> anyhow::Result<Self> {
        let mut w = World::simulated(&sim).await?;
        let (pki, mut nodes) = (Pki::new(), MovingNodes::new(&sim));
        w.trust(&pki)?;
        for name in ["a", "b"] {
            let api: Api<Node> = Api::all(w.client.clone());
            let node = json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"unschedulable": name == "b"},
            });
            api.create(&PostParams::default(), &serde_json::from_value(node)?).await?;
            let ready =
                json!({"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let status = Patch::Merge(json!({"status": {"conditions": [ready]}}));
            api.patch_status(name, &PatchParams::default(), &status).await?;
            let address = nodes.start(name, pki.server("127.0.0.1"));
            w.announce(name, &address, 64, 64 * 1024, 86_400).await?;
        }
        Ok(Self { w, nodes, on_drain })
    }

    async fn cordon(&self, node: &str, cordoned: bool) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.w.client.clone());
        let patch = Patch::Merge(json!({"spec": {"unschedulable": cordoned}}));
        nodes.patch(node, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Waits until the VM runs on `a`, cordons `a` and uncordons `b`.
    async fn begin(&self) -> anyhow::Result<()> {
        let spec = MikromVMSpec { agent_address: String::new(), ..self.w.spec() };
        self.w.create("web", spec).await?;
        let annotations = json!({"coracle.dev/on-drain": self.on_drain});
        self.w.patch("web", json!({"metadata": {"annotations": annotations}})).await?;
        self.w.until_running("web").await?;
        self.cordon("b", false).await?;
        self.cordon("a", true).await
    }

    async fn until_on(&self, node: &str) -> anyhow::Result<()> {
        let there = |vm: Option<&coracle_api::MikromVM>| {
            vm.is_some_and(|vm| {
                let status = vm.status.clone().unwrap_or_default();
                status.node_name == node && status.migration.is_none() && ready(vm).1 == "VMRunning"
            })
        };
        self.w.until("web", node, there).await.map(drop)
    }
}

impl Scenario for Drained {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let config = self.w.config();
        Box::pin(async move { coracle_microvm::run(client, config, CancellationToken::new()).await.unwrap() })
    }

    async fn script(&self) -> anyhow::Result<()> {
        self.begin().await?;
        if self.on_drain == "move" {
            self.until_on("b").await?;
            assert_eq!(self.nodes.running("b"), ["memory 1"], "it continues where it was");
        } else {
            self.w.until_reason("web", "Drained").await?;
            assert!(self.nodes.running("a").is_empty());
            self.cordon("a", false).await?;
            self.until_on("a").await?;
        }
        self.w.delete("web").await?;
        self.w.until_gone("web").await
    }

    fn facts(&self) -> Vec<String> {
        self.nodes.facts()
    }
}

#[test]
fn move_ends_as_one_vm_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| Drained::new(sim, "move")).unwrap();
    println!("crash points: {calls}");
    assert!(calls >= 25, "a life, and the calls of a move: {calls}");
}

#[test]
fn drained_vms_return_after_a_crash_at_any_call() {
    for on_drain in ["hibernate", "stop"] {
        let calls = crash_after_each_call(SEED, |sim| Drained::new(sim, on_drain)).unwrap();
        assert!(calls >= 20, "{on_drain}: {calls}");
    }
}

#[test]
fn vm_that_its_target_refuses_returns_with_its_memory() {
    Sim::run(SEED, |sim| async move {
        let drained = Drained::new(sim, "move").await?;
        drained.nodes.refuse_restores("b");
        let operator = Operator::start(drained.w.client.clone(), drained.w.config());
        drained.begin().await?;
        drained.w.until_event("web", "MoveFailed").await?;
        drained.until_on("a").await?;
        assert_eq!(drained.nodes.running("a"), ["memory 1"]);
        let facts = drained.nodes.facts();
        assert_eq!(facts, ["VMs booted: 1", "a: VM team-web Running", "a: snapshots 0", "b: snapshots 0"]);
        operator.stop().await
    });
}

#[test]
fn object_that_is_deleted_while_it_moves_leaves_nothing() {
    Sim::run(SEED, |sim| async move {
        let drained = Drained::new(sim, "move").await?;
        drained.nodes.refuse_restores("b");
        let operator = Operator::start(drained.w.client.clone(), drained.w.config());
        drained.begin().await?;
        let moving = |vm: Option<&coracle_api::MikromVM>| {
            vm.and_then(|vm| vm.status.as_ref()).is_some_and(|status| status.migration.is_some())
        };
        drained.w.until("web", "moving", moving).await?;
        drained.w.delete("web").await?;
        drained.w.until_gone("web").await?;
        let empty = ["VMs booted: 1", "a: snapshots 0", "b: snapshots 0"];
        eventually("nothing is left", async || (drained.nodes.facts() == empty).then_some(())).await?;
        operator.stop().await
    });
}

#[test]
fn vm_without_the_annotation_stays_on_a_cordoned_node() {
    Sim::run(SEED, |sim| async move {
        let drained = Drained::new(sim, "").await?;
        let operator = Operator::start(drained.w.client.clone(), drained.w.config());
        drained.begin().await?;
        drained.w.until_reconciled(10).await?;
        assert_eq!(drained.nodes.running("a"), ["memory 1"]);
        operator.stop().await
    });
}

#[test]
fn vm_with_keys_is_not_moved() {
    Sim::run(SEED, |sim| async move {
        let drained = Drained::new(sim, "move").await?;
        let w = &drained.w;
        let operator = Operator::start(w.client.clone(), w.config());
        let keys = vec!["ssh-ed25519 AAAA".to_owned()];
        let spec = MikromVMSpec { agent_address: String::new(), ssh_authorized_keys: keys, ..w.spec() };
        w.create("web", spec).await?;
        w.patch("web", json!({"metadata": {"annotations": {"coracle.dev/on-drain": "move"}}})).await?;
        w.until_running("web").await?;
        drained.cordon("b", false).await?;
        drained.cordon("a", true).await?;
        let blocked = w.until_reason("web", "DrainBlocked").await?;
        assert!(crate::world::message(&blocked).contains("it has volumes or SSH keys"), "{blocked:?}");
        assert_eq!(drained.nodes.running("a").len(), 1, "it runs where it was");
        operator.stop().await
    });
}
