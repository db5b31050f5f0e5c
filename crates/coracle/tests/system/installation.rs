//! The rendered manifests in a real API server, and the processes that they start, by their own arguments: two nodes
//! get certificates of the operator's authority, and may act for themselves alone.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::crash_node::import;
use crate::support::{CORACLE, coracle_ok, node_tools, root, text, until};
use coracle_testkit::cluster::Cluster;
use coracle_testkit::{netns, tools};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

/// A start on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

struct Installed {
    cluster: Cluster,
    kubectl: PathBuf,
    dir: tempfile::TempDir,
}

impl Installed {
    async fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        self.kubectl_as(self.cluster.kubeconfig(), args).await
    }

    async fn kubectl_as(&self, kubeconfig: &Path, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.kubectl);
        let output = command.arg("--kubeconfig").arg(kubeconfig).args(args).output().await.unwrap();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    async fn apply(&self, object: Value) {
        let file = self.dir.path().join("object.json");
        std::fs::write(&file, object.to_string()).unwrap();
        self.kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    }

    /// The kubeconfig of a Pod of `account` on `node`: its token is bound to both, as a kubelet gets it.
    async fn pod_kubeconfig(&self, account: &str, node: &str) -> PathBuf {
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
        let mut config: Value = serde_json::to_value(self.cluster.config().unwrap()).unwrap();
        config["users"][0]["user"] = json!({"token": token.trim()});
        let file = self.dir.path().join(format!("{name}.kubeconfig"));
        std::fs::write(&file, config.to_string()).unwrap();
        file
    }

    /// Runs what a manifest runs, with the places of a test machine in the place of those of a Pod.
    async fn start(
        &self,
        manifest: &str,
        name: &str,
        env: &[(&str, &str)],
        places: &[(&str, String)],
    ) -> Child {
        let object = ["get", manifest, "-n", "coracle-system", "-o", "json"];
        let object: Value = serde_json::from_str(&self.kubectl(&object).await.unwrap()).unwrap();
        let args = object["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap().clone();
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
        command.args(args).envs(env.iter().copied()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true).spawn().unwrap()
    }

    async fn start_operator(&self) -> Child {
        let kubeconfig = self.pod_kubeconfig("coracle-operator", "n0").await;
        let authority = format!("--node-authority={}", self.dir.path().join("authority").display());
        let places = [
            ("--admin-listen", "--admin-listen=127.0.0.1:0".to_owned()),
            ("--webhook-listen", "--webhook-listen=127.0.0.1:0".to_owned()),
            ("--node-authority", authority),
        ];
        let kubeconfig = [("CORACLE_OPERATOR_KUBECONFIG", kubeconfig.to_str().unwrap())];
        self.start("deployment/coracle-operator", "operator", &kubeconfig, &places).await
    }

    fn state(&self, node: &str) -> PathBuf {
        self.dir.path().join(node)
    }

    async fn start_node(&self, node: &str, kubeconfig: &Path) -> Child {
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

    async fn announced(&self, node: &str) -> Value {
        let lease = ["get", "lease", node, "-n", "coracle-nodes", "-o", "json"];
        let lease = until("the node's Lease", LIMIT, || self.kubectl(&lease)).await;
        serde_json::from_str(&lease).unwrap()
    }
}

#[test]
fn rendered_manifests_run_and_nodes_act_for_themselves_alone() {
    netns::run_within(Duration::from_secs(240), || async {
        if node_tools().is_none() {
            return;
        }
        let Some([_, _, kubectl]) = tools::require(["etcd", "kube-apiserver", "kubectl"]) else { return };
        let cluster = Cluster::start().await.unwrap();
        let installed = Installed { cluster, kubectl, dir: tempfile::tempdir().unwrap() };
        for part in ["crds", "base"] {
            let part = root().join("deploy/kustomize").join(part);
            installed.kubectl(&["apply", "--server-side", "-k", part.to_str().unwrap()]).await.unwrap();
        }
        let accounts = [
            installed.pod_kubeconfig("coracle-node", "n1").await,
            installed.pod_kubeconfig("coracle-node", "n2").await,
        ];
        let mut processes = vec![
            installed.start_node("n1", &accounts[0]).await,
            installed.start_node("n2", &accounts[1]).await,
            installed.start_operator().await,
        ];
        let lease = installed.announced("n1").await;
        let said = &lease["metadata"]["annotations"];
        assert_eq!(said["coracle.dev/tls-server-name"], "n1", "the name in its certificate");
        installed.announced("n2").await;

        runs_a_vm(&installed).await;
        own_lease_alone(&installed, &accounts[0]).await;
        own_certificate_alone(&installed, &accounts[0]).await;
        key_of_a_node_opens_no_other(&installed).await;

        for process in &mut processes {
            let pid = rustix::process::Pid::from_raw(process.id().unwrap().cast_signed()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        }
        for process in &mut processes {
            process.wait().await.unwrap();
        }
    });
}

/// The operator reaches the node by TLS both ways.
async fn runs_a_vm(installed: &Installed) {
    let state = installed.state("n1");
    until("the node's socket", LIMIT, || async {
        state.join("host.sock").exists().then_some(()).ok_or_else(|| "no socket".to_owned())
    })
    .await;
    import(&state, &installed.dir.path().join("layout")).await;
    let vm = json!({
        "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "one"},
        "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128, "nodeName": "n1"},
    });
    // Admission is at an address that this API server cannot reach: the Service has no endpoints here.
    let hooks = ["delete", "validatingwebhookconfigurations", "coracle-mikromvm"];
    until("admission", LIMIT, || installed.kubectl(&hooks)).await;
    installed.apply(vm).await;
    until("a running VM", LIMIT * 2, || async {
        let phase = ["get", "mikromvm", "one", "-o=jsonpath={.status.phase} {.status.conditions[0].message}"];
        let phase = installed.kubectl(&phase).await?;
        if phase.starts_with("Running") { Ok(()) } else { Err(phase) }
    })
    .await;
    installed.kubectl(&["delete", "mikromvm", "one", "--timeout=60s"]).await.unwrap();
    assert_eq!(coracle_ok(&state, &["ps", "-a", "-o", "name"]).await, "");
}

async fn own_lease_alone(installed: &Installed, n1: &Path) {
    let annotate = |lease: &'static str, what: &'static str| async move {
        let args = ["annotate", "lease", lease, "-n", "coracle-nodes", "--overwrite", what];
        installed.kubectl_as(n1, &args).await
    };
    // Nodes with a bridge have made it.
    installed
        .apply(json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": "coracle-guest-subnets", "namespace": "coracle-nodes",
                "annotations": {"subnet.coracle.dev/10.9.2.0-24": "n2"},
            },
        }))
        .await;
    annotate("n1", "coracle.dev/driver=qemu").await.unwrap();
    annotate("coracle-guest-subnets", "subnet.coracle.dev/10.9.1.0-24=n1").await.unwrap();
    for (lease, what, why) in [
        ("n2", "coracle.dev/agent-address=192.0.2.1:1", "its own Lease alone"),
        ("n1", "coracle.dev/node=n2", "its own name alone"),
        ("n1", "coracle.dev/tls-server-name=n2", "its own name alone"),
        ("coracle-guest-subnets", "subnet.coracle.dev/10.9.3.0-24=n2", "its own networks alone"),
        ("coracle-guest-subnets", "subnet.coracle.dev/10.9.2.0-24=n1", "its own networks alone"),
        ("coracle-guest-subnets", "subnet.coracle.dev/10.9.2.0-24-", "its own networks alone"),
    ] {
        let refused = annotate(lease, what).await.unwrap_err();
        assert!(refused.contains(why), "{lease} {what}: {refused}");
    }
    let election = ["get", "lease", "coracle-mikromvm", "-n", "coracle-system"];
    let refused = installed.kubectl_as(n1, &election).await.unwrap_err();
    assert!(refused.contains("forbidden"), "{refused}");
}

async fn own_certificate_alone(installed: &Installed, n1: &Path) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["n2".to_owned()]).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, "coracle.dev:node:n2");
    let pem = params.serialize_request(&key).unwrap().pem().unwrap();
    let object = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "stolen"},
        "spec": {
            "signerName": "coracle.dev/node", "usages": ["digital signature", "server auth"],
            "request": k8s_openapi::ByteString(pem.into_bytes()),
        },
    });
    let file = installed.dir.path().join("csr.json");
    std::fs::write(&file, object.to_string()).unwrap();
    installed.kubectl_as(n1, &["create", "-f", file.to_str().unwrap()]).await.unwrap();
    let status = until("the answer", LIMIT, || async {
        let csr = installed.kubectl(&["get", "csr", "stolen", "-o=jsonpath={.status}"]).await?;
        if csr.contains("conditions") { Ok(csr) } else { Err(csr) }
    })
    .await;
    assert!(
        status.contains("Denied") && status.contains("n1") && !status.contains("\"certificate\""),
        "{status}"
    );
}

/// Nodes show certificates of servers; none is taken from a client.
async fn key_of_a_node_opens_no_other(installed: &Installed) {
    use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
    let lease = installed.announced("n2").await;
    let address = lease["metadata"]["annotations"]["coracle.dev/host-address"].as_str().unwrap().to_owned();
    let read = |path: PathBuf| std::fs::read(path).unwrap();
    let authority = installed.dir.path().join("authority");
    let stolen = read(installed.state("n1").join("certificates/node.pem"));
    let of_operator = (read(authority.join("tls.crt")), read(authority.join("tls.key")));
    let ca = Certificate::from_pem(read(authority.join("ca.crt")));
    for (who, certificate, key, opens) in
        [("the operator", of_operator.0, of_operator.1, true), ("node n1", stolen.clone(), stolen, false)]
    {
        let identity = Identity::from_pem(certificate, key);
        let tls = ClientTlsConfig::new().ca_certificate(ca.clone()).identity(identity).domain_name("n2");
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
        let asked = async {
            let mut host = coracle_proto::host::host_client::HostClient::new(endpoint.connect().await.ok()?);
            host.info(coracle_proto::host::InfoRequest {}).await.ok()
        };
        assert_eq!(asked.await.is_some(), opens, "{who}");
    }
}
