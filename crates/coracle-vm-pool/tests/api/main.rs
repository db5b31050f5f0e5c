//! Controller of pools in simulations, and pools on a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use coracle_api::{MikromVM, MikromVMPool, keys};
use coracle_reconcile::ControllerConfig;
use coracle_testkit::{
    cluster, eventually,
    sim::{Scenario, Sim, crash_after_each_call},
    tools,
    world::{self, Process, until},
};
use futures_util::future::BoxFuture;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const SEED: u64 = 41;

/// Pool whose VMs become Ready at once: the script acts as the VMs' own controller.
struct Life {
    client: Client,
    ns: String,
    sim: Option<Sim>,
}

impl Life {
    fn simulated(sim: Sim) -> Self {
        let mut crds = coracle_api::crds();
        crds.retain(|crd| ["MikromVM", "MikromVMPool"].contains(&crd.spec.names.kind.as_str()));
        sim.prepare(&crds, "team");
        Self { client: sim.client(), ns: "team".into(), sim: Some(sim) }
    }

    fn vms(&self) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn pools(&self) -> Api<MikromVMPool> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn config(&self) -> ControllerConfig {
        let mut config = ControllerConfig { namespace: Some(self.ns.clone()), ..Default::default() };
        if let Some(sim) = &self.sim {
            config.clock = sim.clock();
        }
        config
    }

    async fn create(&self) -> anyhow::Result<()> {
        let pool = json!({"metadata": {"name": "web"}, "spec": {
            "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"image": "i:1", "vcpuCount": 1, "memoryMB": 128}},
        }});
        self.pools().create(&Default::default(), &serde_json::from_value(pool)?).await?;
        Ok(())
    }

    async fn patch(&self, spec: Value) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({"spec": spec}));
        self.pools().patch("web", &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Makes every VM Ready, until the status of the pool has `count` VMs of that image.
    async fn until_complete(&self, count: usize, image: &str) -> anyhow::Result<()> {
        eventually(&format!("{count} VMs of {image}"), async || {
            let vms = self.vms().list(&ListParams::default()).await.ok()?.items;
            for vm in vms.iter().filter(|vm| vm.status.is_none()) {
                let ready = json!({"type": "Ready", "status": "True", "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-02T03:04:05Z"});
                let patch = Patch::Merge(json!({"status": {"conditions": [ready]}}));
                let _gone = self.vms().patch_status(&vm.name_any(), &PatchParams::default(), &patch).await;
            }
            let images = vms.iter().all(|vm| vm.spec.image == image);
            let pool = self.pools().get("web").await.ok()?;
            let status =
                pool.status.filter(|status| status.observed_generation == pool.metadata.generation)?;
            let complete = status.conditions.iter().any(|c| c.reason == "Complete");
            (images
                && complete
                && vms.len() == count
                && status.ready_replicas == i32::try_from(count).unwrap())
            .then_some(())
        })
        .await
    }
}

impl Scenario for Life {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let config = self.config();
        Box::pin(async move { coracle_vm_pool::run(client, config, CancellationToken::new()).await.unwrap() })
    }

    async fn script(&self) -> anyhow::Result<()> {
        self.create().await?;
        self.until_complete(2, "i:1").await?;
        self.patch(json!({"replicas": 3})).await?;
        self.until_complete(3, "i:1").await?;
        self.patch(json!({"template": {"spec": {"image": "i:2"}}})).await?;
        self.until_complete(3, "i:2").await?;
        self.patch(json!({"replicas": 1, "maxUnavailable": 2})).await?;
        self.until_complete(1, "i:2").await?;
        eventually("VMs have the budget", async || {
            let vms = self.vms().list(&ListParams::default()).await.ok()?.items;
            let told =
                |vm: &MikromVM| vm.annotations().get(keys::vm::MAX_UNAVAILABLE).is_some_and(|n| n == "2");
            vms.iter().all(told).then_some(())
        })
        .await?;
        self.pools().delete("web", &DeleteParams::default()).await?;
        until(&self.pools(), "web", "deleted", |found| found.is_none()).await.map(drop)
    }

    fn facts(&self) -> Vec<String> {
        vec![]
    }
}

#[test]
fn pool_converges_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| async move { Ok(Life::simulated(sim)) }).unwrap();
    println!("crash points: {calls}");
    assert!(calls >= 40, "finalizer, creations, deletions, statuses, and reads between: {calls}");
}

#[test]
fn kubectl_scales_a_pool_on_a_real_api_server() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let client = cluster.client();
        world::install(&client, &coracle_api::crds()).await?;
        let life = Life { client: client.clone(), ns: cluster.namespace().await?, sim: None };
        let config = life.config();
        let controller = Process::start(|stop| coracle_vm_pool::run(client, config, stop));
        life.create().await?;
        life.until_complete(2, "i:1").await?;
        let mut scale = tokio::process::Command::new(kubectl);
        scale.arg("--kubeconfig").arg(cluster.kubeconfig());
        scale.args(["-n", &life.ns, "scale", "mvmpool/web", "--replicas=3"]);
        let said = scale.output().await?;
        anyhow::ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        life.until_complete(3, "i:1").await?;
        let scale = life.pools().get_scale("web").await?;
        let status = scale.status.unwrap();
        assert_eq!(
            (status.replicas, status.selector.as_deref()),
            (3, Some("app=web")),
            "what an autoscaler reads"
        );
        for (spec, want) in [
            (json!({"selector": {"matchLabels": {"app": "db"}}}), "selector cannot change"),
            (
                json!({"template": {"metadata": {"labels": {"app": null}}}}),
                "must have the labels of selector",
            ),
            (json!({"maxUnavailable": 0, "maxSurge": 0}), "cannot both be 0"),
            (json!({"template": {"spec": {"memoryMB": 1}}}), "memoryMB"),
        ] {
            let error = life.patch(spec.clone()).await.unwrap_err().to_string();
            assert!(error.contains(want), "{spec}: {error}");
        }
        life.pools().delete("web", &DeleteParams::default()).await?;
        until(&life.pools(), "web", "deleted", |found| found.is_none()).await?;
        let left = life.vms().list(&ListParams::default()).await?.items;
        assert!(left.is_empty(), "its VMs went first: {}", left.len());
        controller.stop().await
    });
}
