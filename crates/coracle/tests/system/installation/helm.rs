//! A release of the chart is installed, upgraded and uninstalled by a real Helm, while a real kubelet runs its Pods.

use std::path::PathBuf;
use std::time::Duration;

use crate::support::{root, text, until};
use coracle_testkit::{netns, tools};
use tokio::process::Command;

use super::harness::{Installed, LIMIT};
use super::kubelet::{Worker, is_running, runs_a_vm, vmms};
use super::removal::{inventory, is_of_the_test};

/// Arguments with the release and the namespace of its records; the objects are in the namespace of the chart.
const RELEASE: [&str; 3] = ["coracle", "--namespace", "releases"];

struct Helm<'a> {
    program: PathBuf,
    installed: &'a Installed,
}

impl Helm<'_> {
    /// Runs a command on the release and returns its output.
    async fn run(&self, command: &str, args: &[&str]) -> Result<String, String> {
        let mut helm = Command::new(&self.program);
        helm.arg("--kubeconfig").arg(self.installed.cluster.kubeconfig()).arg(command).args(RELEASE);
        // HOME is in the test directory, because Helm writes its caches there.
        let output = helm.args(args).env("HOME", self.installed.dir.path()).output().await.unwrap();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

/// Checks that uninstall removes nothing while there are VMs, and that the log of the hook's Job says why.
async fn uninstall_is_refused(worker: &Worker, helm: &Helm<'_>) {
    let error = helm.run("uninstall", &["--timeout=60s"]).await.unwrap_err();
    assert!(error.contains("coracle-uninstall not ready"), "{error}");
    let logs = ["logs", "-n", "coracle-system", "job/coracle-uninstall"];
    let said = worker.kubectl(&logs).await.unwrap();
    assert!(said.contains("1 MikromVMs"), "{said}");
    is_running(worker).await;
    worker.rolled_out("deployment/coracle-operator").await;
}

#[test]
fn helm_chart_installs_upgrades_and_uninstalls_on_a_kubelet() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some([program]) = tools::require(["helm"]) else { return };
        let Some(installed) = Installed::plane_for_pods().await else { return };
        let Some(worker) = Worker::start(installed, "chart-one").await else { return };
        let helm = Helm { program, installed: &worker.installed };
        let account = ["get", "serviceaccount", "default", "-n", "default"];
        until("the controllers", LIMIT, || worker.kubectl(&account)).await;
        // The kubelet creates the CSINode some time after its Node.
        until("the kubelet's CSINode", LIMIT, || worker.kubectl(&["get", "csinode", "worker"])).await;
        let before = inventory(&worker.installed).await;
        let chart = root().join("deploy/helm/coracle");
        let chart = chart.to_str().unwrap();
        helm.run("install", &[chart, "--create-namespace", "--wait", "--timeout=180s"]).await.unwrap();
        for workload in ["daemonset/coracle-node", "deployment/coracle-operator"] {
            worker.rolled_out(workload).await;
        }
        runs_a_vm(&worker).await;
        let guest = vmms(&worker).await;
        uninstall_is_refused(&worker, &helm).await;

        // Helm cannot upgrade a release whose uninstallation has begun.
        helm.run("rollback", &["1", "--wait", "--timeout=180s"]).await.unwrap();
        // Another CPU request of the node replaces its Pod.
        let values = ["--reuse-values", "--set=uninstall.deleteObjects=true,node.resources.requests.cpu=60m"];
        helm.run("upgrade", &[&[chart, "--wait", "--timeout=180s"], &values[..]].concat()).await.unwrap();
        is_running(&worker).await;
        assert_eq!(vmms(&worker).await, guest, "over the upgrade");
        helm.run("uninstall", &["--wait", "--timeout=180s"]).await.unwrap();
        assert_eq!(vmms(&worker).await, Vec::<String>::new());
        worker.kubectl(&["delete", "namespace", "releases", "--timeout=60s"]).await.unwrap();
        let after = inventory(&worker.installed).await;
        let left: Vec<_> = after.difference(&before).filter(|line| !is_of_the_test(line)).collect();
        assert_eq!(left, Vec::<&String>::new(), "left behind");
        worker.end().await;
    });
}
