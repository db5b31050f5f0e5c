//! One test's corner of the cluster: a namespace, an agent, and an operator that can be killed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use coracle_api::{MikromVM, MikromVMSpec, condition, keys};
use coracle_microvm::{Config, Deadlines, Policy, Scope};
use coracle_reconcile::{Backoff, find};
use coracle_testkit::cluster::Cluster;
use futures_util::TryStreamExt as _;
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        events::v1::Event,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, WatchEvent, WatchParams},
    runtime::wait::await_condition,
};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::fake_agent::FakeAgent;

/// No state is waited for longer.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) cluster: &'static Cluster,
    pub(crate) ns: String,
    pub(crate) agent: FakeAgent,
}

impl World {
    pub(crate) async fn new(cluster: &'static Cluster) -> anyhow::Result<Self> {
        let client = cluster.client();
        for crd in coracle_api::crds() {
            let api: Api<CustomResourceDefinition> = Api::all(client.clone());
            api.patch(&crd.name_any(), &PatchParams::apply("test").force(), &Patch::Apply(&crd)).await?;
            let established = kube::runtime::conditions::is_crd_established();
            tokio::time::timeout(LIMIT, await_condition(api, &crd.name_any(), established)).await??;
        }
        let ns = cluster.namespace().await?;
        Ok(Self { client, cluster, ns, agent: FakeAgent::start().await })
    }

    /// Fast enough that no test waits for a clock.
    pub(crate) fn config(&self) -> Config {
        let ms = Duration::from_millis;
        Config {
            scope: Scope { namespace: Some(self.ns.clone()), system_namespace: self.ns.clone() },
            deadlines: Deadlines { connect: ms(1000), boot: ms(1000), call: ms(1000) },
            policy: Policy {
                resync: ms(300),
                node_grace: ms(1500),
                restart: Backoff { base: ms(50), max: ms(400) },
                healthy_after: Duration::from_secs(600),
                internal_max: 3,
                silent_max: 3,
            },
            backoff: Backoff { base: ms(30), max: ms(200) },
            ..Config::default()
        }
    }

    pub(crate) fn operator(&self) -> Operator {
        Operator::start(self.client.clone(), self.config())
    }

    pub(crate) fn vms(&self) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    pub(crate) fn id(&self, name: &str) -> String {
        format!("{}-{name}", self.ns)
    }

    /// The spec of the seed's manifest, at our agent.
    pub(crate) fn spec(&self) -> MikromVMSpec {
        MikromVMSpec {
            image: "docker.io/myorg/my-app:v1.2.3".into(),
            vcpu_count: 2,
            memory_mib: 1024,
            agent_address: self.agent.address.clone(),
            ..MikromVMSpec::default()
        }
    }

    pub(crate) async fn create(&self, name: &str, spec: MikromVMSpec) -> kube::Result<MikromVM> {
        self.vms().create(&Default::default(), &MikromVM::new(name, spec)).await
    }

    pub(crate) async fn patch(&self, name: &str, patch: serde_json::Value) -> kube::Result<MikromVM> {
        self.vms().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await
    }

    pub(crate) async fn delete(&self, name: &str) -> kube::Result<()> {
        self.vms().delete(name, &DeleteParams::default()).await.map(drop)
    }

    /// Waits until the object is so; fails with what it is instead.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        test: impl Fn(Option<&MikromVM>) -> bool,
    ) -> anyhow::Result<Option<MikromVM>> {
        let found =
            tokio::time::timeout(LIMIT, await_condition(self.vms(), name, |vm: Option<&MikromVM>| test(vm)))
                .await;
        match found {
            Ok(found) => Ok(found?),
            Err(_) => anyhow::bail!(
                "{name} is not {what}: {:#?}\ncalls: {:?}",
                self.vms().get_opt(name).await?,
                self.agent.mutations()
            ),
        }
    }

    pub(crate) async fn until_running(&self, name: &str) -> anyhow::Result<MikromVM> {
        let running = |vm: Option<&MikromVM>| {
            vm.is_some_and(|vm| vm.is_provisioned() && ready(vm) == ("True".into(), "VMRunning".into()))
        };
        Ok(self.until(name, "running", running).await?.unwrap())
    }

    pub(crate) async fn until_reason(&self, name: &str, reason: &str) -> anyhow::Result<MikromVM> {
        Ok(self.until(name, reason, |vm| vm.is_some_and(|vm| ready(vm).1 == reason)).await?.unwrap())
    }

    pub(crate) async fn until_gone(&self, name: &str) -> anyhow::Result<()> {
        self.until(name, "gone", |vm| vm.is_none()).await.map(drop)
    }

    /// The Lease by which a node announces its agent.
    pub(crate) async fn announce(
        &self,
        node: &str,
        address: &str,
        vcpus: u32,
        memory_mib: u64,
        seconds: i32,
    ) -> anyhow::Result<()> {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": node, "labels": {"coracle.dev/agent": "true"},
                "annotations": {
                    keys::node::AGENT_ADDRESS: address, keys::node::NODE: node,
                    keys::node::CAPACITY_VCPUS: vcpus.to_string(), keys::node::CAPACITY_MEMORY_MIB: memory_mib.to_string(),
                },
            },
            "spec": LeaseSpec { holder_identity: Some(node.into()), lease_duration_seconds: Some(seconds), ..Default::default() },
        });
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.ns);
        api.patch(node, &PatchParams::apply("node").force(), &Patch::Apply(lease)).await?;
        Ok(())
    }

    pub(crate) async fn withdraw(&self, node: &str) -> anyhow::Result<()> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.ns);
        api.delete(node, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits for an event with that reason about `name`; its note.
    pub(crate) async fn until_event(&self, name: &str, reason: &str) -> anyhow::Result<String> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.ns);
        let fits = |e: &Event| {
            e.reason.as_deref() == Some(reason)
                && e.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(name)
        };
        let found = eventually(&format!("event {reason}"), async || {
            api.list(&Default::default()).await.unwrap().into_iter().find(fits)
        })
        .await?;
        Ok(found.note.unwrap_or_default())
    }

    /// Follows every write to `name` from now on, at the API server's side: one watch event each.
    pub(crate) async fn writes(&self, name: &str) -> anyhow::Result<Writes> {
        let from = self.vms().list(&Default::default()).await?.metadata.resource_version.unwrap_or_default();
        let count: Arc<std::sync::Mutex<Vec<MikromVM>>> = Arc::default();
        let (seen, api) = (count.clone(), self.vms());
        let params = WatchParams::default().fields(&format!("metadata.name={name}"));
        let stream = api.watch(&params, &from).await?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut stream = std::pin::pin!(stream);
            while let Ok(Some(event)) = stream.try_next().await {
                if let WatchEvent::Added(vm) | WatchEvent::Modified(vm) = event {
                    seen.lock().unwrap().push(vm);
                }
            }
        });
        Ok(Writes { seen: count, _task: task })
    }
}

pub(crate) struct Writes {
    seen: Arc<std::sync::Mutex<Vec<MikromVM>>>,
    _task: JoinSet<()>,
}

impl Writes {
    pub(crate) fn all(&self) -> Vec<MikromVM> {
        self.seen.lock().unwrap().clone()
    }
}

/// Status and reason of Ready; Available always says the same.
pub(crate) fn ready(vm: &MikromVM) -> (String, String) {
    let conditions = vm.status.as_ref().map(|s| s.conditions.clone()).unwrap_or_default();
    let of = |kind| find(&conditions, kind).map(|c| (c.status.clone(), c.reason.clone())).unwrap_or_default();
    assert_eq!(of(condition::READY), of(condition::AVAILABLE), "written together");
    of(condition::READY)
}

pub(crate) fn message(vm: &MikromVM) -> String {
    let conditions = vm.status.as_ref().map(|s| s.conditions.clone()).unwrap_or_default();
    find(&conditions, condition::READY).map(|c| c.message.clone()).unwrap_or_default()
}

/// Asks until there is an answer.
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> anyhow::Result<T> {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = ask().await {
            return Ok(answer);
        }
        anyhow::ensure!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A running controller. Dropping it kills it where it stands.
pub(crate) struct Operator {
    stop: CancellationToken,
    task: JoinSet<Result<(), coracle_microvm::Error>>,
}

impl Operator {
    pub(crate) fn start(client: Client, config: Config) -> Self {
        let stop = CancellationToken::new();
        let mut task = JoinSet::new();
        task.spawn(coracle_microvm::run(client, config, stop.clone()));
        Self { stop, task }
    }

    /// Asks it to stop and waits for it.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        Ok(tokio::time::timeout(LIMIT, self.task.join_next()).await?.unwrap()??)
    }

    /// Kills it where it stands, and waits until nothing of it runs.
    pub(crate) async fn kill(mut self) {
        self.task.shutdown().await;
    }
}
