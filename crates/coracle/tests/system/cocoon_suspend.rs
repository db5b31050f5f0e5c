//! CocoonSets on the virtual node of `coracle up --with scheduler,controller-manager`: forks, suspension that keeps memory,
//! and saved states in the registry of the system.

use std::time::Duration;

use coracle_testkit::netns;

use crate::pod_system::{LIMIT, System};
use crate::support::until;

#[test]
fn set_is_forked_suspended_and_resumed_with_its_memory() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(system) = System::start("scheduler,controller-manager").await else { return };
        let run = async |args: &[&str]| system.kubectl(args).await;
        system.apply_example("cocoonset.yaml").await;
        system.wait(&["cocoonset/demo"], "{.status.phase}", "Running").await;
        system.wait(&["cocoonset/demo"], "{.status.readyAgents}", "2").await;
        let forked =
            run(&["get", "cocoonset/demo", "-o=jsonpath={.status.agents[1].forkedFrom}"]).await.unwrap();
        assert_eq!(forked, "vk-default-demo-0");
        // State that is only in memory, not on a disk: a process that counts.
        let count = "(n=0; while :; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.2; done) >/dev/null 2>&1 </dev/null &";
        run(&["exec", "demo-0", "--", "sh", "-c", count]).await.unwrap();
        let counted = async || -> Result<u32, String> {
            let text = system.kubectl(&["exec", "demo-0", "--", "cat", "/dev/shm/count"]).await?;
            text.trim().parse().map_err(|error| format!("{text:?}: {error}"))
        };
        until("it counts", LIMIT, async || match counted().await? {
            5.. => Ok(()),
            other => Err(other.to_string()),
        })
        .await;
        // The file is empty for a moment at each update of the count.
        let before = until("its count", LIMIT, counted).await;
        run(&["patch", "cocoonset/demo", "--type=merge", "-p", r#"{"spec":{"suspend":true}}"#])
            .await
            .unwrap();
        system.wait(&["cocoonset/demo"], "{.status.phase}", "Suspended").await;
        system.wait(&["pod/demo-0"], "{.status.phase}", "Running").await;
        system
            .wait(&["pod/demo-0"], "{.status.containerStatuses[0].state.waiting.reason}", "Hibernated")
            .await;
        system.until_no_vm().await;
        run(&["patch", "cocoonset/demo", "--type=merge", "-p", r#"{"spec":{"suspend":false}}"#])
            .await
            .unwrap();
        system.wait(&["cocoonset/demo"], "{.status.phase}", "Running").await;
        system
            .wait(&["pod/demo-0"], "{.metadata.annotations.vm\\.cocoonstack\\.io/lifecycle-state}", "ready")
            .await;
        until("it counts on", LIMIT, async || match counted().await? {
            now if now > before => Ok(()),
            now => Err(format!("{now} after {before}")),
        })
        .await;
        run(&["delete", "cocoonset/demo", "--timeout=120s"]).await.unwrap();
        system.until_no_vm().await;
        assert_eq!(run(&["get", "pods", "-o", "name"]).await.unwrap(), "");
        system.end().await;
    });
}
