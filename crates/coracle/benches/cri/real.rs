//! Starts of pods on QEMU, compared with cold boots of VMs.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use coracle_proto::cri::ExecSyncRequest;
use coracle_proto::host as pb;
use coracle_testkit::figures::{figure, percentile};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::tools;
use futures_util::future::join_all;
use hyper_util::rt::TokioIo;
use pb::host_client::HostClient;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint};

use super::fake_node::IMAGE;
use super::kubelet::{Kubelet, MEMORY_MIB};
use super::ms_since;

const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");
/// Number of pods and of cold boots, alternating.
const SAMPLES: usize = 20;
const EXECS: usize = 50;
const BURST: usize = 10;
const SLEEP: [&str; 3] = ["/bin/busybox", "sleep", "100000"];

pub(super) async fn measure(dir: &Path) {
    std::fs::create_dir_all(dir).expect("a directory");
    let (state, socket) = (dir.join("state"), dir.join("cri.sock"));
    let mut node = node(&state, &socket);
    let kubelet = Kubelet::wait(socket).await;
    import(&state, &dir.join("layout")).await;
    let host = connect(&state).await;
    // The first pod takes the template of its VM shape.
    let first = kubelet.run_sandbox("first").await;
    kubelet.start(&first, "first", "main", IMAGE, &SLEEP).await;
    kubelet.remove(first).await;
    let (mut cold, mut pods) = (Vec::new(), Vec::new());
    for n in 0..SAMPLES {
        cold.push(boot(host.clone(), n).await);
        let (elapsed, pod) = start(&kubelet, &format!("pod{n}")).await;
        pods.push(elapsed);
        kubelet.remove(pod).await;
    }
    eprintln!("samples: {SAMPLES} each, alternating\ncold ms: {cold:.0?}\npods ms: {pods:.0?}");
    let cold = percentile(&cold, 50);
    let (p50, p95) = (percentile(&pods, 50), percentile(&pods, 95));
    figure("cri.cold_ms", cold, "ms");
    figure("cri.start_p50_ms", p50, "ms");
    figure("cri.start_p95_ms", p95, "ms");
    figure("cri.start_ratio", p50 / cold, "ratio");
    figure("cri.start_p95_ratio", p95 / cold, "ratio");
    execs(&kubelet, cold).await;
    let names: Vec<_> = (0..BURST).map(|n| format!("burst{n}")).collect();
    let burst = join_all(names.iter().map(|name| start(&kubelet, name))).await;
    let times: Vec<_> = burst.iter().map(|(elapsed, _)| *elapsed).collect();
    eprintln!("burst ms: {times:.0?}");
    figure("cri.burst10_ratio", percentile(&times, 95) / cold, "ratio");
    for (_, pod) in burst {
        kubelet.remove(pod).await;
    }
    node.kill().await.expect("kill the node");
    let down = Command::new(CORACLE).arg("--state").arg(&state).arg("down").status().await;
    assert!(down.expect("run coracle down").success());
}

/// Starts a pod as a kubelet does. Returns the milliseconds from RunPodSandbox to the answer of StartContainer, and the
/// sandbox.
async fn start(kubelet: &Kubelet, name: &str) -> (f64, String) {
    let began = Instant::now();
    let pod = kubelet.run_sandbox(name).await;
    kubelet.start(&pod, name, "main", IMAGE, &SLEEP).await;
    (ms_since(began), pod)
}

async fn execs(kubelet: &Kubelet, cold: f64) {
    let (_, pod) = start(kubelet, "exec").await;
    let id = kubelet.start(&pod, "exec", "second", IMAGE, &SLEEP).await;
    let mut times = Vec::new();
    for _ in 0..EXECS {
        let began = Instant::now();
        let cmd = vec!["/bin/busybox".to_owned(), "true".to_owned()];
        let request = ExecSyncRequest { container_id: id.clone(), cmd, timeout: 10 };
        let reply = kubelet.runtime.clone().exec_sync(request).await.expect("exec").into_inner();
        assert_eq!(reply.exit_code, 0);
        times.push(ms_since(began));
    }
    eprintln!("samples: {EXECS}\nexecs ms: {times:.1?}");
    let p50 = percentile(&times, 50);
    figure("cri.execsync_p50_ms", p50, "ms");
    figure("cri.execsync_ratio", p50 / cold, "ratio");
    kubelet.remove(pod).await;
}

/// Returns the milliseconds of a cold boot of a VM of the same size, from create to Running.
async fn boot(mut host: HostClient<Channel>, n: usize) -> f64 {
    let name = format!("cold-{n}");
    let began = Instant::now();
    let request = pb::CreateVmRequest {
        name: name.clone(),
        image: IMAGE.to_owned(),
        vcpus: 1,
        memory_mib: u64::try_from(MEMORY_MIB).expect("positive").max(128),
        cold: true,
        ..Default::default()
    };
    host.create_vm(request).await.expect("create");
    host.start_vm(pb::StartVmRequest { vm: name.clone(), ..Default::default() }).await.expect("start");
    let elapsed = ms_since(began);
    host.delete_vm(pb::DeleteVmRequest { vm: name, force: true, ..Default::default() })
        .await
        .expect("delete");
    elapsed
}

fn node(state: &Path, socket: &Path) -> Child {
    let mut command = Command::new(CORACLE);
    command.arg("--state").arg(state).arg("node").arg("--cri-listen").arg(socket);
    // One accelerator for all figures, so that they are comparable.
    command.env("CORACLE_NODE_ACCELERATOR", "tcg").env("CORACLE_NODE_LOG", "warn");
    command.stdin(Stdio::null()).kill_on_drop(true).spawn().expect("start the node")
}

async fn connect(state: &Path) -> HostClient<Channel> {
    let path = state.join("host.sock");
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await;
    HostClient::new(channel.expect("the node's socket"))
}

/// Imports an image with a busybox, which sleeps.
async fn import(state: &Path, layout: &Path) {
    let busybox = std::fs::read(tools::tool("busybox").expect("busybox")).expect("read busybox");
    let layer = LayerTar::new().file("bin/busybox", 0o755, &busybox).finish();
    let cmd = SLEEP.map(str::to_owned).to_vec();
    write_layout(layout, &[layer], &ImageSpec { cmd, ..ImageSpec::default() }, "1").expect("write the image");
    let source = format!("oci:{}:1", layout.display());
    let import =
        Command::new(CORACLE).arg("--state").arg(state).args(["image", "import", &source, IMAGE]).status();
    assert!(import.await.expect("run coracle").success());
}
