//! One pod in a simulation: its task, its fake peers, and the actions of its user.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use coracle_pod::objects::Objects;
use coracle_pod::task::{Ended, PodInput, PodPeers, run};
use coracle_pod::time::add;
use coracle_testkit::sim::Sim;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::fake::{Behaviour, Fake};
use crate::support::node;

/// Longest wait for a condition, in simulated time.
const LIMIT: Duration = Duration::from_secs(3600);

/// A pod and its peers. Clones share the state.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) fake: Fake,
    pub(crate) sim: Sim,
    input: Arc<watch::Sender<PodInput>>,
}

/// The running task of the pod. Dropping it kills it.
pub(crate) struct Running(JoinSet<Ended>);

impl Running {
    /// Waits until the task has ended.
    pub(crate) async fn wait_for_end(&mut self) -> Ended {
        self.0.join_next().await.unwrap().unwrap()
    }
}

impl World {
    pub(crate) fn new(sim: &Sim, spec: Value) -> Self {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "generation": 1},
            "spec": spec,
            "status": {"phase": "Pending"},
        }))
        .unwrap();
        let fake = Fake::new(sim);
        fake.with(|state| state.status = pod.status.clone().unwrap());
        let input = PodInput {
            pod: Arc::new(pod),
            objects: Arc::new(Objects::default()),
            node: Arc::new(node()),
            failure: None,
            forced: false,
        };
        Self { fake, sim: sim.clone(), input: Arc::new(watch::channel(input).0) }
    }

    pub(crate) fn with_behaviours(self, name: &str, behaviours: &[Behaviour]) -> Self {
        self.fake.with(|state| state.behaviours.insert(name.to_owned(), behaviours.to_vec()));
        self
    }

    /// Runs the task like a restarted frontend, which reads the object with its stored status.
    pub(crate) async fn task(self) -> Ended {
        let status = self.fake.read(|state| state.status.clone());
        self.input.send_modify(|input| {
            let mut pod = Pod::clone(&input.pod);
            pod.status = Some(status);
            input.pod = Arc::new(pod);
        });
        let fake = Arc::new(self.fake.clone());
        let peers =
            PodPeers { runtime: fake.clone(), object: fake.clone(), network: fake, clock: self.sim.clock() };
        run(peers, self.input.subscribe(), CancellationToken::new()).await
    }

    pub(crate) fn start(&self) -> Running {
        let mut set = JoinSet::new();
        set.spawn(self.clone().task());
        Running(set)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut PodInput)) {
        self.input.send_modify(change);
    }

    pub(crate) fn change_pod(&self, change: impl FnOnce(&mut Pod)) {
        self.change(|input| {
            let mut pod = Pod::clone(&input.pod);
            change(&mut pod);
            input.pod = Arc::new(pod);
        });
    }

    /// Deletes the pod like `kubectl delete` with this grace period.
    pub(crate) fn delete(&self, grace: u64) {
        let at = Time(add(self.fake.now(), Duration::from_secs(grace)));
        self.change_pod(|pod| {
            pod.metadata.deletion_timestamp = Some(at);
            pod.metadata.deletion_grace_period_seconds = Some(i64::try_from(grace).unwrap());
        });
    }

    pub(crate) fn status(&self) -> PodStatus {
        self.fake.read(|state| state.status.clone())
    }

    pub(crate) fn phase(&self) -> String {
        self.status().phase.unwrap()
    }

    /// Returns status and reason of a condition.
    pub(crate) fn condition(&self, kind: &str) -> (String, String) {
        let conditions = self.status().conditions.unwrap_or_default();
        let found = conditions.into_iter().find(|one| one.type_ == kind);
        found.map(|one| (one.status, one.reason.unwrap_or_default())).unwrap_or_default()
    }

    pub(crate) fn container(&self, name: &str) -> ContainerStatus {
        let status = self.status();
        let lists =
            [status.init_container_statuses, status.container_statuses, status.ephemeral_container_statuses];
        lists.into_iter().flatten().flatten().find(|one| one.name == name).unwrap_or_default()
    }

    /// Returns `running`, or the reason of another state.
    pub(crate) fn state(&self, name: &str) -> String {
        let state = self.container(name).state.unwrap_or_default();
        let waiting = state.waiting.and_then(|waiting| waiting.reason);
        let terminated = state.terminated.and_then(|terminated| terminated.reason);
        let running = state.running.map(|_| "running".to_owned());
        running.or(waiting).or(terminated).unwrap_or_default()
    }

    /// Waits until `test` holds; it is evaluated after each change.
    pub(crate) async fn until(&self, what: &str, test: impl Fn(&Self) -> bool) -> Result<()> {
        let mut versions = self.fake.versions();
        let reached = async {
            while !test(self) {
                versions.changed().await?;
            }
            Ok(())
        };
        match timeout(LIMIT, reached).await {
            Ok(reached) => reached,
            Err(_) => bail!("never: {what}: {:#?}\n{:#?}", self.status(), self.fake.effects()),
        }
    }
}
