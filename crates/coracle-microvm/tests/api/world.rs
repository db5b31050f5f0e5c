//! Environment of one test: a namespace of a cluster or a simulation, an agent, and an operator that can be killed.

use std::{sync::Arc, time::Duration};

use coracle_api::{MikromVM, MikromVMSpec, condition, keys};
use coracle_microvm::{AgentTls, Config, Deadlines, Policy, Scope, agent::TcpConnect};
use coracle_reconcile::{Backoff, Clock, ControllerMetrics, WallTime as _, find};
pub(crate) use coracle_testkit::eventually;
use coracle_testkit::{
    cluster::Cluster,
    sim::Sim,
    world::{self, Process},
};
use futures_util::TryStreamExt as _;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, WatchEvent, WatchParams},
};
use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    fake_agent::{FakeAgent, MemoryConnect, Net, Shared},
    pki::Pki,
};

pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) ns: String,
    pub(crate) net: Net,
    pub(crate) agent: FakeAgent,
    metrics: ControllerMetrics,
    /// TLS of a node with a host service: the operator's certificates, and their directory.
    tls: Option<(AgentTls, tempfile::TempDir)>,
}

/// Runs a test body in a simulation.
pub(crate) fn simulate<Fut>(body: impl FnOnce(World) -> Fut)
where
    Fut: Future<Output = anyhow::Result<()>>,
{
    Sim::run(1, |sim| async move { body(World::simulated(&sim).await?).await });
}

impl World {
    pub(crate) async fn new(cluster: &'static Cluster) -> anyhow::Result<Self> {
        let client = cluster.client();
        world::install(&client, &coracle_api::crds()).await?;
        let ns = cluster.namespace().await?;
        let agent = FakeAgent::start(&Net::Tcp).await;
        Ok(Self { client, ns, net: Net::Tcp, agent, metrics: ControllerMetrics::default(), tls: None })
    }

    /// Like [`World::new`], but the agent is a node that announces its host service, and has no agent service.
    pub(crate) async fn with_host_service(cluster: &'static Cluster) -> anyhow::Result<Self> {
        Self::new(cluster).await?.announced_host().await
    }

    /// Replaces the agent by a node that announces its host service.
    pub(crate) async fn announced_host(mut self) -> anyhow::Result<Self> {
        let pki = Pki::new();
        self.agent = FakeAgent::start_host(&self.net, pki.server("127.0.0.1")).await;
        self.trust(&pki)?;
        self.announce("host", &self.agent.address, 64, 64 * 1024, 600).await?;
        Ok(self)
    }

    /// Configures the operators of this world to use TLS with certificates of `pki`, and the nodes to announce their host
    /// services.
    pub(crate) fn trust(&mut self, pki: &Pki) -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        self.tls = Some((pki.client(dir.path()), dir));
        Ok(())
    }

    pub(crate) async fn simulated(sim: &Sim) -> anyhow::Result<Self> {
        let mut crds = coracle_api::crds();
        crds.retain(|crd| crd.spec.names.kind == "MikromVM");
        sim.prepare(&crds, "team");
        let net = Net::Memory(sim.clone());
        let agent = FakeAgent::start(&net).await;
        let metrics = ControllerMetrics::default();
        Ok(Self { client: sim.client(), ns: "team".into(), net, agent, metrics, tls: None })
    }

    /// Returns the clock of the controller and of Leases.
    pub(crate) fn clock(&self) -> Clock {
        match &self.net {
            Net::Tcp => Clock::system(),
            Net::Memory(sim) => sim.clock(),
        }
    }

    /// Waits for that many more reconciles: what has not happened by then does not happen.
    pub(crate) async fn until_reconciled(&self, more: u64) -> anyhow::Result<()> {
        let done = || self.metrics.reconciles(coracle_microvm::CONTROLLER);
        let enough = done() + more;
        eventually("more reconciles", async || (done() >= enough).then_some(())).await
    }

    /// Kills the agent and starts an empty one in its place. Returns the old agent's VMs and address.
    pub(crate) async fn kill_agent(&mut self) -> (Arc<Shared>, String) {
        let spare = FakeAgent::start(&self.net).await;
        std::mem::replace(&mut self.agent, spare).kill().await
    }

    /// Returns a configuration with short times, so that no test waits for a clock.
    pub(crate) fn config(&self) -> Config {
        let ms = Duration::from_millis;
        Config {
            scope: Scope {
                namespace: Some(self.ns.clone()),
                system_namespace: self.ns.clone(),
                node_namespace: self.ns.clone(),
                // Addresses of the fake agents.
                allowed: vec!["127.0.0.1".parse().unwrap()],
            },
            deadlines: Deadlines { connect: ms(1000), boot: ms(1000), call: ms(1000) },
            policy: Policy {
                resync: ms(300),
                node_grace: ms(1500),
                restart: Backoff { base: ms(50), max: ms(400) },
                healthy_after: Duration::from_secs(600),
                internal_max: 3,
                silent_max: 3,
                ..Policy::default()
            },
            backoff: Backoff { base: ms(30), max: ms(200) },
            connect: match &self.net {
                Net::Tcp => Arc::new(TcpConnect),
                Net::Memory(sim) => Arc::new(MemoryConnect(sim.clone())),
            },
            tls: self.tls.as_ref().map(|(tls, _)| tls.clone()),
            clock: self.clock(),
            metrics: self.metrics.clone(),
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

    /// Returns the spec of the example manifest, at this world's agent.
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

    /// Waits until `test` holds for the object; on failure reports the present object.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        test: impl Fn(Option<&MikromVM>) -> bool,
    ) -> anyhow::Result<Option<MikromVM>> {
        let found = world::until(&self.vms(), name, what, test).await;
        found.map_err(|error| error.context(format!("calls: {:?}", self.agent.mutations())))
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

    /// Writes the Lease by which a node announces its agent, and its host service in a world with host services.
    pub(crate) async fn announce(
        &self,
        node: &str,
        address: &str,
        vcpus: u32,
        memory_mib: u64,
        seconds: i32,
    ) -> anyhow::Result<()> {
        let mut lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": node, "labels": {"coracle.dev/agent": "true"},
                "annotations": {
                    keys::node::AGENT_ADDRESS: address, keys::node::NODE: node,
                    keys::node::CAPACITY_VCPUS: vcpus.to_string(), keys::node::CAPACITY_MEMORY_MIB: memory_mib.to_string(),
                },
            },
            "spec": LeaseSpec { holder_identity: Some(node.into()), lease_duration_seconds: Some(seconds), renew_time: Some(MicroTime(self.clock().timestamp())), ..Default::default() },
        });
        if self.tls.is_some() {
            lease["metadata"]["annotations"][keys::node::HOST_ADDRESS] = address.into();
        }
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.ns);
        api.patch(node, &PatchParams::apply("node").force(), &Patch::Apply(lease)).await?;
        Ok(())
    }

    pub(crate) async fn withdraw(&self, node: &str) -> anyhow::Result<()> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.ns);
        api.delete(node, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits for an Event with that reason about `name`, and returns its note.
    pub(crate) async fn until_event(&self, name: &str, reason: &str) -> anyhow::Result<String> {
        world::until_event(&self.client, &self.ns, name, reason).await
    }

    /// Follows every write to `name` from now on: each write is one watch event.
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

/// Returns status and reason of Ready, which equal those of Available.
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

/// Running controller. Dropping it kills it.
pub(crate) struct Operator(Process<coracle_microvm::Error>);

impl Operator {
    pub(crate) fn start(client: Client, config: Config) -> Self {
        Self(Process::start(|stop| coracle_microvm::run(client, config, stop)))
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.0.stop().await
    }

    pub(crate) async fn kill(self) {
        self.0.kill().await;
    }
}
