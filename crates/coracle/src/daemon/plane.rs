//! A local control plane: real etcd and kube-apiserver on loopback.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use miette::{IntoDiagnostic, WrapErr};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{announce, find_tool, pki};
use crate::error::Failure;

/// The API server is Ready after some 3 s; a cold disk and a busy host take longer.
const READY_LIMIT: Duration = Duration::from_secs(90);

/// Ports of a system, chosen once and kept, so that a kubeconfig stays true.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ports {
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) apiserver: u16,
    pub(crate) agent: u16,
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
        // All are held until all are known, or the system would hand one out twice.
        let held: Vec<_> =
            (0..4).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>().into_diagnostic()?;
        let mut free = held.iter().filter_map(|l| l.local_addr().ok()).map(|a| a.port());
        let mut next = || free.next().unwrap_or(0);
        let ports = Self { etcd: next(), etcd_peer: next(), apiserver: next(), agent: next() };
        pki::write(&path, &serde_json::to_vec(&ports).into_diagnostic()?)?;
        Ok(ports)
    }
}

/// A child process to run: name, program, arguments.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) args: Vec<String>,
}

/// etcd and kube-apiserver, and the kubeconfig that leads to them.
pub(crate) fn programs(state: &Path, tools: Option<&Path>, ports: Ports) -> miette::Result<Vec<Program>> {
    let find = |name: &str| {
        find_tool(name, tools).ok_or_else(|| {
            Failure::new("COR-UP-001", format!("{name} is not to be found"))
                .help("in a checkout: cargo xtask setup\nelsewhere: --tools DIR, or --kubeconfig FILE for a cluster that runs")
        })
    };
    let dir = state.join("plane");
    super::make_dir(&dir)?;
    let at = dir.display();
    let token = secrets(&dir)?;
    kubeconfig(&state.join("kubeconfig"), ports.apiserver, &token)?;
    let Ports { etcd, etcd_peer, apiserver, .. } = ports;
    let etcd = Program {
        name: "etcd",
        path: find("etcd")?,
        args: vec![
            format!("--data-dir={at}/etcd"),
            format!("--listen-client-urls=http://127.0.0.1:{etcd}"),
            format!("--advertise-client-urls=http://127.0.0.1:{etcd}"),
            format!("--listen-peer-urls=http://127.0.0.1:{etcd_peer}"),
            "--log-level=warn".to_owned(),
        ],
    };
    let client = ports.etcd;
    let apiserver = Program {
        name: "kube-apiserver",
        path: find("kube-apiserver")?,
        args: vec![
            format!("--etcd-servers=http://127.0.0.1:{client}"),
            "--bind-address=127.0.0.1".to_owned(),
            // Nobody but this machine is told of it; without this a default route would be needed.
            "--advertise-address=127.0.0.1".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--secure-port={apiserver}"),
            format!("--cert-dir={at}/certs"),
            format!("--token-auth-file={at}/tokens.csv"),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={at}/sa.pub"),
            format!("--service-account-signing-key-file={at}/sa.key"),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            // Without a controller manager nobody makes the default ServiceAccount.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            "--allow-privileged=true".to_owned(),
        ],
    };
    link_kubectl(state, tools)?;
    Ok(vec![etcd, apiserver])
}

/// Signing key of ServiceAccounts and the administrator's token; made once.
fn secrets(dir: &Path) -> miette::Result<String> {
    let (key, public) = (dir.join("sa.key"), dir.join("sa.pub"));
    if !public.exists() {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).into_diagnostic()?;
        pki::write(&key, pair.serialize_pem().as_bytes())?;
        // The API server verifies with a public key of its own file only: it reads no PKCS #8 there.
        pki::write(&public, pair.public_key_pem().as_bytes())?;
    }
    let tokens = dir.join("tokens.csv");
    if let Ok(text) = std::fs::read_to_string(&tokens)
        && let Some(token) = text.split(',').next().filter(|t| t.len() == 32)
    {
        return Ok(token.to_owned());
    }
    let token = format!("{:032x}", rand::random::<u128>());
    pki::write(&tokens, format!("{token},admin,admin,system:masters\n").as_bytes())?;
    Ok(token)
}

fn kubeconfig(path: &Path, port: u16, token: &str) -> miette::Result<()> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "coracle", "cluster": {
            "server": format!("https://127.0.0.1:{port}"), "insecure-skip-tls-verify": true}}],
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

/// Waits until the API server says that it is ready.
pub(crate) async fn wait_ready(kubeconfig: &Path) -> miette::Result<kube::Client> {
    let deadline = Instant::now() + READY_LIMIT;
    let client =
        announce::client(Some(kubeconfig), false).await?.ok_or_else(|| miette::miette!("no cluster"))?;
    let request = || http_get("/readyz");
    loop {
        match client.request_text(request()?).await {
            Ok(text) if text.trim() == "ok" => return Ok(client),
            _ if Instant::now() > deadline => {
                let help = "its log is logs/kube-apiserver.log in the state folder";
                return Err(Failure::new("COR-UP-002", "the API server did not become ready")
                    .help(help)
                    .into());
            }
            _ => sleep(Duration::from_millis(100)).await,
        }
    }
}

fn http_get(path: &str) -> miette::Result<http::Request<Vec<u8>>> {
    http::Request::get(path).body(vec![]).into_diagnostic()
}
