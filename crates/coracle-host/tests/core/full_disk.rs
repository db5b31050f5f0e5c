//! Node whose state is on a full disk.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Fault, Host, VmSpec};
use coracle_oci::NoProgress;
use coracle_testkit::netns;
use coracle_types::VmState;

use super::support::{IMAGE, Node, create};

/// Mounts a small file system for the state, in the mount namespace of the test.
fn mount(state: &Path) {
    netns::ensure_inside().unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(state).status();
    assert!(mounted.unwrap().success());
}

/// Writes until the disk is full.
fn fill(state: &Path) {
    let mut filler = File::create(state.join("filler")).unwrap();
    for size in [64 * 1024, 4096] {
        while filler.write_all(&vec![0; size]).is_ok() {}
    }
}

async fn end(host: Host, state: &Path) {
    host.shutdown().await;
    drop(host);
    // Lazy: a process that another test is starting holds the same open files until its execve.
    assert!(Command::new("umount").arg("--lazy").arg(state).status().unwrap().success());
}

#[test]
fn full_disk_does_not_refuse_a_deletion() {
    netns::run(|| async {
        let node = Node::new().await;
        mount(&node.state());
        let host = node.open().await;
        for name in ["off", "on"] {
            create(&host, name).await;
        }
        host.start("on", None).await.unwrap();
        fill(&node.state());
        for name in ["off", "on"] {
            host.delete(name, true, None).await.unwrap();
        }
        assert_eq!((host.list().len(), node.machines.running()), (0, 0));
        assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0);
        end(host, &node.state()).await;
    });
}

#[test]
fn stop_on_a_full_disk_is_answered_with_the_reason() {
    netns::run(|| async {
        let node = Node::new().await;
        mount(&node.state());
        let host = node.open().await;
        // The record does not fit into the space that the end of its VMM frees.
        let mut spec = VmSpec::of("web".parse().unwrap(), IMAGE);
        spec.metadata.insert("note".to_owned(), "x".repeat(64 * 1024));
        host.create(spec, Arc::new(NoProgress)).await.unwrap();
        host.start("web", None).await.unwrap();
        fill(&node.state());
        for _ in 0..2 {
            let refused = host.stop("web", Duration::ZERO, None).await.unwrap_err();
            assert_eq!(refused.fault(), Fault::Exhausted, "{}", refused.chain());
        }
        assert_eq!((host.get("web").unwrap().record.state, node.machines.running()), (VmState::Stopped, 0));
        std::fs::remove_file(node.state().join("filler")).unwrap();
        assert_eq!(host.stop("web", Duration::ZERO, None).await.unwrap().state, VmState::Stopped);
        end(host, &node.state()).await;
    });
}
