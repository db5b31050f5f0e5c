//! Many clones at once, with a pooled clone for each and without a pool.

use std::path::Path;
use std::time::Instant;

use coracle_testkit::figures::{cpu_seconds, figure, percentile};
use futures_util::future::join_all;

use super::node::{self, Start};
use super::system::System;
use super::{ms_since, warm, without_workload};

/// Number of concurrent clones.
const BURST: usize = 20;
/// Number of bursts without a pool: the last clone of one takes a fifth more or less than that of the next.
const BURSTS: usize = 5;
/// Number of cold boots before each of them.
const COLD: usize = 3;

/// Measures a node that had time to pool a clone for each start. `cold` is the median of cold boots in ms.
pub(super) async fn measure_pooled(dir: &Path, cold: f64) {
    std::fs::create_dir_all(dir).expect("a directory");
    let depth = BURST.to_string();
    let settings = [("CORACLE_NODE_WARM_POOL_MIN", &*depth), ("CORACLE_NODE_WARM_POOL_MAX", &*depth)];
    let system = System::up(dir, &settings).await;
    warm(&system).await;
    system.node.until_pooled(BURST).await;
    let times = burst(&system).await;
    figure("burst20.p50_ms", percentile(&times, 50), "ms");
    figure("burst20.p95_ms", percentile(&times, 95), "ms");
    figure("burst20.ratio", percentile(&times, 95) / cold, "ratio");
    system.down().await;
}

/// Measures a node without a warm pool. The figures are medians over the bursts, compared with the cold boots between them.
pub(super) async fn measure_unpooled(system: &System) {
    let (mut p50, mut p95, mut cold) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..BURSTS {
        for n in 0..COLD {
            let (whole, vm) = system.node.boot(n, Start::Cold).await;
            cold.push(without_workload(whole, &vm));
        }
        let times = burst(system).await;
        p50.push(percentile(&times, 50));
        p95.push(percentile(&times, 95));
    }
    eprintln!("bursts alone: p95 {p95:.0?}, cold boots between them {cold:.0?}");
    let (p50, p95) = (percentile(&p50, 50), percentile(&p95, 50));
    figure("burst20.alone_p50_ms", p50, "ms");
    figure("burst20.alone_p95_ms", p95, "ms");
    figure("burst20.alone_ratio", p95 / percentile(&cold, 50), "ratio");
}

/// Starts the clones and returns the milliseconds of each to the start of its workload.
async fn burst(system: &System) -> Vec<f64> {
    let names: Vec<_> = (0..BURST).map(|n| format!("burst-{n}")).collect();
    let began = Instant::now();
    let all = join_all(names.iter().map(|name| system.node.create(name, node::IMAGE, Start::Clone))).await;
    let whole = ms_since(began);
    let times: Vec<_> = all.iter().map(|(ms, _)| *ms).collect();
    let cpu: Vec<_> = all.iter().map(|(_, vm)| cpu_seconds(vm.vmm_pid).expect("its CPU time")).collect();
    eprintln!("burst of {BURST}: {whole:.0} ms in all, each {times:.0?}\nCPU seconds each: {cpu:.2?}");
    for name in &names {
        system.node.remove(name).await;
    }
    times
}
