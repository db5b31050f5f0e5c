//! Snapshots of VMs with shared directories and with containers, and VMs that keep their identity when they move.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{
    ContainerSpec, Host, Owner, PullOrigin, PullPolicy, RestoreSpec, RestoredIdentity, Sandbox, Submounts,
    Tmpfs, VmSpec, VolumeRequest, Workload,
};
use coracle_oci::NoProgress;
use coracle_testkit::{eventually, netns};
use coracle_types::IdMapping;

use crate::support::{IMAGE, Node, close, counter, exec, guest, last_number, run, wait_until_counted};

fn shared(source: &Path) -> VolumeRequest {
    let source = source.to_str().unwrap().to_owned();
    VolumeRequest { name: "data".into(), source, ..VolumeRequest::default() }
}

fn dir(node: &Node, name: &str, text: &str) -> std::path::PathBuf {
    let dir = node.dir.path().join(name);
    std::fs::create_dir_all(dir.join("deep")).unwrap();
    std::fs::write(dir.join("deep/file"), text).unwrap();
    dir
}

async fn read(host: &Host, vm: &str) -> String {
    let line = "cat /mnt/data/deep/file /mnt/data/only-* 2>&1";
    exec(host, vm, &["sh", "-c", line]).await.0
}

#[test]
fn restored_shared_directories_get_new_sources() {
    netns::run_within(Duration::from_secs(180), || async {
        let Some(node) = Node::new().await else { return };
        let (one, two) = (dir(&node, "one", "one\n"), dir(&node, "two", "two\n"));
        std::fs::write(two.join("only-two"), "and more\n").unwrap();
        let volume_dirs = vec![node.dir.path().to_owned()];
        let host = node.open_with(|config| config.volume_dirs = volume_dirs).await;
        run(&host, "web").await;
        host.attach_volume("web", shared(&one), None).await.unwrap();
        assert!(read(&host, "web").await.starts_with("one\n"));
        let info = host.save_snapshot("web", Some("first".parse().unwrap())).await.unwrap();
        assert_eq!(info.volumes.len(), 1);
        assert!(!serde_json::to_string(&info).unwrap().contains("/one"), "a source is the node's own affair");

        // A missing source, an invalid one, and one too many.
        let restore = async |name: &str, volumes: Vec<VolumeRequest>| {
            let name = Some(name.parse().unwrap());
            host.restore("first", RestoreSpec { name, volumes, ..RestoreSpec::default() }).await
        };
        let refused = restore("copy", vec![]).await.unwrap_err().chain();
        assert!(refused.contains("give --volume data=SOURCE"), "{refused}");
        let file = node.dir.path().join("file.raw");
        std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let refused = restore("copy", vec![shared(&file)]).await.unwrap_err().chain();
        assert!(refused.contains("is not what the snapshot has as volume data"), "{refused}");
        let other = VolumeRequest { name: "other".into(), ..shared(&two) };
        assert!(restore("copy", vec![other]).await.unwrap_err().chain().contains("has no volume other"));

        restore("copy", vec![shared(&two)]).await.unwrap();
        assert_eq!(read(&host, "copy").await, "two\nand more\n", "what it knew of the other one is stale");
        exec(&host, "copy", &["sh", "-c", "echo written > /mnt/data/new"]).await;
        assert_eq!(std::fs::read_to_string(two.join("new")).unwrap(), "written\n");
        assert!(!one.join("new").exists());
        // A fork shares the directory of its original.
        let forks = host.fork("web", 2, None).await.unwrap();
        for fork in &forks {
            assert!(read(&host, fork.name.as_str()).await.starts_with("one\n"));
        }
        close(&node, host).await;
    });
}

#[test]
fn owners_of_a_shared_directory_are_kept() {
    netns::run_within(Duration::from_secs(180), || async {
        let Some(node) = Node::new().await else { return };
        let one = dir(&node, "one", "one\n");
        let volume_dirs = vec![node.dir.path().to_owned()];
        let host = node.open_with(|config| config.volume_dirs = volume_dirs).await;
        run(&host, "web").await;
        let ids = Some(IdMapping::new(100_000, 65_536).unwrap());
        let submounts = Submounts { private: true, writable: true };
        let request = VolumeRequest { ids, submounts, read_only: true, ..shared(&one) };
        host.attach_volume("web", request, None).await.unwrap();
        let line = "set -- $(ls -ln /mnt/data/deep/file); echo $3 $4";
        let owner = async |vm: &str| exec(&host, vm, &["sh", "-c", line]).await.0;
        assert_eq!(owner("web").await, "100000 100000\n");

        host.save_snapshot("web", Some("first".parse().unwrap())).await.unwrap();
        let name = Some("copy".parse().unwrap());
        let spec = RestoreSpec { name, volumes: vec![shared(&one)], ..RestoreSpec::default() };
        let copy = host.restore("first", spec).await.unwrap();
        assert_eq!(copy.volumes[0].submounts, submounts);
        assert_eq!(owner("copy").await, "100000 100000\n");
        close(&node, host).await;
    });
}

/// The content is in the guest's memory, so it is part of the snapshot and needs no source on the node.
#[test]
fn tmpfs_volumes_are_part_of_a_snapshot() {
    netns::run_within(Duration::from_secs(180), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        run(&host, "web").await;
        let tmpfs = Some(Tmpfs { size_bytes: 1 << 20, mode: 0o777, ..Tmpfs::default() });
        let cache = VolumeRequest { name: "cache".into(), tmpfs, ..VolumeRequest::default() };
        host.attach_volume("web", cache, None).await.unwrap();
        let sh = async |vm: &str, line: &str| exec(&host, vm, &["sh", "-c", line]).await;
        sh("web", "echo kept > /mnt/cache/file").await;
        host.save_snapshot("web", Some("first".parse().unwrap())).await.unwrap();
        sh("web", "echo later > /mnt/cache/file").await;
        let fork = host.fork("web", 1, None).await.unwrap().remove(0);
        assert_eq!(sh(fork.name.as_str(), "cat /mnt/cache/file").await.0, "later\n");

        let (reader, writer) = std::io::pipe().unwrap();
        let import = host.import_snapshot("arrived".parse().unwrap(), Owner::default(), reader);
        let (exported, arrived) = tokio::join!(host.export_snapshot("first", writer), import);
        exported.unwrap();
        assert_eq!(arrived.unwrap().volumes.len(), 1);
        let spec = RestoreSpec { name: Some("copy".parse().unwrap()), ..RestoreSpec::default() };
        host.restore("arrived", spec).await.unwrap();
        let full =
            "cat /mnt/cache/file; dd if=/dev/zero of=/mnt/cache/x bs=1M count=2 2>&1 | grep -o 'No space.*'";
        assert_eq!(sh("copy", full).await.0, "kept\nNo space left on device\n");
        assert_eq!(sh("web", "ls /mnt/cache").await.0, "file\n", "each has a volume of its own");
        host.detach_volume("copy", "cache", None).await.unwrap();
        assert!(host.get("copy").unwrap().record.volumes.is_empty());
        close(&node, host).await;
    });
}

/// Identity of a guest without its boot id, which differs in every boot.
async fn guest_identity(host: &Host, vm: &str) -> String {
    let line = "hostname; cat /etc/machine-id; ip -o link show eth0 | grep -o 'link/ether [0-9a-f:]*'";
    exec(host, vm, &["sh", "-c", line]).await.0
}

#[test]
fn moved_vm_keeps_its_identity() {
    netns::run_within(Duration::from_secs(180), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let before = counter(&host, "web").await;
        wait_until_counted(&host, "web", 3).await;
        let was = guest_identity(&host, "web").await;
        host.hibernate("web", None).await.unwrap();
        host.save_snapshot("web", Some("moving".parse().unwrap())).await.unwrap();
        let same = || RestoreSpec { identity: RestoredIdentity::Same, ..RestoreSpec::default() };
        assert!(host.restore("moving", same()).await.is_err(), "it still exists");
        host.delete("web", true, None).await.unwrap();
        let renamed = RestoreSpec { name: Some("other".parse().unwrap()), ..same() };
        let refused = host.restore("moving", renamed).await.unwrap_err().chain();
        assert!(refused.contains("cannot have the identity of web"), "{refused}");
        let after = host.restore("moving", same()).await.unwrap();
        assert_eq!((after.mac, after.address), (before.mac, before.address));
        assert_eq!(guest_identity(&host, "web").await, was);
        let seen = last_number(&host, "web").await;
        wait_until_counted(&host, "web", seen + 3).await;
        close(&node, host).await;
    });
}

#[test]
fn sandbox_moves_with_its_containers() {
    netns::run_within(Duration::from_secs(180), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let vm = VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("pod".parse().unwrap(), "") };
        host.create(vm, Arc::new(NoProgress)).await.unwrap();
        host.start("pod", None).await.unwrap();
        let count = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.05; done";
        let argv = ["sh", "-c", &format!("mkdir -p /tmp; {count}")].map(str::to_owned).to_vec();
        let process = Workload { argv, ..Workload::default() };
        let spec = ContainerSpec { image: IMAGE.to_owned(), process, ..ContainerSpec::default() };
        let (id, from) = ("main".parse().unwrap(), (PullPolicy::Never, PullOrigin::Local));
        host.create_container("pod", id, spec, from, Arc::new(NoProgress)).await.unwrap();
        let id = "main".parse().unwrap();
        let started = host.start_container("pod", &id).await.unwrap();
        host.hibernate("pod", None).await.unwrap();
        host.save_snapshot("pod", Some("moving".parse().unwrap())).await.unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let import = async {
            let taken = host.import_snapshot("arrived".parse().unwrap(), Owner::default(), reader).await;
            taken.unwrap()
        };
        let (exported, arrived) = tokio::join!(host.export_snapshot("moving", writer), import);
        exported.unwrap();
        assert_eq!((arrived.images.len(), arrived.containers.len()), (1, 1));
        host.delete("pod", true, None).await.unwrap();
        let spec = RestoreSpec { identity: RestoredIdentity::Same, ..RestoreSpec::default() };
        host.restore("arrived", spec).await.unwrap();
        let moved = host.get("pod").unwrap().containers[&id].clone();
        assert_eq!(
            (moved.state, moved.started_at),
            (started.state, started.started_at),
            "it was not restarted"
        );
        let guest = guest(&host, "pod").await;
        let listed = eventually("it runs", async || guest.list_containers().await.ok());
        assert_eq!(listed.await.unwrap().len(), 1);
        host.stop_container("pod", &id, Duration::ZERO).await.unwrap();
        host.remove_container("pod", &id).await.unwrap();
        close(&node, host).await;
    });
}
