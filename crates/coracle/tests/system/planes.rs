//! `coracle up` with other control planes than its default: an existing cluster, and one with scheduler and controller manager.

use std::path::Path;
use std::time::Duration;

use crate::support::{coracle, coracle_ok, kubectl, node_tools, text, until};
use coracle_testkit::cluster::Cluster;
use coracle_testkit::{netns, tools};
use tokio::process::Command;

/// MikromVM with more CPUs than the test machine has, which the schema allows.
const WIDE: &str = "apiVersion: vm.mikrom.es/v1alpha1\nkind: MikromVM\nmetadata: {name: wide}\n\
    spec: {image: 'localhost/coracle/demo:1', vcpuCount: 32, memoryMB: 128}\n";

async fn foreign(program: &Path, kubeconfig: &Path, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).arg("--kubeconfig").arg(kubeconfig).args(args).output().await.unwrap();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[test]
fn existing_cluster_gets_admission_that_down_removes() {
    netns::run_within(Duration::from_secs(180), || async {
        if node_tools().is_none() {
            return;
        }
        let Some([_, _, program]) = tools::require(["etcd", "kube-apiserver", "kubectl"]) else { return };
        let cluster = Cluster::start().await.unwrap();
        let kubeconfig = cluster.kubeconfig().to_owned();
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let kubeconfig_text = kubeconfig.to_str().unwrap();
        let args = [
            "up",
            "--detach",
            "--no-demo",
            "--kubeconfig",
            kubeconfig_text,
            "--webhook-url-host",
            "127.0.0.1",
        ];
        let up = coracle(&state, &args).await;
        let said = text(&up.stderr);
        assert!(up.status.success(), "coracle up: {said}");
        assert!(said.contains(&format!("export KUBECONFIG={kubeconfig_text}")), "{said}");
        assert!(
            !state.join("plane").exists() && !state.join("kubeconfig").exists(),
            "no control plane of its own"
        );
        assert_eq!(coracle_ok(&state, &["image", "ls", "-o", "name"]).await, "", "no demo image");

        let wide = dir.path().join("wide.yaml");
        std::fs::write(&wide, WIDE).unwrap();
        let apply = ["apply", "-f", wide.to_str().unwrap()];
        let refused = foreign(&program, &kubeconfig, &apply).await.unwrap_err();
        assert!(refused.contains("capacity.vm.mikrom.es"), "{refused}");
        let leases = ["get", "lease", "-n", "coracle-nodes", "-l", "coracle.dev/agent=true", "-o", "name"];
        assert_ne!(foreign(&program, &kubeconfig, &leases).await.unwrap(), "");

        let api = ["get", "apiservices", "v1alpha1.subresources.coracle.dev", "-o"];
        let available = "jsonpath={.status.conditions[?(@.type==\"Available\")].status}";
        let available = foreign(&program, &kubeconfig, &[&api[..], &[available]].concat()).await.unwrap();
        assert_eq!(available, "True", "users reach guests through the cluster");

        coracle_ok(&state, &["down"]).await;
        let gone = foreign(&program, &kubeconfig, &[&api[..], &["name"]].concat()).await.unwrap_err();
        assert!(gone.contains("NotFound"), "no API without a server: {gone}");
        assert_eq!(foreign(&program, &kubeconfig, &leases).await.unwrap(), "", "the node is gone");
        let hooks = ["get", "validatingwebhookconfigurations", "-o", "name"];
        assert_eq!(foreign(&program, &kubeconfig, &hooks).await.unwrap(), "", "no webhook without a server");
        foreign(&program, &kubeconfig, &apply).await.expect("the cluster can be used without us");
        let left = coracle_hypervisor_testing::instances::processes_of(&state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    });
}

#[test]
fn up_starts_and_down_stops_scheduler_and_controller_manager() {
    netns::run_within(Duration::from_secs(180), || async {
        let programs = ["etcd", "kube-apiserver", "kubectl", "kube-scheduler", "kube-controller-manager"];
        if node_tools().is_none() || tools::require(programs).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up =
            coracle(&state, &["up", "--detach", "--no-demo", "--with", "scheduler,controller-manager"]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        // Only a controller manager creates the default ServiceAccount, and only a scheduler reports why it finds no node.
        kubectl(&state, &["run", "lonely", "--image=localhost/coracle/demo:1"]).await.unwrap();
        until("the scheduler's word", Duration::from_secs(20), || async {
            let path = "-o=jsonpath={.status.conditions[?(@.type=='PodScheduled')].reason}";
            match kubectl(&state, &["get", "pod", "lonely", path]).await?.as_str() {
                "Unschedulable" => Ok(()),
                other => Err(other.to_owned()),
            }
        })
        .await;
        coracle_ok(&state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    });
}
