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
