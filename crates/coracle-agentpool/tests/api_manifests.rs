//! Deployment manifests: equal to the files in `deploy/`, accepted by a real API server, and sufficient.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test reports by panicking")]

use std::path::Path;

use coracle_agentpool::manifests;
use coracle_testkit::{cluster, tools};

fn deploy() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

fn image_of_the_files() -> String {
    let text = std::fs::read_to_string(deploy().join("kustomize/agent-forge/operator.yaml")).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("image: ")).unwrap();
    line.trim_matches('"').to_owned()
}

#[test]
fn deploy_files_match_the_generated_manifests() {
    for (path, text) in manifests(&image_of_the_files()) {
        let stored = std::fs::read_to_string(deploy().join(&path)).unwrap_or_default();
        assert!(stored == text, "deploy/{path} is not what is generated: run cargo xtask codegen");
    }
}

#[test]
fn names_match_original_for_replacement_in_place() {
    let all: String = manifests("image").into_iter().map(|(_, text)| text).collect();
    for name in [
        "name: agent-forge-operator-system",
        "name: agent-forge-operator-controller-manager",
        "name: agent-forge-operator-manager-role",
        "name: agent-forge-operator-leader-election-role",
        "name: agent-forge-operator-metrics-reader",
        "name: agent-forge-operator-controller-manager-metrics-service",
        "name: agent-forge-operator-vsphereagentpool-editor-role",
        "agent-forge-operator.containeroo.ch",
        "terminationGracePeriodSeconds: 10",
        "memory: 128Mi",
    ] {
        assert!(all.contains(name), "{name} is not in\n{all}");
    }
}

#[test]
fn manifests_are_accepted_by_the_api_server() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let kubectl = async |args: &[&str]| {
            let mut command = tokio::process::Command::new(&kubectl);
            let output = command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(args).output().await?;
            let said = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&said).into_owned();
            anyhow::ensure!(output.status.success(), "kubectl {args:?}: {text}");
            anyhow::Ok(text)
        };
        // A dry run creates nothing, but namespaced objects need their namespace.
        kubectl(&["create", "namespace", manifests::NAMESPACE]).await?;
        for part in ["crds", "agent-forge"] {
            let part = deploy().join("kustomize").join(part);
            let dir = part.to_str().unwrap_or_default();
            println!("{}", kubectl(&["apply", "--server-side", "--dry-run=server", "-k", dir]).await?);
        }
        let crds = deploy().join("kustomize/crds");
        kubectl(&["apply", "--server-side", "-k", crds.to_str().unwrap_or_default()]).await?;
        for kind in ["vsphereagentpools", "vsphereagents"] {
            let crd = format!("crd/{kind}.agent-forge.containeroo.ch");
            kubectl(&["wait", "--for=condition=Established", &crd, "--timeout=10s"]).await?;
        }
        let example = deploy().join("../examples/vsphereagentpool.yaml");
        let path = example.to_str().unwrap_or_default();
        println!("{}", kubectl(&["apply", "--server-side", "--dry-run=server", "-f", path]).await?);
        anyhow::Ok(())
    });
}
