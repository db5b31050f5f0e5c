//! Running VMs after a restart of the daemon.

use super::support::Node;

#[tokio::test(flavor = "multi_thread")]
async fn guest_of_an_adopted_vm_is_waited_for() {
    let node = Node::new().await;
    let (host, _) = node.with(&["web"]).await;
    host.start("web", None).await.unwrap();
    host.shutdown().await;
    drop(host);
    let host = node.open().await;
    let guest = host.guest("web").await.unwrap();
    guest.status().await.unwrap();
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_watch_reports_only_later_changes() {
    let node = Node::new().await;
    let (host, _) = node.with(&["web"]).await;
    host.start("web", None).await.unwrap();
    let mut view = host.observe("web").unwrap();
    assert!(!view.has_changed().unwrap(), "what it is now counts as seen");
    host.stop("web", std::time::Duration::ZERO, None).await.unwrap();
    view.changed().await.unwrap();
    host.shutdown().await;
}
