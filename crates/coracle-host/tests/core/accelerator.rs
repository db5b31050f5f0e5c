//! VMMs that do not use the node's accelerator.

use coracle_host::RestoreSpec;
use coracle_hypervisor::Accelerator;
use coracle_types::VmState;

use super::support::{Node, create};

#[tokio::test(flavor = "multi_thread")]
async fn vm_that_fell_back_to_tcg_wakes_and_is_copied() {
    let node = Node::new().await;
    node.machines.set_accelerators(Accelerator::Kvm, Accelerator::Tcg);
    let host = node.open().await;
    create(&host, "web").await;
    assert_eq!(host.start("web", None).await.unwrap().accelerator, Some(Accelerator::Tcg));
    host.save_snapshot("web", Some("copy".parse().unwrap())).await.unwrap();
    assert_eq!(host.snapshot("copy").await.unwrap().machine.accelerator, "tcg");
    host.hibernate("web", None).await.unwrap();
    assert_eq!(host.resume("web", None).await.unwrap().state, VmState::Running);
    let spec = RestoreSpec { name: Some("second".parse().unwrap()), ..RestoreSpec::default() };
    assert_eq!(host.restore("copy", spec).await.unwrap().accelerator, Some(Accelerator::Tcg));
    host.shutdown().await;
}
