//! Local control plane: real etcd and kube-apiserver on loopback, and on request scheduler and controller manager.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use miette::{IntoDiagnostic, WrapErr};
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{find_tool, kubeconfig, pki};
use coracle_cli::cli::Part;
use coracle_cli::error::Failure;

/// Time limit for the API server. It is Ready after about 3 s; a cold disk and a busy host take longer.
const READY_LIMIT: Duration = Duration::from_secs(90);

/// Time that an existing cluster may be unreachable.
const FOREIGN_LIMIT: Duration = Duration::from_secs(15);

/// Ports of a system, chosen once and kept, so that its kubeconfig stays valid.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ports {
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) apiserver: u16,
    pub(crate) agent: u16,
    pub(crate) host: u16,
    pub(crate) webhook: u16,
    pub(crate) scheduler: u16,
    pub(crate) controller_manager: u16,
}

impl Ports {
    /// Reads the ports of an earlier start, or takes free ones.
    pub(crate) fn load_or_choose(state: &Path) -> miette::Result<Self> {
        let path = state.join("ports.json");
        if let Ok(bytes) = std::fs::read(&path)
            && let Ok(ports) = serde_json::from_slice(&bytes)
        {
            return Ok(ports);
        }
        let mut free = free_ports([Ipv4Addr::LOCALHOST; 8])?.into_iter();
        let mut next = || free.next().unwrap_or(0);
        let ports = Self {
            etcd: next(),
            etcd_peer: next(),
            apiserver: next(),
            agent: next(),
            host: next(),
            webhook: next(),
            scheduler: next(),
            controller_manager: next(),
        };
        pki::write(&path, &serde_json::to_vec(&ports).into_diagnostic()?)?;
        Ok(ports)
    }
}

/// Returns a free port of each address. All are different, because each is held until all are known.
pub(super) fn free_ports<const N: usize>(addresses: [Ipv4Addr; N]) -> miette::Result<[u16; N]> {
    let held = addresses.map(|at| TcpListener::bind((at, 0)));
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&held) {
        let bound = listener.as_ref().map_err(|e| miette::miette!("cannot listen: {e}"))?;
        *port = bound.local_addr().into_diagnostic()?.port();
    }
    Ok(ports)
}

/// Child process to run: name, program, arguments, and environment variables for values that must not show in arguments.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(&'static str, String)>,
}

/// Selected optional programs of a control plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct With {
    pub(crate) scheduler: bool,
    pub(crate) controller_manager: bool,
    pub(crate) kubelet: bool,
    /// Whether a virtual node runs pods: there is a scheduler and no kubelet.
    pub(crate) virtual_node: bool,
}

impl With {
    /// Returns the selection of `--with`.
    pub(crate) fn of(parts: &[Part]) -> Self {
        let (scheduler, kubelet) = (parts.contains(&Part::Scheduler), parts.contains(&Part::Kubelet));
        Self {
            scheduler,
            controller_manager: parts.contains(&Part::ControllerManager),
            kubelet,
            virtual_node: scheduler && !kubelet && rustix::process::geteuid().is_root(),
        }
    }
}

pub(super) fn find(name: &str, tools: Option<&Path>) -> Result<PathBuf, Failure> {
    find_tool(name, tools).ok_or_else(|| {
        Failure::new("COR-UP-001", format!("{name} is not to be found")).help(
            "in a checkout: cargo xtask setup\nelsewhere: --tools DIR, or --kubeconfig FILE for a cluster that runs",
        )
    })
}

/// Returns etcd and kube-apiserver, and the kubeconfig for them.
pub(crate) fn programs(
    state: &Path,
    tools: Option<&Path>,
    ports: Ports,
    with: With,
) -> miette::Result<Vec<Program>> {
    let dir = state.join("plane");
    super::make_dir(&dir)?;
    let token = secrets(&dir, with)?;
    let certificates = Certificates::make(&dir)?;
    let admission = admission_config(&dir, &certificates.webhook_client)?;
    kubeconfig(&state.join("kubeconfig"), ports.apiserver, &certificates.authority, &token)?;
    link_kubectl(state, tools)?;
    Ok(vec![
        Program {
            name: "etcd",
            path: find("etcd", tools)?,
            args: etcd(&dir, ports, &certificates),
            env: vec![],
        },
        Program {
            name: "kube-apiserver",
            path: find("kube-apiserver", tools)?,
            args: apiserver(&dir, ports, with, &certificates, &admission),
            env: vec![],
        },
    ])
}

/// Certificates of the parts of a control plane. None of its ports answers without a credential.
struct Certificates {
    /// Authority of the API server in PEM, which kubeconfigs trust. Kept, so that copies of a kubeconfig stay valid.
    authority: String,
    apiserver: pki::Leaf,
    /// Authority of etcd alone, so that no other certificate of the system gives access to the store.
    etcd_ca: PathBuf,
    /// Certificate of etcd, as a server and as its own peer.
    etcd: pki::Leaf,
    etcd_client: pki::Leaf,
    /// Client certificate for webhooks, which answer only this client.
    webhook_client: pki::Leaf,
    /// Client certificate for kubelets, with the rights of an administrator.
    kubelet_client: pki::Leaf,
    /// Authority of the client certificate for extension API servers, which trust this client's statement of the user.
    front_proxy_ca: PathBuf,
    front_proxy_client: pki::Leaf,
}

impl Certificates {
    fn make(dir: &Path) -> miette::Result<Self> {
        let (api, store, proxy) = (dir.join("pki"), dir.join("etcd-pki"), dir.join("front-proxy-pki"));
        super::make_dir(&store)?;
        super::make_dir(&proxy)?;
        let authority = pki::Authority::load_or_create(&api, "API server")?;
        authority.publish(&api)?;
        let etcd = pki::Authority::new("etcd")?;
        let front_proxy = pki::Authority::new("front proxy")?;
        Ok(Self {
            authority: authority.pem(),
            apiserver: authority.leaf(&api, "apiserver", &[ServerAuth])?,
            etcd_ca: etcd.publish(&store)?,
            etcd: etcd.leaf(&store, "etcd", &[ServerAuth, ClientAuth])?,
            etcd_client: etcd.leaf(&store, "apiserver", &[ClientAuth])?,
            webhook_client: authority.leaf(&api, "webhook-client", &[ClientAuth])?,
            kubelet_client: authority.administrator(&api, "kubelet-client")?,
            front_proxy_ca: front_proxy.publish(&proxy)?,
            front_proxy_client: front_proxy.leaf(&proxy, "front-proxy-client", &[ClientAuth])?,
        })
    }
}

/// Returns the authority of a local API server and of its client certificate for webhooks.
pub(crate) fn authority_file(state: &Path) -> PathBuf {
    state.join("plane/pki/ca.crt")
}

/// Configures the API server's client certificate for webhooks: files `admission.json` and `webhooks.json` (Kubernetes
/// documentation, "Dynamic Admission Control", "Authenticate apiservers"). Returns the path of the first.
fn admission_config(dir: &Path, (certificate, key): &pki::Leaf) -> miette::Result<PathBuf> {
    let (admission, webhooks) = (dir.join("admission.json"), dir.join("webhooks.json"));
    let user = json!({"client-certificate": certificate, "client-key": key});
    let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "users": [{"name": "*", "user": user}]});
    let plugins = ["ValidatingAdmissionWebhook", "MutatingAdmissionWebhook"].map(|name| {
        json!({
            "name": name,
            "configuration": {
                "apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration",
                "kubeConfigFile": webhooks,
            },
        })
    });
    let config = json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration", "plugins": plugins,
    });
    for (path, value) in [(&webhooks, kubeconfig), (&admission, config)] {
        pki::write(path, &serde_json::to_vec_pretty(&value).into_diagnostic()?)?;
    }
    Ok(admission)
}

fn etcd(dir: &Path, Ports { etcd, etcd_peer, .. }: Ports, certificates: &Certificates) -> Vec<String> {
    let Certificates { etcd_ca, etcd: (certificate, key), .. } = certificates;
    let mut args = vec![
        format!("--data-dir={}/etcd", dir.display()),
        format!("--listen-client-urls=https://127.0.0.1:{etcd}"),
        format!("--advertise-client-urls=https://127.0.0.1:{etcd}"),
        format!("--listen-peer-urls=https://127.0.0.1:{etcd_peer}"),
        "--client-cert-auth".to_owned(),
        "--peer-client-cert-auth".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    for peer in ["", "peer-"] {
        args.push(format!("--{peer}trusted-ca-file={}", etcd_ca.display()));
        args.push(format!("--{peer}cert-file={}", certificate.display()));
        args.push(format!("--{peer}key-file={}", key.display()));
    }
    args
}

fn apiserver(
    dir: &Path,
    Ports { etcd, apiserver, .. }: Ports,
    with: With,
    certificates: &Certificates,
    admission: &Path,
) -> Vec<String> {
    let at = dir.display();
    let (own, client) = (&certificates.apiserver, &certificates.etcd_client);
    let mut args = vec![
        format!("--etcd-servers=https://127.0.0.1:{etcd}"),
        format!("--etcd-cafile={}", certificates.etcd_ca.display()),
        format!("--etcd-certfile={}", client.0.display()),
        format!("--etcd-keyfile={}", client.1.display()),
        "--bind-address=127.0.0.1".to_owned(),
        // Only this machine uses the address; without this flag the API server requires a default route.
        "--advertise-address=127.0.0.1".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        format!("--secure-port={apiserver}"),
        format!("--tls-cert-file={}", own.0.display()),
        format!("--tls-private-key-file={}", own.1.display()),
        format!("--admission-control-config-file={}", admission.display()),
        format!("--token-auth-file={at}/tokens.csv"),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={at}/sa.pub"),
        format!("--service-account-signing-key-file={at}/sa.key"),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--allow-privileged=true".to_owned(),
    ];
    // Passes the user to extension API servers such as metrics-server (Kubernetes documentation, "Configure the Aggregation
    // Layer").
    let (certificate, key) = &certificates.front_proxy_client;
    args.extend([
        format!("--requestheader-client-ca-file={}", certificates.front_proxy_ca.display()),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        format!("--proxy-client-cert-file={}", certificate.display()),
        format!("--proxy-client-key-file={}", key.display()),
    ]);
    if with.kubelet || with.virtual_node {
        let (certificate, key) = &certificates.kubelet_client;
        args.extend([
            format!("--kubelet-client-certificate={}", certificate.display()),
            format!("--kubelet-client-key={}", key.display()),
            // The API server publishes this authority; the virtual node reads it to verify client certificates.
            format!("--client-ca-file={at}/pki/ca.crt"),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
        ]);
    }
    // The virtual node has the certificate of its daemon, which another authority signed. The connection stays on this machine,
    // so that this authority is only required for a kubelet.
    if with.kubelet {
        args.push(format!("--kubelet-certificate-authority={at}/pki/ca.crt"));
    }
    if !with.controller_manager {
        // Without a controller manager the default ServiceAccount does not exist.
        args.push("--disable-admission-plugins=ServiceAccount".to_owned());
    }
    args
}

/// Returns the selected scheduler and controller manager. They read files that a running API server has made.
pub(crate) fn controller_programs(
    state: &Path,
    tools: Option<&Path>,
    ports: Ports,
    with: With,
) -> miette::Result<Vec<Program>> {
    let kubeconfig = state.join("kubeconfig").display().to_string();
    let common = |port: u16| {
        let kubeconfig = &kubeconfig;
        vec![
            format!("--kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            "--leader-elect=false".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
        ]
    };
    let mut programs = Vec::new();
    if with.scheduler {
        let (name, args) = ("kube-scheduler", common(ports.scheduler));
        programs.push(Program { name, path: find(name, tools)?, args, env: vec![] });
    }
    if with.controller_manager {
        let (name, mut args) = ("kube-controller-manager", common(ports.controller_manager));
        let at = state.join("plane");
        args.push(format!("--service-account-private-key-file={}/sa.key", at.display()));
        args.push(format!("--root-ca-file={}", authority_file(state).display()));
        programs.push(Program { name, path: find(name, tools)?, args, env: vec![] });
    }
    Ok(programs)
}

/// Writes a kubeconfig that authenticates a kubelet as the Node of that name.
pub(crate) fn node_kubeconfig(state: &Path, node: &str) -> miette::Result<PathBuf> {
    let ports = Ports::load_or_choose(state)?;
    let dir = state.join("plane");
    let authority = std::fs::read_to_string(authority_file(state)).into_diagnostic()?;
    let tokens = std::fs::read_to_string(dir.join("tokens.csv")).into_diagnostic()?;
    let user = format!("system:node:{node}");
    let line = tokens.lines().find(|line| line.split(',').nth(1) == Some(&user));
    let token = line.and_then(|line| line.split(',').next()).unwrap_or_default();
    let path = dir.join("kubelet.kubeconfig");
    kubeconfig(&path, ports.apiserver, &authority, token)?;
    Ok(path)
}

/// Makes a serving certificate of the API server's authority for a kubelet with these names and addresses.
pub(crate) fn kubelet_certificate(state: &Path, names: &[String]) -> miette::Result<pki::Leaf> {
    let dir = state.join("plane/pki");
    pki::Authority::load_or_create(&dir, "API server")?.leaf_for(&dir, "kubelet", &[ServerAuth], names)
}

/// Makes the ServiceAccount signing key and the tokens of administrator and node, once. Returns the administrator's token.
fn secrets(dir: &Path, with: With) -> miette::Result<String> {
    let (key, public) = (dir.join("sa.key"), dir.join("sa.pub"));
    if !public.exists() {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).into_diagnostic()?;
        pki::write(&key, pair.serialize_pem().as_bytes())?;
        // The API server verifies with a public key in a file of its own: it reads no PKCS #8 there.
        pki::write(&public, pair.public_key_pem().as_bytes())?;
    }
    let tokens = dir.join("tokens.csv");
    let known = std::fs::read_to_string(&tokens).unwrap_or_default();
    let of_user = |user: &str| {
        let line = known.lines().find(|line| line.split(',').nth(1) == Some(user));
        line.and_then(|line| line.split(',').next()).filter(|token| token.len() == 32).map(str::to_owned)
    };
    let token_of = |user: &str| of_user(user).unwrap_or_else(|| format!("{:032x}", rand::random::<u128>()));
    let admin = token_of("admin");
    let mut text = format!("{admin},admin,admin,system:masters\n");
    if with.kubelet {
        let user = format!("system:node:{}", super::kubelet::node_name());
        text.push_str(&format!("{},{user},{user},system:nodes\n", token_of(&user)));
    }
    if text != known {
        pki::write(&tokens, text.as_bytes())?;
    }
    Ok(admin)
}

fn kubeconfig(path: &Path, port: u16, authority: &str, token: &str) -> miette::Result<()> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "coracle", "cluster": {
            "server": format!("https://127.0.0.1:{port}"),
            "certificate-authority-data": Base64Display::new(authority.as_bytes(), &STANDARD).to_string()}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "coracle", "context": {"cluster": "coracle", "user": "admin", "namespace": "default"}}],
        "current-context": "coracle",
    });
    let yaml = serde_saphyr::to_string(&config).into_diagnostic()?;
    pki::write(path, yaml.as_bytes())
}

fn link_kubectl(state: &Path, tools: Option<&Path>) -> miette::Result<()> {
    let Some(kubectl) = find_tool("kubectl", tools) else { return Ok(()) };
    let link = state.join("bin/kubectl");
    super::make_dir(&state.join("bin"))?;
    let _absent = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&kubectl, &link).into_diagnostic().wrap_err("link kubectl")
}

/// Waits until the API server is ready. A foreign cluster gets a shorter limit, because it should already run.
pub(crate) async fn wait_ready(kubeconfig: &Path, own: bool) -> miette::Result<kube::Client> {
    let deadline = Instant::now() + if own { READY_LIMIT } else { FOREIGN_LIMIT };
    let client =
        kubeconfig::client(Some(kubeconfig), false).await?.ok_or_else(|| miette::miette!("no cluster"))?;
    let request = || http_get("/readyz");
    loop {
        let why = match client.request_text(request()?).await {
            Ok(text) if text.trim() == "ok" => return Ok(client),
            Ok(text) => text,
            Err(error) => root_cause(&error),
        };
        if Instant::now() > deadline {
            let help = if own {
                "its log is logs/kube-apiserver.log in the state directory".to_owned()
            } else {
                format!("check the cluster: kubectl --kubeconfig {} get --raw /readyz", kubeconfig.display())
            };
            let message =
                format!("the API server did not become ready: {}", coracle_cli::error::printable(&why));
            return Err(Failure::new("COR-UP-002", message).help(help).into());
        }
        sleep(Duration::from_millis(100)).await;
    }
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |e| e.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}

fn http_get(path: &str) -> miette::Result<http::Request<Vec<u8>>> {
    http::Request::get(path).body(vec![]).into_diagnostic()
}

/// Waits until a program listens on the port.
pub(crate) async fn wait_listening(name: &str, port: u16) -> Result<(), Failure> {
    let deadline = Instant::now() + READY_LIMIT;
    while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        if Instant::now() > deadline {
            let help = format!("its log is logs/{name}.log in the state directory");
            return Err(Failure::new("COR-UP-012", format!("{name} did not become ready")).help(help));
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
