//! Node whose pod table is filled by the test, its API, and clients with certificates.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{
    ContainerId, ContainerSpec, ContainerState, Host, HostConfig, PullOrigin, PullPolicy, Sandbox, VmSpec,
    Workload,
};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::NoProgress;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_types::Clock;
use kube::Client;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::table::{ContainerEntry, PodEntry, PodTable};

pub(super) const IMAGE: &str = "localhost/test/empty:1";
/// Group with all permissions.
pub(super) const MASTERS: &str = "system:masters";
/// Time limit of any exchange in a test.
pub(super) const DEADLINE: Duration = Duration::from_secs(30);

/// Certificate authority.
pub(super) struct Authority {
    certificate: CertificateDer<'static>,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

pub(super) type Leaf = (CertificateDer<'static>, PrivateKeyDer<'static>);

impl Authority {
    pub(super) fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.self_signed(&key).unwrap();
        let (pem, certificate) = (certificate.pem(), certificate.der().clone());
        Self { certificate, pem, issuer: Issuer::new(params, key) }
    }

    /// Returns the certificate of this authority, without its key.
    pub(super) fn copy(&self) -> Trusted {
        Trusted(self.certificate.clone())
    }

    pub(super) fn leaf(&self, name: &str, group: &str) -> Leaf {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name = Default::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        (certificate.der().clone(), key)
    }
}

/// Certificate that clients trust.
pub(super) struct Trusted(CertificateDer<'static>);

pub(super) struct World {
    pub(super) host: Host,
    pub(super) pods: PodTable,
    pub(super) address: SocketAddr,
    pub(super) ca: Authority,
    pub(super) sync_loop: watch::Sender<bool>,
    serving: watch::Sender<Arc<ServerConfig>>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    dir: tempfile::TempDir,
}

impl World {
    /// Returns the API of the node `node`, whose API server is that of `client`.
    pub(super) async fn new(client: Client, node: &str, anonymous: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = open_host(dir.path()).await;
        Self::of(host, dir, client, node, anonymous).await
    }

    /// Like [`World::new`], for VMs in `dir`.
    pub(super) async fn of(
        host: Host,
        dir: tempfile::TempDir,
        client: Client,
        node: &str,
        anonymous: bool,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
        let address = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()).into();
        let (ca, pods, stop) = (Authority::new("clients"), PodTable::default(), CancellationToken::new());
        let (serving, tls) = watch::channel(server_config(ca.leaf(node, "system:nodes")));
        let (sync_loop, health) = watch::channel(true);
        let api = Api {
            host: host.clone(),
            pods: pods.clone(),
            client,
            node: node.to_owned(),
            anonymous,
            sync_loop: health,
            ssh: None,
        };
        let mut tasks = JoinSet::new();
        let (pem, stopped) = (ca.pem.clone().into_bytes(), stop.clone());
        tasks.spawn(async move { api.serve(listener, tls, Some(pem), stopped).await.unwrap() });
        Self { host, pods, address, ca, sync_loop, serving, stop, tasks, dir }
    }

    /// Replaces the certificate for new connections.
    pub(super) fn renew(&self, name: &str) {
        self.serving.send_replace(server_config(self.ca.leaf(name, "system:nodes")));
    }

    pub(super) async fn end(mut self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(DEADLINE, self.tasks.join_next()).await;
        ended.expect("the API ends in time").unwrap().unwrap();
        self.host.shutdown().await;
    }

    /// Adds a pod with the containers `main`, which runs `argv`, and `later`, which is not created yet.
    pub(super) async fn run(&self, namespace: &str, name: &str, argv: &[&str], stdin: bool) -> ContainerId {
        let spec = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of(name.parse().unwrap(), "") };
        self.host.create(spec, Arc::new(NoProgress)).await.unwrap();
        self.host.start(name, None).await.unwrap();
        let id: ContainerId = "main-0".parse().unwrap();
        let log = self.dir.path().join(format!("{name}.log"));
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        let spec = ContainerSpec {
            image: IMAGE.to_owned(),
            process: Workload { argv, ..Workload::default() },
            stdin,
            log_path: Some(log.clone()),
            ..ContainerSpec::default()
        };
        let pull = (PullPolicy::Never, PullOrigin::Cluster);
        self.host.create_container(name, id.clone(), spec, pull, Arc::new(NoProgress)).await.unwrap();
        self.host.start_container(name, &id).await.unwrap();
        let pod = json!({
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}")},
            "spec": {"containers": [{"name": "main"}, {"name": "later"}]},
        });
        let main = ContainerEntry {
            name: "main".to_owned(),
            id: id.clone(),
            state: ContainerState::Running,
            log,
            previous: None,
        };
        self.pods.put(Arc::new(PodEntry {
            vm: Some(name.to_owned()),
            containers: vec![main],
            ..PodEntry::new(Arc::new(serde_json::from_value(pod).unwrap()))
        }));
        id
    }

    /// Connects a client that presents `leaf`.
    pub(super) async fn connect(&self, leaf: Option<Leaf>, alpn: &[u8]) -> TlsStream<TcpStream> {
        connect(self.address, &self.ca.copy(), leaf, alpn).await.unwrap()
    }
}

pub(super) async fn connect(
    address: SocketAddr,
    ca: &Trusted,
    leaf: Option<Leaf>,
    alpn: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.0.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots);
    let mut config = match leaf {
        Some((certificate, key)) => config.with_client_auth_cert(vec![certificate], key).unwrap(),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let stream = TcpStream::connect(address).await?;
    let name = "127.0.0.1".try_into().unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

fn server_config((certificate, key): Leaf) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap())
}

async fn open_host(dir: &std::path::Path) -> Host {
    let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
    let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
    write_layout(&dir.join("layout"), &[layer], &spec, "1").unwrap();
    let store = Store::open(dir.join("images"), StoreOptions::default()).unwrap();
    let source: Source = format!("oci:{}:1", dir.join("layout").display()).parse().unwrap();
    store.import(&source, Some(&IMAGE.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    std::fs::create_dir(dir.join("state")).unwrap();
    let mut config = HostConfig::new(dir.join("state"), "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.join("run");
    config.disk_mib = 16;
    config.memory_overcommit = 100.0;
    config.templates.enabled = false;
    config.warm_pool.shapes_max = 0;
    let driver = Arc::new(FakeDriver::new(FakeMachines::new()));
    let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
    Host::open(config, driver, network, Arc::new(store), Clock::system()).await.unwrap()
}
