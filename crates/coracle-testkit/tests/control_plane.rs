//! One control plane per binary, and one namespace per test.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]
#![cfg(feature = "cluster")]

use coracle_testkit::{cluster, cluster::Cluster, netns, tools};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{Api, api::PostParams};

async fn writes_and_reads(cluster: &'static Cluster) -> anyhow::Result<()> {
    let namespace = cluster.namespace().await?;
    let mut map = ConfigMap::default();
    map.metadata.name = Some("same-name".into());
    Api::namespaced(cluster.client(), &namespace).create(&PostParams::default(), &map).await?;
    Ok(())
}

#[test]
fn test_has_a_namespace() {
    cluster::run(writes_and_reads);
}

#[test]
fn second_test_has_another_namespace() {
    cluster::run(writes_and_reads);
}

#[test]
fn kubectl_reads_the_kubeconfig() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let mut command = tokio::process::Command::new(kubectl);
        let output = command
            .arg("--kubeconfig")
            .arg(cluster.kubeconfig())
            .args(["get", "ns", "-o", "name"])
            .output()
            .await?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("namespace/kube-system"), "{text}{}", String::from_utf8_lossy(&output.stderr));
        anyhow::Ok(())
    });
}

#[test]
fn own_control_plane_leaves_nothing() {
    netns::run(|| async {
        if tools::require(["etcd", "kube-apiserver"]).is_none() {
            return Ok(());
        }
        let cluster = Cluster::start().await?;
        let namespaces: Api<Namespace> = Api::all(cluster.client());
        namespaces.get("kube-system").await?;
        anyhow::Ok(())
    });
}
