//! Node over in-memory VMMs, its CRI socket, and a client.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_cri::{CriOptions, CriServer};
use coracle_host::{Host, HostConfig};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::{NoProgress, Registries};
use coracle_pod::NamespaceKeys;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::*;
use coracle_testkit::oci::{ImageSpec as Config, LayerTar, write_layout};
use coracle_types::Clock;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

pub(crate) const IMAGE: &str = "localhost/test/empty:1";

/// Clients of a kubelet.
#[derive(Clone)]
pub(crate) struct Kubelet {
    pub(crate) runtime: RuntimeServiceClient<Channel>,
    pub(crate) images: ImageServiceClient<Channel>,
}

/// Connects to a socket.
pub(crate) async fn connect(socket: PathBuf) -> Kubelet {
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
    Kubelet {
        runtime: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(16 << 20),
        images: ImageServiceClient::new(channel),
    }
}

/// Node in one directory. Its VMMs outlive the daemon.
pub(crate) struct Node {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) machines: Arc<FakeMachines>,
    registries: Registries,
    pub(crate) image_keys: NamespaceKeys,
}

/// Running daemon.
pub(crate) struct Daemon {
    pub(crate) host: Host,
    pub(crate) kubelet: Kubelet,
    stop: CancellationToken,
    served: JoinSet<()>,
}

impl Daemon {
    pub(crate) async fn end(mut self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(30), self.served.join_next()).await;
        ended.expect("it ends in time").unwrap().unwrap();
        self.host.shutdown().await;
    }
}

impl Node {
    pub(crate) async fn new() -> Self {
        Self::with(Registries::default()).await
    }

    /// Returns a node with this registry configuration.
    pub(crate) async fn with(registries: Registries) -> Self {
        let (dir, machines) = (tempfile::tempdir().unwrap(), FakeMachines::new());
        let node = Self { dir, machines, registries, image_keys: NamespaceKeys::default() };
        std::fs::create_dir(node.dir.path().join("state")).unwrap();
        node.import(IMAGE, "").await;
        node
    }

    fn store(&self) -> Store {
        let registries = self.registries.clone();
        let options = StoreOptions { registries, retries: 0, ..StoreOptions::default() };
        Store::open(self.dir.path().join("images"), options).unwrap()
    }

    pub(crate) async fn import(&self, name: &str, user: &str) {
        let layout = tempfile::tempdir_in(self.dir.path()).unwrap();
        let layer = LayerTar::new().file("bin/true", 0o755, name.as_bytes()).finish();
        let config = Config { cmd: vec!["/bin/true".into()], user: user.into(), ..Config::default() };
        write_layout(layout.path(), &[layer], &config, "1").unwrap();
        let source: Source = format!("oci:{}:1", layout.path().display()).parse().unwrap();
        let name = name.parse().unwrap();
        self.store().import(&source, Some(&name), Arc::new(NoProgress)).await.unwrap();
    }

    pub(crate) async fn open(&self) -> Daemon {
        let mut config = HostConfig::new(self.dir.path().join("state"), "/nowhere".into(), "/nowhere".into());
        config.run_dir = self.dir.path().join("run");
        config.agent = self.dir.path().join("agent");
        config.disk_mib = 16;
        config.memory_overcommit = 1000.0;
        config.templates.enabled = false;
        config.warm_pool.shapes_max = 0;
        let driver = Arc::new(FakeDriver::new(self.machines.clone()));
        let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
        let host =
            Host::open(config, driver, network, Arc::new(self.store()), Clock::system()).await.unwrap();
        self.serve(host).await
    }

    pub(crate) async fn serve(&self, host: Host) -> Daemon {
        let socket = self.dir.path().join("cri.sock");
        let _earlier = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let image_keys = self.image_keys.clone();
        let options = CriOptions { vcpus_max: 2, memory_mib: 128, image_keys, ..CriOptions::default() };
        let (server, stop) = (CriServer::new(host.clone(), options), CancellationToken::new());
        let stopped = stop.clone();
        let mut served = JoinSet::new();
        served.spawn(async move { server.serve(listener, stopped).await.unwrap() });
        Daemon { host, kubelet: connect(socket).await, stop, served }
    }
}

/// Returns the configuration of a sandbox, as a kubelet sends it.
pub(crate) fn sandbox(name: &str) -> PodSandboxConfig {
    let metadata = PodSandboxMetadata {
        name: name.into(),
        uid: format!("uid-{name}"),
        namespace: "default".into(),
        attempt: 0,
    };
    PodSandboxConfig {
        metadata: Some(metadata),
        hostname: name.into(),
        labels: labels(&[("io.kubernetes.pod.uid", name), ("app", "web")]),
        annotations: labels(&[("io.kubernetes.container.hash", "1a2b")]),
        ..PodSandboxConfig::default()
    }
}

pub(crate) fn labels(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Returns the configuration of a container.
pub(crate) fn container(name: &str, image: &str, command: &[&str]) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(ImageSpec { image: image.into(), ..ImageSpec::default() }),
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        labels: labels(&[("io.kubernetes.container.name", name)]),
        ..ContainerConfig::default()
    }
}

impl Kubelet {
    pub(crate) async fn run_sandbox(&mut self, config: PodSandboxConfig) -> Result<String, tonic::Status> {
        let request = RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        Ok(self.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    pub(crate) async fn create(
        &mut self,
        sandbox: &str,
        config: ContainerConfig,
        sandbox_config: PodSandboxConfig,
    ) -> Result<String, tonic::Status> {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        Ok(self.runtime.create_container(request).await?.into_inner().container_id)
    }

    pub(crate) async fn start(&mut self, id: &str) -> Result<(), tonic::Status> {
        self.runtime.start_container(StartContainerRequest { container_id: id.into() }).await.map(drop)
    }

    pub(crate) async fn stop(&mut self, id: &str, timeout: i64) -> Result<(), tonic::Status> {
        let request = StopContainerRequest { container_id: id.into(), timeout };
        self.runtime.stop_container(request).await.map(drop)
    }

    pub(crate) async fn remove(&mut self, id: &str) -> Result<(), tonic::Status> {
        self.runtime.remove_container(RemoveContainerRequest { container_id: id.into() }).await.map(drop)
    }

    pub(crate) async fn status(&mut self, id: &str) -> Result<ContainerStatus, tonic::Status> {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: false };
        Ok(self.runtime.container_status(request).await?.into_inner().status.unwrap())
    }

    pub(crate) async fn stop_sandbox(&mut self, id: &str) -> Result<(), tonic::Status> {
        self.runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.into() }).await.map(drop)
    }

    pub(crate) async fn remove_sandbox(&mut self, id: &str) -> Result<(), tonic::Status> {
        self.runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.into() }).await.map(drop)
    }

    pub(crate) async fn sandbox_status(&mut self, id: &str) -> Result<PodSandboxStatus, tonic::Status> {
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose: false };
        Ok(self.runtime.pod_sandbox_status(request).await?.into_inner().status.unwrap())
    }

    pub(crate) async fn sandboxes(&mut self) -> Vec<PodSandbox> {
        self.runtime
            .list_pod_sandbox(ListPodSandboxRequest::default())
            .await
            .unwrap()
            .into_inner()
            .decode_items()
            .unwrap()
    }

    pub(crate) async fn containers(&mut self) -> Vec<Container> {
        self.runtime
            .list_containers(ListContainersRequest::default())
            .await
            .unwrap()
            .into_inner()
            .decode_containers()
            .unwrap()
    }

    pub(crate) async fn image_status(&mut self, image: &str) -> Option<Image> {
        let image = Some(ImageSpec { image: image.into(), ..ImageSpec::default() });
        let request = ImageStatusRequest { image, verbose: false };
        self.images.image_status(request).await.unwrap().into_inner().image
    }

    pub(crate) async fn image_list(&mut self) -> Vec<Image> {
        self.images.list_images(ListImagesRequest::default()).await.unwrap().into_inner().images
    }

    pub(crate) async fn pull(
        &mut self,
        image: &str,
        auth: Option<AuthConfig>,
    ) -> Result<String, tonic::Status> {
        let image = Some(ImageSpec { image: image.into(), ..ImageSpec::default() });
        let request = PullImageRequest { image, auth, sandbox_config: None };
        Ok(self.images.pull_image(request).await?.into_inner().image_ref)
    }

    pub(crate) async fn remove_image(&mut self, image: &str) -> Result<(), tonic::Status> {
        let image = Some(ImageSpec { image: image.into(), ..ImageSpec::default() });
        self.images.remove_image(RemoveImageRequest { image }).await.map(drop)
    }
}
