//! `coracle uninstall --cluster` leaves what was there before the installation, and nothing else.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::crash_node::import;
use crate::support::{CORACLE, coracle_ok, text, until};
use coracle_testkit::netns;
use serde_json::json;
use tokio::process::Command;

use super::harness::{Installed, LIMIT, end};
use super::without_admission;

/// Kind, namespace and name of everything but events.
async fn inventory(installed: &Installed) -> BTreeSet<String> {
    let kinds = installed.kubectl(&["api-resources", "--verbs=list", "-o", "name"]).await.unwrap();
    let kinds: Vec<_> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
    let rows = "-o=jsonpath={range .items[*]}{.kind} {.metadata.namespace}/{.metadata.name}{\"\\n\"}{end}";
    let found = installed.kubectl(&["get", &kinds.join(","), "-A", rows]).await.unwrap();
    found.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
}

async fn uninstall(installed: &Installed, args: &[&str]) -> (i32, String) {
    let mut command = Command::new(CORACLE);
    command.args(["uninstall", "--cluster", "--timeout=60s", "--kubeconfig"]);
    let output = command.arg(installed.cluster.kubeconfig()).args(args).output().await.unwrap();
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn uninstall_leaves_nothing() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(installed) = Installed::plane().await else { return };
        // Garbage collection and the end of namespaces; the workloads of the manifests are started by the test.
        let controllers = ["--controllers=*,-deployment,-daemonset,-replicaset"];
        let Some(mut manager) = installed.start_controller_manager(&controllers).await else { return };
        let account = ["get", "serviceaccount", "default", "-n", "default"];
        until("the controllers", LIMIT, || installed.kubectl(&account)).await;
        let root_ca = ["get", "configmap", "kube-root-ca.crt", "-n", "kube-node-lease"];
        let _without_a_root_file = installed.kubectl(&root_ca).await;
        let before = inventory(&installed).await;
        installed.install().await;
        let account = installed.pod_kubeconfig("coracle-node", "n1").await;
        let mut processes =
            vec![installed.start_node("n1", &account).await, installed.start_operator().await];
        installed.announced("n1").await;
        let state = installed.state("n1");
        import(&state, &installed.dir.path().join("layout")).await;
        without_admission(&installed).await;
        installed
            .apply(json!({
                "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "one"},
                "spec": {"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128, "nodeName": "n1"},
            }))
            .await;
        installed.until_running("one").await;

        let (code, said) = uninstall(&installed, &[]).await;
        assert_eq!(code, 4, "{said}");
        assert!(said.contains("1 MikromVMs; 1 VMs run"), "{said}");
        let (code, said) = uninstall(&installed, &["--delete-objects"]).await;
        assert_eq!(code, 4, "its Deployment is not ready yet: {said}");
        assert!(said.contains("COR-CLU-002"), "{said}");
        let ready = json!({"status": {"replicas": 2, "readyReplicas": 2}}).to_string();
        let args = ["patch", "deployment/coracle-operator", "-n", "coracle-system", "--subresource=status"];
        installed.kubectl(&[&args[..], &["--type=merge", "-p", &ready]].concat()).await.unwrap();
        // A kubelet ends Pods; these were never run by one. Their tokens end with them.
        let kubelet = until("the end of the VM", LIMIT, || async {
            let vms = installed.kubectl(&["get", "mikromvm", "-A", "-o", "name"]).await.unwrap_or_default();
            if vms.is_empty() { Ok(()) } else { Err(vms) }
        });
        let kubelet = async {
            kubelet.await;
            installed.forget_pods().await;
        };
        let ((code, said), ()) = tokio::join!(uninstall(&installed, &["--delete-objects"]), kubelet);
        assert_eq!(code, 0, "{said}");
        assert_eq!(coracle_ok(&state, &["ps", "-a", "-o", "name"]).await, "", "the VM was ended");
        end(&mut processes).await;

        let after = inventory(&installed).await;
        let left: Vec<_> = after.difference(&before).filter(|line| !is_of_the_test(line)).collect();
        assert_eq!(left, Vec::<&String>::new(), "left behind");
        let (code, said) = uninstall(&installed, &[]).await;
        assert_eq!(code, 0, "again: {said}");
        manager.start_kill().unwrap();
        manager.wait().await.unwrap();
    });
}

/// Nodes that the harness made.
fn is_of_the_test(line: &str) -> bool {
    line.starts_with("Node ")
}
