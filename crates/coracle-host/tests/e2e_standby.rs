//! Clones that run before anybody asks, with real VMs: a VM takes one over and is nobody but itself, and none is left over.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle_host::{Host, HostConfig, TemplateKey};
use coracle_hypervisor::{ProcessId, find_by_argument};
use coracle_image::NoProgress;
use coracle_testkit::netns;
use coracle_types::VmState;
use support::{Node, counter, exec, page, run, spec, until_counted, vmms};

fn one_stands_by(config: &mut HostConfig) {
    config.templates.enabled = true;
    config.standbys.count_max = 1;
}

/// Waits until a clone of this shape stands by, or none does.
async fn until(host: &Host, key: &TemplateKey, stands_by: bool) {
    let change = async {
        while host.stands_by(key) != stands_by {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), change).await;
    waited.unwrap_or_else(|_| panic!("stands by: not {stands_by} in time"));
}

/// Has a template taken for what [`spec`] describes, and waits for the first clone of it.
async fn ready(host: &Host) -> TemplateKey {
    let spec = spec("shape");
    let warm = host.warm_template(spec.vcpus, spec.memory, "", None).await.unwrap();
    until(host, &warm.key, true).await;
    warm.key
}

/// What a machine knows of itself, and of others if it does.
const WHO: &str = "hostname; cat /etc/hosts /etc/hostname /etc/resolv.conf /etc/machine-id; ip addr; ip route; ls /bin /etc";

fn standby_vmms(node: &Node) -> Vec<ProcessId> {
    find_by_argument(&node.state().join("standbys")).unwrap()
}

/// Everything that is there for VMs: taps, and folders of what stands by.
fn left_over(node: &Node) -> (Vec<String>, Vec<PathBuf>) {
    let taps = std::fs::read_dir("/sys/class/net").unwrap().map(|tap| tap.unwrap().file_name());
    let taps = taps.filter_map(|tap| tap.into_string().ok()).filter(|tap| tap.starts_with("ct")).collect();
    let folders = std::fs::read_dir(node.state().join("standbys")).into_iter().flatten();
    (taps, folders.map(|folder| folder.unwrap().path()).collect())
}

#[test]
fn a_vm_takes_over_the_clone_that_stands_by() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(one_stands_by).await;
        let key = ready(&host).await;
        let mut boot_ids = Vec::new();
        for name in ["a", "b"] {
            until(&host, &key, true).await;
            let taken = run(&host, name).await;
            assert!(taken.standby && taken.prepared, "{name} took over what stood by, its disk too");
            assert_eq!(taken.template.as_ref(), Some(&key));
            let (who, _) = exec(&host, name, &["sh", "-c", WHO]).await;
            assert_eq!(who.lines().next(), Some(name));
            assert!(who.contains(&taken.mac.to_string()), "{who}");
            assert!(who.contains(&taken.address.unwrap().to_string()), "{who}");
            for others in ["standby", "192.0.2.", "02:00:00:00:00:01", "program", "00000000000000000000"] {
                assert!(!who.contains(others), "{others} was rehearsed, and is gone: {who}");
            }
            assert!(page(&taken).await.contains("hello from the guest"));
            boot_ids.push(exec(&host, name, &["cat", "/proc/sys/kernel/random/boot_id"]).await.0);
        }
        assert_ne!(boot_ids[0], boot_ids[1]);

        // It is a VM like any other: it sleeps, wakes up, stops and starts, with its disk.
        until(&host, &key, true).await;
        let counting = counter(&host, "counter").await;
        assert!(counting.standby);
        until_counted(&host, "counter", 5).await;
        assert_eq!(host.hibernate("counter", None).await.unwrap().state, VmState::Hibernated);
        host.resume("counter", None).await.unwrap();
        until_counted(&host, "counter", 10).await;
        exec(&host, "a", &["sh", "-c", "echo kept > /kept"]).await;
        host.stop("a", Duration::from_secs(10), None).await.unwrap();
        until(&host, &key, true).await;
        let again = host.start("a", None).await.unwrap();
        assert_eq!((again.standby, again.prepared), (true, false), "it has a disk already");
        assert_eq!(exec(&host, "a", &["cat", "/kept"]).await.0, "kept\n");

        // One with another disk mounts it itself.
        until(&host, &key, true).await;
        let mut larger = spec("larger");
        larger.disk_mib = Some(288);
        host.create(larger, Arc::new(NoProgress)).await.unwrap();
        let larger = host.start("larger", None).await.unwrap();
        assert_eq!((larger.standby, larger.prepared), (true, false));
        exec(&host, "larger", &["sh", "-c", "echo here > /here"]).await;

        for name in ["a", "b", "counter", "larger"] {
            host.delete(name, true, None).await.unwrap();
        }
        until(&host, &key, true).await;
        assert_eq!(vmms(node.dir.path()), 1, "what stands by");
        host.delete_template(key.as_str()).unwrap();
        until(&host, &key, false).await;
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        host.network().teardown().await.unwrap();
    });
}

#[test]
fn a_standby_that_dies_or_idles_is_missed_by_nobody() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(one_stands_by).await;
        let key = ready(&host).await;
        for vmm in standby_vmms(&node) {
            vmm.kill().await.unwrap();
        }
        let vm = run(&host, "vm").await;
        assert_eq!((vm.template.as_ref(), vm.standby), (Some(&key), false), "a clone of its own instead");
        until(&host, &key, true).await;

        // Many at once: one of them takes it over.
        let names: Vec<_> = (0..4).map(|n| format!("many-{n}")).collect();
        let all = futures_util::future::join_all(names.iter().map(|name| run(&host, name))).await;
        assert_eq!(all.iter().filter(|vm| vm.standby).count(), 1);
        for name in names.iter().map(String::as_str).chain(["vm"]) {
            host.delete(name, true, None).await.unwrap();
        }
        until(&host, &key, true).await;
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        drop(host);

        let idles = |config: &mut HostConfig| {
            one_stands_by(config);
            config.standbys.idle_max = Duration::from_secs(4);
        };
        let host = node.open_with(idles).await;
        let key = ready(&host).await;
        until(&host, &key, false).await;
        assert_eq!(run(&host, "late").await.template.as_ref(), Some(&key), "its template is still there");
        host.delete("late", true, None).await.unwrap();
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        host.network().teardown().await.unwrap();
    });
}
