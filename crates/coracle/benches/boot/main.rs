//! `cargo xtask bench boot`: cost of a VM of ours compared with a bare VM, and cost of the idle daemons.
//!
//! Everything is the real program: `coracle up` with its node and operator, QEMU, a real API server.

mod fleet;
#[path = "../support/node.rs"]
mod node;
mod raw;
#[path = "../support/system.rs"]
mod system;

use std::time::Duration;

use coracle_hypervisor::ELF_KERNEL;
use coracle_testkit::figures::{figure, no_figure, percentile};
use coracle_testkit::{netns, tools};
use node::{Start, to_f64};
use system::System;

/// Number of boots of each kind, alternating: the speed of a processor of a shared machine changes by half within seconds.
const SAMPLES: usize = 40;
/// Number of objects that are applied one after another.
const APPLIES: usize = 10;
/// Number of concurrent VMs while the node's memory is read.
const AT_ONCE: usize = 8;

fn main() {
    netns::run_within(Duration::from_secs(3000), || async {
        let boot = tools::guest_kernel().expect("a guest kernel: cargo xtask setup");
        let dir = tempfile::tempdir().expect("a temporary directory");
        let system = System::up(dir.path(), &[]).await;
        let idle = system.node.rss_mib().await;
        figure("node.rss_idle_mib", idle, "MiB");
        let ratio = boots(&system, dir.path(), &boot).await;
        eprintln!("boot ratio {ratio:.3}, goal 1.2");
        applies(&system).await;
        let before = system.node.rss_mib().await;
        system.node.create_many(AT_ONCE, Start::Cold).await;
        let after = system.node.rss_mib().await;
        eprintln!("node RSS MiB: {before:.1} without VMs, {after:.1} with {AT_ONCE}");
        figure("node.rss_per_vm_mib", (after - before) / to_f64(AT_ONCE), "MiB");
        system.down().await;
        match fleet::measure(dir.path()).await {
            Ok(quiet) => {
                figure("operator.rss_1000_mib", quiet.rss_mib, "MiB");
                figure("operator.quiet_writes_per_min", quiet.writes_per_min, "writes/min");
            }
            Err(error) => {
                let why = format!("{error:#}");
                no_figure("operator.rss_1000_mib", &why, "MiB");
                no_figure("operator.quiet_writes_per_min", &why, "writes/min");
            }
        }
    });
}

/// Compares raw boots with ours, alternating, with the same kernel, initramfs, memory and accelerator. A raw boot uses the
/// kernel as Debian packs it, where our driver boots the unpacked one under TCG, and it has none of our devices. It ends at the
/// first line that user space prints; ours ends when the node has answered that the workload runs. A second raw boot, with the
/// unpacked kernel, shows how much of the difference is the kernel's.
async fn boots(system: &System, dir: &std::path::Path, boot: &tools::GuestKernel) -> f64 {
    let unpacked = tools::GuestKernel { kernel: boot.kernel.with_file_name(ELF_KERNEL), ..boot.clone() };
    let (mut raw, mut raw_unpacked, mut ready) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..SAMPLES {
        raw.push(raw::boot(dir, boot, n == 0));
        ready.push(system.node.boot(n, Start::Cold).await.0);
        raw_unpacked.push(raw::boot(dir, &unpacked, n == 0));
    }
    eprintln!("raw ms: {raw:.0?}\nwith the unpacked kernel: {raw_unpacked:.0?}\nready ms: {ready:.0?}");
    eprintln!("samples: {SAMPLES} each, alternating");
    let (raw, raw_unpacked) = (percentile(&raw, 50), percentile(&raw_unpacked, 50));
    let ready = percentile(&ready, 50);
    figure("boot.raw_ms", raw, "ms");
    figure("boot.raw_unpacked_ms", raw_unpacked, "ms");
    figure("boot.ready_ms", ready, "ms");
    figure("boot.ratio", ready / raw, "ratio");
    figure("boot.unpacked_ratio", ready / raw_unpacked, "ratio");
    ready / raw
}

/// Measures the time from apply to Running with a cached image, and the writes of the API server for it.
async fn applies(system: &System) {
    let before = system.writes().await;
    let mut running = Vec::new();
    for n in 0..APPLIES {
        running.push(system.apply_until_running(n).await);
    }
    let grown = system.writes().await.since(&before);
    eprintln!(
        "apply ms: {running:.0?}\nsamples: {APPLIES}\nwrites of create to Running and delete: {grown:?}"
    );
    figure("apply.running_ms", percentile(&running, 50), "ms");
    figure("apply.api_writes", system.writes_of_one(APPLIES).await, "writes/VM");
}
