//! Controllers of snapshots in simulations, with in-memory nodes, and their objects on a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use coracle_api::{MikromVM, RestorePhase, SnapshotPhase, VMRestore, VMSnapshot};
use coracle_microvm::agent::SavedSnapshot;
use coracle_reconcile::ControllerConfig;
use coracle_testkit::{
    cluster,
    sim::{Scenario, Sim, crash_after_each_call},
    world::{self, until},
};
use coracle_vm_snapshot::{Config, NodeError, SnapshotNodes};
use futures_util::future::BoxFuture;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const SEED: u64 = 37;

/// Snapshots on nodes, by node and name.
#[derive(Debug)]
struct Nodes {
    sim: Option<Sim>,
    saved: Mutex<BTreeMap<(String, String), SavedSnapshot>>,
    saves: Mutex<u32>,
}

impl Nodes {
    async fn after_call(&self, call: &str) {
        if let Some(sim) = &self.sim {
            sim.after_call(call).await;
        }
    }

    fn names(&self) -> Vec<String> {
        self.saved.lock().unwrap().keys().map(|(node, name)| format!("{node}/{name}")).collect()
    }
}

#[async_trait]
impl SnapshotNodes for Nodes {
    async fn save(&self, vm: &MikromVM, name: &str) -> Result<(), NodeError> {
        {
            let node = vm.status.as_ref().unwrap().node_name.clone();
            let mut saved = self.saved.lock().unwrap();
            saved.entry((node, name.to_owned())).or_insert_with(|| {
                *self.saves.lock().unwrap() += 1;
                SavedSnapshot {
                    vcpus: 2,
                    memory_mib: 256,
                    memory_bytes: 4096,
                    disk_bytes: 8192,
                    image_digest: "sha256:1".into(),
                    taken_at_ms: i64::from(*self.saves.lock().unwrap()) * 1000,
                    ..SavedSnapshot::default()
                }
            });
        }
        self.after_call("save").await;
        Ok(())
    }

    async fn get(&self, node: &str, name: &str) -> Result<Option<SavedSnapshot>, NodeError> {
        let found = self.saved.lock().unwrap().get(&(node.to_owned(), name.to_owned())).cloned();
        self.after_call("get").await;
        Ok(found)
    }

    async fn copy(&self, node: &str, (name, copy): (&str, &str), _: &str) -> Result<(), NodeError> {
        {
            let mut saved = self.saved.lock().unwrap();
            let found = saved.get(&(node.to_owned(), name.to_owned())).cloned().unwrap();
            saved.insert((node.to_owned(), copy.to_owned()), found);
        }
        self.after_call("copy").await;
        Ok(())
    }

    async fn delete(&self, node: &str, name: &str) -> Result<(), NodeError> {
        self.saved.lock().unwrap().remove(&(node.to_owned(), name.to_owned()));
        self.after_call("delete").await;
        Ok(())
    }
}

/// VM that is saved, restored as a new VM, and restored in place. The script acts as the VM's own controller.
struct Life {
    client: Client,
    ns: String,
    nodes: Arc<Nodes>,
    sim: Option<Sim>,
    sent_back: Mutex<u32>,
}

impl Life {
    fn new(client: Client, ns: String, sim: Option<Sim>) -> Self {
        let nodes = Nodes { sim: sim.clone(), saved: Mutex::default(), saves: Mutex::default() };
        Self { client, ns, nodes: Arc::new(nodes), sim, sent_back: Mutex::default() }
    }

    fn simulated(sim: Sim) -> Self {
        let mut crds = coracle_api::crds();
        crds.retain(|crd| ["MikromVM", "VMSnapshot", "VMRestore"].contains(&crd.spec.names.kind.as_str()));
        sim.prepare(&crds, "team");
        Self::new(sim.client(), "team".into(), Some(sim))
    }

    fn config(&self) -> Config {
        let mut common = ControllerConfig { namespace: Some(self.ns.clone()), ..Default::default() };
        if let Some(sim) = &self.sim {
            common.clock = sim.clock();
        }
        Config { common, nodes: self.nodes.clone() }
    }

    fn vms(&self) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn snapshots(&self) -> Api<VMSnapshot> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn restores(&self) -> Api<VMRestore> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    async fn snapshot(&self, name: &str, spec: Value) -> anyhow::Result<()> {
        let mut object = json!({"metadata": {"name": name}, "spec": {"vmName": "web"}});
        for (key, value) in spec.as_object().unwrap() {
            object["spec"][key] = value.clone();
        }
        self.snapshots().create(&Default::default(), &serde_json::from_value(object)?).await?;
        Ok(())
    }

    async fn restore(&self, name: &str, vm: &str, identity: &str) -> anyhow::Result<()> {
        let spec = json!({"snapshotName": "two", "vmName": vm, "identity": identity});
        let object = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
        self.restores().create(&Default::default(), &object).await?;
        Ok(())
    }

    async fn vm_status(&self, name: &str, ready: &str, more: Value) -> anyhow::Result<()> {
        let ready = json!({"type": "Ready", "status": ready, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z"});
        let mut status = json!({"vmID": format!("{}-{name}", self.ns), "nodeName": "n1", "agentAddress": "a:1",
            "powerState": "Running", "conditions": [ready]});
        for (key, value) in more.as_object().unwrap() {
            status[key] = value.clone();
        }
        let patch = Patch::Merge(json!({"status": status}));
        self.vms().patch_status(name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    async fn until_ready(&self, name: &str) -> anyhow::Result<VMSnapshot> {
        let is_ready = |found: Option<&VMSnapshot>| {
            found.is_some_and(|f| f.status.as_ref().and_then(|s| s.phase) == Some(SnapshotPhase::Ready))
        };
        Ok(until(&self.snapshots(), name, "Ready", is_ready).await?.unwrap())
    }

    async fn until_restored(&self, name: &str) -> anyhow::Result<()> {
        let is_restored = |found: Option<&VMRestore>| {
            found.is_some_and(|f| f.status.as_ref().and_then(|s| s.phase) == Some(RestorePhase::Restored))
        };
        until(&self.restores(), name, "Restored", is_restored).await.map(drop)
    }
}

impl Scenario for Life {
    fn controller(&self, client: Client) -> BoxFuture<'static, ()> {
        let config = self.config();
        Box::pin(async move {
            coracle_vm_snapshot::run(client, config, CancellationToken::new()).await.unwrap();
        })
    }

    async fn script(&self) -> anyhow::Result<()> {
        let spec = json!({"image": "i:1", "vcpuCount": 2, "memoryMB": 256});
        let vm = serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec}))?;
        self.vms().create(&Default::default(), &vm).await?;
        self.snapshot("one", json!({"retain": 1})).await?;
        until(&self.snapshots(), "one", "VMNotRunning", |found| {
            found.is_some_and(|f| f.status.as_ref().is_some_and(|s| s.conditions[0].reason == "VMNotRunning"))
        })
        .await?;
        self.vm_status("web", "True", json!({})).await?;
        let one = self.until_ready("one").await?.status.unwrap();
        assert_eq!(
            (one.node_name.as_str(), one.memory_bytes, one.disk_bytes),
            ("n1", Some(4096), Some(8192))
        );
        self.snapshot("two", json!({"retain": 1})).await?;
        self.until_ready("two").await?;
        until(&self.snapshots(), "one", "deleted by the retention", |found| found.is_none()).await?;
        self.snapshot("kept", json!({"deletionPolicy": "Retain"})).await?;
        self.until_ready("kept").await?;

        self.restore("as-new", "twin", "New").await?;
        let twin = until(&self.vms(), "twin", "created", |found| found.is_some()).await?.unwrap();
        assert!(twin.spec.clone_from.starts_with("vmsnap-") && twin.spec.node_name == "n1");
        self.vm_status("twin", "True", json!({})).await?;
        self.until_restored("as-new").await?;

        self.restore("back", "web", "Same").await?;
        let sent = |found: Option<&MikromVM>| {
            found.is_some_and(|f| f.status.as_ref().is_some_and(|s| s.migration.is_some()))
        };
        let web = until(&self.vms(), "web", "sent back", sent).await?.unwrap();
        let migration = web.status.unwrap().migration.unwrap();
        assert!(migration.snapshot.starts_with("vmrest-") && migration.source == migration.target);
        *self.sent_back.lock().unwrap() += 1;
        // The script acts as the VM's controller: the copy is consumed, and the VM runs again.
        self.nodes.saved.lock().unwrap().remove(&("n1".to_owned(), migration.snapshot));
        self.vm_status("web", "True", json!({"migration": null})).await?;
        self.until_restored("back").await?;

        for name in ["two", "kept"] {
            self.snapshots().delete(name, &DeleteParams::default()).await?;
            until(&self.snapshots(), name, "deleted", |found| found.is_none()).await?;
        }
        Ok(())
    }

    fn facts(&self) -> Vec<String> {
        let (saves, sent) = (self.nodes.saves.lock().unwrap(), self.sent_back.lock().unwrap());
        let left = self.nodes.names().len();
        vec![format!("saved {saves}, sent back {sent}, left on nodes {left}")]
    }
}

#[test]
fn snapshots_converge_after_a_crash_at_any_call() {
    let calls = crash_after_each_call(SEED, |sim| async move { Ok(Life::simulated(sim)) }).unwrap();
    println!("crash points: {calls}");
    assert!(
        calls >= 40,
        "finalizers, bindings, saves, copies, statuses, deletions, and reads between: {calls}"
    );
}

#[test]
fn real_api_server_takes_snapshots_and_restores() {
    cluster::run(|cluster| async move {
        let client = cluster.client();
        world::install(&client, &coracle_api::crds()).await?;
        let life = Life::new(client.clone(), cluster.namespace().await?, None);
        let config = life.config();
        let controller = world::Process::start(|stop| coracle_vm_snapshot::run(client, config, stop));
        life.script().await?;
        assert_eq!(life.facts(), ["saved 3, sent back 1, left on nodes 1"]);
        let spec = json!({"snapshotName": "two", "vmName": "other"});
        let patch = Patch::Merge(json!({"spec": spec}));
        let error =
            life.restores().patch("back", &PatchParams::default(), &patch).await.unwrap_err().to_string();
        assert!(error.contains("a VMRestore cannot change"), "{error}");
        let done = life.restores().get("back").await?;
        assert!(!done.status.clone().unwrap().vm_uid.is_empty(), "{}", done.name_any());
        controller.stop().await
    });
}
