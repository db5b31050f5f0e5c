//! Manifests: golden snapshots, equality with the files in `deploy/`, and acceptance by a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use coracle_install::files;
use coracle_testkit::{cluster, tools};

mod chart;
mod queries;

pub(crate) fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").canonicalize().unwrap()
}

#[test]
fn deploy_has_exactly_the_manifests() {
    let deploy = deploy();
    let wanted = files();
    for (path, text) in &wanted {
        let file = deploy.join(path);
        if std::env::var_os("CORACLE_WRITE").is_some() {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, text).unwrap();
        }
        let stored = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            stored == *text,
            "deploy/{path} is not what is generated: run this test with CORACLE_WRITE=1, or codegen"
        );
    }
    let known: BTreeSet<_> = wanted.iter().map(|(path, _)| deploy.join(path)).collect();
    let mut stale = Vec::new();
    for dir in ["kustomize", "helm"] {
        all_files(&deploy.join(dir), &mut |file| {
            if !known.contains(&file) {
                stale.push(file);
            }
        });
    }
    assert!(stale.is_empty(), "not generated: {stale:?}");
}

fn all_files(dir: &Path, found: &mut impl FnMut(PathBuf)) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { all_files(&path, found) } else { found(path) }
    }
}

#[test]
fn node_daemonset_mounts_no_device_paths() {
    let all = files();
    let (_, text) = all.iter().find(|(path, _)| path.ends_with("base/node.yaml")).unwrap();
    let object: serde_json::Value = serde_saphyr::from_str(text).unwrap();
    let pod = &object["spec"]["template"]["spec"];
    assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&true.into(), &true.into()));
    assert_eq!(pod["containers"][0]["securityContext"]["privileged"], true);
    assert!(!text.contains("/dev/"), "a path of a device that is absent becomes a directory");
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
        let dir = deploy().join("kustomize");
        for what in ["default", "everything"] {
            let dir = dir.join(what);
            println!(
                "{}",
                kubectl(&["apply", "--server-side", "-k", dir.to_str().unwrap_or_default()]).await?
            );
        }
        kubectl(&["wait", "--for=condition=Established", "crd/mikromvms.vm.mikrom.es", "--timeout=10s"])
            .await?;
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/mikromvm.yaml");
        let path = example.to_str().unwrap_or_default();
        println!("{}", kubectl(&["apply", "--server-side", "--dry-run=server", "-f", path]).await?);
        anyhow::Ok(())
    });
}
