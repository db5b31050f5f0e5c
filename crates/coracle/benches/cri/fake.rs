//! 500 pods of three containers on VMMs in memory: lists, memory, and statistics beside a guest that does not answer.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use coracle_cri::{CriOptions, CriServer};
use coracle_proto::cri::{ListContainerStatsRequest, ListContainersRequest, ListPodSandboxRequest};
use coracle_testkit::figures::{figure, percentile, rss_mib};
use futures_util::stream::{self, StreamExt};
use tokio::io::AsyncReadExt;
use tokio::net::UnixListener;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::fake_node::{self, IMAGE};
use super::kubelet::Kubelet;
use super::ms_since;

/// Variable with the directory that a process of this program serves.
pub(super) const DIR: &str = "CORACLE_BENCH_CRI_DIR";
const PODS: usize = 500;
const CONTAINERS: [&str; 3] = ["main", "proxy", "log"];
/// Number of pods that are made at a time.
const AT_ONCE: usize = 8;
const LISTS: usize = 200;
const STATS_PODS: usize = 50;
const STATS: usize = 50;
/// Idle time before memory is read.
const IDLE: Duration = Duration::from_secs(10);

/// Serves until standard input ends. A line with the name of a VM pauses that VM, so that its guest does not answer any more.
pub(super) fn serve(dir: PathBuf) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let host = fake_node::open(&dir, "10.100.0.0/16").await;
        let listener = UnixListener::bind(dir.join("cri.sock")).expect("a socket");
        let options = CriOptions { memory_mib: 128, ..CriOptions::default() };
        let (server, stop) = (CriServer::new(host.clone(), options), CancellationToken::new());
        let mut input = tokio::io::stdin();
        let ended = async {
            let mut byte = [0];
            while input.read(&mut byte).await.is_ok_and(|length| length > 0) {
                let vm = host.list().first().expect("a VM").record.name.to_string();
                host.pause(&vm, None).await.expect("pause");
            }
            stop.cancel();
        };
        let (served, ()) = tokio::join!(server.serve(listener, stop.clone()), ended);
        served.expect("it served");
        host.shutdown().await;
    });
}

pub(super) async fn measure(dir: &Path) {
    let own = std::env::current_exe().expect("this program");
    fake_node::prepare(dir).await;
    let mut command = Command::new(own);
    command.env(DIR, dir).stdin(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().expect("start the server");
    let pid = child.id().expect("it runs");
    let kubelet = Kubelet::wait(dir.join("cri.sock")).await;
    let began = Instant::now();
    make(&kubelet, 0..STATS_PODS).await;
    stats(&kubelet, child.stdin.as_mut().expect("its input")).await;
    make(&kubelet, STATS_PODS..PODS).await;
    eprintln!("{PODS} pods of {} containers in {:.0} s", CONTAINERS.len(), began.elapsed().as_secs_f64());
    lists(&kubelet).await;
    tokio::time::sleep(IDLE).await;
    figure("cri.rss_500_mib", rss_mib(pid).expect("its memory"), "MiB");
    drop(child.stdin.take());
    child.wait().await.expect("it ends");
}

async fn make(kubelet: &Kubelet, pods: std::ops::Range<usize>) {
    let one = |n: usize| async move {
        let name = format!("{n:012}");
        let pod = kubelet.run_sandbox(&name).await;
        for container in CONTAINERS {
            kubelet.start(&pod, &name, container, IMAGE, &["serve"]).await;
        }
    };
    stream::iter(pods).map(one).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
}

async fn lists(kubelet: &Kubelet) {
    let mut runtime = kubelet.runtime.clone();
    let mut times = Vec::new();
    for _ in 0..LISTS {
        let began = Instant::now();
        let listed = runtime.list_containers(ListContainersRequest::default()).await.expect("containers");
        times.push(ms_since(began));
        assert_eq!(listed.into_inner().containers.len(), PODS * CONTAINERS.len());
        let began = Instant::now();
        let listed = runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.expect("sandboxes");
        times.push(ms_since(began));
        assert_eq!(listed.into_inner().items.len(), PODS);
    }
    eprintln!("samples: {} lists; p50 {:.2} ms", times.len(), percentile(&times, 50));
    figure("cri.list500_p99_ms", percentile(&times, 99), "ms");
}

async fn stats(kubelet: &Kubelet, input: &mut tokio::process::ChildStdin) {
    use tokio::io::AsyncWriteExt;
    input.write_all(b"\n").await.expect("tell it");
    let mut times = Vec::new();
    for _ in 0..STATS {
        let began = Instant::now();
        let request = ListContainerStatsRequest::default();
        let listed = kubelet.runtime.clone().list_container_stats(request).await.expect("statistics");
        times.push(ms_since(began));
        assert!(listed.into_inner().stats.len() >= (STATS_PODS - 1) * CONTAINERS.len());
    }
    eprintln!("samples: {STATS}; p50 {:.2} ms", percentile(&times, 50));
    figure("cri.stats_frozen_ms", percentile(&times, 100), "ms");
}
