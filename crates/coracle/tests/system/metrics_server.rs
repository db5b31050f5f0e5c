//! `kubectl top` with a real metrics-server behind the API server.

use std::process::Stdio;

use coracle_testkit::tools;
use tokio::process::{Child, Command};

use crate::pod_system::{LIMIT, System};
use crate::support::until;

const PORT: u16 = 4443;
/// Objects by which the API server finds metrics-server (metrics-server, `manifests/base`).
const API: &str = r"
apiVersion: v1
kind: Service
metadata: {name: metrics-server, namespace: kube-system}
spec: {type: ExternalName, externalName: localhost}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta1.metrics.k8s.io}
spec:
  group: metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {name: metrics-server, namespace: kube-system, port: PORT}
";

impl System {
    /// Starts metrics-server, which ends on drop.
    async fn start_metrics_server(&self, program: &std::path::Path) -> Child {
        self.apply("metrics-server.yaml", &API.replace("PORT", &PORT.to_string())).await;
        let log = std::fs::File::create(self.state.join("logs/metrics-server.log")).unwrap();
        let mut command = Command::new(program);
        for flag in ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"] {
            command.arg(flag).arg(self.state.join("kubeconfig"));
        }
        command.arg("--cert-dir").arg(self.state.join("metrics-server"));
        command.args(["--bind-address=127.0.0.1", &format!("--secure-port={PORT}")]);
        // Minimum that metrics-server accepts.
        command.args(["--metric-resolution=10s", "--kubelet-request-timeout=9s"]);
        command.args(["--kubelet-insecure-tls", "--kubelet-preferred-address-types=InternalIP"]);
        command.arg("--kubelet-use-node-status-port");
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        command.spawn().unwrap()
    }

    /// Checks that `kubectl top` shows the node and these pods, each with one container `main` and the memory of a guest.
    pub(crate) async fn top(&self, pods: &[&str]) {
        let program = tools::tool("metrics-server").unwrap();
        let mut server = self.start_metrics_server(&program).await;
        let shown = until("kubectl top pods", LIMIT, async || {
            if server.try_wait().unwrap().is_some() {
                let log = std::fs::read_to_string(self.state.join("logs/metrics-server.log")).unwrap();
                panic!("the metrics server ended: {log}");
            }
            let said = self.kubectl(&["top", "pods", "--containers", "--no-headers"]).await?;
            if said.lines().count() == pods.len() { Ok(said) } else { Err(said) }
        })
        .await;
        for (pod, line) in pods.iter().zip(shown.lines()) {
            let fields: Vec<_> = line.split_whitespace().collect();
            let [name, container, cpu, memory] = fields[..] else { panic!("{shown}") };
            assert_eq!((name, container), (*pod, "main"), "{shown}");
            assert!(cpu.strip_suffix('m').is_some_and(|cpu| cpu.parse::<u64>().is_ok()), "{shown}");
            let mebibytes = memory.strip_suffix("Mi").and_then(|memory| memory.parse::<u64>().ok());
            assert!(mebibytes.is_some_and(|mebibytes| mebibytes >= 8), "{shown}");
        }
        let node = self.kubectl(&["top", "nodes", "--no-headers"]).await.unwrap();
        let fields: Vec<_> = node.split_whitespace().collect();
        assert!(fields.len() == 5 && fields[4].ends_with('%') && fields[4] != "0%", "{node}");
        self.kubectl(&["delete", "-f", self.state.join("metrics-server.yaml").to_str().unwrap()])
            .await
            .unwrap();
    }
}
