//! Manifests: equal to the files in `deploy/`, and accepted by a real API server.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test reports by panicking")]

use std::path::Path;

use coracle_cocoon::manifests;
use coracle_testkit::{cluster, tools};

fn deploy() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

#[test]
fn deploy_files_match_the_generated_manifests() {
    let text = std::fs::read_to_string(deploy().join("kustomize/cocoon/operator.yaml")).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("image: ")).unwrap();
    for (path, text) in manifests(line.trim_matches('"')) {
        let stored = std::fs::read_to_string(deploy().join(&path)).unwrap_or_default();
        assert!(stored == text, "deploy/{path} is not what is generated: run cargo xtask codegen");
    }
}

#[test]
fn rbac_rights_are_limited_to_the_contract() {
    let all = manifests("image");
    let rbac = &all.iter().find(|(path, _)| path.ends_with("rbac.yaml")).unwrap().1;
    assert!(!rbac.contains('*'), "{rbac}");
    for needed in
        ["cocoonsets/status", "cocoonsets/finalizers", "cocoonhibernations", "pods", "leases", "configmaps"]
    {
        assert!(rbac.contains(needed), "{needed} is not in\n{rbac}");
    }
}

#[test]
fn manifests_are_accepted_by_the_api_server() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let kubectl = async |args: &[&str]| {
            let mut command = tokio::process::Command::new(&kubectl);
            let output = command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(args).output().await?;
            let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            anyhow::ensure!(output.status.success(), "kubectl {args:?}: {said}");
            anyhow::Ok(said)
        };
        let crds = deploy().join("kustomize/crds");
        kubectl(&["apply", "--server-side", "-k", crds.to_str().unwrap()]).await?;
        let namespace = deploy().join("kustomize/cocoon/namespace.yaml");
        kubectl(&["apply", "-f", namespace.to_str().unwrap()]).await?;
        let all = deploy().join("kustomize/cocoon");
        let said =
            kubectl(&["apply", "--server-side", "--dry-run=server", "-k", all.to_str().unwrap()]).await?;
        assert!(said.contains("deployment.apps/cocoon-operator"), "{said}");
        let example = deploy().join("../examples/cocoonset.yaml");
        let said = kubectl(&["apply", "--dry-run=server", "-f", example.to_str().unwrap()]).await?;
        assert!(said.contains("cocoonset.cocoonset.cocoonstack.io/demo"), "{said}");
        let columns = kubectl(&["get", "cocoonsets,ch", "-A"]).await?;
        assert!(columns.contains("No resources found"), "{columns}");
        anyhow::Ok(())
    });
}
