//! Many pods, in sequence and some in parallel: each has a VM, and nothing of it is left behind.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use coracle_hypervisor_testing::instances::processes_of;
use coracle_proto::cri::*;
use futures_util::{StreamExt as _, stream};

use crate::pod::shell;
use crate::support::{Daemon, Node};

/// Number of parallel pods.
const AT_ONCE: usize = 4;
/// Number of pods before the first measurement, so that objects that are created once exist already.
const WARM_UP: usize = 8;
/// Growth of this process that is tolerated, because its allocator keeps the memory of a load peak.
const GROWTH_MAX_MIB: u64 = 48;

/// Resources that pods could leak.
#[derive(Debug)]
struct Usage {
    /// Counts by kind: VMMs, taps, mounts, cgroups, files of the node, open files.
    counts: BTreeMap<&'static str, usize>,
    memory_mib: u64,
}

/// Returns whether no other test runs in this process: the number of pods is set, as in a soak scenario.
fn is_alone() -> bool {
    std::env::var_os("CORACLE_PODS").is_some()
}

fn files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { 1 }).sum()
}

fn lines(path: &str) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

fn usage(daemon: &Daemon) -> Usage {
    let config = daemon.host.config();
    let interfaces = std::fs::read_dir("/sys/class/net").unwrap().flatten();
    let taps = interfaces.filter(|link| link.file_name().to_string_lossy().starts_with("ct")).count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.and_then(|text| text.trim().split(' ').next()?.parse::<u64>().ok());
    let mut counts = BTreeMap::from([
        ("VMMs", processes_of(&config.state_dir).len()),
        ("taps", taps),
        ("mounts", lines("/proc/thread-self/mountinfo")),
        ("files of VMs", files(&config.state_dir.join("vms"))),
        ("files of the run directory", files(&config.run_dir)),
    ]);
    if is_alone() {
        counts.insert("open files", std::fs::read_dir("/proc/self/fd").unwrap().count());
        counts.insert("tasks", std::fs::read_dir("/proc/self/task").unwrap().count());
    }
    Usage { counts, memory_mib: resident.unwrap_or_default() / 1024 }
}

/// Runs a build: a new VM, one command, and its end. Every tenth pod is removed while it runs.
async fn build(daemon: &Daemon, number: usize) {
    let pod = daemon.pod(&format!("build-{number}")).await;
    let mut runtime = pod.kubelet.runtime.clone();
    if number.is_multiple_of(10) {
        pod.run(shell("main", "sleep 1000")).await;
    } else {
        let id = pod.run(shell("main", "echo built; exit 3")).await;
        let (status, log) = pod.wait_for_exit(&id).await;
        assert_eq!((status.exit_code, log), (3, vec!["built".to_owned()]), "build {number}");
        let request = StopPodSandboxRequest { pod_sandbox_id: pod.id.clone() };
        runtime.stop_pod_sandbox(request).await.unwrap();
    }
    runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: pod.id.clone() }).await.unwrap();
    drop(std::fs::remove_dir_all(&pod.config.log_directory));
}

async fn run_builds(daemon: &Daemon, numbers: std::ops::Range<usize>) {
    stream::iter(numbers).for_each_concurrent(AT_ONCE, |number| build(daemon, number)).await;
}

pub(crate) async fn pods_leave_nothing(node: &Node) {
    let count = std::env::var("CORACLE_PODS").map_or(12, |count| count.parse().unwrap());
    let daemon = node.open_with_templates().await;
    run_builds(&daemon, 0..WARM_UP).await;
    let before = usage(&daemon);
    let began = Instant::now();
    run_builds(&daemon, WARM_UP..WARM_UP + count).await;
    let took = began.elapsed().as_secs_f64();
    let after = usage(&daemon);
    eprintln!(
        "{count} pods in {took:.0} s, {:.2} per second; {before:?}, then {after:?}",
        f64::from(u32::try_from(count).unwrap()) / took
    );
    for (what, number) in &after.counts {
        // The number of idle connections and threads varies.
        let slack = if ["open files", "tasks"].contains(what) { 16 } else { 0 };
        assert!(
            *number <= before.counts[what] + slack,
            "{what}: {} before, {number} now",
            before.counts[what]
        );
    }
    assert_eq!(after.counts["VMMs"], 0);
    let grown = after.memory_mib.saturating_sub(before.memory_mib);
    assert!(!is_alone() || grown <= GROWTH_MAX_MIB, "{} MiB, {} before", after.memory_mib, before.memory_mib);
    daemon.end().await;
}
