//! `cargo xtask bench clone`: cost of a start by clone compared with a cold boot, and of pausing and saving a guest.
//!
//! Everything is the real program: `coracle up` with its node and operator, QEMU, a real API server. A start counts from the
//! request until the guest agent has answered and the guest has its identity, root and network. The time to start the workload
//! after that is a figure of its own. Bursts and applied objects count until the workload runs.
//!
//! `clone.*` is a start from the warm pool, on a node that had time to fill it. `clone.alone_*` is a start on a node without a
//! warm pool. Each ratio is to the cold boots of the same system, or of the system before it.

mod burst;
mod containers;
#[path = "../support/kubelet.rs"]
mod kubelet;
#[path = "../support/node.rs"]
mod node;
#[path = "../support/system.rs"]
mod system;

use std::path::Path;
use std::time::{Duration, Instant};

use coracle_proto::host as pb;
use coracle_testkit::figures::{cpu_seconds, figure, percentile, private_mib};
use coracle_testkit::netns;
use node::{DISK_MIB, IDLE, MEMORY_MIB, Start, to_f64};
use system::System;
use tokio::time::sleep;

/// Number of cold boots, and of clones of images that never ran, alternating.
const SAMPLES: usize = 20;
/// Number of pauses and resumes of one VM.
const PAUSES: usize = 20;
/// Number of saves of clones.
const SAVES: usize = 5;
/// Number of objects that are applied one after another.
const APPLIES: usize = 10;
/// Number of idle clones whose memory is read.
const AT_REST: usize = 8;

fn main() {
    netns::run_within(Duration::from_secs(3000), || async {
        let dir = tempfile::tempdir().expect("a temporary directory");
        measure_on_request(&dir.path().join("alone")).await;
        // A pool of one clone, which each start waits for, so that no start competes with the clone that replaces the previous
        // one.
        let system = System::up(dir.path(), &[("CORACLE_NODE_WARM_POOL_MIN", "1")]).await;
        let template = warm(&system).await;
        let cold = starts(&system, dir.path()).await;
        figure("template.ratio", whole_ms(template.took_ms) / cold, "ratio");
        // The RAM of a template is shared while it is taken; that of a clone is not.
        figure("save.ms", whole_ms(template.save_ms), "ms");
        measure_idle(&system).await;
        verbs(&system).await;
        applies(&system).await;
        system.down().await;
        burst::measure_pooled(&dir.path().join("burst"), cold).await;
        containers::measure(&dir.path().join("containers"), cold).await;
    });
}

async fn warm(system: &System) -> pb::Template {
    let (memory_mib, disk_mib) = (MEMORY_MIB, DISK_MIB);
    let request = pb::WarmTemplateRequest { vcpus: 1, memory_mib, disk_mib, ..Default::default() };
    let template = system.node.host().warm_template(request).await.expect("a template").into_inner();
    eprintln!("template: {} ms, {} MiB resident", template.took_ms, template.ram_bytes >> 20);
    template
}

fn whole_ms(ms: u64) -> f64 {
    f64::from(u32::try_from(ms).expect("minutes at most"))
}

/// Returns the milliseconds of a start without those for its workload.
fn without_workload(whole: f64, vm: &pb::Vm) -> f64 {
    whole - whole_ms(vm.workload_ms)
}

/// Measures clones that are started on request, compared with cold boots.
async fn measure_on_request(dir: &Path) {
    std::fs::create_dir_all(dir).expect("a directory");
    let system = System::up(dir, &[("CORACLE_NODE_WARM_POOL", "0")]).await;
    warm(&system).await;
    let (mut cold, mut clone) = (Samples::default(), Samples::default());
    for n in 0..SAMPLES {
        let name = format!("cold-{n}");
        let (whole, vm) = system.node.create(&name, node::IMAGE, Start::Cold).await;
        cold.add(whole, &vm);
        system.node.remove(&name).await;
        let image = system.node.import_fresh(dir, n).await;
        let name = format!("clone-{n}");
        let (whole, vm) = system.node.create(&name, &image, Start::Clone).await;
        assert!(!vm.pooled, "no clone was pooled");
        clone.add(whole, &vm);
        system.node.remove(&name).await;
    }
    eprintln!("alone: cold {cold:.2?}\nclone {clone:.2?}");
    let (p50, p95) = (percentile(&clone.ms, 50), percentile(&clone.ms, 95));
    let cold_p50 = percentile(&cold.ms, 50);
    figure("clone.alone_p50_ms", p50, "ms");
    figure("clone.alone_p95_ms", p95, "ms");
    figure("clone.alone_ratio", p50 / cold_p50, "ratio");
    figure("clone.alone_p95_ratio", p95 / cold_p50, "ratio");
    figure("clone.cpu_ratio", percentile(&clone.cpu, 50) / percentile(&cold.cpu, 50), "ratio");
    burst::measure_unpooled(&system).await;
    system.down().await;
}

/// Samples of one kind of start.
#[derive(Debug, Default)]
struct Samples {
    /// Milliseconds to the answer of the guest agent.
    ms: Vec<f64>,
    /// CPU seconds of the VMM until the workload runs.
    cpu: Vec<f64>,
}

impl Samples {
    fn add(&mut self, whole: f64, vm: &pb::Vm) {
        self.ms.push(without_workload(whole, vm));
        self.cpu.push(cpu_seconds(vm.vmm_pid).expect("its CPU time"));
    }
}

/// Measures starts and returns the median of the cold boots, ms.
async fn starts(system: &System, dir: &Path) -> f64 {
    let (mut cold, mut clone, mut workload) = (Vec::new(), Vec::new(), Vec::new());
    let mut waits = Vec::new();
    for n in 0..SAMPLES {
        let (whole, vm) = system.node.boot(n, Start::Cold).await;
        cold.push(without_workload(whole, &vm));
        let image = system.node.import_fresh(dir, n).await;
        let name = format!("clone-{n}");
        waits.push(system.node.wait_until_pooled().await);
        let (whole, vm) = system.node.create(&name, &image, Start::Clone).await;
        assert!(vm.pooled, "its clone was pooled");
        clone.push(without_workload(whole, &vm));
        workload.push(whole_ms(vm.workload_ms));
        system.node.remove(&name).await;
    }
    eprintln!("cold ms: {cold:.0?}\nclone ms: {clone:.0?}\nthen its workload ms: {workload:.0?}");
    eprintln!("samples: {SAMPLES} each, alternating; waited ms until one was pooled: {waits:.0?}");
    let (cold, p50) = (percentile(&cold, 50), percentile(&clone, 50));
    figure("clone.cold_ms", cold, "ms");
    figure("clone.p50_ms", p50, "ms");
    figure("clone.p95_ms", percentile(&clone, 95), "ms");
    figure("clone.ratio", p50 / cold, "ratio");
    figure("clone.workload_ms", percentile(&workload, 50), "ms");
    cold
}

/// Measures the private memory of idle clones and of the pooled one, and the CPU time of the idle clones.
async fn measure_idle(system: &System) {
    let vmms = system.node.create_many(AT_REST, Start::Clone).await;
    system.node.wait_until_pooled().await;
    sleep(IDLE).await;
    // Read while other clones exist: pages of the template that only one process maps would count as its private memory.
    let pooled = private_mib(system.node.pooled_vmm(&vmms)).expect("its memory");
    figure("pooled.private_mib", pooled, "MiB");
    let each: Vec<_> = vmms.iter().map(|pid| private_mib(*pid).expect("its memory")).collect();
    eprintln!("private MiB of {AT_REST} idle clones of {MEMORY_MIB} MiB: {each:.1?}");
    figure("clone.private_mib", each.iter().sum::<f64>() / to_f64(AT_REST), "MiB");
    let cpu = || vmms.iter().map(|pid| cpu_seconds(*pid).expect("its CPU time")).sum::<f64>();
    let before = cpu();
    sleep(IDLE).await;
    let share = (cpu() - before) / IDLE.as_secs_f64() / to_f64(AT_REST);
    figure("clone.idle_cpu_percent", 100.0 * share, "%");
    for n in 0..AT_REST {
        system.node.remove(&format!("many-{n}")).await;
    }
}

/// Measures pause, resume, and saving a clone to disk.
async fn verbs(system: &System) {
    let vm = || "verbs".to_owned();
    system.node.create("verbs", node::IMAGE, Start::Clone).await;
    let mut host = system.node.host();
    let (mut pauses, mut resumes, mut saves) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..PAUSES {
        let began = Instant::now();
        host.pause_vm(pb::PauseVmRequest { vm: vm(), ..Default::default() }).await.expect("pause");
        pauses.push(ms_since(began));
        let began = Instant::now();
        host.resume_vm(pb::ResumeVmRequest { vm: vm(), ..Default::default() }).await.expect("resume");
        resumes.push(ms_since(began));
    }
    for _ in 0..SAVES {
        let began = Instant::now();
        let vm = host
            .hibernate_vm(pb::HibernateVmRequest { vm: vm(), ..Default::default() })
            .await
            .expect("hibernate")
            .into_inner();
        saves.push(ms_since(began));
        eprintln!("saved {} MiB", vm.saved_bytes >> 20);
        host.resume_vm(pb::ResumeVmRequest { vm: vm.name, ..Default::default() }).await.expect("wake up");
    }
    eprintln!("pause ms: {pauses:.1?}\nresume ms: {resumes:.1?}\nhibernate ms: {saves:.0?}");
    figure("pause.ms", percentile(&pauses, 50), "ms");
    figure("resume.ms", percentile(&resumes, 50), "ms");
    figure("save.clone_ms", percentile(&saves, 50), "ms");
    system.node.remove("verbs").await;
}

async fn applies(system: &System) {
    let mut running = Vec::new();
    for n in 0..APPLIES {
        running.push(system.apply_until_running(n).await);
    }
    eprintln!("apply ms: {running:.0?}");
    figure("apply.clone_running_ms", percentile(&running, 50), "ms");
}

fn ms_since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}
