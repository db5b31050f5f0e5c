//! What is deployed: golden, the same as the files in `deploy/`, and accepted by a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use std::path::Path;

use coracle_microvm::{manifests, manifests::NODE_CAPABILITIES};
use coracle_testkit::{cluster, tools};

#[test]
fn deploy_has_exactly_the_manifests() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    for (path, text) in manifests() {
        let file = deploy.join(&path);
        if std::env::var_os("CORACLE_WRITE").is_some() {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, &text).unwrap();
        }
        let stored = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            stored == text,
            "deploy/{path} is not what is generated: run this test with CORACLE_WRITE=1, or codegen"
        );
    }
}

#[test]
fn node_has_exactly_the_listed_capabilities() {
    let all = manifests();
    let (_, text) = all.iter().find(|(path, _)| path.ends_with("base/node.yaml")).unwrap();
    let object: serde_json::Value = serde_saphyr::from_str(text).unwrap();
    let pod = &object["spec"]["template"]["spec"];
    assert_eq!(pod["hostNetwork"], true);
    let security = &pod["containers"][0]["securityContext"];
    assert_eq!(
        (&security["privileged"], &security["capabilities"]["drop"][0]),
        (&false.into(), &"ALL".into())
    );
    assert_eq!(security["capabilities"]["add"], serde_json::json!(NODE_CAPABILITIES));
    for device in ["/dev/kvm", "/dev/net/tun", "/dev/userfaultfd"] {
        assert!(text.contains(device), "{device}");
    }
}

#[test]
fn api_server_accepts_the_manifests() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let kubectl = async |args: &[&str]| {
            let mut command = tokio::process::Command::new(&kubectl);
            let output = command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(args).output().await?;
            let text = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            anyhow::ensure!(output.status.success(), "kubectl {args:?}: {text}");
            anyhow::Ok(text)
        };
        // A dry run puts nothing in place, and namespaced objects need their namespace.
        for namespace in ["coracle-system", "coracle-nodes"] {
            kubectl(&["create", "namespace", namespace]).await?;
        }
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kustomize");
        for part in ["crds", "base"] {
            let part = dir.join(part);
            let args =
                ["apply", "--server-side", "--dry-run=server", "-k", part.to_str().unwrap_or_default()];
            println!("{}", kubectl(&args).await?);
        }
        kubectl(&["apply", "--server-side", "-k", dir.join("crds").to_str().unwrap_or_default()]).await?;
        kubectl(&["wait", "--for=condition=Established", "crd/mikromvms.vm.mikrom.es", "--timeout=10s"])
            .await?;
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/mikromvm.yaml");
        let path = example.to_str().unwrap_or_default();
        println!("{}", kubectl(&["apply", "--server-side", "--dry-run=server", "-f", path]).await?);
        anyhow::Ok(())
    });
}
