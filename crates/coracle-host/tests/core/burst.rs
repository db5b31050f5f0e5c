//! Many VMs of a new shape at once.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::support::{Node, create};

const VMS: usize = 24;

#[tokio::test(flavor = "multi_thread")]
async fn burst_of_a_new_shape_is_cloned_from_its_first_vms() {
    let node = Node::new().await;
    node.machines.set_boot_time(Duration::from_millis(50));
    let host = node.open_with_templates(|config| config.boots_at_once = 1).await;
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
