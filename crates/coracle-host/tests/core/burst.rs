//! Many VMs of a new shape at once.

use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor_testing::AddressOnly;
use tokio::task::JoinSet;

use crate::support::{Node, create};

const VMS: usize = 24;

#[tokio::test(flavor = "multi_thread")]
async fn burst_of_a_new_shape_is_cloned_from_its_first_vms() {
    let node = Node::new().await;
    node.machines.set_boot_time(Duration::from_millis(50));
    let kernel = node.dir.path().join("kernel");
    std::fs::write(&kernel, "kernel and initramfs").unwrap();
    let network = Arc::new(AddressOnly::new("10.100.0.0/24".parse().unwrap()));
    let host = node
        .open_changed(network, "images", |config| {
            config.templates.enabled = true;
            config.boots_at_once = 1;
            (config.kernel, config.initrd) = (kernel.clone(), kernel);
        })
        .await
        .unwrap();
    let mut starts = JoinSet::new();
    for n in 0..VMS {
        let (host, name) = (host.clone(), format!("vm-{n}"));
        create(&host, &name).await;
        starts.spawn(async move { host.start(&name, None).await.unwrap().template });
    }
    let clones = starts.join_all().await.into_iter().flatten().count();
    assert!(clones > 0, "the template waited behind every boot");
    host.shutdown().await;
}
