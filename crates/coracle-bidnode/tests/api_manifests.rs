//! Deployment manifests: equal to the files in `deploy/`, and accepted by a real API server.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test reports by panicking")]

use std::path::Path;

use coracle_bidnode::manifests;
use coracle_testkit::{cluster, tools};

fn deploy() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

#[test]
fn deploy_files_match_the_generated_manifests() {
    let text = std::fs::read_to_string(deploy().join("kustomize/bidnode/operator.yaml")).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("image: ")).unwrap();
    for (path, text) in manifests(line.trim_matches('"')) {
        let stored = std::fs::read_to_string(deploy().join(&path)).unwrap_or_default();
        assert!(stored == text, "deploy/{path} is not what is generated: run cargo xtask codegen");
    }
}

/// Permissions of the operator: no wildcard and no access to Secrets.
#[test]
fn rbac_rights_are_limited_to_the_contract() {
    let all = manifests("image");
    let rbac = &all.iter().find(|(path, _)| path.ends_with("rbac.yaml")).unwrap().1;
    assert!(!rbac.contains('*') && !rbac.contains("secrets"), "{rbac}");
    for needed in ["pods/eviction", "bidnodes/status", "bidnodes/finalizers", "nodes", "leases"] {
        assert!(rbac.contains(needed), "{needed} is not in\n{rbac}");
    }
}

/// The operator authenticates at the market with a token of its own service account, for the market only and with a short
/// lifetime. It has no administrator token, and the market may ask the cluster only for reviews.
#[test]
fn operator_uses_own_service_account_token() {
    let all = manifests("image");
    let text = |name: &str| &all.iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
    let operator: serde_json::Value = serde_saphyr::from_str(text("operator.yaml")).unwrap();
    let pod = &operator["spec"]["template"]["spec"];
    let token = &pod["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"];
    assert_eq!(
        (token["audience"].as_str(), token["path"].as_str()),
        (Some(coracle_market::AUDIENCE), Some("token"))
    );
    assert!(token["expirationSeconds"].as_i64().unwrap() <= 3600, "{token}");
    let container = &pod["containers"][0];
    let mount = container["volumeMounts"][0]["mountPath"].as_str().unwrap();
    let file = serde_json::Value::from(format!("--market-token-file={mount}/token"));
    assert!(container["args"].as_array().unwrap().contains(&file), "{container:#}");
    assert!(!text("operator.yaml").contains("secretKeyRef"), "an administrator's token");
    let market = text("market.yaml");
    let account = pod["serviceAccountName"].as_str().unwrap();
    for flag in ["--accounts=in-cluster", &format!("--operator={}/{account}", coracle_bidnode::NAMESPACE)] {
        assert!(market.contains(flag), "{flag} is not in\n{market}");
    }
    assert!(text("market/rbac.yaml").contains("tokenreviews"));
}

/// Tokens cross the network, so the market uses TLS. The operator trusts only the market's authority and has no private key.
#[test]
fn operator_and_market_speak_tls() {
    let all = manifests("image");
    let text = |name: &str| &all.iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
    let (operator, market) = (text("operator.yaml"), text("market.yaml"));
    let host = format!("coracle-market.{}.svc:7700", coracle_bidnode::NAMESPACE);
    assert!(operator.contains(&format!("--market=https://{host}")), "{operator}");
    assert!(operator.contains("--market-ca=/etc/coracle/market/ca.crt") && !operator.contains("tls.key"));
    for flag in ["--tls-cert=/etc/coracle/market/tls.crt", "--tls-key=/etc/coracle/market/tls.key"] {
        assert!(market.contains(flag), "{flag} is not in\n{market}");
    }
    assert!(!market.contains("--plaintext"));
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
        kubectl(&["create", "namespace", coracle_bidnode::NAMESPACE]).await?;
        for part in ["kustomize/market", "kustomize/bidnode"] {
            let dir = deploy().join(part);
            let args = ["apply", "--server-side", "--dry-run=server", "-k", dir.to_str().unwrap()];
            println!("{}", kubectl(&args).await?);
        }
        let crds = deploy().join("kustomize/crds");
        kubectl(&["apply", "--server-side", "-k", crds.to_str().unwrap()]).await?;
        kubectl(&["wait", "--for=condition=Established", "crd/bidnodes.kubebid.io", "--timeout=10s"]).await?;
        let example = deploy().join("../examples/bidnode.yaml");
        println!(
            "{}",
            kubectl(&["apply", "--server-side", "--dry-run=server", "-f", example.to_str().unwrap()]).await?
        );
        anyhow::Ok(())
    });
}
