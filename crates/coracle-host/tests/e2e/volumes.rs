//! Disks and directories attached to and detached from real VMs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Node, counter, exec, last_number, run, spec, vmms, wait_until_counted};
use coracle_frontends::HostService;
use coracle_host::{Host, VmSpec, VolumeRequest};
use coracle_oci::NoProgress;
use coracle_proto::host as host_pb;
use coracle_proto::host::host_server::Host as _;
use coracle_testkit::{eventually, netns};
use coracle_types::VmState;
use tonic::Request;

fn request(source: impl AsRef<Path>, size_mib: Option<u64>) -> VolumeRequest {
    let source = source.as_ref().to_str().unwrap().to_owned();
    VolumeRequest { source, size_mib, ..VolumeRequest::default() }
}

/// Output of a shell line in the guest, with its exit code in front.
async fn sh(host: &Host, vm: &str, line: &str) -> String {
    let line = format!("({line}) 2>&1");
    let (text, code) = exec(host, vm, &["sh", "-c", &line]).await;
    format!("{code} {text}").trim().to_owned()
}

/// Runs a clone. On a busy host its guest may be late, and the VM boots instead.
async fn run_clone(host: &Host, name: &str) {
    for _ in 0..3 {
        if run(host, name).await.template.is_some() {
            return;
        }
        host.delete(name, true, None).await.unwrap();
    }
    panic!("VM {name} was never a clone");
}

#[test]
fn named_disk_moves_between_vms_with_its_content() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(|config| config.templates.enabled = true).await;
        host.warm_template(1.try_into().unwrap(), 128.try_into().unwrap(), "", None).await.unwrap();
        run_clone(&host, "first").await;
        let with = host.attach_volume("first", request("data", Some(64)), None).await.unwrap();
        assert_eq!(with.volumes[0].target, "/mnt/data");
        assert_eq!(sh(&host, "first", "echo kept > /mnt/data/file; cat /mnt/data/file").await, "0 kept");

        // The disk is in use, so another VM cannot attach it.
        run(&host, "second").await;
        let refused = host.attach_volume("second", request("data", None), None).await.unwrap_err().chain();
        assert!(refused.contains("volume data of VM first"), "{refused}");
        assert!(host.get("second").unwrap().record.volumes.is_empty());

        // A volume in use stays attached.
        let busy = "cd /mnt/data && sleep 1000 > /dev/null & echo $! > /tmp-busy";
        assert_eq!(sh(&host, "first", busy).await, "0");
        let refused = host.detach_volume("first", "data", None).await.unwrap_err().chain();
        assert!(refused.contains("in use"), "{refused}");
        assert_eq!(host.get("first").unwrap().record.volumes.len(), 1, "and is known");
        assert_eq!(sh(&host, "first", "cat /mnt/data/file").await, "0 kept");
        let ended = "kill $(cat /tmp-busy); while kill -0 $(cat /tmp-busy) 2> /dev/null; do sleep 0.1; done";
        assert_eq!(sh(&host, "first", ended).await, "0", "the volume is in use no more");
        let without = host.detach_volume("first", "data", None).await.unwrap();
        assert!(without.volumes.is_empty());
        assert_eq!(sh(&host, "first", "ls /mnt/data").await, "0", "an empty directory is left");
        let missing = host.detach_volume("first", "data", None).await.unwrap_err();
        assert_eq!(missing.code(), "COR-VOL-001");

        host.attach_volume(
            "second",
            VolumeRequest { target: "/srv/d".into(), ..request("data", None) },
            None,
        )
        .await
        .unwrap();
        assert_eq!(sh(&host, "second", "cat /srv/d/file").await, "0 kept");
        // The volume is attached again after a stop, and a restarted daemon knows it.
        host.stop("second", Duration::from_secs(5), None).await.unwrap();
        host.shutdown().await;
        drop(host);
        let host = node.open().await;
        host.start("second", None).await.unwrap();
        assert_eq!(sh(&host, "second", "cat /srv/d/file").await, "0 kept");
        let refused = host.attach_volume("first", request("data", None), None).await.unwrap_err().chain();
        assert!(refused.contains("volume data of VM second"), "{refused}");
        host.delete("second", true, None).await.unwrap();

        // Attached at creation and read-only, although the killed guest left the file system unclean.
        let mut third = spec("third");
        third.volumes = vec![VolumeRequest { read_only: true, ..request("data", None) }];
        let refused = host.create(third.clone(), Arc::new(NoProgress)).await.unwrap_err().chain();
        assert!(refused.contains("attach it once to be written"), "{refused}");
        host.attach_volume("first", request("data", None), None).await.unwrap();
        host.detach_volume("first", "data", None).await.unwrap();
        host.create(third, Arc::new(NoProgress)).await.unwrap();
        host.start("third", None).await.unwrap();
        assert_eq!(sh(&host, "third", "cat /mnt/data/file").await, "0 kept");
        assert!(sh(&host, "third", "echo no > /mnt/data/file").await.contains("Read-only"));
        for vm in ["first", "third"] {
            host.delete(vm, true, None).await.unwrap();
        }
        assert!(node.state().join("volumes/data.ext4").exists(), "the disk belongs to the node");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn raw_file_is_attached_as_a_block_device() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let dir = node.dir.path().join("disks");
        std::fs::create_dir(&dir).unwrap();
        let raw = dir.join("raw.img");
        std::fs::write(&raw, vec![b'.'; 1 << 20]).unwrap();
        let host = node.open_with(|config| config.volume_dirs = vec![dir.clone()]).await;
        run(&host, "web").await;
        let with = host.attach_volume("web", request(&raw, None), None).await.unwrap();
        assert_eq!(with.volumes[0].target, "/dev/raw");
        let write =
            "echo -n hello | dd of=/dev/raw bs=1 seek=512 conv=fsync && dd if=/dev/raw bs=1 skip=510 count=9";
        let said = sh(&host, "web", write).await;
        assert!(said.contains("..hello.."), "{said}");
        assert_eq!(std::fs::read(&raw).unwrap()[510..519], *b"..hello..");
        host.detach_volume("web", "raw", None).await.unwrap();
        assert!(sh(&host, "web", "ls /dev/raw").await.starts_with("1 "), "it is gone");

        // An image of the VM has the files below the mount point, and nothing of the volume.
        host.attach_volume("web", VolumeRequest { target: "/www".into(), ..request(&dir, None) }, None)
            .await
            .unwrap();
        assert_eq!(sh(&host, "web", "ls /www").await, "0 raw.img");
        let image = "localhost/test/committed:1".to_owned();
        let commit = host_pb::CommitVmRequest { vm: "web".into(), reference: image.clone() };
        HostService::new(host.clone()).commit_vm(Request::new(commit)).await.unwrap();
        host.create(VmSpec { image, ..spec("other") }, Arc::new(NoProgress)).await.unwrap();
        host.start("other", None).await.unwrap();
        assert_eq!(sh(&host, "other", "ls /www").await, "0 index.html");
        host.delete("other", true, None).await.unwrap();
        let refused = host.attach_volume("web", request("/etc", None), None).await.unwrap_err().chain();
        assert!(refused.contains("--volume-dir"), "{refused}");
        host.delete("web", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    eventually(what, async || is_so().await.then_some(())).await.unwrap();
}

#[test]
fn workload_command_runs_from_a_shared_directory() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let work = node.dir.path().join("work");
        std::fs::create_dir(&work).unwrap();
        let program = "#!/bin/sh\nfor i in 1 2 3; do echo $i at $(pwd) >> said; done\nexec sleep 1000\n";
        std::fs::write(work.join("program"), program).unwrap();
        std::fs::set_permissions(work.join("program"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let said = || std::fs::read_to_string(work.join("said")).unwrap_or_default();
        let host = node.open_with(|config| config.volume_dirs = vec![node.dir.path().to_owned()]).await;
        let volume = VolumeRequest { target: "/app".into(), ..request(&work, None) };
        let spec = VmSpec {
            command: vec!["./program".into()],
            workdir: "/app".into(),
            volumes: vec![volume],
            ..spec("web")
        };
        host.create(spec, Arc::new(NoProgress)).await.unwrap();
        host.start("web", None).await.unwrap();
        let three = "1 at /app\n2 at /app\n3 at /app\n";
        until("the program has written", async || said().len() >= three.len()).await;
        assert_eq!(said(), three, "each request is carried out once");
        assert_eq!(sh(&host, "web", "wc -l < /app/said").await, "0 3");
        host.stop("web", Duration::from_secs(5), None).await.unwrap();
        host.start("web", None).await.unwrap();
        until("it has written again", async || said().len() >= 2 * three.len()).await;
        host.delete("web", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn shared_directory_is_coherent_and_survives_daemon_restart() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let shared = node.dir.path().join("shared");
        std::fs::create_dir_all(shared.join("below")).unwrap();
        std::fs::write(shared.join("below/host"), "from the host\n").unwrap();
        std::os::unix::fs::symlink("/etc/shadow", shared.join("out")).unwrap();
        let allow = |config: &mut coracle_host::HostConfig| {
            config.templates.enabled = true;
            config.volume_dirs = vec![node.dir.path().to_owned()];
        };
        let host = node.open_with(allow).await;
        host.warm_template(1.try_into().unwrap(), 128.try_into().unwrap(), "", None).await.unwrap();
        let record = counter(&host, "web").await;
        assert!(record.template.is_some(), "directories work on clones");
        host.attach_volume("web", request(&shared, None), None).await.unwrap();
        assert_eq!(sh(&host, "web", "cat /mnt/shared/below/host").await, "0 from the host");
        assert_eq!(sh(&host, "web", "echo from the guest > /mnt/shared/below/guest").await, "0");
        assert_eq!(std::fs::read_to_string(shared.join("below/guest")).unwrap(), "from the guest\n");
        std::fs::write(shared.join("below/host"), "changed\n").unwrap();
        until("the guest sees it", async || {
            sh(&host, "web", "cat /mnt/shared/below/host").await == "0 changed"
        })
        .await;
        assert!(
            sh(&host, "web", "cat /mnt/shared/out").await.contains("No such file"),
            "the guest's own /etc"
        );
        // A program in the directory, run from there: the agent that starts it also serves the directory.
        std::fs::write(shared.join("program"), "#!/bin/sh\necho at $(pwd)\n").unwrap();
        std::fs::set_permissions(shared.join("program"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let (said, code) = exec(&host, "web", &["/mnt/shared/program"]).await;
        assert_eq!((said.trim(), code), ("at /", 0));
        assert_eq!(sh(&host, "web", "cd /mnt/shared && ./program").await, "0 at /mnt/shared");

        // A megabyte in both directions.
        let big: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
        std::fs::write(shared.join("big"), &big).unwrap();
        let copy =
            "dd if=/mnt/shared/big of=/mnt/shared/copy bs=64k && md5sum < /mnt/shared/copy > /mnt/shared/sum";
        let copied = sh(&host, "web", copy).await;
        assert!(copied.starts_with("0 "), "{copied}");
        assert!(std::fs::read(shared.join("copy")).unwrap() == big);

        // A writer holds a file open while the daemon restarts.
        let writer = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done > /mnt/shared/log";
        assert_eq!(sh(&host, "web", &format!("({writer}) < /dev/null & echo $! > /tmp-pid")).await, "0");
        let lines = || std::fs::read_to_string(shared.join("log")).unwrap_or_default().lines().count();
        until("the log grows", async || lines() > 3).await;
        host.shutdown().await;
        drop(host);
        let before = lines();
        let host = node.open_with(allow).await;
        until("the log grows on", async || lines() > before + 3).await;
        // The mount is part of the hibernated memory.
        host.hibernate("web", None).await.unwrap();
        assert_eq!(vmms(node.dir.path()), 0);
        let (before, still) = (lines(), last_number(&host, "web").await);
        host.resume("web", None).await.unwrap();
        wait_until_counted(&host, "web", still + 3).await;
        until("the log grows after sleep", async || lines() > before + 3).await;
        let text = std::fs::read_to_string(shared.join("log")).unwrap();
        let numbers: Vec<usize> = text.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>(), "no line is lost or written twice");

        let refused = host.detach_volume("web", "shared", None).await.unwrap_err().chain();
        assert!(refused.contains("in use"), "{refused}");
        assert_eq!(sh(&host, "web", "kill $(cat /tmp-pid)").await, "0");
        until("its last open file closes", async || host.detach_volume("web", "shared", None).await.is_ok())
            .await;
        let again = VolumeRequest { read_only: true, target: "/ro".into(), ..request(&shared, None) };
        host.attach_volume("web", again, None).await.unwrap();
        assert!(sh(&host, "web", "echo no > /ro/below/host").await.contains("Read-only"));
        assert_eq!(sh(&host, "web", "cat /ro/below/host").await, "0 changed");
        let forked = host.fork("web", 1, None).await.unwrap().remove(0);
        assert_eq!(sh(&host, forked.name.as_str(), "cat /ro/below/host").await, "0 changed");
        host.delete(forked.name.as_str(), true, None).await.unwrap();
        let off = host.stop("web", Duration::from_secs(10), None).await.unwrap();
        assert_eq!(off.state, VmState::Stopped);
        host.start("web", None).await.unwrap();
        assert_eq!(
            sh(&host, "web", "cat /ro/below/host").await,
            "0 changed",
            "it is there with the next start"
        );
        host.delete("web", true, None).await.unwrap();
        assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0, "no file is left");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
