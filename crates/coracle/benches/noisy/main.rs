//! `cargo xtask bench noisy`: throughput that a VM keeps beside a guest that takes every resource it can, and duration of the
//! node's calls meanwhile.
//!
//! The noisy guest has as many vCPUs as the node has processors, the maximum of a VM. At the same time it fills its disk,
//! floods its output, uses up its memory until the kernel kills a process, opens connections and computes. Windows with and
//! without the noisy guest alternate.

mod calls;
#[path = "../support/system.rs"]
mod system;
mod victim;

use std::time::Duration;

use coracle_proto::host as pb;
use coracle_testkit::figures::{cpu_seconds, figure, percentile};
use coracle_testkit::netns;
use system::{DISK_MIB, IMAGE, MEMORY_MIB, Start, System};
use tokio::time::sleep;
use victim::Work;

/// Number of windows of each kind, alternating.
const ROUNDS: usize = 5;
/// Time until the noise is at its maximum: the disk has been full and the memory used up once.
const SETTLE: Duration = Duration::from_secs(15);
const VICTIM: &str = "victim";
const NOISY: &str = "noisy";

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
        let mut system = System::up(dir.path(), &[]).await;
        let vm = system.create(VICTIM, IMAGE, Start::Cold).await.1;
        victim::serve(&system, VICTIM).await;
        let mut kept: [(Vec<f64>, Vec<f64>); Work::ALL.len()] = Default::default();
        let mut times = calls::Times::default();
        for _ in 0..ROUNDS {
            for (work, (quiet, _)) in Work::ALL.into_iter().zip(&mut kept) {
                quiet.push(victim::rate(&system, VICTIM, &vm.ip_address, work).await);
            }
            let vmm = noise(&system).await;
            sleep(SETTLE).await;
            let (before, window) = (cpu_time(&system, vmm).await, std::time::Instant::now());
            let during = calls::under(&system, async {
                for (work, (_, noisy)) in Work::ALL.into_iter().zip(&mut kept) {
                    noisy.push(victim::rate(&system, VICTIM, &vm.ip_address, work).await);
                }
            });
            times.add(during.await);
            let used = cpu_time(&system, vmm).await - before;
            eprintln!("noise: {:.2} processors in use by its VMM", used / window.elapsed().as_secs_f64());
            system.remove(NOISY).await;
        }
        for (work, (quiet, noisy)) in Work::ALL.into_iter().zip(&kept) {
            report(work, quiet, noisy);
        }
        times.report();
        system.remove(VICTIM).await;
        system.down().await;
    });
}

/// Starts the noisy guest and returns the pid of its VMM.
async fn noise(system: &System) -> u32 {
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
    let mut host = system.host();
    host.create_vm(request).await.expect("create the noisy guest");
    let start = pb::StartVmRequest { vm: NOISY.to_owned(), ..Default::default() };
    host.start_vm(start).await.expect("start the noisy guest").into_inner().vmm_pid
}

/// Returns the CPU seconds of the noisy guest's VMM. Fails with the node's explanation and the console if the guest has ended,
/// because a run without noise measures nothing.
async fn cpu_time(system: &System, vmm: u32) -> f64 {
    let used = cpu_seconds(vmm);
    assert!(used.is_ok(), "the noisy guest's VMM {vmm} is gone\n{}", system.explain(NOISY).await);
    used.expect("its CPU time")
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

fn report(work: Work, quiet: &[f64], noisy: &[f64]) {
    eprintln!("{work:?} a second: quiet {quiet:.1?}, beside the noisy guest {noisy:.1?}");
    let (quiet, noisy) = (percentile(quiet, 50), percentile(noisy, 50));
    figure(&format!("noisy.{}_ratio", work.name()), noisy / quiet, "ratio");
    figure(&format!("noisy.{}_per_s", work.name()), noisy, work.unit());
}
