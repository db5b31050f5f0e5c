//! Disk image VMs: a real Debian with systemd and cloud-init, under a BIOS and under UEFI.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Node, exec, spec, vmms};
use coracle_host::{BootFirmware, Host, Record, VmSpec, VolumeRequest};
use coracle_oci::NoProgress;
use coracle_testkit::{eventually_ok_within, netns, tools};
use coracle_types::VmState;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(600);
/// Time limit of a part of a test, so that a failure names the part before the whole test times out.
const PART: Duration = Duration::from_secs(300);
/// Number of console bytes shown in a failure.
const SHOWN: usize = 4000;

fn image() -> Option<PathBuf> {
    let image = tools::system_image();
    if image.is_none() {
        tools::skip("no disk image; `cargo xtask setup` makes it");
    }
    image
}

async fn sh(host: &Host, vm: &str, line: &str) -> String {
    let (text, code) = exec(host, vm, &["sh", "-c", &format!("({line}) 2>&1")]).await;
    format!("{code} {text}").trim().to_owned()
}

/// Repeats the command until it prints the requested text: a first boot takes its time.
async fn until(host: &Host, vm: &str, line: &str, requested: &str) {
    let what = format!("{line} prints {requested}");
    let answered = eventually_ok_within(PART, &what, async || {
        let answer = sh(host, vm, line).await;
        if answer == requested { Ok(()) } else { Err(answer) }
    });
    answered.await.unwrap();
}

/// Starts the VM; a failure shows the end of its console.
async fn start(host: &Host, vm: &str) -> Record {
    match timeout(2 * PART, host.start(vm, None)).await {
        Ok(started) => started.unwrap(),
        Err(_) => {
            let (console, _) = host.console(vm).unwrap().attach().unwrap();
            let end = &console[console.len().saturating_sub(SHOWN)..];
            panic!("{vm} did not start in time; its console: {}", String::from_utf8_lossy(end));
        }
    }
}

fn system(name: &str, image: &str) -> VmSpec {
    VmSpec {
        image: image.to_owned(),
        vcpus: 2.try_into().unwrap(),
        memory: 512.try_into().unwrap(),
        ..spec(name)
    }
}

#[test]
fn cloud_image_vm_supports_volumes_hibernation_and_forks() {
    netns::run_within(LIMIT, || async {
        let (Some(node), Some(image)) = (Node::new().await, image()) else { return };
        // An emulated CPU has nothing of a restored system translated yet.
        let host = node.open().await;
        let image = host.import_disk(&image, None, Arc::new(NoProgress)).await.unwrap();
        assert_eq!(image.names, ["localhost/debian:latest"]);
        let marker = "#cloud-config\nwrite_files: [{path: /etc/marker, content: by-user-data}]\n";
        let mut request = system("deb", "localhost/debian:latest");
        request.disk_mib = Some(2048);
        request.user_data = marker.to_owned();
        let record = host.create(request, Arc::new(NoProgress)).await.unwrap();
        assert_eq!(record.disk_image_vm.unwrap().firmware, BootFirmware::Bios, "it can, and that is faster");
        let record = start(&host, "deb").await;
        let address = record.reachable_address().expect("an acknowledged address");

        assert_eq!(sh(&host, "deb", "hostname").await, "0 deb");
        until(&host, "deb", "cat /etc/marker", "0 by-user-data").await;
        let size = "test $(($(stat -f -c %b*%S /) >> 20)) -ge 1800 && echo grown";
        until(&host, "deb", size, "0 grown").await;
        let own = "ip -4 -o address show scope global | grep -c ' '";
        assert_eq!(sh(&host, "deb", own).await, "0 1", "the address of the node alone");
        let shown = sh(&host, "deb", "ip -4 -o address show scope global").await;
        assert!(shown.contains(&address.to_string()), "{shown}");

        // Disks are attached and detached.
        let data = VolumeRequest { source: "data".into(), size_mib: Some(64), ..VolumeRequest::default() };
        host.attach_volume("deb", data, None).await.unwrap();
        assert_eq!(sh(&host, "deb", "echo kept > /mnt/data/file; sync; cat /mnt/data/file").await, "0 kept");
        host.detach_volume("deb", "data", None).await.unwrap();
        assert_eq!(sh(&host, "deb", "ls /mnt/data").await, "0");

        // The VM continues from its memory, and so does a copy with another identity.
        until(&host, "deb", "test -s /etc/ssh/ssh_host_ed25519_key.pub && echo there", "0 there").await;
        sh(&host, "deb", "setsid sleep 100000 >/dev/null & echo $! > /run/sleeper").await;
        host.hibernate("deb", None).await.unwrap();
        assert_eq!(vmms(node.dir.path()), 0);
        start(&host, "deb").await;
        assert_eq!(sh(&host, "deb", "kill -0 $(cat /run/sleeper) && echo alive").await, "0 alive");
        let copies = host.fork("deb", 1, None).await.unwrap();
        let copy = copies[0].name.as_str();
        let key = "test -s /etc/ssh/ssh_host_ed25519_key.pub && echo there";
        until(&host, copy, key, "0 there").await;
        assert_eq!(sh(&host, copy, "kill -0 $(cat /run/sleeper) && echo alive").await, "0 alive");
        for line in [
            "cat /etc/machine-id",
            "hostname",
            "cat /proc/sys/kernel/random/boot_id",
            "cat /etc/ssh/ssh_host_ed25519_key.pub",
            "cat /sys/class/net/e*/address",
            "head -c 16 /dev/urandom | md5sum",
        ] {
            let (one, other) = (sh(&host, "deb", line).await, sh(&host, copy, line).await);
            assert!(
                one.starts_with("0 ") && other.starts_with("0 ") && one != other,
                "{line}: {one} {other}"
            );
        }
        host.delete(copy, true, None).await.unwrap();

        // The guest is asked to power off, and the disk stays.
        sh(&host, "deb", "echo stays > /root/file").await;
        let stopped = host.stop("deb", Duration::from_secs(120), None).await.unwrap();
        assert_eq!(
            (stopped.state, stopped.message.as_str()),
            (VmState::Stopped, ""),
            "by itself, not killed"
        );
        host.delete("deb", false, None).await.unwrap();
        assert_eq!(vmms(node.dir.path()), 0);
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn uefi_vm_boots_and_stops_on_guest_poweroff() {
    netns::run_within(LIMIT, || async {
        let (Some(node), Some(image)) = (Node::new().await, image()) else { return };
        let host = node.open().await;
        let name = "localhost/cloud/debian:12".parse().unwrap();
        host.import_disk(&image, Some(name), Arc::new(NoProgress)).await.unwrap();
        let mut request = system("uefi", "localhost/cloud/debian:12");
        request.firmware = Some(BootFirmware::Uefi);
        host.create(request, Arc::new(NoProgress)).await.unwrap();
        start(&host, "uefi").await;
        assert_eq!(sh(&host, "uefi", "test -d /sys/firmware/efi && hostname").await, "0 uefi");
        // The daemon restarts; the guest is not affected.
        host.shutdown().await;
        drop(host);
        let host = node.open().await;
        let asked = sh(&host, "uefi", "systemctl poweroff").await;
        assert!(asked.starts_with('0'), "{asked}");
        let mut view = host.observe("uefi").unwrap();
        let off = view.wait_for(|view| view.record.state == VmState::Stopped);
        let view = timeout(LIMIT, off).await.expect("it goes off").unwrap().clone();
        assert_eq!(view.record.message, "the guest powered off");
        // A node with another guest agent provides it to the same image.
        let agent = host.config().agent.clone();
        host.shutdown().await;
        drop(host);
        let newer = node.dir.path().join("newer");
        std::fs::write(&newer, [std::fs::read(agent).unwrap(), b"newer".to_vec()].concat()).unwrap();
        let host = node.open_with(|config| config.agent = newer).await;
        start(&host, "uefi").await;
        assert_eq!(sh(&host, "uefi", "tail -c 5 /run/coracle/coracle-guest").await, "0 newer");
        host.stop("uefi", PART, None).await.unwrap();
        host.delete("uefi", false, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn invalid_disk_image_spec_is_refused_before_creation() {
    netns::run_within(Duration::from_secs(60), || async {
        let Some(node) = Node::new().await else { return };
        let file = node.dir.path().join("small.raw");
        std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
        let host = node.open().await;
        host.import_disk(&file, None, Arc::new(NoProgress)).await.unwrap();
        let small = || system("small", "localhost/small:latest");
        let container = || spec("busy");
        for (what, request, says) in [
            ("a kernel", VmSpec { kernel_path: "/boot/k".into(), ..small() }, "kernel"),
            ("a user", VmSpec { user: "me".into(), ..small() }, "users and directories of its own"),
            ("a smaller disk", VmSpec { disk_mib: Some(32), ..small() }, "smaller than the image's"),
            ("much user data", VmSpec { user_data: "x".repeat(300 << 10), ..small() }, "at most"),
            ("user data of a container", VmSpec { user_data: "x".into(), ..container() }, "for disk images"),
            (
                "a command without an agent",
                VmSpec { without_agent: true, command: vec!["x".into()], ..small() },
                "needs the guest agent",
            ),
            (
                "a container without an agent",
                VmSpec { without_agent: true, ..container() },
                "for disk images",
            ),
            (
                "firmware of a container",
                VmSpec { firmware: Some(BootFirmware::Uefi), ..container() },
                "for disk images",
            ),
        ] {
            let refused = host.create(request, Arc::new(NoProgress)).await.unwrap_err().chain();
            assert!(refused.contains(says), "{what}: {refused}");
            assert!(host.list().is_empty(), "{what}");
            assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0, "{what}");
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
