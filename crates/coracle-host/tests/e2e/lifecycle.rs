//! Host core with real VMs: QEMU, the guest agent, a bridge in the network namespace of the test.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Node, exec, page, run, spec, vmms};
use coracle_host::{Fence, Owner, Record, VmSpec};
use coracle_oci::NoProgress;
use coracle_testkit::oci::LayerTar;
use coracle_testkit::{eventually, netns};
use coracle_types::VmState;

/// Maximum size of console, log and record of a VM together: 256 KiB, twice 4 MiB and an entry, and a margin.
const FLOOD_BOUND: u64 = 10 << 20;

#[test]
fn vm_survives_daemon_restarts_and_leaves_nothing() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let record = run(&host, "web").await;
        assert_eq!(record.state, VmState::Running);
        assert!(page(&record).await.contains("hello from the guest"));
        let vmm = record.process.unwrap();
        let exe = std::fs::read_link(format!("/proc/{}/exe", vmm.pid)).unwrap();
        assert!(exe.ends_with("qemu-system-x86_64"), "{}", exe.display());
        assert_eq!(exec(&host, "web", &["hostname"]).await, ("web\n".to_owned(), 0));
        assert_eq!(exec(&host, "web", &["sh", "-c", "exit 7"]).await.1, 7);
        assert_eq!(exec(&host, "web", &["sh", "-c", "echo kept > /kept"]).await.1, 0);

        // The daemon stops without notice, and another one replaces it.
        host.shutdown().await;
        drop(host);
        let host = node.open().await;
        assert_eq!(host.get("web").unwrap().record.process, Some(vmm), "the same VMM");
        assert_eq!(exec(&host, "web", &["cat", "/kept"]).await.0, "kept\n");
        let (log, _) = host.logs("web").await.unwrap();
        let log: Vec<u8> = log.into_iter().flat_map(|e| e.data).collect();
        assert_eq!(String::from_utf8(log).unwrap(), "started web\n");

        let stopped = host.stop("web", Duration::from_secs(10), None).await.unwrap();
        assert_eq!((stopped.state, vmms(node.dir.path())), (VmState::Stopped, 0));
        let again = host.start("web", None).await.unwrap();
        assert_eq!(again.address, record.address, "the address is kept");
        assert_eq!(exec(&host, "web", &["cat", "/kept"]).await.0, "kept\n", "the disk is kept");

        assert!(host.delete("web", false, None).await.is_err(), "a running VM is not removed without force");
        host.delete("web", true, None).await.unwrap();
        assert_eq!(vmms(node.dir.path()), 0);
        assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0, "no file is left");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn two_vms_of_a_namespace_have_network_and_exit_codes() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let (a, b) = tokio::join!(run(&host, "default-a"), run(&host, "default-b"));
        assert_ne!(a.mac, b.mac);
        assert!(page(&a).await.contains("hello") && page(&b).await.contains("hello"));

        let mut job = spec("job");
        job.command = ["sh", "-c", "echo out; echo err >&2; exit 3"].map(str::to_owned).to_vec();
        host.create(job, Arc::new(NoProgress)).await.unwrap();
        host.start("job", None).await.unwrap();
        let end = tokio::time::timeout(Duration::from_secs(20), host.wait("job")).await.unwrap().unwrap();
        assert_eq!((end.record.state, end.record.exit.as_ref().map(|e| e.code)), (VmState::Stopped, Some(3)));
        let (log, _) = host.logs("job").await.unwrap();
        let mut lines: Vec<_> = log.into_iter().map(|e| String::from_utf8(e.data).unwrap()).collect();
        lines.sort();
        assert_eq!(lines.concat(), "err\nout\n");

        for name in ["default-a", "default-b", "job"] {
            host.delete(name, true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// Uses more memory than the guest has, and is the first process that the kernel kills for it.
const HOGS: &str = "for i in 1 2 3 4 5 6; do dd if=/dev/zero of=/dev/null bs=50M & done; \
    echo 1000 >/proc/$$/oom_score_adj; wait";

#[test]
fn killed_workload_distinguishes_oom_from_signal() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        for (name, script, message, oom_killed) in [
            (
                "greedy",
                HOGS,
                "the workload was killed by signal 9, because the guest was out of memory",
                true,
            ),
            ("killed", "kill -9 $$", "the workload was killed by signal 9", false),
        ] {
            let mut job = spec(name);
            job.command = ["sh", "-c", script].map(str::to_owned).to_vec();
            host.create(job, Arc::new(NoProgress)).await.unwrap();
            host.start(name, None).await.unwrap();
            let limit = Duration::from_secs(120);
            let end = tokio::time::timeout(limit, host.wait(name)).await.unwrap().unwrap();
            let end = &end.record;
            assert_eq!(end.exit.as_ref().map(|exit| (exit.code, exit.signal)), Some((137, 9)), "{name}");
            assert_eq!((end.message.as_str(), end.oom_killed), (message, oom_killed), "{name}");
            host.delete(name, true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn stale_fence_cannot_stop_or_delete_a_vm() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let mut owned = spec("default-web");
        owned.owner = Owner { uid: "u1".to_owned(), generation: 5, ..Owner::default() };
        host.create(owned.clone(), Arc::new(NoProgress)).await.unwrap();
        let fence = |uid: &str, generation| Some(Fence { uid: uid.to_owned(), generation });
        assert!(host.stop("default-web", Duration::ZERO, fence("u1", 4)).await.is_err(), "older generation");
        assert!(host.delete("default-web", true, fence("u2", 9)).await.is_err(), "another object");
        assert!(host.create(owned, Arc::new(NoProgress)).await.is_err(), "the name is taken");
        host.delete("default-web", true, fence("u1", 6)).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// Space that the VM's directory takes on the host's disk without its own writable disk, bytes.
fn kept_bytes(node: &Node, record: &Record) -> u64 {
    let dir = node.state().join("vms").join(record.id.as_str());
    let files = std::fs::read_dir(dir).unwrap().flatten().filter(|e| e.file_type().unwrap().is_file());
    files.map(|e| e.metadata().unwrap().len()).sum()
}

#[test]
fn flooding_guest_stays_within_the_rings() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let mut flood = spec("flood");
        // Both at full speed: the serial port, and the workload's output through the guest agent.
        let script = "mknod /dev/ttyS0 c 4 64; (while :; do cat /bin/busybox > /dev/ttyS0; done) & while :; do cat /bin/busybox; done";
        flood.command = ["sh", "-c", script].map(str::to_owned).to_vec();
        host.create(flood, Arc::new(NoProgress)).await.unwrap();
        let record = host.start("flood", None).await.unwrap();
        // More arrived than may be kept, so both have wrapped around.
        let flooded = eventually("the flood arrives in both", async || {
            let (entries, _) = host.logs("flood").await.unwrap();
            let (console, _) = host.console("flood").unwrap().attach().unwrap();
            let full = console.len() >= 256 << 10;
            (full && entries.last().is_some_and(|e| e.offset > 2 * FLOOD_BOUND)).then_some(())
        });
        flooded.await.unwrap();
        let kept = kept_bytes(&node, &record);
        assert!(kept <= FLOOD_BOUND, "{kept} bytes are kept of a flood");
        assert_eq!(exec(&host, "flood", &["echo", "alive"]).await, ("alive\n".to_owned(), 0));
        host.delete("flood", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn eight_vms_created_at_once_all_run() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let names: Vec<_> = (0..8).map(|n| format!("default-vm-{n}")).collect();
        let mut boots = tokio::task::JoinSet::new();
        for name in names.clone() {
            let host = host.clone();
            boots.spawn(async move { run(&host, &name).await });
        }
        let records = boots.join_all().await;
        let distinct = |key: fn(&Record) -> String| {
            records.iter().map(key).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(distinct(|r| r.mac.to_string()), 8, "every MAC is its own");
        assert_eq!(distinct(|r| r.address.unwrap().to_string()), 8, "every address is its own");
        assert_eq!(vmms(node.dir.path()), 8);
        for record in &records {
            assert!(page(record).await.contains("hello from the guest"), "{}", record.name);
        }
        for name in names {
            host.delete(&name, true, None).await.unwrap();
        }
        assert_eq!(vmms(node.dir.path()), 0);
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// Space that the files below a directory take on disk, bytes.
fn allocated(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    let size = |entry: std::fs::DirEntry| match entry.metadata().unwrap() {
        folder if folder.is_dir() => allocated(&entry.path()),
        file => file.blocks() * 512,
    };
    entries.map(size).sum()
}

/// The root of an image is built for its first VM; later VMs share it.
#[test]
fn large_image_is_shared_and_not_copied_per_vm() {
    const LARGE: &str = "localhost/test/large:1";
    netns::run_within(Duration::from_secs(300), || async {
        let Some(node) = Node::new().await else { return };
        let noise: Vec<u8> =
            (0..1_u32 << 18).flat_map(|n| n.wrapping_mul(0x9E37_79B1).to_le_bytes()).collect();
        node.import(LARGE, LayerTar::new().file("large", 0o644, &noise.repeat(1024))).await;
        let host = node.open().await;
        let of_large = |name: &str| VmSpec { image: LARGE.to_owned(), ..spec(name) };
        host.create(of_large("first"), Arc::new(NoProgress)).await.unwrap();
        let before = allocated(&node.state());
        assert!(before > 1 << 30, "the image is there: {before} bytes");
        host.create(of_large("second"), Arc::new(NoProgress)).await.unwrap();
        host.start("second", None).await.unwrap();
        let grown = allocated(&node.state()).saturating_sub(before);
        assert!(grown < 16 << 20, "{grown} bytes for a VM");
        let (last, _) = exec(&host, "second", &["sh", "-c", "dd if=/large bs=1M skip=1023 | md5sum"]).await;
        let (first, _) = exec(&host, "second", &["sh", "-c", "dd if=/large bs=1M count=1 | md5sum"]).await;
        assert!(last.len() > 32 && last == first, "the guest reads all of it: {last}");
        for vm in ["first", "second"] {
            host.delete(vm, true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// Bridges and tables in this network namespace.
fn network_of_node() -> String {
    let said = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let bridges = said("ip", &["-brief", "link", "show", "type", "bridge"]);
    let bridges: Vec<_> = bridges.lines().filter_map(|line| line.split_whitespace().next()).collect();
    format!("{} {}", bridges.join(" "), said("nft", &["list", "tables"]))
}

#[test]
fn network_of_a_node_ends_with_its_last_vm() {
    netns::run(|| async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        host.create(spec("web"), Arc::new(NoProgress)).await.unwrap();
        host.shutdown().await;
        drop(host);
        let kept = network_of_node();
        assert!(kept.contains("cor") && kept.contains("table ip coracle_"), "for the VM: {kept}");

        let host = node.open().await;
        host.delete("web", true, None).await.unwrap();
        assert_eq!(network_of_node(), kept, "for the next VM");
        host.shutdown().await;
        assert_eq!(network_of_node().trim(), "");
        drop(host);
        let host = node.open().await;
        assert_eq!(network_of_node(), kept, "made anew");
        host.shutdown().await;
    });
}
