//! `coracle routes` against a real API server: routes of this host follow the Nodes of the cluster.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use coracle_testkit::cluster::Cluster;
use coracle_testkit::{netns, tools};
use tokio::process::{Child, Command};

use crate::support::{CORACLE, text, until};

const LIMIT: Duration = Duration::from_secs(60);

async fn output(program: &Path, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().await.unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

struct Host {
    kubectl: std::path::PathBuf,
    kubeconfig: String,
}

impl Host {
    async fn kubectl(&self, args: &[&str]) {
        let all = [&["--kubeconfig", &self.kubeconfig], args].concat();
        output(&self.kubectl, &all).await;
    }

    /// Creates a Node as a kubelet does, with the Pod subnet that a controller has assigned.
    async fn node(&self, dir: &Path, name: &str, pods: &str, address: &str) {
        let object = dir.join(name);
        let text = format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{podCIDR: {pods}, podCIDRs: [{pods}]}}\n"
        );
        std::fs::write(&object, text).unwrap();
        self.kubectl(&["apply", "-f", object.to_str().unwrap()]).await;
        self.address(name, address).await;
    }

    async fn address(&self, name: &str, address: &str) {
        let status = format!(
            "{{\"status\":{{\"addresses\":[{{\"type\":\"InternalIP\",\"address\":\"{address}\"}}]}}}}"
        );
        self.kubectl(&["patch", "node", name, "--subresource=status", "--type=merge", "-p", &status]).await;
    }

    fn router(&self, log: &Path) -> Child {
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        Command::new(CORACLE)
            .args([
                "routes",
                "--kubeconfig",
                &self.kubeconfig,
                "--node-name",
                "mac",
                "--pod-network",
                "10.244.0.0/16",
            ])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    }
}

async fn routes() -> Vec<String> {
    let shown = output(Path::new("ip"), &["route", "show", "proto", "214"]).await;
    shown.lines().map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" ")).collect()
}

async fn shows(want: &[&str]) {
    until("the routes", LIMIT, async || match routes().await {
        routes if routes == want => Ok(()),
        other => Err(format!("{other:?}, not {want:?}")),
    })
    .await;
}

#[test]
fn routes_follow_the_nodes_of_the_cluster() {
    netns::run_within(Duration::from_secs(180), || async {
        let Some([_, _, kubectl]) = tools::require(["etcd", "kube-apiserver", "kubectl"]) else { return };
        for line in ["link add lan type bridge", "addr add 192.0.2.1/24 dev lan", "link set lan up"] {
            output(Path::new("ip"), &line.split(' ').collect::<Vec<_>>()).await;
        }
        let cluster = Cluster::start().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (dir, log) = (dir.path(), dir.path().join("log"));
        let host = Host { kubectl, kubeconfig: cluster.kubeconfig().to_str().unwrap().to_owned() };
        host.node(dir, "mac", "10.244.1.0/24", "192.0.2.1").await;
        host.node(dir, "linux", "10.244.2.0/24", "192.0.2.2").await;
        host.node(dir, "greedy", "10.0.0.0/8", "192.0.2.3").await;
        let mut router = host.router(&log);
        shows(&["10.244.2.0/24 via 192.0.2.2"]).await;
        host.node(dir, "late", "10.244.3.0/24", "192.0.2.4").await;
        host.address("linux", "192.0.2.9").await;
        shows(&["10.244.2.0/24 via 192.0.2.9", "10.244.3.0/24 via 192.0.2.4"]).await;

        // Changes while the program does not run are applied at its next start; its routes stay until then.
        router.kill().await.unwrap();
        host.kubectl(&["delete", "node", "late"]).await;
        assert_eq!(routes().await.len(), 2);
        let mut router = host.router(&log);
        shows(&["10.244.2.0/24 via 192.0.2.9"]).await;
        router.kill().await.unwrap();
        output(Path::new("ip"), &["link", "del", "lan"]).await;
    });
}
