//! VMSnapshot and VMRestore on the real control plane: they preserve a counter in the memory of a real guest.

use std::path::Path;
use std::time::Duration;

use crate::support::{coracle, kubectl, node_tools, text, until};
use coracle_testkit::{netns, tools};

/// VM that counts in a shell variable, and writes the count to a file on a tmpfs.
const COUNTER: &str = r#"{"apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": "counter"},
    "spec": {"image": "localhost/coracle/demo:1", "vcpuCount": 1, "memoryMB": 128, "command": ["sh", "-c"],
        "args": ["mkdir -p /ram; mount -t tmpfs t /ram; n=0; while :; do n=$((n+1)); echo $n > /ram/n; sleep 0.1; done"]}}"#;

#[test]
fn restored_vms_continue_from_memory() {
    netns::run_within(Duration::from_secs(300), || async {
        if node_tools().is_none() || tools::require(["etcd", "kube-apiserver", "kubectl"]).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = coracle(&state, &["up", "--detach"]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        apply(&state, "counter", COUNTER).await;
        kubectl(&state, &["wait", "mvm/counter", "--for=condition=Ready", "--timeout=90s"]).await.unwrap();
        until_counted(&state, "counter", 20).await;

        let snapshot = |name: &str| {
            format!(
                r#"{{"apiVersion": "coracle.dev/v1alpha1", "kind": "VMSnapshot", "metadata": {{"name": "{name}"}},
                    "spec": {{"vmName": "counter", "retain": 1}}}}"#
            )
        };
        for name in ["first", "second"] {
            apply(&state, name, &snapshot(name)).await;
            let wait = ["wait", &format!("vmsnap/{name}"), "--for=condition=Ready", "--timeout=60s"];
            kubectl(&state, &wait).await.unwrap();
        }
        let status = "-o=jsonpath={.status.memoryBytes} {.status.nodeName} {.status.imageDigest}";
        let said = kubectl(&state, &["get", "vmsnap", "second", status]).await.unwrap();
        assert!(said.contains(" vm sha256:") && !said.starts_with(' '), "{said}");
        let saved_at = count(&state, "counter").await.unwrap();
        until("the retention deletes the first", Duration::from_secs(20), || async {
            let left = snapshots(&state);
            if left.len() == 1 { Ok(()) } else { Err(left.join(" ")) }
        })
        .await;
        until_counted(&state, "counter", saved_at + 50).await;

        restore(&state, "as-new", "twin", "New").await;
        let twin = count(&state, "twin").await.unwrap();
        assert!(twin >= 20, "the twin counts on from the snapshot: {twin}");
        let address = address(&state, "counter").await;
        let before = count(&state, "counter").await.unwrap();
        restore(&state, "back", "counter", "Same").await;
        let after = count(&state, "counter").await.unwrap();
        assert!((20..before).contains(&after), "it went back from {before}, and not to the start: {after}");
        assert_eq!(self::address(&state, "counter").await, address, "under its identity");
        until_counted(&state, "counter", after + 5).await;

        kubectl(&state, &["delete", "mvm", "counter", "twin", "--timeout=60s"]).await.unwrap();
        kubectl(&state, &["delete", "vmsnap", "--all", "--timeout=60s"]).await.unwrap();
        assert_eq!(snapshots(&state), [] as [&str; 0], "no snapshot is left");
        let down = coracle(&state, &["down"]).await;
        assert!(down.status.success(), "coracle down: {}", text(&down.stderr));
    });
}

/// Lists the snapshots of the node.
fn snapshots(state: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(state.join("snapshots")).unwrap().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

async fn apply(state: &Path, name: &str, manifest: &str) {
    let file = state.join(format!("{name}.json"));
    std::fs::write(&file, manifest).unwrap();
    kubectl(state, &["apply", "-f", file.to_str().unwrap()]).await.unwrap();
}

async fn restore(state: &Path, name: &str, vm: &str, identity: &str) {
    let manifest = format!(
        r#"{{"apiVersion": "coracle.dev/v1alpha1", "kind": "VMRestore", "metadata": {{"name": "{name}"}},
            "spec": {{"snapshotName": "second", "vmName": "{vm}", "identity": "{identity}"}}}}"#
    );
    apply(state, name, &manifest).await;
    let wait = ["wait", &format!("vmrest/{name}"), "--for=condition=Ready", "--timeout=90s"];
    if let Err(error) = kubectl(state, &wait).await {
        let shown = kubectl(state, &["get", "vmrest,mvm", "-o", "yaml"]).await;
        panic!("{error}\n{shown:?}");
    }
}

async fn count(state: &Path, vm: &str) -> Result<u64, String> {
    let said = coracle(state, &["exec", &format!("default-{vm}"), "cat", "/ram/n"]).await;
    text(&said.stdout).trim().parse().map_err(|_| format!("{} {}", text(&said.stdout), text(&said.stderr)))
}

async fn until_counted(state: &Path, vm: &str, at_least: u64) {
    until("the guest counts", Duration::from_secs(60), || async {
        let n = count(state, vm).await?;
        if n >= at_least { Ok(()) } else { Err(n.to_string()) }
    })
    .await;
}

async fn address(state: &Path, vm: &str) -> String {
    kubectl(state, &["get", "mvm", vm, "-o=jsonpath={.status.ipAddress}"]).await.unwrap()
}
