//! Copies of running guests with real VMs: saved, restored, forked and moved to another node.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Node, close, counter, exec, last_number, wait_until_counted};
use coracle_host::{Host, Owner, RestoreSpec, SnapshotName, VmSpec};
use coracle_oci::NoProgress;
use coracle_testkit::oci::LayerTar;
use coracle_testkit::{eventually_ok_within, netns};
use coracle_types::{Clock, VmState};

const FORKS: u32 = 10;

fn named(name: &str) -> RestoreSpec {
    RestoreSpec { name: Some(name.parse().unwrap()), ..RestoreSpec::default() }
}

/// Returns identifiers that no two VMs may share, and the clock error in whole seconds. The guest read its clock between the
/// request and the answer, which can be seconds apart on a busy host: that much is permitted.
async fn guest_identity(host: &Host, name: &str) -> (Vec<String>, i64) {
    let asked = Clock::system().now().seconds();
    let ask = "cat /etc/machine-id /proc/sys/kernel/random/boot_id /sys/class/net/eth0/address; hostname; \
               ip -4 addr show eth0 | grep inet; dd if=/dev/urandom bs=16 count=1 2>/dev/null | md5sum; date +%s";
    let (said, code) = exec(host, name, &["sh", "-c", ask]).await;
    let answered = Clock::system().now().seconds();
    assert_eq!(code, 0, "{said}");
    let mut lines: Vec<String> = said.lines().map(str::to_owned).collect();
    let clock: i64 = lines.pop().unwrap().parse().unwrap();
    (lines, (asked - clock).max(clock - answered).max(0))
}

/// Inode of the file that a VMM maps as guest memory.
fn memory_of(vmm: u32) -> String {
    let maps = std::fs::read_to_string(format!("/proc/{vmm}/maps")).unwrap();
    let memory = maps.lines().find(|line| line.contains("/memfd:shared-ram")).unwrap();
    memory.split_whitespace().nth(4).unwrap().to_owned()
}

#[test]
fn forks_continue_with_identities_of_their_own() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        counter(&host, "web").await;
        wait_until_counted(&host, "web", 5).await;
        let before = last_number(&host, "web").await;
        let forks = host.fork("web", FORKS, None).await.unwrap();
        assert_eq!(forks.len(), usize::try_from(FORKS).unwrap());
        assert_eq!(host.snapshots().await.unwrap(), [], "what they were made from is not kept");
        wait_until_counted(&host, "web", before + 3).await;

        let mut seen: Vec<HashSet<String>> = Vec::new();
        let names: Vec<String> = forks.iter().map(|record| record.name.to_string()).collect();
        for name in names.iter().map(String::as_str).chain(["web"]) {
            let (lines, off) = guest_identity(&host, name).await;
            assert!(off <= 1, "the clock of {name} is {off} s off");
            seen.resize_with(lines.len(), HashSet::new);
            for (kind, line) in seen.iter_mut().zip(lines) {
                assert!(kind.insert(line.clone()), "{line} is not {name}'s alone");
            }
        }
        assert_eq!(seen.len(), 6, "machine id, boot id, MAC, host name, address, random draw");
        let memories: HashSet<_> =
            forks.iter().map(|record| memory_of(record.process.unwrap().pid)).collect();
        assert_eq!(memories.len(), 1, "they share what none of them changed: {memories:?}");
        for record in &forks {
            assert_eq!(record.state, VmState::Running);
            assert!(record.identity_ms > 0);
            wait_until_counted(&host, record.name.as_str(), before + 3).await;
        }
        close(&node, host).await;
    });
}

#[test]
fn snapshot_hooks_run_and_their_failure_refuses_the_copy() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let hooks =
            ["pre-snapshot", "post-snapshot", "post-clone"].iter().fold(LayerTar::new(), |layer, name| {
                let script = format!("#!/bin/sh\necho {name} >> /told\n[ ! -e /no-{name} ]\n");
                layer.file(&format!("etc/coracle/hooks/{name}"), 0o755, script.as_bytes())
            });
        node.import("localhost/test/hooks:1", hooks).await;
        let host = node.open().await;
        let spec = VmSpec { image: "localhost/test/hooks:1".to_owned(), ..crate::support::spec("web") };
        host.create(spec, Arc::new(NoProgress)).await.unwrap();
        host.start("web", None).await.unwrap();

        let copy = host.fork("web", 1, None).await.unwrap().remove(0);
        assert_eq!(exec(&host, copy.name.as_str(), &["cat", "/told"]).await.0, "pre-snapshot\npost-clone\n");
        wait_for_hook_output(&host, "web", "pre-snapshot\npost-snapshot\n").await;

        exec(&host, "web", &["touch", "/no-pre-snapshot"]).await;
        let refused = host.save_snapshot("web", None).await.unwrap_err();
        assert_eq!(refused.code(), "COR-GST-005");
        assert!(refused.chain().ends_with("hook pre-snapshot: it exited with code 1"), "{}", refused.chain());
        assert_eq!(host.snapshots().await.unwrap(), []);
        wait_for_hook_output(&host, "web", "pre-snapshot\npost-snapshot\npre-snapshot\npost-snapshot\n")
            .await;
        exec(&host, "web", &["sh", "-c", "rm /no-pre-snapshot; touch /no-post-clone"]).await;
        let failed = host.fork("web", 2, None).await.unwrap_err().chain();
        assert!(failed.contains("hook post-clone: it exited with code 1"), "{failed}");
        assert_eq!(host.list().len(), 2, "none of the copies is left");
        close(&node, host).await;
    });
}

/// Waits until the hooks have written `want`.
async fn wait_for_hook_output(host: &Host, name: &str, want: &str) {
    let what = format!("hooks of {name} have written {want:?}");
    let written = eventually_ok_within(Duration::from_secs(90), &what, async || {
        let (told, _) = exec(host, name, &["cat", "/told"]).await;
        if told == want { Ok(()) } else { Err(told) }
    });
    written.await.unwrap();
}

#[test]
fn snapshot_outlives_its_vm() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let web = counter(&host, "web").await;
        wait_until_counted(&host, "web", 5).await;
        exec(&host, "web", &["sh", "-c", "echo precious > /kept; sync"]).await;
        let name: SnapshotName = "first".parse().unwrap();
        let saved = host.save_snapshot("web", Some(name.clone())).await.unwrap();
        assert_eq!((saved.vm.as_str(), saved.image.as_str()), ("web", crate::support::IMAGE));
        let taken = host.save_snapshot("web", Some(name)).await.unwrap_err();
        assert_eq!(taken.code(), "COR-SNP-002", "{}", taken.chain());
        let at_save = last_number(&host, "web").await;
        wait_until_counted(&host, "web", at_save + 5).await;
        exec(&host, "web", &["sh", "-c", "echo changed > /kept"]).await;
        host.pause("web", None).await.unwrap();
        host.save_snapshot("web", Some("still".parse().unwrap())).await.unwrap();
        assert_eq!(host.get("web").unwrap().record.state, VmState::Paused, "it is paused as before");
        host.delete("web", true, None).await.unwrap();
        host.shutdown().await;
        drop(host);

        let host = node.open().await;
        let twice = [host.restore("first", RestoreSpec::default()).await.unwrap()];
        assert_eq!(
            (twice[0].name.as_str(), twice[0].address),
            ("web", web.address),
            "its name and address are free"
        );
        let other = host.restore("first", named("other")).await.unwrap();
        assert_ne!(other.address, web.address);
        for name in ["web", "other"] {
            wait_until_counted(&host, name, at_save + 5).await;
            assert_eq!(
                exec(&host, name, &["cat", "/kept"]).await.0,
                "precious\n",
                "the disk is of that instant, too"
            );
        }
        host.delete_snapshot("first").await.unwrap();
        wait_until_counted(&host, "other", at_save + 10).await;
        let gone = host.restore("first", RestoreSpec::default()).await.unwrap_err();
        assert_eq!(gone.code(), "COR-SNP-001");

        // An incompatible host refuses the snapshot before anything is made.
        let manifest = node.state().join("snapshots/still/manifest.json");
        let text = std::fs::read_to_string(&manifest).unwrap();
        let vmm = host.probes()[0].1.version.clone();
        std::fs::write(&manifest, text.replace(&format!("\"vmm\": \"{vmm}\""), "\"vmm\": \"6.0.0\""))
            .unwrap();
        let foreign = host.restore("still", named("foreign")).await.unwrap_err().chain();
        assert!(foreign.contains("VMM version") && foreign.contains("6.0.0"), "{foreign}");
        assert_eq!(host.list().len(), 2);
        close(&node, host).await;
    });
}

#[test]
fn hibernated_vm_moves_to_another_node() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let web = counter(&host, "web").await;
        wait_until_counted(&host, "web", 5).await;
        host.hibernate("web", None).await.unwrap();
        let still = last_number(&host, "web").await;
        host.save_snapshot("web", Some("moving".parse().unwrap())).await.unwrap();
        let path = node.dir.path().join("moving.tar.zst");
        host.export_snapshot("moving", File::create(&path).unwrap()).await.unwrap();
        close(&node, host).await;

        let other = Node::new().await.unwrap();
        let host = other.open().await;
        let archive = || File::open(&path).unwrap();
        host.import_snapshot("moving".parse().unwrap(), Owner::default(), archive()).await.unwrap();
        let moved = host.restore("moving", RestoreSpec::default()).await.unwrap();
        assert_eq!((moved.name.clone(), moved.address), (web.name, web.address), "same name, same address");
        assert_eq!((moved.id, moved.mac), (web.id, web.mac), "the same machine");
        wait_until_counted(&host, "web", still + 5).await;
        let again =
            host.import_snapshot("moving".parse().unwrap(), Owner::default(), archive()).await.unwrap_err();
        assert_eq!(again.code(), "COR-SNP-002");
        close(&other, host).await;
    });
}
