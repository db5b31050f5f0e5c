//! One node, in a process of its own.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use coracle_frontends::HostService;
use coracle_node_lease::{Endpoints, announce};
use coracle_proto::host::host_server::HostServer;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use crate::fake_node;

const NAME: &str = "CORACLE_BENCH_FLEET_NODE";
const DIR: &str = "CORACLE_BENCH_FLEET_DIR";
const KUBECONFIG: &str = "CORACLE_BENCH_FLEET_KUBECONFIG";
const SUBNET: &str = "CORACLE_BENCH_FLEET_SUBNET";

/// Settings of a node of the benchmark.
pub(crate) struct Settings {
    name: String,
    /// Directory of all nodes; the files of this one are below its name.
    dir: PathBuf,
    kubeconfig: PathBuf,
    /// Subnet of its guests: the operator places no VM on a node whose subnet another node has.
    subnet: String,
}

impl Settings {
    /// Reads the settings from the environment. `None`: this process is not a node.
    pub(crate) fn of_this_process() -> Option<Self> {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let (name, subnet) = (std::env::var(NAME).ok()?, std::env::var(SUBNET).ok()?);
        Some(Self { name, dir: path(DIR)?, kubeconfig: path(KUBECONFIG)?, subnet })
    }
}

/// Starts a node as a process, which ends with its standard input and on drop.
pub(crate) async fn start(
    (name, subnet): (&str, &str),
    dir: &Path,
    kubeconfig: &Path,
) -> std::io::Result<Child> {
    fake_node::prepare(&dir.join(name)).await;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(NAME, name).env(DIR, dir).env(KUBECONFIG, kubeconfig).env(SUBNET, subnet);
    command.stdin(Stdio::piped()).kill_on_drop(true).spawn()
}

/// Serves until standard input ends.
pub(crate) fn serve(settings: &Settings) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let host = fake_node::open(&settings.dir.join(&settings.name), &settings.subnet).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let pem = |name: String| std::fs::read(settings.dir.join(name)).expect("a certificate");
        let identity =
            Identity::from_pem(pem(format!("{}.crt", settings.name)), pem(format!("{}.key", settings.name)));
        let clients = Certificate::from_pem(pem("ca.crt".into()));
        let tls = ServerTlsConfig::new().identity(identity).client_ca_root(clients);
        let service = HostServer::new(HostService::new(host.clone()));
        let routes = Server::builder().tls_config(tls).expect("TLS").add_service(service);
        let stop = CancellationToken::new();
        let served = routes
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop.clone().cancelled_owned());
        let kubeconfig = Kubeconfig::read_from(&settings.kubeconfig).expect("a kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("a configuration")).expect("a client");
        let endpoints = Endpoints { agent: address.clone(), host: Some(address), server_name: None };
        let announced = announce(client, (&settings.name, &endpoints), &host, (), &stop);
        let ended = async {
            let (mut input, mut byte) = (tokio::io::stdin(), [0]);
            while input.read(&mut byte).await.is_ok_and(|length| length > 0) {}
            stop.cancel();
        };
        let (served, (), ()) = tokio::join!(served, announced, ended);
        served.expect("it served");
        host.shutdown().await;
    });
}
