//! The group "Idempotence" of critest.

use crate::support::{IMAGE, Node, container, sandbox};

#[tokio::test(flavor = "multi_thread")]
async fn stop_pod_sandbox_of_an_unknown_id_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    daemon.kubelet.stop_sandbox("nowhere").await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_pod_sandbox_twice_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let id = daemon.kubelet.run_sandbox(sandbox("web")).await.unwrap();
    daemon.kubelet.stop_sandbox(&id).await.unwrap();
    daemon.kubelet.stop_sandbox(&id).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remove_pod_sandbox_of_an_unknown_id_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    daemon.kubelet.remove_sandbox("nowhere").await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_container_of_an_unknown_id_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    daemon.kubelet.stop("nowhere", 2).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_container_twice_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.stop(&main, 2).await.expect("one that was never started");
    kubelet.start(&main).await.unwrap();
    kubelet.stop(&main, 2).await.unwrap();
    kubelet.stop(&main, 2).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remove_container_of_an_unknown_id_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    daemon.kubelet.remove("nowhere").await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remove_image_that_is_unknown_succeeds() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    daemon.kubelet.remove_image("localhost/nowhere:1").await.unwrap();
    daemon.end().await;
}
