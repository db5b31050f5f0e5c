//! Temporary VMs, which the node removes by itself.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use coracle_frontends::HostService;
use coracle_host::{Host, HostError, REMOVE_ANNOTATION, RemoveWhen, VmSpec};
use coracle_hypervisor_testing::AddressOnly;
use coracle_oci::NoProgress;
use coracle_proto::host::{self as pb, host_server::Host as _};
use coracle_testkit::eventually;
use tonic::Request;

use super::support::{IMAGE, Node, create};

/// Longer than the time between two calls on a busy host.
const GRACE: Duration = Duration::from_secs(3);

async fn open(node: &Node, grace: Duration) -> Host {
    let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
    node.open_changed(network, "images", |config| config.released_grace = grace).await.unwrap()
}

async fn create_temporary(host: &Host, name: &str, when: RemoveWhen) {
    let metadata = [(REMOVE_ANNOTATION.to_owned(), when.as_str().to_owned())].into();
    let spec = VmSpec { metadata, ..VmSpec::of(name.parse().unwrap(), IMAGE) };
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
}

/// Waits until the node has exactly these VMs.
async fn wait_for_vms(host: &Host, want: &[&str]) {
    let want: HashSet<_> = want.iter().map(|name| (*name).to_owned()).collect();
    let all = || host.list().iter().map(|view| view.record.name.to_string()).collect::<HashSet<_>>();
    let seen = eventually(&format!("{want:?} are left"), async || (all() == want).then_some(())).await;
    seen.unwrap_or_else(|late| panic!("{late}: {:?}", all()));
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_that_no_client_holds_is_removed() {
    let node = Node::new().await;
    let host = open(&node, GRACE).await;
    let service = HostService::new(host.clone());
    create(&host, "kept").await;
    create_temporary(&host, "held", RemoveWhen::Released).await;
    let request = pb::HoldVmRequest { vm: "held".to_owned() };
    let hold = service.hold_vm(Request::new(request)).await.unwrap();
    for name in ["runs", "free"] {
        create_temporary(&host, name, RemoveWhen::Released).await;
    }
    host.start("runs", None).await.unwrap();
    wait_for_vms(&host, &["kept", "held"]).await;
    assert_eq!(node.machines.running(), 0, "one that ran is gone, too");
    drop(hold);
    wait_for_vms(&host, &["kept"]).await;
    assert!(matches!(host.hold("held"), Err(HostError::NotFound { .. })));
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn temporary_vm_is_removed_once_powered_off() {
    let node = Node::new().await;
    let host = open(&node, GRACE).await;
    for name in ["runs", "ends", "read"] {
        create_temporary(&host, name, RemoveWhen::Off).await;
        host.start(name, None).await.unwrap();
    }
    let reads = host.hold("read").unwrap();
    for name in ["ends", "read"] {
        host.stop(name, Duration::ZERO, None).await.unwrap();
    }
    wait_for_vms(&host, &["runs", "read"]).await;
    drop(reads);
    wait_for_vms(&host, &["runs"]).await;
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_daemon_removes_released_temporary_vms() {
    let node = Node::new().await;
    let host = open(&node, Duration::from_secs(600)).await;
    create_temporary(&host, "held", RemoveWhen::Released).await;
    create_temporary(&host, "runs", RemoveWhen::Off).await;
    host.start("held", None).await.unwrap();
    host.start("runs", None).await.unwrap();
    let _ended_with_its_client = host.hold("held").unwrap();
    host.shutdown().await;
    drop(host);
    let host = open(&node, Duration::from_millis(200)).await;
    wait_for_vms(&host, &["runs"]).await;
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_remove_annotation_is_refused() {
    let node = Node::new().await;
    let host = open(&node, GRACE).await;
    let metadata = [(REMOVE_ANNOTATION.to_owned(), "soon".to_owned())].into();
    let spec = VmSpec { metadata, ..VmSpec::of("web".parse().unwrap(), IMAGE) };
    let refused = host.create(spec, Arc::new(NoProgress)).await.unwrap_err();
    assert!(matches!(refused, HostError::Invalid { .. }), "{refused}");
    host.shutdown().await;
}
