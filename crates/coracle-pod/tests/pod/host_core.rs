//! Pods on the host core, with VMs in memory and files on disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use coracle_host::{Host, HostConfig};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::{NoProgress, Registries};
use coracle_pod::events::PodEvent;
use coracle_pod::host::{HostRuntime, PodDirs, PodId};
use coracle_pod::objects::Objects;
use coracle_pod::probe::ProbeOutcome;
use coracle_pod::probe::prober::Network;
use coracle_pod::runtime::{PodObject, RuntimeError};
use coracle_pod::task::{Ended, PodInput, PodPeers, run};
use coracle_pod::time::add;
use coracle_pod::volume::{Token, TokenRequest};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::registry::{DebianRegistry, LOGIN};
use coracle_testkit::{eventually, tools};
use coracle_types::Clock;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, PodStatus, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::node as facts;

const IMAGE: &str = "localhost/test/empty:1";

/// Node in one directory. Its VMMs outlive the daemon.
struct Node {
    dir: tempfile::TempDir,
    machines: Arc<FakeMachines>,
    registries: Registries,
}

impl Node {
    async fn new() -> Self {
        let (dir, machines) = (tempfile::tempdir().unwrap(), FakeMachines::new());
        let node = Self { dir, machines, registries: Registries::default() };
        std::fs::create_dir(node.path("state")).unwrap();
        let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
        let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
        write_layout(&node.path("layout"), &[layer], &spec, "1").unwrap();
        let source: Source = format!("oci:{}:1", node.path("layout").display()).parse().unwrap();
        let name = IMAGE.parse().unwrap();
        node.store().import(&source, Some(&name), Arc::new(NoProgress)).await.unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn store(&self) -> Store {
        let options = StoreOptions { registries: self.registries.clone(), ..StoreOptions::default() };
        Store::open(self.path("images"), options).unwrap()
    }

    async fn open(&self) -> Host {
        let mut config = HostConfig::new(self.path("state"), "/nowhere".into(), "/nowhere".into());
        config.run_dir = self.path("run");
        config.disk_mib = 16;
        config.memory_overcommit = 100.0;
        config.templates.enabled = false;
        config.warm_pool.shapes_max = 0;
        let driver = Arc::new(FakeDriver::new(self.machines.clone()));
        let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
        Host::open(config, driver, network, Arc::new(self.store()), Clock::system()).await.unwrap()
    }
}

/// Fake object of a pod, and fake network of its node.
#[derive(Default)]
struct Object {
    status: Mutex<PodStatus>,
    events: Mutex<Vec<PodEvent>>,
}

#[async_trait]
impl PodObject for Object {
    async fn report(&self, status: &PodStatus) -> Result<(), RuntimeError> {
        *self.status.lock() = status.clone();
        Ok(())
    }

    async fn remove(&self) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn request_token(&self, request: &TokenRequest, now: Timestamp) -> Result<Token, RuntimeError> {
        Ok(Token { value: "t".into(), issued_at: now, expires_at: add(now, request.lifetime) })
    }

    fn event(&self, event: PodEvent) {
        self.events.lock().push(event);
    }
}

#[async_trait]
impl Network for Object {
    async fn grpc(&self, _: &str, _: u16, _: &str, _: Duration) -> ProbeOutcome {
        ProbeOutcome::Success
    }
}

/// Pod with its running task.
struct Running {
    object: Arc<Object>,
    input: watch::Sender<PodInput>,
    task: JoinSet<Ended>,
    stop: CancellationToken,
    dirs: PodDirs,
}

impl Running {
    fn start(node: &Node, host: &Host, pod: Pod, objects: Objects) -> Self {
        let uid = pod.metadata.uid.clone().unwrap();
        let dirs = PodDirs::of(&node.path("pods"), &node.path("memory"), &uid);
        let id = PodId { namespace: "shop".into(), name: "web".into(), uid };
        let runtime = Arc::new(HostRuntime::new(host.clone(), id, dirs.clone()).unwrap());
        let object = Arc::new(Object::default());
        *object.status.lock() = pod.status.clone().unwrap_or_default();
        let first = PodInput {
            pod: Arc::new(pod),
            objects: Arc::new(objects),
            node: Arc::new(facts()),
            failure: None,
            forced: false,
        };
        let (input, receiver) = watch::channel(first);
        let peers =
            PodPeers { runtime, object: object.clone(), network: object.clone(), clock: Clock::system() };
        let (mut task, stop) = (JoinSet::new(), CancellationToken::new());
        task.spawn(run(peers, receiver, stop.clone()));
        Self { object, input, task, stop, dirs }
    }

    fn phase(&self) -> String {
        self.object.status.lock().phase.clone().unwrap_or_default()
    }

    async fn until(&self, what: &str, test: impl Fn(&PodStatus) -> bool) -> Result<PodStatus> {
        let reached = eventually(what, async || Some(self.object.status.lock().clone()).filter(&test)).await;
        reached.map_err(|error| {
            error.context(format!("{:#?} {:#?}", self.object.status.lock(), self.object.events.lock()))
        })
    }

    async fn delete(&mut self) -> Ended {
        let clock = Timestamp::from_millisecond(Clock::system().now().0).unwrap();
        self.input.send_modify(|input| {
            let mut pod = Pod::clone(&input.pod);
            pod.metadata.deletion_timestamp = Some(Time(add(clock, Duration::from_secs(30))));
            input.pod = Arc::new(pod);
        });
        self.task.join_next().await.unwrap().unwrap()
    }
}

fn pod(uid: &str, command: &[&str], extra: Value) -> Pod {
    let mut spec = json!({"containers": [{"name": "main", "image": IMAGE, "command": command}], "restartPolicy": "Never"});
    spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": uid},
        "spec": spec,
    }))
    .unwrap()
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none())
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_ends_with_its_container_and_leaves_nothing() -> Result<()> {
    let node = Node::new().await;
    let host = node.open().await;
    let mut running = Running::start(&node, &host, pod("u1", &["echo", "hi"], json!({})), Objects::default());
    let status =
        running.until("it has succeeded", |status| status.phase.as_deref() == Some("Succeeded")).await?;
    assert!(status.pod_ip.is_some_and(|ip| ip.starts_with("10.100.0.")));
    let container = status.container_statuses.unwrap().remove(0);
    assert!(container.container_id.unwrap().starts_with("coracle://"));
    assert!(container.image_id.starts_with("sha256:"));
    let record = host.list()[0].record.clone();
    let made_for = PodId { namespace: "shop".into(), name: "web".into(), uid: "u1".into() };
    assert_eq!(PodId::of(&record), Some(made_for));
    assert!(record.reach.guests && record.reach.node, "pods reach each other and their node");
    assert_eq!(running.delete().await, Ended::Removed);
    assert!(host.list().is_empty());
    assert!(is_empty(&node.path("pods")) && is_empty(&node.path("memory")), "files are left");
    host.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_and_volumes_survive_a_daemon_restart() -> Result<()> {
    let node = Node::new().await;
    let host = node.open().await;
    let volumes =
        json!({"volumes": [{"name": "s", "secret": {"secretName": "s"}}, {"name": "tmp", "emptyDir": {}}]});
    let pod = pod("u2", &["serve"], volumes);
    let secret = |text: &str| {
        let secret = serde_json::from_value(json!({"data": {"key": text}})).unwrap();
        Objects { secrets: [("s".to_owned(), Arc::new(secret))].into(), ..Objects::default() }
    };
    let mut running = Running::start(&node, &host, pod.clone(), secret("b25l"));
    let ready = |status: &PodStatus| {
        let conditions = status.conditions.iter().flatten();
        conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
    };
    let status = running.until("it is ready", ready).await?;
    let id = status.container_statuses.clone().unwrap().remove(0).container_id;
    let key = running.dirs.memory.join("config/volumes/s/key");
    assert_eq!(std::fs::read_to_string(&key)?, "one");
    assert!(running.dirs.disk.join("data/volumes/tmp").is_dir());
    running.stop.cancel();
    assert_eq!(running.task.join_next().await.unwrap()?, Ended::Stopped);
    host.shutdown().await;
    drop(host);

    let host = node.open().await;
    let mut stored = pod;
    stored.status = Some(status);
    let mut running = Running::start(&node, &host, stored, secret("dHdv"));
    eventually("the new secret is there", async || {
        std::fs::read_to_string(&key).ok().filter(|text| text == "two")
    })
    .await?;
    assert_eq!(running.phase(), "Running");
    let status = running.until("it is ready", ready).await?;
    let container = status.container_statuses.unwrap().remove(0);
    assert_eq!((container.container_id, container.restart_count), (id, 0), "the container was adopted");
    assert_eq!(running.delete().await, Ended::Removed);
    assert!(host.list().is_empty());
    host.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn program_that_is_missing_is_a_start_error() -> Result<()> {
    let node = Node::new().await;
    let host = node.open().await;
    let mut running = Running::start(&node, &host, pod("u3", &["missing"], json!({})), Objects::default());
    let status = running.until("it has failed", |status| status.phase.as_deref() == Some("Failed")).await?;
    let end = status.container_statuses.unwrap().remove(0).state.unwrap().terminated.unwrap();
    assert_eq!((end.exit_code, end.reason.as_deref()), (128, Some("StartError")));
    assert_eq!(end.message.as_deref(), Some("missing: not found"));
    assert_eq!(running.delete().await, Ended::Removed);
    host.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn container_leaves_a_termination_message() -> Result<()> {
    let node = Node::new().await;
    let host = node.open().await;
    let never = json!({"restartPolicy": "Never"});
    let mut running = Running::start(&node, &host, pod("u5", &["leave", "bye"], never), Objects::default());
    let status = running.until("it has failed", |status| status.phase.as_deref() == Some("Failed")).await?;
    let end = status.container_statuses.unwrap().remove(0).state.unwrap().terminated.unwrap();
    assert_eq!((end.exit_code, end.message.as_deref()), (1, Some("bye")));
    assert_eq!(running.delete().await, Ended::Removed);
    host.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn image_that_is_not_on_the_node_is_reported() -> Result<()> {
    let node = Node::new().await;
    let host = node.open().await;
    let mut pod = pod("u4", &["serve"], json!({}));
    let container = &mut pod.spec.as_mut().unwrap().containers[0];
    (container.image, container.image_pull_policy) = (Some("localhost/none:1".into()), Some("Never".into()));
    let mut running = Running::start(&node, &host, pod, Objects::default());
    let waits = |status: &PodStatus| {
        let state = status.container_statuses.iter().flatten().next().and_then(|one| one.state.clone());
        state.and_then(|state| state.waiting).and_then(|w| w.reason).as_deref() == Some("ErrImageNeverPull")
    };
    running.until("it waits", waits).await?;
    assert_eq!(running.delete().await, Ended::Removed);
    host.shutdown().await;
    Ok(())
}

/// Returns a pull Secret with `password` for `registry`.
fn pull_secret(registry: &str, password: &str) -> Objects {
    let login = json!({"username": "user", "password": password});
    let config = json!({"auths": {registry: login}}).to_string();
    let secret = Secret {
        type_: Some("kubernetes.io/dockerconfigjson".to_owned()),
        data: Some([(".dockerconfigjson".to_owned(), ByteString(config.into_bytes()))].into()),
        ..Secret::default()
    };
    Objects { secrets: [("login".to_owned(), Arc::new(secret))].into(), ..Objects::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn private_image_needs_the_secret_of_its_pod() -> Result<()> {
    if tools::require(["docker-registry", "skopeo"]).is_none() {
        return Ok(());
    }
    let mut node = Node::new().await;
    let registry = DebianRegistry::start_with_password()?;
    let image = registry.push(&node.path("layout"), "1", "team/app:1", Some(LOGIN))?;
    let address = registry.address().to_string();
    node.registries = Registries::default().with_url(&format!("http://{address}"));
    let host = node.open().await;
    let with_policy = |uid: &str, policy: &str| {
        let container =
            json!({"name": "main", "image": image, "command": ["serve"], "imagePullPolicy": policy});
        pod(uid, &[], json!({"containers": [container], "imagePullSecrets": [{"name": "login"}]}))
    };
    let with_secret = |uid: &str| with_policy(uid, "Always");
    let waits = |status: &PodStatus| {
        let state = status.container_statuses.as_ref().and_then(|all| all[0].state.clone());
        let reason = state.and_then(|state| state.waiting).and_then(|waiting| waiting.reason);
        matches!(reason.as_deref(), Some("ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull"))
    };
    for (uid, objects) in [
        ("none", Objects::default()),
        ("wrong", pull_secret(&address, "guess")),
        ("other", pull_secret("elsewhere.example", "secret")),
    ] {
        let mut running = Running::start(&node, &host, with_secret(uid), objects);
        running.until(&format!("{uid}: the pull is refused"), waits).await?;
        let named =
            running.object.events.lock().iter().any(|e| e.reason == "FailedToRetrieveImagePullSecret");
        assert_eq!(named, uid == "none", "an event names a Secret that is missing");
        assert_eq!(running.delete().await, Ended::Removed);
    }
    let objects = pull_secret(&address, "secret");
    let mut running = Running::start(&node, &host, with_secret("right"), objects);
    let runs = |status: &PodStatus| status.phase.as_deref() == Some("Running");
    running.until("it runs", runs).await?;
    assert_eq!(running.delete().await, Ended::Removed);
    // The image is on the node now, and still refused to pods that may not pull it.
    for (uid, policy, objects) in [
        ("later-none", "IfNotPresent", Objects::default()),
        ("later-none-never", "Never", Objects::default()),
        ("later-wrong", "IfNotPresent", pull_secret(&address, "guess")),
        ("later-wrong-never", "Never", pull_secret(&address, "guess")),
    ] {
        let mut running = Running::start(&node, &host, with_policy(uid, policy), objects);
        running.until(&format!("{uid}: the image is refused"), waits).await?;
        assert_eq!(running.delete().await, Ended::Removed);
    }
    // A pod whose credentials were accepted uses the image without the registry.
    drop(registry);
    for policy in ["IfNotPresent", "Never"] {
        let objects = pull_secret(&address, "secret");
        let mut running = Running::start(&node, &host, with_policy(&policy.to_lowercase(), policy), objects);
        running.until(&format!("{policy}: it runs without the registry"), runs).await?;
        assert_eq!(running.delete().await, Ended::Removed);
    }
    host.shutdown().await;
    Ok(())
}
