//! Access to a running system without a credential: only health and versions.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::{coracle, coracle_ok, kubectl, node_tools, text};
use coracle_testkit::{netns, tools};
use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_groups, set_thread_uid};

/// uid and gid of the unprivileged user of Debian.
const UNPRIVILEGED: u32 = 65534;
/// Paths that every port is queried for.
const PATHS: [&str; 16] = [
    "/",
    "/metrics",
    "/version",
    "/health",
    "/healthz",
    "/livez",
    "/readyz",
    "/api",
    "/apis",
    "/api/v1/secrets",
    "/openapi/v2",
    "/debug/pprof/",
    "/v2/_catalog",
    "/v2/keys",
    "/v3/kv/range",
    "/members",
];
/// Paths that everyone may read: health, and the version of Kubernetes (its role `system:public-info-viewer`).
const OPEN: [&str; 4] = ["/healthz", "/livez", "/readyz", "/version"];
/// Time limit of each query.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn up_refuses_callers_without_a_credential() {
    netns::run_within(Duration::from_secs(180), || async {
        let programs = ["etcd", "kube-apiserver", "kubectl", "kube-scheduler", "kube-controller-manager"];
        if node_tools().is_none() || tools::require(programs).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        // The directory above the state directory admits every user.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let state = dir.path().join("state");
        let up =
            coracle(&state, &["up", "--detach", "--no-demo", "--with", "scheduler,controller-manager"]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));

        let run = std::fs::read_link(state.join("host.sock")).map(|at| at.parent().unwrap().to_owned());
        let folders = [state.clone(), run.unwrap_or_else(|_| state.clone())];
        let (ports, sockets) =
            (listening(), folders.iter().flat_map(|dir| sockets_below(dir)).collect::<Vec<_>>());
        assert!(ports.len() >= 6, "etcd twice, the API server, the node twice, the webhook: {ports:?}");
        assert!(!sockets.is_empty(), "the node has a socket");
        let secrets =
            ["kubeconfig", "plane/tokens.csv", "plane/sa.key", "plane/pki/ca.key", "pki/client.key"];
        let secrets = secrets.map(|file| state.join(file));
        let answers = std::thread::spawn(move || as_unprivileged(&ports, &sockets, &secrets)).join().unwrap();
        let services = services(&state).await;
        let open = tokio::task::spawn_blocking(|| silent_connections_that_stay(services)).await.unwrap();
        // Images and boot files are shared with VMMs of other users. Their parent directory admits no other user.
        let readable: Vec<_> = readable_by_others(&state)
            .into_iter()
            .filter(|at| !["images", "boot"].iter().any(|shared| at.starts_with(state.join(shared))))
            .collect();
        coracle_ok(&state, &["down"]).await;
        assert_eq!(answers, BTreeSet::new());
        assert_eq!(open, Vec::<String>::new(), "a client that never begins its handshake is closed");
        assert_eq!(readable, Vec::<PathBuf>::new(), "files are made for their user alone");
    });
}

/// Returns what a thread of the unprivileged user could reach.
fn as_unprivileged(ports: &BTreeSet<u16>, sockets: &[PathBuf], secrets: &[PathBuf]) -> BTreeSet<String> {
    become_unprivileged();
    let mut given = BTreeSet::new();
    given.extend(
        sockets.iter().filter(|at| UnixStream::connect(at).is_ok()).map(|at| at.display().to_string()),
    );
    given.extend(secrets.iter().filter(|at| std::fs::read(at).is_ok()).map(|at| at.display().to_string()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for port in ports {
        given.extend(plain(*port).map(|answer| format!("{port} plain: {answer}")));
        given.extend(runtime.block_on(by_tls(*port)));
    }
    given
}

/// Addresses of the node's agent and host services.
async fn services(state: &Path) -> Vec<String> {
    let path = "-o=jsonpath={.items[*].metadata.annotations}";
    let of_agents = ["get", "lease", "-n", "coracle-nodes", "-l", "coracle.dev/agent=true", path];
    let said = kubectl(state, &of_agents).await.unwrap();
    let annotations: BTreeMap<String, String> = serde_json::from_str(&said).unwrap();
    let addresses: Vec<_> =
        annotations.into_values().filter(|value| value.parse::<SocketAddr>().is_ok()).collect();
    assert_eq!(addresses.len(), 2, "{said}");
    addresses
}

/// Returns the services that keep a TLS connection without a handshake open for longer than a busy machine explains.
fn silent_connections_that_stay(services: Vec<String>) -> Vec<String> {
    let mut connections: Vec<_> =
        services.into_iter().map(|at| (TcpStream::connect(&at).unwrap(), at)).collect();
    connections.retain_mut(|(stream, _)| {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let end = stream.read(&mut [0; 64]);
        end.is_err_and(|error| error.kind() != ErrorKind::ConnectionReset)
    });
    connections.into_iter().map(|(_, at)| at).collect()
}

/// Lists files below a directory whose modes let others read or enter, including those in directories that others cannot enter.
fn readable_by_others(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(about) = entry.metadata() else { continue };
        let is_link = about.file_type().is_symlink();
        if !is_link && about.permissions().mode() & 0o077 != 0 {
            found.push(entry.path());
        } else if about.is_dir() {
            found.extend(readable_by_others(&entry.path()));
        }
    }
    found
}

fn become_unprivileged() {
    set_thread_groups(&[]).unwrap();
    set_thread_gid(Gid::from_raw(UNPRIVILEGED)).unwrap();
    set_thread_uid(Uid::from_raw(UNPRIVILEGED)).unwrap();
    assert!(std::fs::read("/etc/shadow").is_err(), "the thread is still root");
}

/// Returns the status line of an answer without TLS, unless it is a refusal.
fn plain(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = vec![0; 256];
    let read = stream.read(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
    // "Client sent an HTTP request to an HTTPS server" does not count as an answer, nor does a TLS alert.
    let status = answer.lines().next().filter(|line| line.starts_with("HTTP/"))?;
    let refused = [" 400 ", " 401 ", " 403 ", " 404 "].iter().any(|code| status.contains(code));
    (!refused).then(|| status.to_owned())
}

/// Returns the answers of a port to a client without a certificate or token: `GET` for data, `POST` for changes.
async fn by_tls(port: u16) -> Vec<String> {
    let client = reqwest::Client::builder().danger_accept_invalid_certs(true).timeout(LIMIT).build().unwrap();
    let mut given = Vec::new();
    for path in PATHS {
        let url = format!("https://127.0.0.1:{port}{path}");
        for request in [client.get(&url), client.post(&url).body("{}")] {
            let Ok(answer) = request.send().await else { continue };
            let status = answer.status();
            let is_refused = matches!(status.as_u16(), 401 | 403 | 404 | 405 | 415);
            if !is_refused && !OPEN.contains(&path) {
                given.push(format!("{port} {path}: {status}"));
            }
        }
    }
    given
}

/// Returns the listening ports in this thread's network namespace (proc(5), `net/tcp`: state 0A).
fn listening() -> BTreeSet<u16> {
    let mut ports = BTreeSet::new();
    for table in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<_> = line.split_whitespace().collect();
            if let [_, local, _, "0A", ..] = fields.as_slice() {
                let port = local.rsplit_once(':').and_then(|(_, hex)| u16::from_str_radix(hex, 16).ok());
                ports.extend(port);
            }
        }
    }
    ports
}

fn sockets_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(sockets_below(&entry.path()));
        } else if kind.is_socket() {
            found.push(entry.path());
        }
    }
    found
}
