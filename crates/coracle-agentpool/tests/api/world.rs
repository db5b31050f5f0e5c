//! Environment of one test: a namespace of the cluster, and a vCenter.

use std::{sync::Arc, time::Duration};

use coracle_agentpool::Config;
use coracle_api::agentpool::{
    OwnedVm, VsphereAgent, VsphereAgentPool,
    foreign::{Agent, INFRA_ENV, InfraEnv},
};
use coracle_reconcile::{Backoff, Clock, ControllerMetrics, find};
use coracle_testkit::{
    cluster::Cluster,
    eventually_within,
    sim::Sim,
    vcsim::Vcsim,
    world::{self, Process},
};
use coracle_vsphere::{
    Connect, Credentials, SoapConnect, SoapOptions, SoapVsphere, Vm, Vsphere as _, VsphereMetrics,
};
use coracle_vsphere_testing::FakeVsphere;
use k8s_openapi::{
    ByteString,
    api::{core::v1::Secret, events::v1::Event},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    image::ImageService,
    objects::{definitions, machine, pool_object, secret, site_spec},
    sims::{self, Style, apis, create, set},
};

pub(crate) use crate::objects::POOL;

/// Longest wait for an expected state.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub(crate) enum Vcenter {
    Real(Arc<Vcsim>, Arc<SoapVsphere>),
    Fake(FakeVsphere),
}

impl Vcenter {
    /// Present VMs, read now.
    pub(crate) async fn vms(&self) -> Vec<Vm> {
        match self {
            Self::Fake(fake) => fake.vms(),
            Self::Real(_, client) => {
                let Ok(site) = client.site(&site_spec()).await else { return Vec::new() };
                let machines = client.machines(&site).borrow().clone();
                machines.vms.values().map(|vm| vm.as_ref().clone()).collect()
            }
        }
    }

    pub(crate) fn fake(&self) -> &FakeVsphere {
        match self {
            Self::Fake(fake) => fake,
            Self::Real(..) => panic!("this world has a real vCenter"),
        }
    }

    pub(crate) fn vcsim(&self) -> &Vcsim {
        match self {
            Self::Real(vcsim, _) => vcsim,
            Self::Fake(_) => panic!("this world has a fake vCenter"),
        }
    }
}

pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) ns: String,
    pub(crate) vcenter: Vcenter,
    pub(crate) image: ImageService,
    /// API client of the operators, separate from that of the other components.
    pub(crate) operators: Client,
    clock: Clock,
    /// Pause between two turns of the provider and the guests.
    tick: Duration,
    /// Metrics of operators that have no registry of their own.
    pub(crate) metrics: ControllerMetrics,
    sims: JoinSet<()>,
}

impl World {
    /// Creates a world with a fake vCenter.
    pub(crate) async fn fake(cluster: &Cluster) -> anyhow::Result<Self> {
        Self::new(cluster, Vcenter::Fake(FakeVsphere::default()), secret("vc.example", "")).await
    }

    /// Creates a world with a vCenter API in a separate process; `None`: the program is missing.
    pub(crate) async fn real(cluster: &Cluster, args: &[&str]) -> anyhow::Result<Option<Self>> {
        let _ = rustls_provider();
        let Some(vcsim) = Vcsim::start_or_skip(args)? else { return Ok(None) };
        let data = secret(vcsim.url(), vcsim.thumbprint());
        let credentials =
            Credentials::parse(&data.iter().map(|(k, v)| (k.clone(), v.clone().into_bytes())).collect())?;
        // Session of the simulated guests, which is separate from those of the operator.
        let eyes = SoapVsphere::open(&credentials, fast_options(), VsphereMetrics::default()).await?;
        let site = eyes.site(&site_spec()).await?;
        eyes.machines(&site).wait_for(|m| m.is_current).await?;
        Self::new(cluster, Vcenter::Real(Arc::new(vcsim), Arc::new(eyes)), data).await.map(Some)
    }

    /// Like [`Self::fake`], on a cluster that has the CRDs already.
    pub(crate) async fn on(cluster: &Cluster) -> anyhow::Result<Self> {
        Self::furnish(cluster, Vcenter::Fake(FakeVsphere::default()), secret("vc.example", "")).await
    }

    async fn new(
        cluster: &Cluster,
        vcenter: Vcenter,
        secret: std::collections::BTreeMap<String, String>,
    ) -> anyhow::Result<Self> {
        world::install(&cluster.client(), &definitions(&["v1beta2", "v1beta1"])).await?;
        Self::furnish(cluster, vcenter, secret).await
    }

    async fn furnish(
        cluster: &Cluster,
        vcenter: Vcenter,
        secret: std::collections::BTreeMap<String, String>,
    ) -> anyhow::Result<Self> {
        let world = Self {
            client: cluster.client(),
            ns: cluster.namespace().await?,
            vcenter,
            image: ImageService::start().await?,
            operators: cluster.client(),
            clock: Clock::system(),
            tick: Duration::from_millis(40),
            metrics: ControllerMetrics::default(),
            sims: JoinSet::new(),
        };
        world.prepare(secret).await?;
        Ok(world)
    }

    /// Creates a world in a simulation, with a fake vCenter whose calls the simulation counts.
    pub(crate) async fn simulated(sim: &Sim) -> anyhow::Result<Self> {
        let mut crds = definitions(&["v1beta2"]);
        let others = ["MikromVM", "BidNode"];
        crds.retain(|crd| !others.contains(&crd.spec.names.kind.as_str()));
        sim.prepare(&crds, "team");
        let fake = FakeVsphere::default();
        let counted = sim.clone();
        fake.after_each_call(move |call| {
            let sim = counted.clone();
            Box::pin(async move { sim.after_call(call).await })
        });
        let world = Self {
            client: sim.client(),
            ns: "team".into(),
            vcenter: Vcenter::Fake(fake),
            image: ImageService::absent(),
            operators: sim.client(),
            clock: sim.clock(),
            tick: Duration::from_millis(200),
            metrics: ControllerMetrics::default(),
            sims: JoinSet::new(),
        };
        world.prepare(secret("vc.example", "")).await?;
        Ok(world)
    }

    /// Creates Secret and InfraEnv.
    async fn prepare(&self, secret: std::collections::BTreeMap<String, String>) -> anyhow::Result<()> {
        let data = secret.into_iter().map(|(key, value)| (key, ByteString(value.into_bytes())));
        let mut object = Secret { data: Some(data.collect()), ..Secret::default() };
        object.metadata.name = Some("vsphere-credentials".into());
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.ns);
        secrets.create(&PostParams::default(), &object).await?;
        create(&self.client, &self.ns, &INFRA_ENV, json!({"metadata": {"name": "demo"}, "spec": {}})).await?;
        self.image_ready(true).await
    }

    /// Sets whether the InfraEnv's image exists.
    pub(crate) async fn image_ready(&self, yes: bool) -> anyhow::Result<()> {
        let envs: Api<InfraEnv> =
            Api::namespaced_with(self.client.clone(), &self.ns, &INFRA_ENV.resource("v1beta1"));
        let status = if yes { "True" } else { "False" };
        let patch = json!({"status": {
            "isoDownloadURL": self.image.url(),
            "conditions": [{"type": "ImageCreated", "status": status, "reason": "x"}],
        }});
        Ok(set(&envs, "demo", patch, true).await?)
    }

    /// Starts the provider and the guests.
    pub(crate) fn simulate(&mut self, style: Style) {
        self.simulate_provider(style);
        self.simulate_guests();
    }

    pub(crate) fn simulate_provider(&mut self, style: Style) {
        self.sims.spawn(sims::provider(self.client.clone(), self.ns.clone(), style, self.tick));
    }

    pub(crate) fn simulate_guests(&mut self) {
        let (client, ns, vcenter) = (self.client.clone(), self.ns.clone(), self.vcenter.clone());
        self.sims.spawn(sims::guests(client, ns, self.tick, async move || vcenter.vms().await));
    }

    /// Configuration with times so short that no test waits long.
    pub(crate) fn config(&self) -> Config {
        let ms = Duration::from_millis;
        let connect: Arc<dyn Connect> = match &self.vcenter {
            Vcenter::Fake(fake) => Arc::new(fake.clone()),
            Vcenter::Real(..) => {
                Arc::new(SoapConnect { options: fast_options(), metrics: VsphereMetrics::default() })
            }
        };
        let mut config = Config::new(connect);
        config.namespace = Some(self.ns.clone());
        config.times.machine = ms(1000);
        config.times.pool = ms(1000);
        config.times.blocked = ms(200);
        config.times.steady = ms(1500);
        config.times.refused = ms(400);
        config.times.debounce = ms(20);
        config.times.patience = ms(1000);
        config.backoff = Backoff { base: ms(50), max: ms(400) };
        config.capacity = Backoff { base: ms(100), max: ms(400) };
        config.iso.idle = ms(2000);
        (config.clock, config.metrics) = (self.clock.clone(), self.metrics.clone());
        config
    }

    pub(crate) fn operator(&self) -> Operator {
        Operator::start(self.operators.clone(), self.config())
    }

    pub(crate) fn pools(&self) -> Api<VsphereAgentPool> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    pub(crate) fn requests(&self) -> Api<VsphereAgent> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    pub(crate) fn agents(&self) -> Api<Agent> {
        apis(&self.client, &self.ns).2
    }

    pub(crate) async fn pool(
        &self,
        change: impl FnOnce(&mut VsphereAgentPool),
    ) -> anyhow::Result<VsphereAgentPool> {
        let mut pool = pool_object(&self.ns);
        change(&mut pool);
        Ok(self.pools().create(&PostParams::default(), &pool).await?)
    }

    pub(crate) async fn edit(&self, patch: serde_json::Value) -> anyhow::Result<()> {
        Ok(set(&self.pools(), POOL, patch, false).await?)
    }

    /// Acts as the autoscaler: Machines `w-0` to `w-<n-1>`, and no others.
    pub(crate) async fn scale(&self, n: usize) -> anyhow::Result<()> {
        let (machines, ..) = apis(&self.client, &self.ns);
        let there: Vec<_> =
            machines.list(&ListParams::default()).await?.iter().map(|m| m.name_any()).collect();
        for name in (0..n).map(|i| format!("w-{i}")).filter(|name| !there.contains(name)) {
            machine(&self.client, &self.ns, &name).await?;
        }
        for name in there.iter().filter(|m| m[2..].parse::<usize>().is_ok_and(|i| i >= n)) {
            machines.delete(name, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    pub(crate) async fn rows(&self) -> Vec<OwnedVm> {
        let pool = self.pools().get_opt(POOL).await.unwrap();
        pool.and_then(|p| p.status).map(|s| s.owned_vms).unwrap_or_default()
    }

    /// Waits for `n` rows in the phase, and no other row.
    pub(crate) async fn until_rows(&self, n: usize, phase: &str) -> anyhow::Result<()> {
        let found = within_limit(async || {
            let rows = self.rows().await;
            (rows.len() == n && rows.iter().all(|r| r.phase == phase)).then_some(())
        })
        .await;
        if found.is_none() {
            let rows: Vec<_> = self.rows().await.into_iter().map(|r| (r.name, r.phase, r.reason)).collect();
            let requests = self.requests().list(&ListParams::default()).await?;
            let told: Vec<_> = requests.iter().map(|r| (r.name_any(), ready(r))).collect();
            let vms = self.vcenter.vms().await;
            let vms: Vec<_> = vms.iter().map(|v| (&v.name, &v.uuid, v.powered_on, &v.mac)).collect();
            let (_, agent_machines, agents) = apis(&self.client, &self.ns);
            let wait: Vec<_> = agent_machines.list(&ListParams::default()).await?.items;
            let wait: Vec<_> = wait.iter().map(|am| (am.name_any(), &am.view)).collect();
            let agents = agents.list(&ListParams::default()).await?.items;
            let agents: Vec<_> = agents.iter().map(|a| (a.name_any(), a.labels(), &a.view.spec)).collect();
            let all = self.dump_objects().await?;
            anyhow::bail!("not {n} rows {phase}: {rows:?}\n{told:?}\n{vms:?}\n{wait:?}\n{agents:?}\n{all}");
        }
        Ok(())
    }

    /// Waits for `n` VMs.
    pub(crate) async fn until_vms(&self, n: usize) -> anyhow::Result<Vec<Vm>> {
        let found = within_limit(async || Some(self.vcenter.vms().await).filter(|vms| vms.len() == n)).await;
        match found {
            Some(vms) => Ok(vms),
            None => anyhow::bail!(
                "not {n} VMs: {:?}",
                self.vcenter.vms().await.iter().map(|v| &v.name).collect::<Vec<_>>()
            ),
        }
    }

    /// Waits until the VsphereAgent's condition Ready has the reason, and returns its message.
    pub(crate) async fn until_reason(&self, name: &str, reason: &str) -> anyhow::Result<String> {
        let found = within_limit(async || {
            let request = self.requests().get_opt(name).await.unwrap()?;
            Some(ready(&request)).filter(|(r, _)| r == reason).map(|(_, message)| message)
        })
        .await;
        match found {
            Some(message) => Ok(message),
            None => anyhow::bail!(
                "{name} is not {reason}: {:?}",
                self.requests().get_opt(name).await?.map(|r| ready(&r))
            ),
        }
    }

    /// Waits for a condition of the pool.
    pub(crate) async fn until_condition(
        &self,
        kind: &str,
        status: &str,
        reason: &str,
    ) -> anyhow::Result<String> {
        let conditions = async || {
            self.pools()
                .get_opt(POOL)
                .await
                .unwrap()
                .and_then(|p| p.status)
                .map(|s| s.conditions)
                .unwrap_or_default()
        };
        let found = within_limit(async || {
            let all = conditions().await;
            find(&all, kind).filter(|c| c.status == status && c.reason == reason).map(|c| c.message.clone())
        })
        .await;
        match found {
            Some(message) => Ok(message),
            None => anyhow::bail!("{kind} is not {status} {reason}: {:#?}", conditions().await),
        }
    }

    /// Waits for an event with that reason.
    pub(crate) async fn until_event(&self, reason: &str) -> anyhow::Result<Event> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.ns);
        let found = within_limit(async || {
            api.list(&ListParams::default())
                .await
                .unwrap()
                .into_iter()
                .find(|e| e.reason.as_deref() == Some(reason))
        })
        .await;
        found.ok_or_else(|| anyhow::anyhow!("no event {reason}"))
    }

    /// Text of all objects that the cluster stores in this namespace.
    pub(crate) async fn dump_objects(&self) -> anyhow::Result<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.ns);
        let pools = self.pools().list(&ListParams::default()).await?;
        let requests = self.requests().list(&ListParams::default()).await?;
        let events = events.list(&ListParams::default()).await?;
        Ok(format!("{pools:?}{requests:?}{events:?}"))
    }
}

pub(crate) fn ready(request: &VsphereAgent) -> (String, String) {
    let conditions = request.status.as_ref().map(|s| s.conditions.clone()).unwrap_or_default();
    find(&conditions, "Ready").map(|c| (c.reason.clone(), c.message.clone())).unwrap_or_default()
}

fn fast_options() -> SoapOptions {
    SoapOptions { coalesce: Duration::from_millis(50), ..SoapOptions::default() }
}

fn rustls_provider() -> bool {
    rustls::crypto::aws_lc_rs::default_provider().install_default().is_ok()
}

/// Polls `ask` until it returns a value, for at most [`LIMIT`].
pub(crate) async fn within_limit<T>(ask: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    eventually_within(LIMIT, "", ask).await.ok()
}

/// Running operator. Dropping it kills it at once.
pub(crate) struct Operator {
    metrics: ControllerMetrics,
    process: Process<coracle_agentpool::Error>,
}

impl Operator {
    pub(crate) fn start(client: Client, mut config: Config) -> Self {
        let metrics = ControllerMetrics::default();
        config.metrics = metrics.clone();
        Self { metrics, process: Process::start(|stop| coracle_agentpool::run(client, config, stop)) }
    }

    /// Waits until each of these controllers has ended `n` more reconciles.
    pub(crate) async fn reconciles(&self, controllers: &[&'static str], n: u64) -> anyhow::Result<()> {
        for controller in controllers {
            let count = || self.metrics.reconciles(controller);
            let enough = count() + n;
            let done = within_limit(async || (count() >= enough).then_some(()));
            anyhow::ensure!(done.await.is_some(), "{controller} does not reconcile");
        }
        Ok(())
    }

    /// Requests a stop and waits until the operator has ended.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.process.stop().await
    }

    /// Kills the operator at once, and waits until all its tasks have ended.
    pub(crate) async fn kill(self) {
        self.process.kill().await;
    }
}
