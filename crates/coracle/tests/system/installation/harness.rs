//! An installation for tests: the rendered manifests in a real API server, and the processes that they start.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::Duration;

use crate::support::{CORACLE, node_tools, root, text, until};
use coracle_testkit::cluster::Cluster;
use coracle_testkit::tools;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

/// Time limit of a start on a loaded machine.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

pub(super) struct Installed {
    pub(super) cluster: Cluster,
    kubectl: PathBuf,
    pub(super) dir: tempfile::TempDir,
    /// Additional environment variables of all processes.
    pub(super) env: Vec<(&'static str, String)>,
    /// Peers that run until the test ends.
    tasks: Mutex<JoinSet<()>>,
}

/// Keeps the logs of a failed test.
impl Drop for Installed {
    #[expect(clippy::print_stdout, reason = "part of the output of a failed test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.dir.disable_cleanup(true);
            println!("files and logs of the installation are kept in {}", self.dir.path().display());
        }
    }
}

/// Components that the tests install in addition to the default.
const COMPONENTS: [&str; 2] = ["webhook", "market"];

impl Installed {
    /// Starts the control plane without an installation. `None` with a printed reason if a program is missing.
    pub(super) async fn plane() -> Option<Self> {
        Self::of(Cluster::start_routed()).await
    }

    /// Like [`Installed::plane`], for a kubelet.
    pub(super) async fn plane_for_pods() -> Option<Self> {
        Self::of(Cluster::start_for_pods()).await
    }

    async fn of(cluster: impl Future<Output = anyhow::Result<Cluster>>) -> Option<Self> {
        node_tools()?;
        let [_, _, kubectl] = tools::require(["etcd", "kube-apiserver", "kubectl"])?;
        let cluster = cluster.await.unwrap();
        Some(Self {
            cluster,
            kubectl,
            dir: tempfile::tempdir().unwrap(),
            env: Vec::new(),
            tasks: Mutex::default(),
        })
    }

    /// Runs a peer until the test ends.
    pub(super) fn spawn(&self, peer: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().unwrap().spawn(peer);
    }

    /// Serves the API server at port 443 of `address`, as Pods reach it.
    pub(super) async fn serve_api(&self, address: &str) {
        let to = self.cluster.server().trim_start_matches("https://").to_owned();
        let listener = TcpListener::bind((address, 443)).await.unwrap();
        self.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                let to = to.clone();
                connections.spawn(async move {
                    let Ok(mut far) = TcpStream::connect(to).await else { return };
                    let _one_side_closed = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                });
            }
        });
    }

    /// Starts the standard controllers with additional arguments. `None` with a printed reason if the program is missing.
    pub(super) async fn start_controller_manager(&self, args: &[&str]) -> Option<Child> {
        let [program] = tools::require(["kube-controller-manager"])?;
        let certificates = self.cluster.dir();
        let log = std::fs::File::create(self.dir.path().join("controller-manager.log")).unwrap();
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(self.cluster.kubeconfig());
        command.arg("--service-account-private-key-file").arg(certificates.join("sa.key"));
        command.arg("--root-ca-file").arg(certificates.join("certs/apiserver.crt"));
        command.args(["--leader-elect=false", "--secure-port=0"]).args(args);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        Some(command.spawn().unwrap())
    }

    /// Applies an overlay of the default with components by `kubectl apply -k`.
    pub(super) async fn install(&self) {
        let dir = self.dir.path().canonicalize().unwrap().join("overlay");
        std::fs::create_dir(&dir).unwrap();
        // kustomize accepts no absolute paths.
        let up = "../".repeat(dir.components().count() - 1);
        let deploy = format!("{up}{}/deploy/kustomize", root().display().to_string().trim_start_matches('/'));
        let components: Vec<_> =
            COMPONENTS.iter().map(|name| format!("{deploy}/components/{name}")).collect();
        let overlay = json!({"resources": [format!("{deploy}/default")], "components": components});
        std::fs::write(dir.join("kustomization.yaml"), overlay.to_string()).unwrap();
        self.kubectl(&["apply", "--server-side", "-k", dir.to_str().unwrap()]).await.unwrap();
    }

    /// Makes the endpoints of the admission Service, as a cluster's network and controllers do. Admission listens on every
    /// address.
    pub(super) async fn route_webhook(&self) {
        // The API refuses Service endpoints in 127.0.0.0/8.
        let address = "192.0.2.10";
        let mut ip = Command::new("ip");
        assert!(ip.args(["addr", "add", address, "dev", "lo"]).status().await.unwrap().success());
        self.apply(webhook_endpoints(address)).await;
    }

    /// Applies only the default by `kubectl apply -k`.
    pub(super) async fn install_default(&self) {
        let dir = root().join("deploy/kustomize/default");
        self.kubectl(&["apply", "--server-side", "-k", dir.to_str().unwrap()]).await.unwrap();
    }

    /// Restores changed objects.
    pub(super) async fn apply_again(&self) {
        let dir = self.dir.path().canonicalize().unwrap().join("overlay");
        let args = ["apply", "--server-side", "--force-conflicts", "-k", dir.to_str().unwrap()];
        self.kubectl(&args).await.unwrap();
    }

    /// Deletes the Pods to which the harness has bound tokens, which invalidates the tokens.
    pub(super) async fn forget_pods(&self) {
        let args = ["delete", "pods", "--all", "-n", "coracle-system", "--force", "--grace-period=0"];
        self.kubectl(&args).await.unwrap();
    }

    pub(super) async fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        self.kubectl_as(self.cluster.kubeconfig(), args).await
    }

    pub(super) async fn kubectl_as(&self, kubeconfig: &Path, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.kubectl);
        let output = command.arg("--kubeconfig").arg(kubeconfig).args(args).output().await.unwrap();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    pub(super) async fn apply(&self, object: Value) {
        let file = self.dir.path().join("object.json");
        std::fs::write(&file, object.to_string()).unwrap();
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    }

    /// Returns the token of a Pod of `account` on `node`, bound to both, as a kubelet gets it.
    pub(super) async fn pod_token(&self, account: &str, node: &str) -> String {
        let name = format!("{account}-{node}");
        self.apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})).await;
        self.apply(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "coracle-system"},
            "spec": {
                "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
                "containers": [{"name": "c", "image": "none"}],
            },
        }))
        .await;
        let token = ["create", "token", account, "-n", "coracle-system", "--bound-object-kind", "Pod"];
        let token = self.kubectl(&[&token[..], &["--bound-object-name", &name]].concat()).await.unwrap();
        token.trim().to_owned()
    }

    /// Writes a kubeconfig with such a token.
    pub(super) async fn pod_kubeconfig(&self, account: &str, node: &str) -> PathBuf {
        let token = self.pod_token(account, node).await;
        let mut config: Value = serde_json::to_value(self.cluster.config().unwrap()).unwrap();
        config["users"][0]["user"] = json!({"token": token});
        let file = self.dir.path().join(format!("{account}-{node}.kubeconfig"));
        std::fs::write(&file, config.to_string()).unwrap();
        file
    }

    /// Returns the Pod spec of a workload.
    pub(super) async fn pod_spec(&self, workload: &str) -> Value {
        let object = ["get", workload, "-n", "coracle-system", "-o", "json"];
        let object: Value = serde_json::from_str(&self.kubectl(&object).await.unwrap()).unwrap();
        object["spec"]["template"]["spec"].clone()
    }

    /// Runs the program of a manifest, with paths of the test machine in place of those of a Pod.
    async fn start(
        &self,
        manifest: &str,
        name: &str,
        env: &[(&str, &str)],
        places: &[(&str, String)],
    ) -> Child {
        let args = self.pod_spec(manifest).await["containers"][0]["args"].as_array().unwrap().clone();
        let args: Vec<String> = args
            .iter()
            .map(|arg| {
                let arg = arg.as_str().unwrap();
                let flag = arg.split('=').next().unwrap();
                places.iter().find(|(place, _)| *place == flag).map_or(arg.to_owned(), |(_, to)| to.clone())
            })
            .collect();
        for (place, to) in places {
            assert!(args.contains(to), "{manifest} has no {place}");
        }
        let log = std::fs::File::create(self.dir.path().join(format!("{name}.log"))).unwrap();
        let mut command = Command::new(CORACLE);
        command.args(args).envs(env.iter().copied()).envs(self.env.iter().cloned()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true).spawn().unwrap()
    }

    pub(super) async fn start_operator(&self) -> Child {
        let kubeconfig = self.pod_kubeconfig("coracle-operator", "n0").await;
        let authority = format!("--node-authority={}", self.dir.path().join("authority").display());
        let places =
            [("--admin-listen", "--admin-listen=127.0.0.1:0".to_owned()), ("--node-authority", authority)];
        let kubeconfig = [("CORACLE_OPERATOR_KUBECONFIG", kubeconfig.to_str().unwrap())];
        self.start("deployment/coracle-operator", "operator", &kubeconfig, &places).await
    }

    pub(super) fn state(&self, node: &str) -> PathBuf {
        self.dir.path().join(node)
    }

    pub(super) async fn start_node(&self, node: &str, kubeconfig: &Path) -> Child {
        let boot = tools::guest_kernel().unwrap().kernel.parent().unwrap().to_owned();
        let places = [
            ("--agent-listen", "--agent-listen=127.0.0.1:0".to_owned()),
            ("--host-listen", "--host-listen=127.0.0.1:0".to_owned()),
            ("--admin-listen", "--admin-listen=127.0.0.1:0".to_owned()),
            ("--state", format!("--state={}", self.state(node).display())),
            ("--in-cluster", format!("--kubeconfig={}", kubeconfig.display())),
            ("--boot", format!("--boot={}", boot.display())),
        ];
        let env = [("CORACLE_NODE_NAME", node), ("CORACLE_NODE_NETWORK", "user")];
        self.start("daemonset/coracle-node", node, &env, &places).await
    }

    /// Waits until a VM of the namespace `default` runs.
    pub(super) async fn until_running(&self, vm: &str) {
        let shows = "-o=jsonpath={.status.phase} {.status.conditions[0].message}";
        until(&format!("VM {vm} runs"), LIMIT * 2, || async {
            let phase = self.kubectl(&["get", "mikromvm", vm, shows]).await?;
            if phase.starts_with("Running") { Ok(()) } else { Err(phase) }
        })
        .await;
    }

    pub(super) async fn announced(&self, node: &str) -> Value {
        let lease = ["get", "lease", node, "-n", "coracle-nodes", "-o", "json"];
        let lease = until("the node's Lease", LIMIT, || self.kubectl(&lease)).await;
        serde_json::from_str(&lease).unwrap()
    }
}

/// Returns the endpoints of the admission Service.
pub(super) fn webhook_endpoints(address: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "coracle-webhook-1", "namespace": "coracle-system",
            "labels": {"kubernetes.io/service-name": "coracle-webhook"},
        },
        "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        "ports": [{"name": "webhook", "port": 9443}],
    })
}

/// Ends processes as a kubelet does: by SIGTERM.
pub(super) async fn end(processes: &mut [Child]) {
    for process in &mut *processes {
        let pid = rustix::process::Pid::from_raw(process.id().unwrap().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
    for process in processes {
        process.wait().await.unwrap();
    }
}
