//! Pods that run as VMs, their Deployments, and sets, through the real API server with the webhook configured.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use std::sync::Arc;

use coracle_admission::{Clients, Config, Extension, Reach};
use coracle_api::cocoon::keys;
use coracle_api::{CocoonHibernation, CocoonSet};
use coracle_cocoon::{Webhook, WebhookMetrics, WebhookSettings, configurations, router};
use coracle_reconcile::{Clock, WallTime as _};
use coracle_testkit::{
    cluster::{self, Cluster},
    eventually, world,
};
use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
    apps::v1::{Deployment, ReplicaSet},
    coordination::v1::Lease,
    core::v1::{ConfigMap, Namespace, Node, Pod},
};
use kube::{
    Api, Client, CustomResourceExt as _, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;

struct World {
    client: Client,
    ns: String,
    pool: String,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    name: String,
}

impl World {
    async fn new(
        cluster: &'static Cluster,
        change: impl FnOnce(&mut WebhookSettings),
    ) -> anyhow::Result<Self> {
        let client = cluster.client();
        world::install(&client, &[CocoonSet::crd(), CocoonHibernation::crd()]).await?;
        let ns = cluster.namespace().await?;
        let mut settings =
            WebhookSettings { namespace: ns.clone(), every_pod: true, ..WebhookSettings::default() };
        change(&mut settings);
        let name = format!("cocoon-{ns}");
        let hook = Webhook::new(client.clone(), settings, WebhookMetrics::default(), Clock::system());
        let (of, here) = (name.clone(), ns.clone());
        let extension = Extension {
            router: router(hook),
            clients: Clients::ApiServer,
            objects: Arc::new(move |at| configurations(&of, Some(&here), &|path| at.client_config(path))),
        };
        let config = Config {
            reach: Reach::Url { host: "127.0.0.1".into() },
            namespace: Some(ns.clone()),
            system_namespace: ns.clone(),
            extensions: vec![extension],
            ..Config::default()
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let (of_task, to_stop) = (client.clone(), stop.clone());
        tasks.spawn(async move {
            coracle_admission::run_on(of_task, config, None, listener, to_stop).await.unwrap();
        });
        let pool = format!("pool-{ns}");
        let world = Self { client, ns, pool, stop, tasks, name };
        let installed: Api<ValidatingWebhookConfiguration> = Api::all(world.client.clone());
        world::until(&installed, &world.name, "installed", |found| found.is_some()).await?;
        eventually("the webhook is asked", async || {
            let bad = json!({"agent": {"image": "host:5000/u:1"}});
            world.create_set("probe", bad, true).await.err().map(drop)
        })
        .await?;
        // The API server reads the two configurations one after the other.
        eventually("pods are reviewed", async || {
            let metadata = json!({"name": "probe", "annotations": {keys::IMAGE: "vm:1"}});
            let pod = world.pod(metadata, json!({}));
            let params = PostParams { dry_run: true, ..PostParams::default() };
            let pod = world.pods().create(&params, &pod).await.ok()?;
            pod.annotations().contains_key(keys::VM_NAME).then_some(())
        })
        .await?;
        Ok(world)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn pod(&self, metadata: Value, spec: Value) -> Pod {
        let toleration = json!({"key": keys::TAINT_KEY, "operator": "Exists"});
        let mut pod = json!({"metadata": metadata, "spec": {"containers": [{"name": "agent", "image": "vm:1"}],
            "tolerations": [toleration], "nodeSelector": {keys::POOL_LABEL: self.pool},
            "automountServiceAccountToken": false}});
        for (key, value) in spec.as_object().unwrap() {
            pod["spec"][key] = value.clone();
        }
        serde_json::from_value(pod).unwrap()
    }

    async fn create(&self, metadata: Value) -> anyhow::Result<Pod> {
        Ok(self.pods().create(&PostParams::default(), &self.pod(metadata, json!({}))).await?)
    }

    /// Returns the metadata of a pod of a Deployment, which has no name yet.
    fn replica(&self, deployment: &str, uid: &str) -> Value {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{deployment}-5d9f"),
            "uid": uid, "controller": true});
        json!({"generateName": format!("{deployment}-5d9f-"), "labels": {"pod-template-hash": "5d9f"},
            "ownerReferences": [owner]})
    }

    async fn node(&self, name: &str) -> anyhow::Result<()> {
        let taint = json!({"key": keys::TAINT_KEY, "value": "cocoon", "effect": "NoSchedule"});
        let node = json!({"apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {keys::POOL_LABEL: self.pool}}, "spec": {"taints": [taint]}});
        let nodes: Api<Node> = Api::all(self.client.clone());
        let params = PatchParams::apply("test").force();
        nodes.patch(name, &params, &Patch::Apply(node)).await?;
        let status = json!({"status": {"conditions": [{"type": "Ready", "status": "True",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
            "reason": "KubeletReady", "message": ""}]}});
        nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
        self.renew(name, 0).await
    }

    /// Writes the node's Lease with that age in seconds.
    async fn renew(&self, node: &str, age: i64) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let home = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-node-lease"}});
        let params = PatchParams::apply("test").force();
        namespaces.patch("kube-node-lease", &params, &Patch::Apply(home)).await?;
        let at = Clock::system().timestamp() - jiff::SignedDuration::from_secs(age);
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": format!("{at:.6}")}});
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        leases.patch(node, &params, &Patch::Apply(lease)).await?;
        Ok(())
    }

    async fn create_set(&self, name: &str, spec: Value, dry_run: bool) -> anyhow::Result<CocoonSet> {
        let sets: Api<CocoonSet> = Api::namespaced(self.client.clone(), &self.ns);
        let set = json!({"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "metadata": {"name": name},
            "spec": spec});
        let params = PostParams { dry_run, ..PostParams::default() };
        Ok(sets.create(&params, &serde_json::from_value(set)?).await?)
    }

    /// Deletes a pod at once, or leaves it terminating.
    async fn delete(&self, pod: &Pod, at_once: bool) -> anyhow::Result<()> {
        let grace = at_once.then_some(0);
        let params = DeleteParams { grace_period_seconds: grace, ..DeleteParams::default() };
        Ok(self.pods().delete(&pod.name_any(), &params).await.map(drop)?)
    }

    async fn reservations(&self) -> anyhow::Result<Vec<Value>> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.ns);
        let map = maps.get_opt(&format!("cocoon-affinity-{}", self.pool)).await?.unwrap_or_default();
        Ok(map.data.iter().flatten().map(|(_, text)| serde_json::from_str(text).unwrap()).collect())
    }

    async fn end(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.tasks.shutdown().await;
        let validating: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        validating.delete(&self.name, &DeleteParams::default()).await?;
        let mutating: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        mutating.delete(&self.name, &DeleteParams::default()).await?;
        Ok(())
    }
}

fn vm_and_node(pod: &Pod) -> (String, String) {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
    (pod.annotations().get(keys::VM_NAME).cloned().unwrap_or_default(), node)
}

#[test]
fn slot_vm_and_node_survive_the_pod() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster, |_| {}).await?;
        let (a, b) = (format!("{}-a", w.ns), format!("{}-b", w.ns));
        w.node(&a).await?;
        w.node(&b).await?;
        let vm = |slot: u32| format!("vk-{}-web-{slot}", w.ns);
        let mut pods = Vec::new();
        for _ in 0..3 {
            pods.push(w.create(w.replica("web", "u")).await?);
        }
        let placed: Vec<_> = pods.iter().map(vm_and_node).collect();
        assert_eq!(placed, [(vm(0), a.clone()), (vm(1), b.clone()), (vm(2), a.clone())], "fewest pods first");
        w.delete(&pods[1], false).await?;
        let again = w.create(w.replica("web", "u")).await?;
        assert_eq!(vm_and_node(&again), (vm(1), b.clone()), "its pod is still ending");
        let fourth = w.create(w.replica("web", "u")).await?;
        assert_eq!(vm_and_node(&fourth).0, vm(3), "all others are in use");
        w.delete(&pods[1], true).await?;
        w.delete(&again, true).await?;
        w.renew(&b, 600).await?;
        let moved = w.create(w.replica("web", "u")).await?;
        assert_eq!(vm_and_node(&moved), (vm(1), a.clone()), "a node that is silent is not alive");
        let kept = w.reservations().await?;
        assert_eq!(kept.len(), 4, "{kept:?}");
        assert!(kept.iter().all(|r| r["namespace"] == w.ns.as_str() && r["pool"] == w.pool.as_str()));
        w.end().await
    });
}

#[test]
fn pods_without_an_owner_get_names_of_their_own() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster, |settings| settings.image_annotation = true).await?;
        let one = w.create(json!({"name": "one"})).await?;
        let two = w.create(json!({"name": "two"})).await?;
        assert_eq!(
            vm_and_node(&one),
            (format!("vk-{}-one", w.ns), String::new()),
            "no node: the scheduler decides"
        );
        assert_eq!(vm_and_node(&two).0, format!("vk-{}-two", w.ns));
        assert_eq!(one.annotations()[keys::IMAGE], "vm:1", "as asked for");
        let bound = w.pod(json!({"name": "bound"}), json!({"nodeName": "elsewhere"}));
        let bound = w.pods().create(&PostParams::default(), &bound).await?;
        assert_eq!(vm_and_node(&bound), (format!("vk-{}-bound", w.ns), "elsewhere".into()));
        assert_eq!(w.reservations().await?.len(), 2);
        let long = w.create(json!({"name": "x".repeat(62)})).await.unwrap_err();
        assert!(format!("{long:#}").contains("at most 63 characters"), "{long:#}");
        w.end().await
    });
}

/// Slot 0 of Deployment `web-1` and pod `web-1-0` would both have the VM name `vk-…-web-1-0`.
#[test]
fn deployments_do_not_share_a_vm_name() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster, |_| {}).await?;
        w.create(json!({"name": "web-1-0"})).await?;
        let pod = w.create(w.replica("web-1", "u")).await?;
        assert_eq!(vm_and_node(&pod).0, format!("vk-{}-web-1-1", w.ns));
        let fixed = || json!({"generateName": "x-", "annotations": {keys::VM_NAME: "golden"}});
        w.create(fixed()).await?;
        let second = w.create(fixed()).await.unwrap_err();
        assert!(format!("{second:#}").contains("golden"), "{second:#}");
        w.end().await
    });
}

#[test]
fn scale_down_of_vms_is_refused() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster, |_| {}).await?;
        let deployment = |name: &str, replicas: i32, key: &str| {
            let template = json!({"metadata": {"labels": {"app": name}}, "spec": {
                "containers": [{"name": "a", "image": "i"}], "tolerations": [{"key": key, "operator": "Exists"}]}});
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
                "replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}})
        };
        let all: Api<Deployment> = Api::namespaced(w.client.clone(), &w.ns);
        for (name, key) in [("vms", keys::TAINT_KEY), ("plain", "other")] {
            all.create(&PostParams::default(), &serde_json::from_value(deployment(name, 3, key))?).await?;
        }
        let to = |replicas: i32| Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let params = PatchParams::default();
        all.patch("vms", &params, &to(4)).await?;
        let refused = all.patch("vms", &params, &to(3)).await.unwrap_err().to_string();
        assert!(refused.contains("cannot scale down from 4 to 3"), "{refused}");
        let refused = all.patch_scale("vms", &params, &to(0)).await.unwrap_err().to_string();
        assert!(refused.contains("cannot scale down from 4 to 0"), "{refused}");
        all.patch_scale("vms", &params, &to(5)).await?;
        all.patch_scale("plain", &params, &to(0)).await?;
        let sets: Api<ReplicaSet> = Api::namespaced(w.client.clone(), &w.ns);
        assert!(sets.list(&Default::default()).await?.items.is_empty(), "no controller runs here");
        w.end().await
    });
}

#[test]
fn sets_that_cannot_work_are_refused() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster, |_| {}).await?;
        let windows =
            json!({"agent": {"image": "w", "mode": "run", "os": "windows", "backend": "firecracker"}});
        let error = format!("{:#}", w.create_set("bad", windows, false).await.unwrap_err());
        assert!(error.contains("firecracker cannot run os windows"), "{error}");
        let name = "x".repeat(60);
        let error =
            format!("{:#}", w.create_set(&name, json!({"agent": {"image": "u"}}), false).await.unwrap_err());
        assert!(error.contains("more than 63 characters"), "{error}");
        w.create_set("good", json!({"agent": {"image": "ubuntu:24.04"}}), false).await?;
        w.end().await
    });
}

/// Pods of the virtual node that run containers have the same toleration.
#[test]
fn pods_that_run_containers_are_left_alone() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster, |settings| settings.every_pod = false).await?;
        let plain = w.create(json!({"name": "plain"})).await?;
        assert!(!plain.annotations().contains_key(keys::VM_NAME), "{plain:?}");
        let vm = w.create(json!({"name": "vm", "annotations": {keys::IMAGE: "vm:1"}})).await?;
        assert_eq!(vm_and_node(&vm).0, format!("vk-{}-vm", w.ns));
        let template = json!({"metadata": {"labels": {"app": "web"}}, "spec": {
            "containers": [{"name": "a", "image": "i"}], "tolerations": [{"key": keys::TAINT_KEY, "operator": "Exists"}]}});
        let web = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
            "replicas": 3, "selector": {"matchLabels": {"app": "web"}}, "template": template}});
        let all: Api<Deployment> = Api::namespaced(w.client.clone(), &w.ns);
        all.create(&PostParams::default(), &serde_json::from_value(web)?).await?;
        let fewer = Patch::Merge(json!({"spec": {"replicas": 1}}));
        all.patch_scale("web", &PatchParams::default(), &fewer).await?;
        w.end().await
    });
}
