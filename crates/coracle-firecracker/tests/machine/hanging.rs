//! VMM that accepts calls and never answers: stops and deletions do not wait for it.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::VmSpec;
use coracle_hypervisor::Driver;
use coracle_oci::NoProgress;
use coracle_testkit::{eventually, netns, tools};
use coracle_types::VmState;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Machine;
use super::whole_life::{IMAGE, open};

/// Time limit of a stop and of a forced deletion.
const LIMIT: Duration = Duration::from_secs(10);

/// The call that starts the VM is never answered: a forced deletion ends the VMM.
pub(crate) fn check_deletion_while_starting(
    machine: &Machine,
    driver: impl Fn() -> Arc<dyn Driver> + Send + Sync,
) {
    if tools::require(["mke2fs", "nft", "busybox"]).is_none() {
        return;
    }
    netns::run_within(Duration::from_secs(60), || async {
        let dir = tempfile::tempdir().unwrap();
        let host = open(machine, driver(), dir.path()).await;
        host.create(VmSpec::of("web".parse().unwrap(), IMAGE), Arc::new(NoProgress)).await.unwrap();
        let mut starts = JoinSet::new();
        let starter = host.clone();
        starts.spawn(async move { starter.start("web", None).await.map(drop) });
        let run_dir = dir.path().join("run");
        let vmm = async || {
            let dirs = std::fs::read_dir(&run_dir).ok()?.flatten();
            dirs.filter_map(|dir| coracle_hypervisor::launch::find_in(&dir.path()).ok()?).next()
        };
        let vmm = eventually("a VMM that hangs", vmm).await.unwrap();
        timeout(LIMIT, host.delete("web", true, None)).await.expect("it is deleted in time").unwrap();
        assert!(!vmm.is_alive().unwrap());
        starts.join_next().await.unwrap().unwrap().unwrap_err();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// A call to a running VM is never answered: a stop still ends the VMM, and so does a forced deletion.
pub(crate) fn check_stop_while_running(
    machine: &Machine,
    driver: impl Fn() -> Arc<dyn Driver> + Send + Sync,
) {
    if tools::require(["mke2fs", "nft", "busybox"]).is_none() {
        return;
    }
    netns::run_within(Duration::from_secs(60), || async {
        let dir = tempfile::tempdir().unwrap();
        let host = open(machine, driver(), dir.path()).await;
        host.create(VmSpec::of("web".parse().unwrap(), IMAGE), Arc::new(NoProgress)).await.unwrap();
        for deleted in [false, true] {
            let web = host.start("web", None).await.unwrap();
            let mut pauses = JoinSet::new();
            let other = host.clone();
            pauses.spawn(async move { other.pause("web", None).await.map(drop) });
            tokio::task::yield_now().await;
            if deleted {
                timeout(LIMIT, host.delete("web", true, None)).await.expect("it is deleted in time").unwrap();
            } else {
                let stopped = timeout(LIMIT, host.stop("web", Duration::from_secs(2), None)).await;
                assert_eq!(stopped.expect("it stops in time").unwrap().state, VmState::Stopped);
            }
            assert!(!web.process.unwrap().is_alive().unwrap());
            timeout(LIMIT, pauses.join_next()).await.expect("the pause ends").unwrap().unwrap().unwrap_err();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
