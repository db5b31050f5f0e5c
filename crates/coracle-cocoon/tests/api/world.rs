//! Environment of one test: a namespace of a cluster or a simulation, a node, saved states, and controllers that can be killed.

use std::{sync::Arc, time::Duration};

use coracle_api::cocoon::{HibernationPhase, SetPhase};
use coracle_api::{CocoonHibernation, CocoonSet};
use coracle_cocoon::{Config, Error, Settings, Times};
use coracle_reconcile::{Clock, ControllerMetrics};
use coracle_testkit::{
    cluster::Cluster,
    sim::Sim,
    world::{self, Process},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, CustomResourceExt as _, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::{node::FakeNode, tags::Tags};

pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) ns: String,
    pub(crate) node: FakeNode,
    pub(crate) tags: Tags,
    pub(crate) settings: Settings,
    pub(crate) metrics: ControllerMetrics,
    clock: Clock,
    _tasks: JoinSet<()>,
}

/// Returns short times, so that no test waits for a clock.
fn times() -> Times {
    let ms = Duration::from_millis;
    Times { poll: ms(200), resync: ms(1000), ..Times::default() }
}

impl World {
    pub(crate) async fn new(cluster: &'static Cluster) -> anyhow::Result<Self> {
        let client = cluster.client();
        world::install(&client, &[CocoonSet::crd(), CocoonHibernation::crd()]).await?;
        let ns = cluster.namespace().await?;
        Ok(Self::with(client, ns, Tags::default(), Clock::system(), false))
    }

    pub(crate) fn simulated(sim: &Sim) -> Self {
        sim.prepare(&[CocoonSet::crd(), CocoonHibernation::crd()], "team");
        Self::with(sim.client(), "team".into(), Tags::simulated(sim), sim.clock(), true)
    }

    fn with(client: Client, ns: String, tags: Tags, clock: Clock, is_sim: bool) -> Self {
        let node = FakeNode::default();
        let tasks = node.serve(client.clone(), &ns, tags.clone(), is_sim);
        let settings = Settings { times: times(), ..Settings::default() };
        Self { client, ns, node, tags, settings, metrics: ControllerMetrics::default(), clock, _tasks: tasks }
    }

    pub(crate) fn config(&self) -> Config {
        Config {
            namespace: Some(self.ns.clone()),
            settings: self.settings.clone(),
            metrics: self.metrics.clone(),
            clock: self.clock.clone(),
            ..Config::new(Arc::new(self.tags.clone()))
        }
    }

    pub(crate) fn operator(&self) -> Process<Error> {
        let (client, config) = (self.client.clone(), self.config());
        Process::start(|stop| coracle_cocoon::run(client, config, stop))
    }

    pub(crate) fn sets(&self) -> Api<CocoonSet> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    pub(crate) fn hibernations(&self) -> Api<CocoonHibernation> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.ns)
    }

    pub(crate) fn vm(&self, pod: &str) -> String {
        format!("vk-{}-{pod}", self.ns)
    }

    pub(crate) async fn create_set(&self, name: &str, spec: Value) -> anyhow::Result<CocoonSet> {
        let set = json!({"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "metadata": {"name": name},
            "spec": spec});
        Ok(self.sets().create(&PostParams::default(), &serde_json::from_value(set)?).await?)
    }

    pub(crate) async fn patch_set(&self, name: &str, spec: Value) -> anyhow::Result<CocoonSet> {
        let patch = Patch::Merge(json!({"spec": spec}));
        Ok(self.sets().patch(name, &PatchParams::default(), &patch).await?)
    }

    pub(crate) async fn delete_set(&self, name: &str) -> anyhow::Result<()> {
        Ok(self.sets().delete(name, &DeleteParams::default()).await.map(drop)?)
    }

    pub(crate) async fn until_phase(&self, name: &str, phase: SetPhase) -> anyhow::Result<CocoonSet> {
        let has = |set: Option<&CocoonSet>| {
            set.is_some_and(|set| {
                let status = set.status.clone().unwrap_or_default();
                status.phase == Some(phase) && status.observed_generation == set.metadata.generation
            })
        };
        let found = world::until(&self.sets(), name, phase.as_str(), has).await;
        let context = || format!("begun: {:?}, tags: {:?}", self.node.begun(), self.tags.all());
        Ok(found.map_err(|error| error.context(context()))?.unwrap())
    }

    pub(crate) async fn until_gone(&self, name: &str) -> anyhow::Result<()> {
        world::until(&self.sets(), name, "gone", |set| set.is_none()).await.map(drop)
    }

    pub(crate) async fn hibernate(&self, name: &str, pod: &str, desire: &str) -> anyhow::Result<()> {
        let object = json!({"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonHibernation",
            "metadata": {"name": name}, "spec": {"podRef": {"name": pod}, "desire": desire}});
        let params = PatchParams::apply("test").force();
        self.hibernations().patch(name, &params, &Patch::Apply(object)).await?;
        Ok(())
    }

    pub(crate) async fn until_hibernation(
        &self,
        name: &str,
        phase: HibernationPhase,
    ) -> anyhow::Result<CocoonHibernation> {
        let has = |object: Option<&CocoonHibernation>| {
            object.is_some_and(|object| {
                let status = object.status.clone().unwrap_or_default();
                status.phase == Some(phase) && status.observed_generation == object.metadata.generation
            })
        };
        Ok(world::until(&self.hibernations(), name, phase.as_str(), has).await?.unwrap())
    }

    /// Creates a pod of a user, without a set.
    pub(crate) async fn create_pod(&self, name: &str) -> anyhow::Result<Pod> {
        let annotations = json!({"vm.cocoonstack.io/name": self.vm(name), "cocoonset.cocoonstack.io/image": "u",
            "cocoonset.cocoonstack.io/managed": "true"});
        let toleration = json!({"key": "virtual-kubelet.io/provider", "operator": "Exists"});
        let spec = json!({"containers": [{"name": "agent", "image": "vm"}], "tolerations": [toleration],
            "automountServiceAccountToken": false});
        let pod = json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec});
        Ok(self.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
    }

    pub(crate) async fn pod_names(&self) -> anyhow::Result<Vec<String>> {
        let mut names: Vec<_> =
            self.pods().list(&Default::default()).await?.iter().map(|p| p.name_any()).collect();
        names.sort();
        Ok(names)
    }
}

/// Returns the message of the condition Ready.
pub(crate) fn message(set: &CocoonSet) -> String {
    let conditions = set.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    coracle_reconcile::find(&conditions, "Ready").map(|ready| ready.message.clone()).unwrap_or_default()
}
