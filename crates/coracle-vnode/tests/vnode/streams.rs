//! kubectl through the API server and a whole virtual node.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use coracle_testkit::cluster::{self, Cluster};
use coracle_testkit::{eventually_ok_within, tools};
use coracle_vnode::CertificateSource;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

use crate::world::{IMAGE, World};

const DEADLINE: Duration = Duration::from_secs(40);
/// Address of the node. The API server refuses to forward raw requests to loopback addresses.
const ADDRESS: &str = "10.98.0.2";

/// Grants access to nodes to anonymous requests: the API server of the tests has no client certificate for nodes.
async fn allow_anonymous(cluster: &Cluster) -> anyhow::Result<()> {
    let name = "anonymous-to-nodes";
    let role: ClusterRole = serde_json::from_value(json!({
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": ["nodes/proxy", "nodes/stats"], "verbs": ["*"]}],
    }))?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:anonymous"}],
    }))?;
    Api::all(cluster.client()).create(&PostParams::default(), &role).await?;
    Api::all(cluster.client()).create(&PostParams::default(), &binding).await?;
    let mut ip = Command::new("busybox");
    let added = ip.args(["ip", "address", "add", &format!("{ADDRESS}/32"), "dev", "lo"]).status().await?;
    anyhow::ensure!(added.success(), "ip address add: {added}");
    Ok(())
}

/// kubectl for one namespace.
struct Kubectl<'a> {
    program: PathBuf,
    cluster: &'a Cluster,
    namespace: String,
}

impl Kubectl<'_> {
    async fn run(&self, args: &[&str], input: &[u8]) -> (Option<i32>, String, String) {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(self.cluster.kubeconfig()).args(["-n", &self.namespace]).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let writing = async {
            let _kubectl_may_end_first = stdin.write_all(input).await;
            drop(stdin);
        };
        let ending = async { tokio::join!(writing, child.wait_with_output()).1.unwrap() };
        let output = timeout(DEADLINE, ending).await.expect("kubectl does not end");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }
}

#[test]
fn kubectl_enters_pods_of_the_node() {
    cluster::run_within(Duration::from_secs(120), async |cluster| {
        let Some([program]) = tools::require(["kubectl"]) else { return Ok(()) };
        allow_anonymous(cluster).await?;
        let mut world = World::new(cluster).await?;
        (world.options.listen, world.options.address) = ("0.0.0.0:0".parse()?, Some(ADDRESS.parse()?));
        // The API server of the tests prefers host names, and resolves only addresses.
        world.options.hostname = Some(ADDRESS.to_owned());
        (world.options.certificate, world.options.anonymous) = (CertificateSource::SelfSigned, true);
        let daemon = world.start().await?;
        let container = |name: &str, command: [&str; 2]| json!({"name": name, "image": IMAGE, "command": command, "stdin": true, "imagePullPolicy": "Never"});
        let containers = [container("main", ["serve", "x"]), container("job", ["echo", "hello world"])];
        world.create("web", &[], json!({"containers": containers})).await?;
        let kubectl = Kubectl { program, cluster, namespace: world.namespace.clone() };
        eventually_ok_within(DEADLINE, "the job has printed", async || {
            let (code, stdout, stderr) = kubectl.run(&["logs", "web", "-c", "job"], b"").await;
            if code == Some(0) && stdout == "hello world\n" { Ok(()) } else { Err(stdout + &stderr) }
        })
        .await?;
        let (code, stdout, stderr) = kubectl.run(&["logs", "web", "-c", "job", "-f"], b"").await;
        assert_eq!((code, stdout.as_str()), (Some(0), "hello world\n"), "{stderr}");
        let (code, _, stderr) = kubectl.run(&["logs", "web", "-c", "job", "--previous"], b"").await;
        assert!(code == Some(1) && stderr.contains("previous terminated container"), "{stderr}");
        let args = ["exec", "web", "-c", "main", "--", "say", "two words"];
        let (code, stdout, stderr) = kubectl.run(&args, b"").await;
        assert_eq!((code, stdout.as_str()), (Some(0), "say two words\n"), "{stderr}");
        let args = ["attach", "web", "-c", "main", "-i", "-q"];
        let (code, stdout, stderr) = kubectl.run(&args, b"hello\n").await;
        assert_eq!((code, stdout.as_str()), (Some(0), "hello\n"), "{stderr}");
        let path = format!("/api/v1/nodes/{}/proxy/stats/summary", world.options.name);
        let (_, stdout, stderr) = kubectl.run(&["get", "--raw", &path], b"").await;
        assert!(
            stdout.contains("\"name\":\"main\"") && stdout.contains("\"name\":\"web\""),
            "{stdout} {stderr}"
        );
        world.delete("web").await?;
        world.until_gone("web").await?;
        let (_, stdout, _) = kubectl.run(&["get", "--raw", &path], b"").await;
        assert!(!stdout.contains("\"name\":\"web\""), "{stdout}");
        daemon.stop().await
    });
}
