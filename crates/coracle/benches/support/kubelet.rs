//! CRI calls of a kubelet.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, ImageSpec, LinuxContainerResources,
    LinuxPodSandboxConfig, PodSandboxConfig, PodSandboxMetadata, RemovePodSandboxRequest,
    RunPodSandboxRequest, StartContainerRequest, StopPodSandboxRequest,
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Memory of each sandbox: together with the guest's own need it equals the size class of a cold boot here.
pub(crate) const MEMORY_MIB: i64 = 64;

/// CRI client with the calls of a kubelet.
#[derive(Clone)]
pub(crate) struct Kubelet {
    pub(crate) runtime: RuntimeServiceClient<Channel>,
}

impl Kubelet {
    async fn connect(socket: PathBuf) -> Option<Self> {
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector(connector).await.ok()?;
        let runtime = RuntimeServiceClient::new(channel).max_decoding_message_size(16 << 20);
        Some(Self { runtime })
    }

    /// Connects as soon as the socket answers.
    pub(crate) async fn wait(socket: PathBuf) -> Self {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(kubelet) = Self::connect(socket.clone()).await {
                return kubelet;
            }
            assert!(Instant::now() < deadline, "{} does not answer", socket.display());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Runs a new sandbox and returns its id.
    pub(crate) async fn run_sandbox(&self, name: &str) -> String {
        let request = RunPodSandboxRequest { config: Some(sandbox(name)), ..Default::default() };
        self.runtime.clone().run_pod_sandbox(request).await.expect("a sandbox").into_inner().pod_sandbox_id
    }

    /// Starts a container and returns its id.
    pub(crate) async fn start(
        &self,
        pod: &str,
        sandbox_name: &str,
        name: &str,
        image: &str,
        command: &[&str],
    ) -> String {
        let mut runtime = self.runtime.clone();
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(container(name, image, command)),
            sandbox_config: Some(sandbox(sandbox_name)),
        };
        let id = runtime.create_container(request).await.expect("a container").into_inner().container_id;
        let request = StartContainerRequest { container_id: id.clone() };
        runtime.start_container(request).await.expect("a start");
        id
    }

    pub(crate) async fn remove(&self, pod: String) {
        let mut runtime = self.runtime.clone();
        let request = StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
        runtime.stop_pod_sandbox(request).await.expect("stop");
        let request = RemovePodSandboxRequest { pod_sandbox_id: pod };
        runtime.remove_pod_sandbox(request).await.expect("remove");
    }
}

/// Returns the configuration of a sandbox. Labels and annotations are as large as those of a Deployment's pod.
fn sandbox(name: &str) -> PodSandboxConfig {
    let text =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    // One CPU, like the VMs that boot cold.
    let resources = LinuxContainerResources {
        memory_limit_in_bytes: MEMORY_MIB << 20,
        cpu_quota: 100_000,
        cpu_period: 100_000,
        ..Default::default()
    };
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("5f0e6c1e-0000-4000-8000-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        labels: text(&[
            ("app", "web"),
            ("pod-template-hash", "6d4cf56db6"),
            ("io.kubernetes.pod.name", name),
            ("io.kubernetes.pod.namespace", "default"),
            ("io.kubernetes.pod.uid", name),
        ]),
        annotations: text(&[
            ("kubernetes.io/config.seen", "2026-01-01T00:00:00.000000000Z"),
            ("kubernetes.io/config.source", "api"),
        ]),
        linux: Some(LinuxPodSandboxConfig { resources: Some(resources), ..Default::default() }),
        ..Default::default()
    }
}

fn container(name: &str, image: &str, command: &[&str]) -> ContainerConfig {
    let text =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(ImageSpec { image: image.to_owned(), ..Default::default() }),
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        labels: text(&[
            ("io.kubernetes.container.name", name),
            ("io.kubernetes.pod.name", "web-6d4cf56db6-abcde"),
            ("io.kubernetes.pod.namespace", "default"),
            ("io.kubernetes.pod.uid", "5f0e6c1e-0000-4000-8000-000000000000"),
        ]),
        annotations: text(&[
            ("io.kubernetes.container.hash", "8a6f3c2d"),
            ("io.kubernetes.container.restartCount", "0"),
            ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log"),
            ("io.kubernetes.container.terminationMessagePolicy", "File"),
            ("io.kubernetes.pod.terminationGracePeriod", "30"),
        ]),
        ..Default::default()
    }
}
