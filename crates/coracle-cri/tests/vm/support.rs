//! Node with real VMs, its CRI socket, and a client.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_cri::{CriOptions, CriServer};
use coracle_host::{Host, HostConfig};
use coracle_image::{Source, Store, StoreOptions};
use coracle_net::BridgeNetwork;
use coracle_oci::NoProgress;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::*;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_testkit::oci::{ImageSpec as Config, LayerTar, write_layout};
use coracle_testkit::tools;
use coracle_types::Clock;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::pod::Pod;

pub(crate) const IMAGE: &str = "localhost/test/busybox:1";
/// Image with a user 1000 in a group 50000.
pub(crate) const GROUPS: &str = "localhost/test/groups:1";

/// Program with the set-user-ID bit, owned by root.
pub(crate) const SET_UID: &str = "/set-uid/ping";

const APPLETS: [&str; 43] = [
    "sh", "echo", "cat", "httpd", "sleep", "hostname", "ip", "touch", "ls", "mknod", "dd", "grep", "date",
    "kill", "rm", "[", "id", "ps", "chmod", "chown", "mount", "umount", "ifconfig", "netstat", "wget", "seq",
    "ping", "brctl", "top", "pidof", "readlink", "head", "tail", "wc", "mkdir", "stty", "tty", "env", "sed",
    "tr", "true", "false", "stat",
];

/// Clients of a kubelet.
#[derive(Clone)]
pub(crate) struct Kubelet {
    pub(crate) runtime: RuntimeServiceClient<Channel>,
    pub(crate) images: ImageServiceClient<Channel>,
}

async fn connect(socket: PathBuf) -> Kubelet {
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

/// Files of a node, in one directory.
pub(crate) struct Node {
    pub(crate) dir: tempfile::TempDir,
    boot: tools::GuestKernel,
}

/// Running daemon.
pub(crate) struct Daemon {
    pub(crate) host: Host,
    pub(crate) kubelet: Kubelet,
    dir: PathBuf,
    stop: CancellationToken,
    served: JoinSet<()>,
}

impl Node {
    pub(crate) async fn new() -> Option<Self> {
        tools::require(["qemu-system-x86_64", "mke2fs", "nft", "busybox"])?;
        let Some(boot) = tools::guest_kernel() else {
            tools::skip("no guest kernel; `cargo xtask setup` makes it");
            return None;
        };
        let node = Self { dir: tempfile::tempdir().unwrap(), boot };
        let root = "root:x:0:0::/:/bin/sh\n";
        let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
        let passwd = LayerTar::new()
            .dir("set-uid", 0o755)
            .file("set-uid/ping", 0o4755, &busybox)
            .file("etc/passwd", 0o644, format!("{root}www-data:x:33:33::/:/bin/sh\n").as_bytes())
            .file("etc/group", 0o644, b"root:x:0:\nwww-data:x:33:\n")
            .file("model/en/words", 0o644, b"hello\n");
        node.import(IMAGE, passwd).await;
        let groups = LayerTar::new()
            .file("etc/passwd", 0o644, format!("{root}default:x:1000:1000::/:/bin/sh\n").as_bytes())
            .file("etc/group", 0o644, b"root:x:0:\nextra:x:50000:default\n");
        node.import(GROUPS, groups).await;
        Some(node)
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn store(&self) -> Store {
        Store::open(self.state().join("images"), StoreOptions::default()).unwrap()
    }

    /// Imports an image with busybox and the content of `layer`.
    async fn import(&self, name: &str, layer: LayerTar) {
        std::fs::create_dir_all(self.state()).unwrap();
        let layout = tempfile::tempdir_in(self.dir.path()).unwrap();
        let busybox = std::fs::read(tools::tool("busybox").unwrap()).unwrap();
        let mut layer = layer.dir("bin", 0o755).file("bin/busybox", 0o755, &busybox);
        for applet in APPLETS {
            layer = layer.symlink(&format!("bin/{applet}"), "busybox");
        }
        let layer =
            layer.dir("tmp", 0o1777).dir("www", 0o755).file("www/index.html", 0o644, b"hello\n").finish();
        let config = Config {
            cmd: ["sh", "-c", "exec sleep 1000"].map(str::to_owned).to_vec(),
            env: vec!["PATH=/bin".to_owned()],
            ..Config::default()
        };
        write_layout(layout.path(), &[layer], &config, "1").unwrap();
        let source: Source = format!("oci:{}:1", layout.path().display()).parse().unwrap();
        self.store().import(&source, Some(&name.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    }

    /// Opens the daemon, as after a start of its process.
    pub(crate) async fn open(&self) -> Daemon {
        self.open_where(false).await
    }

    /// Opens a daemon whose VMs are clones of a template.
    pub(crate) async fn open_with_templates(&self) -> Daemon {
        self.open_where(true).await
    }

    async fn open_where(&self, templates: bool) -> Daemon {
        let mut config = HostConfig::new(self.state(), self.boot.kernel.clone(), self.boot.initrd.clone());
        config.run_dir = self.dir.path().join("run");
        config.disk_mib = 256;
        config.templates.enabled = templates;
        config.warm_pool.shapes_max = 0;
        let program = tools::tool("qemu-system-x86_64").unwrap();
        let driver = Arc::new(QemuDriver::new(QemuConfig { program, kvm: None }));
        let network = Arc::new(BridgeNetwork::open(&self.state(), None).await.unwrap());
        let store = Arc::new(self.store());
        let host = Host::open(config, driver, network, store, Clock::system()).await.unwrap();
        let socket = self.dir.path().join("cri.sock");
        let _earlier = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let options = CriOptions { vcpus: 1, vcpus_max: 2, memory_mib: 192, ..CriOptions::default() };
        let (server, stop) = (CriServer::new(host.clone(), options), CancellationToken::new());
        let (stopped, mut served) = (stop.clone(), JoinSet::new());
        served.spawn(async move { server.serve(listener, stopped).await.unwrap() });
        let dir = self.dir.path().canonicalize().unwrap();
        Daemon { host, kubelet: connect(socket).await, dir, stop, served }
    }
}

/// Returns the configuration of a sandbox, as a kubelet sends it.
pub(crate) fn sandbox(name: &str, dir: &std::path::Path) -> PodSandboxConfig {
    let metadata = PodSandboxMetadata {
        name: name.into(),
        uid: format!("uid-{name}"),
        namespace: "default".into(),
        attempt: 0,
    };
    PodSandboxConfig {
        metadata: Some(metadata),
        hostname: name.into(),
        log_directory: dir.join("logs").join(name).display().to_string(),
        linux: Some(LinuxPodSandboxConfig::default()),
        ..PodSandboxConfig::default()
    }
}

impl Daemon {
    /// Starts a sandbox with default settings.
    pub(crate) async fn pod(&self, name: &str) -> Pod {
        self.pod_of(sandbox(name, &self.dir)).await
    }

    pub(crate) async fn pod_of(&self, config: PodSandboxConfig) -> Pod {
        self.pod_with(config, "").await
    }

    /// Like [`Daemon::pod_of`], with the runtime handler `handler`.
    pub(crate) async fn pod_with(&self, config: PodSandboxConfig, handler: &str) -> Pod {
        let mut kubelet = self.kubelet.clone();
        let request =
            RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.to_owned() };
        let id = kubelet.runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        Pod { kubelet, id, config, dir: self.dir.clone() }
    }

    pub(crate) fn config(&self, name: &str) -> PodSandboxConfig {
        sandbox(name, &self.dir)
    }

    /// Removes all sandboxes and stops the daemon.
    pub(crate) async fn end(mut self) {
        let sandboxes =
            self.kubelet.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap();
        for sandbox in sandboxes.into_inner().decode_items().unwrap() {
            let pod_sandbox_id = sandbox.id;
            self.kubelet
                .runtime
                .remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id })
                .await
                .unwrap();
        }
        self.stop.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(60), self.served.join_next()).await;
        ended.expect("it ends in time").unwrap().unwrap();
        self.host.network().teardown().await.unwrap();
        self.host.shutdown().await;
    }
}
