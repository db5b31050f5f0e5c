//! Clones of a template with real VMs: one boot per shape, and every clone has its own identity.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{IMAGE, Node, assert_clock_between, exec, now, page, run, spec, vmms};
use coracle_host::{Host, Record, VmSpec};
use coracle_oci::NoProgress;
use coracle_testkit::oci::LayerTar;
use coracle_testkit::{eventually, netns};
use coracle_types::VmState;

/// Workload that prints its identity, one line each, before it serves.
const WHO: &str = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; \
    dd if=/dev/urandom bs=16 count=1 2>/dev/null | md5sum; ip link show eth0 | grep -o 'ether [0-9a-f:]*'; \
    date +%s; exec httpd -f -h /www";

async fn lines(host: &Host, name: &str) -> Vec<String> {
    let identity = eventually("the workload shows its identity", async || {
        let (log, _) = host.logs(name).await.unwrap();
        let text: Vec<u8> = log.into_iter().flat_map(|entry| entry.data).collect();
        let lines: Vec<_> = String::from_utf8(text).unwrap().lines().map(str::to_owned).collect();
        (lines.len() >= 6).then_some(lines)
    });
    identity.await.unwrap()
}

/// Whether huge pages are on for the VMM (proc_pid_status(5)).
fn has_huge_pages(record: &Record) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", record.process.unwrap().pid)).unwrap();
    status.contains("THP_enabled:\t1\n")
}

async fn start(host: &Host, name: &str) -> Record {
    let mut spec = spec(name);
    spec.command = ["sh", "-c", WHO].map(str::to_owned).to_vec();
    host.create(spec, Arc::new(NoProgress)).await.unwrap();
    host.start(name, None).await.unwrap_or_else(|e| panic!("start {name}: {e:?}"))
}

#[test]
fn clones_of_one_boot_have_distinct_identities() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(|config| config.templates.enabled = true).await;
        let first = run(&host, "first").await;
        assert_eq!(first.template, None, "there was nothing to clone");
        assert!(has_huge_pages(&first), "as RAM of its own may be in them");
        let warm = host.warm_template(first.vcpus, first.memory, "", None).await.unwrap();
        assert_eq!(
            host.templates(),
            std::slice::from_ref(&warm),
            "the boot had it taken, and asking again takes no other"
        );

        let mut seen: Vec<BTreeSet<String>> = vec![BTreeSet::new(); 5];
        for n in 0..4 {
            let name = format!("clone-{n}");
            let before = now();
            let clone = start(&host, &name).await;
            assert_eq!(clone.template.as_ref(), Some(&warm.key), "{name} is a clone");
            assert!(!has_huge_pages(&clone), "{name} is emulated, with RAM of a file");
            assert!(clone.premounted, "{name} begins with the disk that the template has mounted");
            assert!(
                clone.identity_ms > 0 && clone.identity_ms <= clone.boot_ms,
                "its new identity is measured"
            );
            let who = lines(&host, &name).await;
            assert_eq!(who[0], name);
            assert!(who[4].ends_with(&clone.mac.to_string()), "{who:?} has the MAC of its record");
            assert_clock_between(before, &who[5]);
            for (distinct, line) in seen.iter_mut().zip(&who) {
                distinct.insert(line.clone());
            }
            assert!(page(&clone).await.contains("hello from the guest"));
        }
        let (scheduler, _) = exec(&host, "clone-0", &["cat", "/sys/block/vda/queue/scheduler"]).await;
        assert!(scheduler.contains("[none]"), "the host schedules its disks: {scheduler}");
        let counts: Vec<_> = seen.iter().map(BTreeSet::len).collect();
        assert_eq!(counts, [4; 5], "host name, machine id, boot id, random draw, MAC of each: {seen:?}");
        assert_eq!(vmms(node.dir.path()), 5, "a template has no VMM");

        // The daemon restarts: the template on disk is equivalent to the one in memory.
        host.shutdown().await;
        drop(host);
        let host = node.open_with(|config| config.templates.enabled = true).await;
        assert_eq!(
            exec(&host, "clone-0", &["hostname"]).await.0,
            "clone-0\n",
            "a clone is adopted like any VM"
        );
        let after = start(&host, "after").await;
        assert_eq!(after.template.as_ref(), Some(&warm.key));

        // A clone keeps its disk over stop and start, and starts as a clone again.
        exec(&host, "after", &["sh", "-c", "echo kept > /kept"]).await;
        let stopped = host.stop("after", Duration::from_secs(10), None).await.unwrap();
        assert_eq!(stopped.state, VmState::Stopped);
        let again = host.start("after", None).await.unwrap();
        assert_eq!((again.template.as_ref(), again.premounted), (Some(&warm.key), false));
        assert_eq!(exec(&host, "after", &["cat", "/kept"]).await.0, "kept\n");

        // A VM with another disk size is a clone, too.
        let mut larger = spec("larger");
        larger.disk_mib = Some(first.disk_mib + 32);
        host.create(larger, Arc::new(NoProgress)).await.unwrap();
        let larger = host.start("larger", None).await.unwrap();
        assert_eq!((larger.template.as_ref(), larger.premounted), (Some(&warm.key), false));
        exec(&host, "larger", &["sh", "-c", "echo here > /here"]).await;

        host.delete_template(warm.key.as_str()).unwrap();
        assert_eq!(host.templates(), []);
        for view in host.list() {
            host.delete(view.record.name.as_str(), true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn failed_clone_falls_back_to_boot_and_cold_start_boots() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(|config| config.templates.enabled = true).await;
        let (one, memory) = (1.try_into().unwrap(), 128.try_into().unwrap());
        let warm = host.warm_template(one, memory, "", spec("cold").disk_mib).await.unwrap();
        let mut cold = spec("cold");
        cold.cold = true;
        host.create(cold, Arc::new(NoProgress)).await.unwrap();
        assert_eq!(host.start("cold", None).await.unwrap().template, None);

        // A clone that does not get its identity in time never runs its workload.
        host.shutdown().await;
        drop(host);
        let slow = |config: &mut coracle_host::HostConfig| {
            config.templates.enabled = true;
            config.identity_limit = Duration::from_millis(1);
        };
        let host = node.open_with(slow).await;
        let late = run(&host, "late").await;
        assert_eq!((late.state, late.template), (VmState::Running, None), "too late, and booted");
        assert!(page(&host.get("late").unwrap().record).await.contains("hello from the guest"));
        assert_eq!(host.templates().len(), 1, "the template is as good as it was");
        host.delete("late", true, None).await.unwrap();

        // The files are changed while the daemon is stopped.
        host.shutdown().await;
        drop(host);
        let state = node.state().join("templates").join(warm.key.as_str()).join("state");
        let length = std::fs::metadata(&state).unwrap().len();
        std::fs::write(&state, vec![7; usize::try_from(length).unwrap()]).unwrap();
        let host = node.open_with(|config| config.templates.enabled = true).await;
        let booted = run(&host, "booted").await;
        assert_eq!((booted.state, booted.template), (VmState::Running, None), "refused, and booted");
        for name in ["cold", "booted"] {
            host.delete(name, true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

/// Script that shows the root of an image: its directories, `/etc`, files of the image and of the identity, and mounts.
const ROOT: &str = "ls /; ls -ld /etc; cat /etc/passwd /etc/hosts /etc/hostname; ls -d /proc/1 /dev/null /sys/class; \
    rm /etc/hosts && touch /etc/new /new && ls /etc; ls /dev/own; grep ' / overlay' /proc/mounts";

/// The guest of a template has a root mounted, below which a clone finds its own image.
#[test]
fn clones_of_one_template_have_the_roots_of_their_images() {
    const MANY: &str = "localhost/test/many:1";
    const PRIVATE: &str = "localhost/test/private:1";
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let many =
            (0..120).fold(LayerTar::new(), |layer, n| layer.file(&format!("entry-{n:03}"), 0o644, b""));
        node.import(MANY, many).await;
        let private = LayerTar::new().dir("etc", 0o700).dir("dev", 0o700).file("dev/own", 0o644, b"");
        node.import(PRIVATE, private.file("only-here", 0o644, b"")).await;
        let host = node.open_with(|config| config.templates.enabled = true).await;
        let first = run(&host, "first").await;
        host.warm_template(first.vcpus, first.memory, "", None).await.unwrap();
        for (name, image, own, etc) in [
            ("plain", IMAGE, "www", "drwxr-xr-x"),
            ("many", MANY, "entry-119", "drwxr-xr-x"),
            ("private", PRIVATE, "only-here", "drwx------"),
        ] {
            let spec = VmSpec { image: image.to_owned(), ..spec(name) };
            host.create(spec, Arc::new(NoProgress)).await.unwrap();
            let clone = host.start(name, None).await.unwrap();
            assert!(clone.template.is_some() && clone.premounted, "{name} is a clone");
            let (root, _) = exec(&host, name, &["sh", "-c", ROOT]).await;
            let has = |line: &str| root.lines().any(|l| l == line);
            assert!(["bin", "etc", own, "root:x:0:0::/:/bin/sh", name, "new"].into_iter().all(has), "{root}");
            assert!(
                ["/proc/1", "/dev/null", "/sys/class"].into_iter().all(has),
                "{name} has its mounts: {root}"
            );
            assert!(root.contains(etc) && root.contains(&format!("\t{name}\n")), "{root}");
            assert!(!has("/dev/own") && !has("hosts"), "{root}");
            let is_prepared = root.contains("lowerdir=/run/coracle/identity:");
            assert_eq!(is_prepared, image != MANY, "{name} has the root of the template: {root}");
            assert_eq!((has("entry-000"), has("only-here")), (image == MANY, image == PRIVATE), "{root}");
        }
        for view in host.list() {
            host.delete(view.record.name.as_str(), true, None).await.unwrap();
        }
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
