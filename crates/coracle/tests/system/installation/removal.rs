//! `coracle uninstall --cluster` restores the state before the installation.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::crash_node::import;
use crate::support::{CORACLE, coracle_ok, root, text, until};
use coracle_testkit::{netns, tools};
use serde_json::{Value, json};
use tokio::process::Command;

use super::harness::{Installed, LIMIT, end};
use super::without_admission;

/// Returns kind, namespace and name of all objects except events.
pub(super) async fn inventory(installed: &Installed) -> BTreeSet<String> {
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

/// Runs the Job of the chart's hook with the permissions of the chart: VMs and webhooks are removed, and the operator stays.
async fn before_helm_uninstall(installed: &Installed) {
    let Some([helm]) = tools::require(["helm"]) else { return };
    let chart = root().join("deploy/helm/coracle");
    let mut template = Command::new(helm);
    template.args(["template", "coracle", "--kube-version=1.36.0", "--set=uninstall.deleteObjects=true"]);
    let rendered = template.arg("--show-only=templates/uninstall.yaml").arg(chart).output().await.unwrap();
    assert!(rendered.status.success(), "{}", text(&rendered.stderr));
    let file = installed.dir.path().join("hook.yaml");
    std::fs::write(&file, rendered.stdout).unwrap();
    installed.kubectl(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    let job = ["get", "job", "coracle-uninstall", "-n", "coracle-system", "-o", "json"];
    let job: Value = serde_json::from_str(&installed.kubectl(&job).await.unwrap()).unwrap();
    let pod = &job["spec"]["template"]["spec"];
    let account = installed.pod_kubeconfig(pod["serviceAccountName"].as_str().unwrap(), "n1").await;
    let mut command = Command::new(CORACLE);
    for arg in pod["containers"][0]["args"].as_array().unwrap() {
        command.arg(arg.as_str().unwrap());
    }
    let output = command.arg("--kubeconfig").arg(account).output().await.unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("deleting MikromVM default/one"), "{said}");
    let hooks = ["get", "validatingwebhookconfigurations,apiservices", "-o", "name"];
    let hooks = installed.kubectl(&[&hooks[..], &["-l", "app.kubernetes.io/part-of=coracle"]].concat()).await;
    assert_eq!(hooks.unwrap(), "");
    installed.kubectl(&["get", "deployment", "coracle-operator", "-n", "coracle-system"]).await.unwrap();
}

#[test]
fn uninstall_leaves_nothing() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(installed) = Installed::plane().await else { return };
        // Garbage collection and deletion of namespaces; the test itself starts the workloads of the manifests.
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
        before_helm_uninstall(&installed).await;
        assert_eq!(coracle_ok(&state, &["ps", "-a", "-o", "name"]).await, "", "the VM was ended");
        // A kubelet would end the Pods, but there is none here. The tokens end with the Pods.
        installed.forget_pods().await;
        let (code, said) = uninstall(&installed, &[]).await;
        assert_eq!(code, 0, "{said}");
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

/// Returns whether the line is a Node of the harness, or a Lease that a kubelet would make for it.
pub(super) fn is_of_the_test(line: &str) -> bool {
    line.starts_with("Node ") || line.starts_with("Lease kube-node-lease/")
}
