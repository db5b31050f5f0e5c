//! Machines that end while they boot, as a kernel does that could not calibrate its timer.

use std::time::Duration;

use coracle_host::Host;
use coracle_testkit::eventually;
use coracle_types::{InstanceId, VmState};

use super::support::{Node, create};

/// Ends so many machines of a VM while they boot, one after the other. The next one comes up.
async fn end_while_booting(node: &Node, host: &Host, count: u32) {
    let mut ended: Option<InstanceId> = None;
    for number in 1..=count {
        let booting = eventually("another machine boots", async || {
            let instance = host.get("web").ok()?.record.instance.clone()?;
            (ended.as_ref() != Some(&instance)).then_some(instance)
        });
        let booting = booting.await.unwrap();
        let is_last = number == count;
        node.machines.set_boot_time(if is_last { Duration::ZERO } else { Duration::from_secs(3600) });
        assert!(node.machines.crash(&booting), "{booting}");
        ended = Some(booting);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_that_ends_while_it_boots_is_booted_again() {
    let node = Node::new().await;
    let host = node.open().await;
    create(&host, "web").await;
    for (ends, comes_up) in [(3, false), (2, true), (1, true)] {
        let before = node.machines.starts();
        node.machines.set_boot_time(Duration::from_secs(3600));
        let (started, ()) = tokio::join!(host.start("web", None), end_while_booting(&node, &host, ends));
        assert_eq!(node.machines.starts() - before, u64::from(ends + u32::from(comes_up)));
        match started {
            Ok(record) => assert!(comes_up && record.state == VmState::Running),
            Err(error) => assert!(!comes_up && error.chain().contains("the VMM exited"), "{}", error.chain()),
        }
        if comes_up {
            host.stop("web", Duration::ZERO, None).await.unwrap();
        }
        assert_eq!(node.machines.running(), 0, "nothing is left");
    }
    host.shutdown().await;
}
