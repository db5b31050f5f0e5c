//! A thousand pods on VMMs in memory: time until all are ready, writes, memory, CPU time at rest.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use coracle_testkit::cluster::{self, Cluster};
use coracle_testkit::figures::{api_writes, cpu_seconds, figure, rss_mib};
use coracle_vnode::{CertificateSource, VirtualNode, VirtualNodeOptions};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::fake_node::{self, IMAGE};
use super::memory;
use super::pods::{is_ready, pod};

/// Variable with the directory that a process of this program serves.
pub(super) const DIR: &str = "CORACLE_BENCH_VNODE_DIR";
const KUBECONFIG: &str = "CORACLE_BENCH_VNODE_KUBECONFIG";
const NODE: &str = "bench";
const PODS: usize = 1000;
/// Number of pods that are created at a time.
const AT_ONCE: usize = 16;
const LIMIT: Duration = Duration::from_secs(600);
/// Idle time before memory is read and before the quiet minute begins.
const IDLE: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);

/// Serves until standard input ends, with the memory settings of a daemon.
pub(super) fn serve(dir: PathBuf) {
    memory::map_large_buffers();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let host = fake_node::open(&dir, "10.100.0.0/16").await;
        let file = std::env::var(KUBECONFIG).expect("the path of a kubeconfig");
        let kubeconfig = Kubeconfig::read_from(file).expect("a kubeconfig");
        let client = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let client = Client::try_from(client.expect("a configuration")).expect("a client");
        let mut options = VirtualNodeOptions::new(NODE);
        options.listen = "127.0.0.1:0".parse().expect("an address");
        options.pods_max = u32::try_from(PODS).expect("a small count");
        options.cpus = Some(options.pods_max);
        options.memory = Some((u64::from(options.pods_max) * 256).try_into().expect("an amount of memory"));
        options.certificate = CertificateSource::SelfSigned;
        let (node, stop) = (VirtualNode::new(host.clone(), client, options), CancellationToken::new());
        let ended = async {
            let (mut input, mut byte) = (tokio::io::stdin(), [0]);
            while input.read(&mut byte).await.is_ok_and(|length| length > 0) {}
            stop.cancel();
        };
        let (served, (), ()) =
            tokio::join!(node.run(stop.clone()), ended, memory::trim_when_idle(stop.clone()));
        served.expect("it served");
        host.shutdown().await;
    });
}

pub(super) fn measure() {
    cluster::run_within(Duration::from_secs(1800), async |cluster| {
        let dir = tempfile::tempdir()?;
        node_of_1000(cluster, dir.path()).await
    });
}

async fn node_of_1000(cluster: &Cluster, dir: &Path) -> Result<()> {
    fake_node::prepare(dir).await;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(DIR, dir).env(KUBECONFIG, cluster.kubeconfig());
    let mut child = command.stdin(Stdio::piped()).kill_on_drop(true).spawn()?;
    let pid = child.id().context("it runs")?;
    let client = cluster.client();
    until_node(&client).await?;
    let before = api_writes(&client).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &cluster.namespace().await?);
    let began = Instant::now();
    let (created, ready) = tokio::join!(create(&pods), until_all_ready(&pods));
    created?;
    ready?;
    figure("vnode.ready_1000_s", began.elapsed().as_secs_f64(), "s");
    // Waits for late writes, which belong to the way to Ready, too.
    sleep(IDLE).await;
    let grown = api_writes(&client).await?.since(&before);
    let of_pods = grown.objects.get("pods.").copied().unwrap_or_default();
    let count = u32::try_from(PODS)?;
    eprintln!("writes: {grown:?}, {PODS} of them create the pods");
    figure("vnode.writes_per_pod", of_pods / f64::from(count) - 1.0, "writes/pod");
    figure("vnode.rss_mib", rss_mib(pid)?, "MiB");
    let cpu = cpu_seconds(pid)?;
    sleep(MINUTE).await;
    figure("vnode.quiet_cpu_cores", (cpu_seconds(pid)? - cpu) / MINUTE.as_secs_f64(), "cores");
    drop(child.stdin.take());
    ensure!(child.wait().await?.success(), "the node ends well");
    Ok(())
}

async fn create(pods: &Api<Pod>) -> Result<()> {
    let one = |n: usize| async move {
        let spec = json!({"nodeName": NODE});
        pods.create(&PostParams::default(), &pod(&format!("pod-{n}"), IMAGE, &["serve"], spec)).await?;
        anyhow::Ok(())
    };
    stream::iter(0..PODS).map(one).buffer_unordered(AT_ONCE).try_collect().await
}

/// Waits by a watch from the beginning until all pods are ready. The API server ends the watch of a slow reader; it is then
/// reopened where it ended.
async fn until_all_ready(pods: &Api<Pod>) -> Result<()> {
    let list = pods.list(&ListParams::default()).await?;
    let mut version = list.metadata.resource_version.context("a version")?;
    let all = async {
        let mut ready = std::collections::BTreeSet::new();
        while ready.len() < PODS {
            let mut changes = std::pin::pin!(pods.watch(&WatchParams::default(), &version).await?);
            while ready.len() < PODS {
                match changes.try_next().await? {
                    Some(WatchEvent::Added(pod) | WatchEvent::Modified(pod)) => {
                        version = pod.resource_version().unwrap_or(version);
                        if is_ready(&pod) {
                            ready.insert(pod.metadata.name);
                        }
                    }
                    Some(WatchEvent::Error(error)) => anyhow::bail!("{error:?}"),
                    Some(_) => {}
                    None => break,
                }
            }
        }
        Ok(())
    };
    timeout(LIMIT, all).await.context("the pods are not ready in time")?
}

async fn until_node(client: &Client) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let registered = kube::runtime::wait::await_condition(nodes, NODE, |node: Option<&Node>| {
        let conditions = node.and_then(|node| node.status.as_ref()?.conditions.as_ref());
        conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"))
    });
    timeout(Duration::from_secs(60), registered).await.context("the node is not ready")??;
    Ok(())
}
