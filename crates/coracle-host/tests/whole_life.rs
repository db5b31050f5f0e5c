//! Whole life cycle of a real VM, after which nothing of it is left. A test program of its own, because it counts the open
//! files of its process.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

#[path = "e2e/support.rs"]
mod support;

use std::time::Duration;

use coracle_host::{Host, RestoreSpec};
use coracle_testkit::leaks::{Inventory, open_files};
use coracle_testkit::netns;
use coracle_types::VmState;
use support::{Node, counter, last_number, vmms, wait_until_counted};

/// create → boot → pause → resume → snapshot → kill → restore → graceful stop → delete.
async fn whole_life(host: &Host, node: &Node) {
    let web = counter(host, "web").await;
    wait_until_counted(host, "web", 3).await;
    assert_eq!(host.pause("web", None).await.unwrap().state, VmState::Paused);
    assert_eq!(host.resume("web", None).await.unwrap().state, VmState::Running);
    host.save_snapshot("web", Some("life".parse().unwrap())).await.unwrap();
    let before = last_number(host, "web").await;

    let vmm = rustix::process::Pid::from_raw(web.process.unwrap().pid.cast_signed()).unwrap();
    rustix::process::kill_process(vmm, rustix::process::Signal::KILL).unwrap();
    let mut view = host.observe("web").unwrap();
    let failed = view.wait_for(|view| view.record.state == VmState::Failed);
    tokio::time::timeout(Duration::from_secs(20), failed).await.expect("its end is noticed").unwrap();
    host.delete("web", false, None).await.unwrap();
    assert_eq!(vmms(node.dir.path()), 0);

    let again = host.restore("life", RestoreSpec::default()).await.unwrap();
    assert_eq!((again.name.to_string(), again.address), ("web".to_owned(), web.address));
    wait_until_counted(host, "web", before).await;
    let off = host.stop("web", Duration::from_secs(10), None).await.unwrap();
    assert_eq!((off.state, off.process), (VmState::Stopped, None));
    host.delete("web", false, None).await.unwrap();
    host.delete_snapshot("life").await.unwrap();
}

#[test]
fn vm_lifecycle_leaves_nothing() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(node) = Node::new().await else { return };
        // Files that a node makes for itself exist after the first life.
        let host = node.open().await;
        whole_life(&host, &node).await;
        let (before, open) = (Inventory::take(node.dir.path()), open_files());
        whole_life(&host, &node).await;
        assert_eq!(before.leaked(&Inventory::take(node.dir.path())), "");
        assert_eq!(open_files(), open, "files, sockets and process handles of the daemon");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
