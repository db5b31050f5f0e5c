//! A second container in a running VM, and processes in it.

use std::path::Path;
use std::time::Instant;

use coracle_proto::host as pb;
use coracle_testkit::figures::{figure, percentile};

use super::kubelet::Kubelet;
use super::node::{IMAGE, Start};
use super::system::System;
use super::{ms_since, warm};

const CONTAINERS: usize = 20;
const EXECS: usize = 50;
const POD: &str = "containers";
const SLEEP: [&str; 2] = ["/bin/sleep", "100000"];

/// Measures the figures; `cold` is the median of cold boots in ms.
pub(super) async fn measure(dir: &Path, cold: f64) {
    std::fs::create_dir_all(dir).expect("a directory");
    let socket = dir.join("cri.sock");
    let listen = socket.to_str().expect("a path of our own").to_owned();
    let system = System::up(dir, &[("CORACLE_NODE_CRI_LISTEN", &listen)]).await;
    let kubelet = Kubelet::wait(socket).await;
    let pod = kubelet.run_sandbox(POD).await;
    kubelet.start(&pod, POD, "first", IMAGE, &SLEEP).await;
    let mut times = Vec::new();
    for n in 0..CONTAINERS {
        let began = Instant::now();
        kubelet.start(&pod, POD, &format!("more-{n}"), IMAGE, &SLEEP).await;
        times.push(ms_since(began));
    }
    eprintln!("containers ms: {times:.1?}");
    let p50 = percentile(&times, 50);
    figure("container.start_p50_ms", p50, "ms");
    figure("container.start_ratio", p50 / cold, "ratio");
    kubelet.remove(pod).await;
    execs(&system, cold).await;
    system.down().await;
}

/// Measures the time from the request to the exit code of a process that does nothing.
async fn execs(system: &System, cold: f64) {
    warm(system).await;
    system.node.create("exec", IMAGE, Start::Clone).await;
    let mut times = Vec::new();
    for _ in 0..EXECS {
        let start = pb::ExecStart {
            vm: "exec".to_owned(),
            argv: ["/bin/busybox", "true"].map(str::to_owned).to_vec(),
            ..Default::default()
        };
        let request = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(start)) };
        let mut host = system.node.host();
        let began = Instant::now();
        let requests = tokio_stream::once(request);
        let mut replies = host.exec(requests).await.expect("exec").into_inner();
        let mut exit = None;
        while let Some(reply) = replies.message().await.expect("a reply") {
            if let Some(pb::exec_response::Message::Exit(status)) = reply.message {
                exit = Some(status);
            }
        }
        times.push(ms_since(began));
        assert_eq!(exit.expect("an exit status").code, 0);
    }
    eprintln!("exec ms: {times:.1?}");
    let p50 = percentile(&times, 50);
    figure("exec.p50_ms", p50, "ms");
    figure("exec.ratio", p50 / cold, "ratio");
    system.node.remove("exec").await;
}
