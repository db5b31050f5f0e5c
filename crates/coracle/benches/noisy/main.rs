//! `cargo xtask bench noisy`: throughput that a VM keeps beside a guest that takes every resource it can, and duration of the
//! node's calls meanwhile.
//!
//! The noisy guest has as many vCPUs as the node has processors, the maximum of a VM. At the same time it fills its disk,
//! floods its output, uses up its memory until the kernel kills a process, opens connections and computes. Windows in which it
//! is paused alternate with windows in which it runs: short ones and many, because the speed of a processor of a shared
//! machine changes by half within seconds. The calls are made in both. The node has no control plane beside it: that of the
//! local system takes a tenth of a processor while it is idle, which does not slow a VM that has two processors for itself.

mod calls;
#[path = "../support/node.rs"]
mod node;
mod victim;

use std::time::{Duration, Instant};

use coracle_proto::host as pb;
use coracle_testkit::figures::{cpu_seconds, figure};
use coracle_testkit::netns;
use node::{DISK_MIB, IMAGE, MEMORY_MIB, Node};
use tokio::time::sleep;
use victim::{Victim, Window, Work};

/// Number of windows of each kind, alternating.
const ROUNDS: usize = 20;
/// Time until the noise is at its maximum: the disk has been full and the memory used up once.
const SETTLE: Duration = Duration::from_secs(15);
/// Time until the noise is at its maximum again after a pause.
const RESUMED: Duration = Duration::from_secs(2);
const VICTIM: &str = "victim";
const NOISY: &str = "noisy";

/// Windows of each kind of workload.
type Windows = [Vec<Window>; Work::ALL.len()];

/// Script of the noisy guest. When memory runs out, the kernel spares only its first shell: without it the guest would end.
const NOISE: &str = "
while :; do /bin/busybox dd if=/dev/zero of=/fill bs=1M 2>/dev/null; /bin/busybox rm -f /fill; done &
/bin/busybox yes 'a line of a program that prints without end, so that its log is rotated again and again' &
while :; do /bin/busybox sort /dev/zero >/dev/null 2>&1; done &
p=1; while :; do
  p=$((p % 60000 + 1)); /bin/busybox timeout 20 /bin/busybox nc 198.51.100.1 $p </dev/null >/dev/null 2>&1 &
  [ $((p % 20)) = 0 ] && /bin/busybox sleep 0.5
done &
while :; do :; done &
echo -1000 >/proc/$$/oom_score_adj
while :; do :; done";

fn main() {
    netns::run_within(Duration::from_secs(3000), || async {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let node = Node::start(dir.path()).await;
        let victim = Victim::start(&node).await;
        let vmm = noise(&node).await;
        sleep(SETTLE).await;
        let (mut quiet, mut noisy) = (Windows::default(), Windows::default());
        let mut times = calls::Times::default();
        let mut used = Vec::new();
        for _ in 0..ROUNDS {
            pause(&node).await;
            measure(&node, &victim, &mut quiet).await;
            resume(&node).await;
            sleep(RESUMED).await;
            let (before, began) = (cpu_time(&node, vmm).await, Instant::now());
            times.add(measure(&node, &victim, &mut noisy).await);
            used.push((cpu_time(&node, vmm).await - before) / began.elapsed().as_secs_f64());
        }
        eprintln!("processors in use by the noisy guest's VMM: {used:.2?}");
        for (work, (quiet, noisy)) in Work::ALL.into_iter().zip(quiet.iter().zip(&noisy)) {
            report(work, quiet, noisy);
        }
        times.report();
        node.remove(NOISY).await;
        node.remove(VICTIM).await;
        node.down().await;
    });
}

/// Measures one window of each kind of workload, while calls are made. Returns the durations of the calls.
async fn measure(node: &Node, victim: &Victim, windows: &mut Windows) -> calls::Times {
    let work = async {
        for (work, windows) in Work::ALL.into_iter().zip(windows) {
            windows.push(victim.window(node, work).await);
        }
    };
    calls::measure_during(node, work).await
}

/// Pauses the noisy guest, and writes to disk what it has left in memory.
async fn pause(node: &Node) {
    let request = pb::PauseVmRequest { vm: NOISY.to_owned(), ..Default::default() };
    node.host().pause_vm(request).await.expect("pause the noisy guest");
    tokio::task::spawn_blocking(rustix::fs::sync).await.expect("it is written");
}

async fn resume(node: &Node) {
    let request = pb::ResumeVmRequest { vm: NOISY.to_owned(), ..Default::default() };
    node.host().resume_vm(request).await.expect("resume the noisy guest");
}

/// Starts the noisy guest and returns the pid of its VMM.
async fn noise(node: &Node) -> u32 {
    let request = pb::CreateVmRequest {
        name: NOISY.to_owned(),
        image: IMAGE.to_owned(),
        vcpus: u32::try_from(processors()).expect("a small count"),
        memory_mib: MEMORY_MIB,
        disk_mib: DISK_MIB,
        command: ["/bin/busybox", "sh", "-c", NOISE].map(str::to_owned).to_vec(),
        cold: true,
        ..Default::default()
    };
    let mut host = node.host();
    host.create_vm(request).await.expect("create the noisy guest");
    let start = pb::StartVmRequest { vm: NOISY.to_owned(), ..Default::default() };
    host.start_vm(start).await.expect("start the noisy guest").into_inner().vmm_pid
}

/// Returns the CPU seconds of the noisy guest's VMM. Fails with the node's explanation and the console if the guest has ended,
/// because a run without noise measures nothing.
async fn cpu_time(node: &Node, vmm: u32) -> f64 {
    let used = cpu_seconds(vmm);
    assert!(used.is_ok(), "the noisy guest's VMM {vmm} is gone\n{}", node.explain(NOISY).await);
    used.expect("its CPU time")
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

fn report(work: Work, quiet: &[Window], noisy: &[Window]) {
    let rates = |windows: &[Window]| windows.iter().map(|w| w.rounds / w.seconds).collect::<Vec<_>>();
    eprintln!("{work:?} a second: quiet {:.1?}, beside the noisy guest {:.1?}", rates(quiet), rates(noisy));
    let (quiet, noisy) = (Window::sum(quiet), Window::sum(noisy));
    let used = |windows: Window| windows.cpu_seconds / windows.seconds;
    eprintln!("processors in use by the VMM: {:.2}, beside the noisy guest {:.2}", used(quiet), used(noisy));
    let rate = noisy.rounds / noisy.seconds;
    figure(&format!("noisy.{}_ratio", work.name()), rate * quiet.seconds / quiet.rounds, "ratio");
    figure(&format!("noisy.{}_per_s", work.name()), rate, work.unit());
}
