//! The server has no state that is lost in a restart of the daemon.

use coracle_host::{Sandbox, VmSpec};
use coracle_oci::NoProgress;
use coracle_proto::cri::*;

use crate::support::{IMAGE, Node, container, sandbox};

#[tokio::test(flavor = "multi_thread")]
async fn daemon_restart_keeps_sandbox_and_container_state() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", IMAGE, &["serve"]), sandbox("web")).await.unwrap();
    kubelet.start(&main).await.unwrap();
    let resources = LinuxContainerResources { cpu_quota: 20_000, cpu_period: 100_000, ..Default::default() };
    let update = UpdateContainerResourcesRequest {
        container_id: main.clone(),
        linux: Some(resources),
        ..UpdateContainerResourcesRequest::default()
    };
    kubelet.runtime.update_container_resources(update).await.unwrap();
    let before =
        (kubelet.sandboxes().await, kubelet.containers().await, kubelet.status(&main).await.unwrap());
    assert_eq!(before.2.resources.as_ref().unwrap().linux.as_ref().unwrap().cpu_quota, 20_000);
    daemon.end().await;

    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let after = (kubelet.sandboxes().await, kubelet.containers().await, kubelet.status(&main).await.unwrap());
    assert_eq!(before, after);
    daemon.host.guest(&id).await.unwrap();
    kubelet.stop(&main, 2).await.unwrap();
    kubelet.remove_sandbox(&id).await.unwrap();
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_created_outside_cri_are_not_sandboxes() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let other = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("pod".parse().unwrap(), "") };
    daemon.host.create(other, std::sync::Arc::new(NoProgress)).await.unwrap();
    daemon.host.start("pod", None).await.unwrap();
    assert!(daemon.kubelet.sandboxes().await.is_empty());
    daemon.kubelet.remove_sandbox("pod").await.unwrap();
    assert_eq!(daemon.host.list().len(), 1, "and are not touched");
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sandbox_whose_creation_was_cut_off_is_removed() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let spec = VmSpec {
        metadata: daemon.host.get(&id).unwrap().record.metadata.clone(),
        sandbox: Some(Sandbox::default()),
        ..VmSpec::of("cutoff".parse().unwrap(), "")
    };
    daemon.host.create(spec, std::sync::Arc::new(NoProgress)).await.unwrap();
    assert_eq!(kubelet.sandboxes().await.len(), 1, "it was never acknowledged");
    daemon.end().await;
    let mut daemon = node.open().await;
    assert_eq!(daemon.kubelet.sandboxes().await.len(), 1);
    assert_eq!(daemon.host.list().len(), 1);
    daemon.end().await;
}
