//! Warm pool with real VMs: a VM that claims a clone shows no trace of the warm-up, and no clone is left.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::containers;
use crate::support::{IMAGE, Node, counter, exec, page, run, spec, vmms, wait_until_counted};
use coracle_host::{ContainerSpec, Host, HostConfig, Sandbox, TemplateKey, VmSpec};
use coracle_hypervisor::ProcessId;
use coracle_hypervisor_testing::instances::vmms_of;
use coracle_oci::NoProgress;
use coracle_testkit::{elapse, eventually, netns};
use coracle_types::VmState;

fn with_one_pooled(config: &mut HostConfig) {
    config.templates.enabled = true;
    config.warm_pool.shapes_max = 1;
    (config.warm_pool.depth_min, config.warm_pool.clones_max) = (1, 1);
}

/// Waits until a clone of this shape is pooled, or none is.
async fn until(host: &Host, key: &TemplateKey, pooled: bool) {
    let what = format!("pooled: {pooled}");
    eventually(&what, async || (host.has_pooled(key) == pooled).then_some(())).await.unwrap();
}

/// Requests a template for the shape of [`spec`], and waits for its first pooled clone.
async fn ready(host: &Host) -> TemplateKey {
    let spec = spec("shape");
    let warm = host.warm_template(spec.vcpus, spec.memory, "", None).await.unwrap();
    until(host, &warm.key, true).await;
    warm.key
}

/// Commands that print the identity of a VM, and traces of others.
const WHO: &str = "hostname; cat /etc/hosts /etc/hostname /etc/resolv.conf /etc/machine-id; ip addr; ip route; ls /bin /etc; ls /sys/fs/cgroup; cat /sys/fs/cgroup/cgroup.subtree_control";
/// Traces that the warm-up would leave.
const OF_WARM_UP: [&str; 7] = [
    "pooled",
    "192.0.2.",
    "02:00:00:00:00:01",
    "program",
    "00000000000000000000",
    "containers",
    "memory pids",
];

fn pooled_vmms(node: &Node) -> Vec<ProcessId> {
    vmms_of(&node.state(), &node.run(), "pool")
}

/// Leftovers of VMs: taps, and directories of instances.
fn left_over(node: &Node) -> (Vec<String>, Vec<PathBuf>) {
    let taps = std::fs::read_dir("/sys/class/net").unwrap().map(|tap| tap.unwrap().file_name());
    let taps = taps.filter_map(|tap| tap.into_string().ok()).filter(|tap| tap.starts_with("ct")).collect();
    let instances = std::fs::read_dir(node.state().join("instances")).into_iter().flatten();
    (taps, instances.map(|dir| dir.unwrap().path()).collect())
}

/// Number of context switches of a VMM's vCPU threads (proc_pid_status(5)): those of a paused VM sleep. QEMU names the threads
/// `CPU N/ACCELERATOR`. Its other threads work even while the VM is paused.
fn cpu_switches(vmm: &ProcessId) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vmm.pid)).unwrap();
    let status = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let cpus: Vec<_> = status.filter(|status| status.starts_with("Name:\tCPU ")).collect();
    assert!(!cpus.is_empty(), "the VMM has a thread for its CPU");
    let switches =
        cpus.iter().flat_map(|status| status.lines()).filter(|line| line.contains("ctxt_switches"));
    switches.map(|line| line.rsplit('\t').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// CPU weight of the VMM, as a percentage of that of every VM (cgroups(7)).
fn cpu_share(vmm: &ProcessId) -> u64 {
    let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", vmm.pid)).unwrap();
    let of = |controller: &str| {
        let line = cgroups.lines().find(|line| line.split(':').nth(1) == Some(controller))?;
        Some(line.rsplit(':').next().unwrap().trim_start_matches('/').to_owned())
    };
    let read = |file: PathBuf| std::fs::read_to_string(file).unwrap().trim().parse::<u64>().unwrap();
    let root = Path::new("/sys/fs/cgroup");
    match of("cpu").or_else(|| of("cpu,cpuacct")) {
        Some(group) => read(root.join("cpu").join(group).join("cpu.shares")) * 100 / 1024,
        None => read(root.join(of("").unwrap()).join("cpu.weight")),
    }
}

#[test]
fn sizes_of_one_class_share_a_paused_clone() {
    netns::run_within(Duration::from_secs(120), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(with_one_pooled).await;
        let sized = |name: &str, mib: u64| {
            let mut spec = spec(name);
            spec.memory = mib.try_into().unwrap();
            spec
        };
        let warm =
            host.warm_template(1.try_into().unwrap(), 250.try_into().unwrap(), "", None).await.unwrap();
        assert_eq!(warm.memory.get(), 256);
        for (name, mib) in [("small", 200), ("whole", 256)] {
            until(&host, &warm.key, true).await;
            let pooled = pooled_vmms(&node);
            assert!(cpu_share(&pooled[0]) < 11, "it was made in the background");
            let before = cpu_switches(&pooled[0]);
            elapse(Duration::from_millis(500)).await;
            assert_eq!(cpu_switches(&pooled[0]), before, "the CPU of a pooled clone is paused");
            host.create(sized(name, mib), Arc::new(NoProgress)).await.unwrap();
            let record = host.start(name, None).await.unwrap();
            assert!(record.pooled && record.template.as_ref() == Some(&warm.key), "{name}");
            assert_eq!(cpu_share(&pooled[0]), 100, "the VM that it became is like any other");
            assert_eq!(
                record.memory.get(),
                u32::try_from(mib).unwrap(),
                "a VM has the size that was asked for"
            );
        }
        let limit = exec(&host, "small", &["cat", "/sys/fs/cgroup/workload/memory.max"]).await.0;
        assert_eq!(limit, format!("{}\n", 200 << 20), "its guest keeps to it");
        assert_eq!(exec(&host, "whole", &["ls", "/sys/fs/cgroup/workload"]).await.1, 1);
        // The VM hibernates and wakes with its own shape.
        host.hibernate("small", None).await.unwrap();
        host.resume("small", None).await.unwrap();
        assert_eq!(exec(&host, "small", &["echo", "here"]).await.0, "here\n");
        for name in ["small", "whole"] {
            host.delete(name, true, None).await.unwrap();
        }
        host.shutdown().await;
        host.network().teardown().await.unwrap();
    });
}

#[test]
fn vm_claims_the_pooled_clone() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(with_one_pooled).await;
        let key = ready(&host).await;
        let mut boot_ids = Vec::new();
        for name in ["a", "b"] {
            until(&host, &key, true).await;
            let taken = run(&host, name).await;
            assert!(taken.pooled && taken.premounted, "{name} claimed the pooled clone with its disk");
            assert_eq!(taken.template.as_ref(), Some(&key));
            let (who, _) = exec(&host, name, &["sh", "-c", WHO]).await;
            assert_eq!(who.lines().next(), Some(name));
            assert!(who.contains(&taken.mac.to_string()), "{who}");
            assert!(who.contains(&taken.address.unwrap().to_string()), "{who}");
            for trace in OF_WARM_UP {
                assert!(!who.contains(trace), "{trace} of the warm-up is visible: {who}");
            }
            assert!(page(&taken).await.contains("hello from the guest"));
            boot_ids.push(exec(&host, name, &["cat", "/proc/sys/kernel/random/boot_id"]).await.0);
        }
        assert_ne!(boot_ids[0], boot_ids[1]);

        // The VM behaves like any other: it hibernates, wakes, stops and starts, with its disk.
        until(&host, &key, true).await;
        let counting = counter(&host, "counter").await;
        assert!(counting.pooled);
        wait_until_counted(&host, "counter", 5).await;
        assert_eq!(host.hibernate("counter", None).await.unwrap().state, VmState::Hibernated);
        host.resume("counter", None).await.unwrap();
        wait_until_counted(&host, "counter", 10).await;
        exec(&host, "a", &["sh", "-c", "echo kept > /kept"]).await;
        host.stop("a", Duration::from_secs(10), None).await.unwrap();
        until(&host, &key, true).await;
        let again = host.start("a", None).await.unwrap();
        assert_eq!((again.pooled, again.premounted), (true, false), "it has a disk already");
        assert_eq!(exec(&host, "a", &["cat", "/kept"]).await.0, "kept\n");

        // A VM with another disk size mounts its disk itself.
        until(&host, &key, true).await;
        let mut larger = spec("larger");
        larger.disk_mib = Some(288);
        host.create(larger, Arc::new(NoProgress)).await.unwrap();
        let larger = host.start("larger", None).await.unwrap();
        assert_eq!((larger.pooled, larger.premounted), (true, false));
        exec(&host, "larger", &["sh", "-c", "echo here > /here"]).await;

        for name in ["a", "b", "counter", "larger"] {
            host.delete(name, true, None).await.unwrap();
        }
        until(&host, &key, true).await;
        assert_eq!(vmms(node.dir.path()), 1, "the pooled clone");
        host.delete_template(key.as_str()).unwrap();
        until(&host, &key, false).await;
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        host.network().teardown().await.unwrap();
    });
}

#[test]
fn burst_of_starts_deepens_the_pool() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let deep = |config: &mut HostConfig| {
            with_one_pooled(config);
            config.warm_pool.clones_max = 8;
        };
        let host = node.open_with(deep).await;
        ready(&host).await;
        assert_eq!(pooled_vmms(&node).len(), 1);
        let names = ["one", "two", "three"];
        for name in names {
            host.create(spec(name), Arc::new(NoProgress)).await.unwrap();
        }
        futures_util::future::try_join_all(names.map(|name| host.start(name, None))).await.unwrap();
        for name in names {
            host.delete(name, true, None).await.unwrap();
        }
        let pooled = || async { (pooled_vmms(&node).len() == names.len()).then_some(()) };
        eventually("the next three find a clone each", pooled).await.unwrap();
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        host.network().teardown().await.unwrap();
    });
}

#[test]
fn sandbox_claims_the_pooled_clone() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(with_one_pooled).await;
        let warm =
            host.warm_template(1.try_into().unwrap(), 128.try_into().unwrap(), "", None).await.unwrap();
        // The second one claims a clone that was warmed up for sandboxes alone.
        for log in ["who.log", "again.log"] {
            until(&host, &warm.key, true).await;
            let sandbox =
                VmSpec { sandbox: Some(Sandbox::default()), ..VmSpec::of("pod".parse().unwrap(), "") };
            host.create(sandbox, Arc::new(NoProgress)).await.unwrap();
            let record = host.start("pod", None).await.unwrap();
            assert!(record.pooled && record.premounted);
            let log = node.dir.path().join(log);
            let who = "hostname; cat /etc/hosts /etc/hostname /proc/self/mountinfo; ls / /proc /sys/fs/cgroup; ip addr";
            let spec = ContainerSpec { log_path: Some(log.clone()), ..containers::spec(IMAGE, who) };
            containers::run(&host, "who", spec).await;
            assert_eq!(containers::code(&host, "who").await, 0);
            let who = containers::lines(&log).join("\n");
            let address = record.address.unwrap();
            assert!(
                who.contains(&format!("{address}\tpod")) && who.contains(&format!("inet {address}/")),
                "{who}"
            );
            for trace in ["pooled", "192.0.2.", "02:00:00:00:00:01", "program"] {
                assert!(!who.contains(trace), "{trace} of the warm-up is visible: {who}");
            }
            host.delete("pod", true, None).await.unwrap();
        }
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        host.network().teardown().await.unwrap();
    });
}

#[test]
fn dead_or_idle_pooled_clone_delays_no_start() {
    netns::run_within(Duration::from_secs(400), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(with_one_pooled).await;
        let key = ready(&host).await;
        for vmm in pooled_vmms(&node) {
            vmm.kill().await.unwrap();
        }
        let vm = run(&host, "vm").await;
        assert_eq!((vm.template.as_ref(), vm.pooled), (Some(&key), false), "a clone of its own instead");
        until(&host, &key, true).await;

        // Many VMs start at once: one of them claims the clone.
        let names: Vec<_> = (0..4).map(|n| format!("many-{n}")).collect();
        for name in &names {
            host.create(spec(name), Arc::new(NoProgress)).await.unwrap();
        }
        let all = names.iter().map(|name| host.start(name, None));
        let all = futures_util::future::try_join_all(all).await.unwrap();
        assert_eq!(all.iter().filter(|vm| vm.pooled).count(), 1);
        for name in names.iter().map(String::as_str).chain(["vm"]) {
            host.delete(name, true, None).await.unwrap();
        }
        until(&host, &key, true).await;
        host.shutdown().await;
        assert_eq!((vmms(node.dir.path()), left_over(&node)), (0, (vec![], vec![])));
        drop(host);

        let idles = |config: &mut HostConfig| {
            with_one_pooled(config);
            // Longer than it takes to make a clone beside busy VMs, which have ten times its share of the CPUs.
            config.warm_pool.idle_max = Duration::from_secs(30);
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
