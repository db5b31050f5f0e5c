//! VMs that end while they boot, as after a kernel that could not calibrate its timer.

use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Host, VmSpec};
use coracle_oci::NoProgress;
use coracle_testkit::eventually;
use coracle_types::{InstanceId, VmState};

use super::support::{Node, create};

/// End of a VM that boots.
#[derive(Clone, Copy, Debug)]
enum End {
    Exit,
    /// Kernel panic: the VMM keeps running.
    Panic,
}

/// Ends `count` booting VMMs one after the other; `machine` finds the current one. The next VMM comes up.
async fn end_while_booting(node: &Node, machine: impl Fn() -> Option<InstanceId>, (count, end): (u32, End)) {
    let mut ended: Option<InstanceId> = None;
    for number in 1..=count {
        let booting = eventually("another machine boots", async || {
            machine().filter(|machine| ended.as_ref() != Some(machine) && node.machines.is_running(machine))
        });
        let booting = booting.await.unwrap();
        let is_last = number == count;
        node.machines.set_boot_time(if is_last { Duration::ZERO } else { Duration::from_secs(3600) });
        match end {
            End::Exit => assert!(node.machines.crash(&booting), "{booting}"),
            End::Panic => panic_kernel(node, &booting).await,
        }
        ended = Some(booting);
    }
}

/// Makes the guest kernel panic until its VMM is ended for that.
async fn panic_kernel(node: &Node, booting: &InstanceId) {
    let ended = eventually("the machine is ended", async || {
        node.machines.print(booting, "[    0.036000] Kernel panic - not syncing: IO-APIC + timer\r\n");
        (!node.machines.is_running(booting)).then_some(())
    });
    ended.await.unwrap();
}

/// Creates a disk image VM, which has its own kernel.
async fn create_of_disk_image(node: &Node, host: &Host, name: &str) {
    let file = node.dir.path().join("system.raw");
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let image = "localhost/system:1";
    host.import_disk(&file, Some(image.parse().unwrap()), Arc::new(NoProgress)).await.unwrap();
    host.create(VmSpec::of(name.parse().unwrap(), image), Arc::new(NoProgress)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_is_retried_twice_after_vmm_exit() {
    let node = Node::new().await;
    let host = node.open().await;
    create(&host, "web").await;
    check_starts(&node, &host, (End::Exit, "the VMM exited")).await;
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_is_retried_twice_after_kernel_panic() {
    let node = Node::new().await;
    let host = node.open().await;
    create_of_disk_image(&node, &host, "web").await;
    check_starts(&node, &host, (End::Panic, "its kernel panicked: IO-APIC + timer")).await;
    host.shutdown().await;
}

/// Two VMMs may end while they boot, and the third one becomes the VM's. The end of a third one fails the start.
async fn check_starts(node: &Node, host: &Host, (end, why): (End, &str)) {
    for (ends, comes_up) in [(3, false), (2, true), (1, true)] {
        let before = node.machines.starts();
        node.machines.set_boot_time(Duration::from_secs(3600));
        let machine = || host.get("web").ok()?.record.instance.clone();
        let (started, ()) =
            tokio::join!(host.start("web", None), end_while_booting(node, machine, (ends, end)));
        assert_eq!(node.machines.starts() - before, u64::from(ends + u32::from(comes_up)));
        match started {
            Ok(record) => assert!(comes_up && record.state == VmState::Running),
            Err(error) => assert!(!comes_up && error.chain().contains(why), "{}", error.chain()),
        }
        if comes_up {
            host.stop("web", Duration::ZERO, None).await.unwrap();
        }
        assert_eq!(node.machines.running(), 0, "nothing is left");
    }
}

/// Only instance of the node.
fn only_instance(node: &Node) -> Option<InstanceId> {
    let mut dirs = std::fs::read_dir(node.state().join("instances")).ok()?.flatten();
    dirs.find_map(|dir| dir.file_name().to_str()?.parse().ok())
}

#[tokio::test(flavor = "multi_thread")]
async fn template_boot_is_retried_when_the_vmm_exits() {
    let node = Node::new().await;
    let host = node.open_with_templates(|_| {}).await;
    for (ends, is_taken) in [(3, false), (2, true)] {
        node.machines.set_boot_time(Duration::from_secs(3600));
        let (vcpus, memory) = (1.try_into().unwrap(), 128.try_into().unwrap());
        let warm = host.warm_template(vcpus, memory, "", None);
        let (taken, ()) =
            tokio::join!(warm, end_while_booting(&node, || only_instance(&node), (ends, End::Exit)));
        match taken {
            Ok(_) => assert!(is_taken),
            Err(error) => assert!(!is_taken && error.chain().contains("the VMM exited"), "{}", error.chain()),
        }
        assert_eq!(node.machines.running(), 0, "nothing is left");
    }
    host.shutdown().await;
}
