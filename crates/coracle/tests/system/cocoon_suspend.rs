//! CocoonSets on the virtual node of `coracle up --with scheduler,controller-manager`: forks, suspension that keeps memory,
//! and saved states in the registry of the system.

use std::path::Path;
use std::time::Duration;

use coracle_testkit::{netns, tools};

use crate::support::{coracle, coracle_ok, kubectl, node_tools, root, text, until};

const LIMIT: Duration = Duration::from_secs(120);

/// Waits until a field of an object has a value.
async fn wait(state: &Path, what: &str, path: &str, want: &str) {
    let path = format!("-o=jsonpath={path}");
    until(&format!("{what} {path} {want}"), LIMIT, async || {
        match kubectl(state, &["get", what, &path]).await? {
            value if value == want => Ok(()),
            other => {
                let described = kubectl(state, &["describe", "cocoonset,pod"]).await.unwrap_or_default();
                Err(format!("{other:?}\n{described}"))
            }
        }
    })
    .await;
}

#[test]
fn set_is_forked_suspended_and_resumed_with_its_memory() {
    netns::run_within(Duration::from_secs(400), || async {
        let programs = ["etcd", "kube-apiserver", "kubectl", "kube-scheduler", "kube-controller-manager"];
        if node_tools().is_none() || tools::require(programs).is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let up = coracle(&state, &["up", "--detach", "--with", "scheduler,controller-manager"]).await;
        assert!(up.status.success(), "coracle up: {}", text(&up.stderr));
        let run = async |args: &[&str]| kubectl(&state, args).await;
        let example = root().join("examples/cocoonset.yaml");
        run(&["apply", "-f", example.to_str().unwrap()]).await.unwrap();
        wait(&state, "cocoonset/demo", "{.status.phase}", "Running").await;
        wait(&state, "cocoonset/demo", "{.status.readyAgents}", "2").await;
        let forked =
            run(&["get", "cocoonset/demo", "-o=jsonpath={.status.agents[1].forkedFrom}"]).await.unwrap();
        assert_eq!(forked, "vk-default-demo-0");
        // What is in memory alone, and not on a disk: a process that counts.
        let count = "(n=0; while :; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.2; done) >/dev/null 2>&1 </dev/null &";
        run(&["exec", "demo-0", "--", "sh", "-c", count]).await.unwrap();
        let counted = async || -> Result<u32, String> {
            let text = kubectl(&state, &["exec", "demo-0", "--", "cat", "/dev/shm/count"]).await?;
            text.trim().parse().map_err(|error| format!("{text:?}: {error}"))
        };
        until("it counts", LIMIT, async || match counted().await? {
            5.. => Ok(()),
            other => Err(other.to_string()),
        })
        .await;
        let before = counted().await.unwrap();
        run(&["patch", "cocoonset/demo", "--type=merge", "-p", r#"{"spec":{"suspend":true}}"#])
            .await
            .unwrap();
        wait(&state, "cocoonset/demo", "{.status.phase}", "Suspended").await;
        wait(&state, "pod/demo-0", "{.status.phase}", "Running").await;
        wait(&state, "pod/demo-0", "{.status.containerStatuses[0].state.waiting.reason}", "Hibernated").await;
        until("no VM is left", LIMIT, async || {
            let vms = coracle_ok(&state, &["ps", "-a", "-o", "name"]).await;
            if vms.trim().is_empty() { Ok(()) } else { Err(vms) }
        })
        .await;
        run(&["patch", "cocoonset/demo", "--type=merge", "-p", r#"{"spec":{"suspend":false}}"#])
            .await
            .unwrap();
        wait(&state, "cocoonset/demo", "{.status.phase}", "Running").await;
        wait(&state, "pod/demo-0", "{.metadata.annotations.vm\\.cocoonstack\\.io/lifecycle-state}", "ready")
            .await;
        until("it counts on", LIMIT, async || match counted().await? {
            now if now > before => Ok(()),
            now => Err(format!("{now} after {before}")),
        })
        .await;
        run(&["delete", "cocoonset/demo", "--timeout=120s"]).await.unwrap();
        until("nothing is left", LIMIT, async || {
            let pods = run(&["get", "pods", "-o", "name"]).await?;
            let vms = coracle_ok(&state, &["ps", "-a", "-o", "name"]).await;
            if pods.is_empty() && vms.trim().is_empty() { Ok(()) } else { Err(format!("{pods} {vms}")) }
        })
        .await;
        coracle_ok(&state, &["down"]).await;
        let left = coracle_hypervisor_testing::instances::processes_of(&state);
        assert!(left.is_empty(), "processes are left: {left:?}");
    });
}
