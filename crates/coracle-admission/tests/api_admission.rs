//! Admission through the real API server, with the webhook configured (acceptance A11).
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use std::time::Duration;

use coracle_admission::{Config, Error, Reach};
use coracle_api::{MikromVM, MikromVMSpec, keys};
use coracle_microvm::{Fleet, Overcommit, Scope};
use coracle_reconcile::{Clock, WallTime};
use coracle_testkit::{
    cluster::{self, Cluster},
    eventually, world,
};
use k8s_openapi::api::{
    admissionregistration::v1::ValidatingWebhookConfiguration,
    coordination::v1::Lease,
    core::v1::{ResourceQuota, Secret},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;

struct World {
    client: Client,
    ns: String,
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl World {
    async fn new(cluster: &'static Cluster) -> anyhow::Result<Self> {
        let client = cluster.client();
        world::install(&client, &coracle_api::crds()).await?;
        Ok(Self {
            client,
            ns: cluster.namespace().await?,
            tasks: JoinSet::new(),
            stop: CancellationToken::new(),
        })
    }

    fn config(&self) -> Config {
        Config {
            reach: Reach::Url { host: "127.0.0.1".into() },
            name: format!("coracle-{}", self.ns),
            namespace: Some(self.ns.clone()),
            system_namespace: self.ns.clone(),
            ..Config::default()
        }
    }

    /// Starts fleet and webhook, and waits until the API server calls it.
    async fn webhook(&mut self, config: Config) -> anyhow::Result<()> {
        let scope = Scope {
            namespace: Some(self.ns.clone()),
            system_namespace: self.ns.clone(),
            node_namespace: self.ns.clone(),
            ..Scope::default()
        };
        let (fleet, keep) = Fleet::watch(&self.client, &scope, Overcommit::default(), Clock::system());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (name, client, stop) = (config.name.clone(), self.client.clone(), self.stop.clone());
        self.tasks.spawn(keep);
        self.tasks.spawn(async move {
            let ended: Result<(), Error> =
                coracle_admission::run_on(client, config, fleet, listener, stop).await;
            ended.unwrap();
        });
        let api: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        world::until(&api, &name, "installed", |c| c.is_some()).await?;
        // The API server takes a moment to call the webhook: an object that is always refused shows when it does.
        let refused = async || self.dry_run("probe", 32, 999_999, "").await.err().map(drop);
        eventually("the webhook is asked", refused).await
    }

    fn vms(&self) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    fn vm(name: &str, vcpu_count: i32, memory_mib: i32, node: &str) -> MikromVM {
        let spec = MikromVMSpec {
            image: "i:1".into(),
            vcpu_count,
            memory_mib,
            node_name: node.into(),
            ..Default::default()
        };
        MikromVM::new(name, spec)
    }

    async fn dry_run(&self, name: &str, vcpus: i32, memory: i32, node: &str) -> kube::Result<MikromVM> {
        let params = PostParams { dry_run: true, ..PostParams::default() };
        self.vms().create(&params, &Self::vm(name, vcpus, memory, node)).await
    }

    async fn create(&self, name: &str, vcpus: i32, memory: i32, node: &str) -> kube::Result<MikromVM> {
        self.vms().create(&PostParams::default(), &Self::vm(name, vcpus, memory, node)).await
    }

    async fn announce(&self, node: &str, vcpus: u32, memory_mib: u64) -> anyhow::Result<()> {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": node, "labels": {"coracle.dev/agent": "true"}, "annotations": {
                keys::node::AGENT_ADDRESS: format!("{node}.example:50051"), keys::node::NODE: node,
                keys::node::CAPACITY_VCPUS: vcpus.to_string(), keys::node::CAPACITY_MEMORY_MIB: memory_mib.to_string(),
            }},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 600, "renewTime": format!("{:.6}", WallTime::timestamp(&Clock::system()))},
        });
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.ns);
        api.patch(node, &PatchParams::apply("node").force(), &Patch::Apply(lease)).await?;
        Ok(())
    }

    async fn end(mut self, name: &str) -> anyhow::Result<()> {
        self.stop.cancel();
        self.tasks.shutdown().await;
        let api: Api<ValidatingWebhookConfiguration> = Api::all(self.client.clone());
        api.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }
}

#[test]
fn vm_beyond_node_capacity_is_refused() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.announce("n1", 4, 2048).await?;
        let config = w.config();
        w.webhook(config.clone()).await?;
        let refusal = |result: kube::Result<MikromVM>| result.expect_err("refused").to_string();
        // A11: more CPUs than the node has; and agentAddress may be omitted.
        let text = refusal(w.create("wide", 8, 512, "n1").await);
        assert!(text.contains("node n1 has 4 vCPUs, 8 requested"), "{text}");
        assert!(text.contains("capacity.vm.mikrom.es"), "it came from our webhook: {text}");
        assert!(
            refusal(w.create("tall", 1, 4096, "").await).contains("node n1 has 2048 MiB, 4096 requested")
        );
        w.create("one", 1, 1536, "n1").await?;
        // Declared VMs count, whether created or not.
        let full = async || w.dry_run("two", 1, 1024, "").await.err().map(drop);
        eventually("the first VM counts", full).await?;
        assert!(refusal(w.create("two", 1, 1024, "").await).contains("node n1 has 512 MiB unreserved"));
        w.create("two", 1, 512, "").await?;
        // An agent outside the cluster has no known capacity.
        let mut outside = World::vm("outside", 32, 99_999, "");
        outside.spec.agent_address = "10.0.0.5:50051".into();
        w.vms().create(&PostParams::default(), &outside).await?;
        // Growth beyond the capacity is refused; other changes are not checked.
        let grow = json!({"spec": {"memoryMB": 4096}});
        assert!(w.vms().patch("two", &PatchParams::default(), &Patch::Merge(grow)).await.is_err());
        let label = json!({"metadata": {"labels": {"a": "b"}, "finalizers": []}});
        w.vms().patch("one", &PatchParams::default(), &Patch::Merge(label)).await?;
        w.end(&config.name).await
    });
}

#[test]
fn namespace_quotas_are_enforced() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.announce("n1", 16, 16_384).await?;
        let config = w.config();
        w.webhook(config.clone()).await?;
        let quotas: Api<ResourceQuota> = Api::namespaced(w.client.clone(), &w.ns);
        let hard = json!({"vm.mikrom.es/cpu": "3", "vm.mikrom.es/memory": "1Gi", "vm.mikrom.es/disk": "1Gi"});
        let quota = serde_json::from_value(json!({"metadata": {"name": "vms"}, "spec": {"hard": hard}}))?;
        quotas.create(&PostParams::default(), &quota).await?;
        let refused = async || w.dry_run("wide", 4, 128, "").await.err().map(drop);
        eventually("the quota counts", refused).await?;
        let text = w.dry_run("wide", 4, 128, "").await.expect_err("refused").to_string();
        let want = "exceeded quota: vms, requested: vm.mikrom.es/cpu=4, used: vm.mikrom.es/cpu=0, limited: vm.mikrom.es/cpu=3";
        assert!(text.contains(want), "{text}");
        w.create("one", 2, 768, "").await?;
        let refused = async || w.dry_run("two", 1, 512, "").await.err().map(drop);
        eventually("the first VM counts", refused).await?;
        w.create("two", 1, 256, "").await?;
        let grow = json!({"spec": {"memoryMB": 512}});
        assert!(w.vms().patch("two", &PatchParams::default(), &Patch::Merge(grow)).await.is_err());
        let disk = json!([{"name": "d", "mountPath": "/d", "disk": {"size": "2Gi"}}]);
        let disk = json!({"spec": {"volumes": disk}});
        let text = w.vms().patch("two", &PatchParams::default(), &Patch::Merge(disk)).await;
        assert!(text.expect_err("refused").to_string().contains("vm.mikrom.es/disk=2048Mi"));
        let label = json!({"metadata": {"labels": {"a": "b"}}});
        w.vms().patch("two", &PatchParams::default(), &Patch::Merge(label)).await?;
        w.end(&config.name).await
    });
}

#[test]
fn failure_policy_decides_when_webhook_is_down() {
    cluster::run(|cluster| async move {
        for fail_open in [false, true] {
            let mut w = World::new(cluster).await?;
            w.announce("n1", 4, 2048).await?;
            let config = Config { fail_open, ..w.config() };
            w.webhook(config.clone()).await?;
            w.create("before", 1, 128, "").await?;
            w.stop.cancel();
            w.tasks.shutdown().await;
            let created = w.create("after", 1, 128, "").await;
            assert_eq!(created.is_ok(), fail_open, "fail-open {fail_open}: {created:?}");
            // Deletion and changes of metadata never depend on the webhook.
            let label = json!({"metadata": {"labels": {"a": "b"}}});
            w.vms().patch("before", &PatchParams::default(), &Patch::Merge(label)).await?;
            w.vms().delete("before", &DeleteParams::default()).await?;
            w.end(&config.name).await?;
        }
        anyhow::Ok(())
    });
}

#[test]
fn certificates_are_renewed_while_the_webhook_serves() {
    cluster::run(|cluster| async move {
        let mut w = World::new(cluster).await?;
        w.announce("n1", 4, 2048).await?;
        let life = Duration::from_secs(12);
        let config = Config { authority_life: life, certificate_life: life, ..w.config() };
        w.webhook(config.clone()).await?;
        let secrets: Api<Secret> = Api::namespaced(w.client.clone(), &w.ns);
        let authority = async || secrets.get("coracle-webhook-ca").await.unwrap();
        // Reviews are always answered, also during a renewal.
        let renewed = async |old: &Secret| {
            eventually("a new authority", async || {
                let refused = w.dry_run("vm", 1, 128, "").await.err().map(Err);
                let new = authority().await;
                refused.or((new.resource_version() != old.resource_version()).then_some(Ok(new)))
            })
            .await
        };
        let first = authority().await;
        let second = renewed(&first).await??;
        let bundle_of = |secret: &Secret, key: &str| {
            String::from_utf8(secret.data.clone().unwrap()[key].0.clone()).unwrap()
        };
        assert_eq!(
            bundle_of(&second, "previous.crt"),
            bundle_of(&first, "ca.crt"),
            "the old one is trusted meanwhile"
        );
        renewed(&second).await??;
        w.end(&config.name).await
    });
}
