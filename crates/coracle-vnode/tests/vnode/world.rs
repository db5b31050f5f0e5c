//! Shared helpers of the tests: a cluster, a machine whose VMMs outlive the daemon, and a daemon on it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use coracle_host::{Host, HostConfig};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::NoProgress;
use coracle_testkit::cluster::Cluster;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::{LIMIT, eventually};
use coracle_types::Clock;
use coracle_vnode::{Intervals, VirtualNode, VirtualNodeError, VirtualNodeOptions};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::KubeConfigOptions;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Only image of all machines; the command decides what a container does.
pub(crate) const IMAGE: &str = "localhost/test/empty:1";

/// Machine with its namespace in the cluster.
pub(crate) struct World {
    pub(crate) client: Client,
    /// Client of the node.
    pub(crate) node_client: Client,
    pub(crate) namespace: String,
    pub(crate) options: VirtualNodeOptions,
    dir: tempfile::TempDir,
    machines: Arc<FakeMachines>,
}

/// Daemon on the machine.
pub(crate) struct Daemon {
    pub(crate) host: Host,
    task: JoinSet<Result<(), VirtualNodeError>>,
    stop: CancellationToken,
}

impl World {
    pub(crate) async fn new(cluster: &Cluster) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mut options = VirtualNodeOptions::new(format!("vm-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        options.listen = "127.0.0.1:0".parse()?;
        options.intervals = Intervals {
            renew: Duration::from_millis(200),
            observe: Duration::from_millis(100),
            sweep: Duration::from_millis(500),
            ..Intervals::default()
        };
        let world = Self {
            client: cluster.client(),
            node_client: cluster.client(),
            namespace: cluster.namespace().await?,
            options,
            dir: tempfile::tempdir()?,
            machines: FakeMachines::new(),
        };
        std::fs::create_dir(world.path("state"))?;
        let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
        let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
        write_layout(&world.path("layout"), &[layer], &spec, "1")?;
        let source: Source = format!("oci:{}:1", world.path("layout").display()).parse()?;
        world.store()?.import(&source, Some(&IMAGE.parse()?), Arc::new(NoProgress)).await?;
        Ok(world)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn store(&self) -> Result<Store> {
        Ok(Store::open(self.path("images"), StoreOptions::default())?)
    }

    /// Opens the host core. A later one finds the VMs of an earlier one.
    pub(crate) async fn host(&self) -> Result<Host> {
        let mut config = HostConfig::new(self.path("state"), "/nowhere".into(), "/nowhere".into());
        config.run_dir = self.path("run");
        // The agent is copied to the disks of disk image VMs; the fake guest has an agent of its own.
        config.agent = self.path("agent");
        std::fs::write(&config.agent, "")?;
        config.disk_mib = 16;
        config.memory_overcommit = 100.0;
        config.templates.enabled = false;
        config.warm_pool.shapes_max = 0;
        let driver = Arc::new(FakeDriver::new(self.machines.clone()));
        let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse()?));
        Ok(Host::open(config, driver, network, Arc::new(self.store()?), Clock::system()).await?)
    }

    /// Starts a daemon.
    pub(crate) async fn start(&self) -> Result<Daemon> {
        let host = self.host().await?;
        let node = VirtualNode::new(host.clone(), self.node_client.clone(), self.options.clone());
        let (mut task, stop) = (JoinSet::new(), CancellationToken::new());
        task.spawn(node.run(stop.clone()));
        Ok(Daemon { host, task, stop })
    }

    /// Gives the node the permissions of a node only.
    pub(crate) async fn as_node(&mut self, cluster: &Cluster) -> Result<()> {
        let user = format!("system:node:{}", self.options.name);
        self.impersonate(cluster, &user, vec!["system:nodes".to_owned()]).await
    }

    /// Gives the node the permissions of a user who may write nodes and not read pods.
    pub(crate) async fn as_user(&mut self, cluster: &Cluster, user: &str) -> Result<()> {
        let how = PostParams::default();
        let role: ClusterRole = serde_json::from_value(json!({
            "metadata": {"name": user},
            "rules": [{"apiGroups": [""], "resources": ["nodes", "nodes/status"], "verbs": ["*"]}],
        }))?;
        let binding: ClusterRoleBinding = serde_json::from_value(json!({
            "metadata": {"name": user},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }))?;
        Api::all(self.client.clone()).create(&how, &role).await?;
        Api::all(self.client.clone()).create(&how, &binding).await?;
        self.impersonate(cluster, user, vec![]).await
    }

    async fn impersonate(&mut self, cluster: &Cluster, user: &str, groups: Vec<String>) -> Result<()> {
        let mut config =
            kube::Config::from_custom_kubeconfig(cluster.config()?, &KubeConfigOptions::default()).await?;
        config.auth_info.impersonate = Some(user.to_owned());
        config.auth_info.impersonate_groups = Some(groups);
        self.node_client = Client::try_from(config)?;
        Ok(())
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a pod on the node. `spec` overrides the default spec: one container, which is never restarted.
    pub(crate) async fn create(&self, name: &str, command: &[&str], spec: Value) -> Result<Pod> {
        let mut pod = json!({
            "metadata": {"name": name},
            "spec": {
                "nodeName": self.options.name,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 3,
                "containers": [{"name": "foo", "image": IMAGE, "imagePullPolicy": "Never", "command": command}],
            },
        });
        pod["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        Ok(self.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
    }

    /// Waits until the pod passes `test`.
    pub(crate) async fn until(&self, name: &str, what: &str, test: impl Fn(&Pod) -> bool) -> Result<Pod> {
        let what = format!("pod {name} is {what}");
        let found =
            eventually(&what, async || self.pods().get_opt(name).await.ok().flatten().filter(&test)).await;
        match found {
            Ok(pod) => Ok(pod),
            Err(error) => {
                let pod = self.pods().get_opt(name).await?;
                Err(error.context(format!(
                    "{:#?} {:#?}",
                    pod.and_then(|pod| pod.status),
                    self.events(name).await?
                )))
            }
        }
    }

    pub(crate) async fn until_ready(&self, name: &str) -> Result<Pod> {
        self.until(name, "ready", is_ready).await
    }

    pub(crate) async fn until_phase(&self, name: &str, phase: &str) -> Result<Pod> {
        self.until(name, phase, |pod| phase_of(pod) == phase).await
    }

    /// Waits until the pod is gone.
    pub(crate) async fn until_gone(&self, name: &str) -> Result<()> {
        eventually(&format!("pod {name} is gone"), async || {
            self.pods().get_opt(name).await.ok()?.is_none().then_some(())
        })
        .await
    }

    /// Returns reasons and messages of the events about a pod.
    pub(crate) async fn events(&self, name: &str) -> Result<Vec<(String, String)>> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let events = events.list(&about).await?;
        Ok(events
            .into_iter()
            .map(|event| (event.reason.unwrap_or_default(), event.message.unwrap_or_default()))
            .collect())
    }

    /// Waits for an event with this reason about a pod, and returns its message.
    pub(crate) async fn until_event(&self, name: &str, reason: &str) -> Result<String> {
        eventually(&format!("event {reason} about {name}"), async || {
            let events = self.events(name).await.ok()?;
            events.into_iter().find(|(found, _)| found == reason).map(|(_, message)| message)
        })
        .await
    }

    /// Deletes a pod; the object stays until the node has ended it.
    pub(crate) async fn delete(&self, name: &str) -> Result<()> {
        self.pods().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Removes the object at once.
    pub(crate) async fn force_delete(&self, name: &str) -> Result<()> {
        self.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        Ok(())
    }

    /// Returns whether files of pods are left.
    pub(crate) fn has_files(&self) -> bool {
        ["state/pods", "run/pods"]
            .iter()
            .any(|dir| std::fs::read_dir(self.path(dir)).is_ok_and(|mut entries| entries.next().is_some()))
    }
}

impl Daemon {
    /// Waits until the node has ended without being stopped, and returns its result.
    pub(crate) async fn wait_for_end(mut self) -> Result<()> {
        let ended = timeout(LIMIT, self.task.join_next()).await?.context("no task")?;
        self.host.shutdown().await;
        Ok(ended??)
    }

    /// Ends the daemon; VMs keep running.
    pub(crate) async fn stop(mut self) -> Result<()> {
        self.stop.cancel();
        let ended = timeout(LIMIT, self.task.join_next()).await?.context("no task")?;
        ended??;
        self.host.shutdown().await;
        Ok(())
    }

    /// Returns the names of the VMs of pods.
    pub(crate) fn vms(&self) -> Vec<String> {
        self.host.list().iter().map(|view| view.record.name.to_string()).collect()
    }

    /// Waits until there are `count` VMs.
    pub(crate) async fn until_vms(&self, count: usize) -> Result<()> {
        let what = format!("{count} VMs");
        let reached = eventually(&what, async || (self.vms().len() == count).then_some(())).await;
        reached.with_context(|| format!("{:?}", self.vms()))
    }
}

pub(crate) fn phase_of(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Returns the first container's id and number of restarts.
pub(crate) fn container(pod: &Pod) -> (String, i32) {
    let status = pod.status.clone().unwrap_or_default().container_statuses.unwrap_or_default().remove(0);
    (status.container_id.unwrap_or_default(), status.restart_count)
}
