//! Creates the VMs, waits for them, and stops a node.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use coracle_api::{MikromVM, Phase, keys};
use coracle_reconcile::{Clock, WallTime as _};
use coracle_testkit::cluster::Cluster;
use coracle_testkit::figures::{Writes, api_writes, figure, rss_mib};
use coracle_testkit::{eventually, world};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::fake_node::IMAGE;
use crate::{node, pki};

/// Time limit of the whole benchmark.
pub(crate) const LIMIT: Duration = Duration::from_secs(3600);
/// Number of MikromVMs unless [`COUNT`] sets another; the names of the figures refer to this number.
const VMS: usize = 10_000;
/// Variable that sets another number of MikromVMs.
const COUNT: &str = "CORACLE_FLEET_VMS";
/// Names and guest subnets of the nodes.
const NODES: [(&str, &str); 3] = [("n1", "10.101.0.0/16"), ("n2", "10.102.0.0/16"), ("n3", "10.103.0.0/16")];
/// Number of objects that are created at a time.
const AT_ONCE: usize = 32;
/// Time limit of each part.
const PART: Duration = Duration::from_secs(1200);
/// Time after which VMs of a silent node may move; the default is minutes.
const GRACE: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(10);
/// Interval of progress lines.
const PROGRESS: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);
const GROUP: &str = "mikromvms.vm.mikrom.es";

pub(crate) async fn measure(cluster: &'static Cluster) -> Result<()> {
    let dir = tempfile::tempdir()?;
    pki::write(dir.path(), &[&NODES.map(|(name, _)| name)[..], &["operator"]].concat());
    let client = cluster.client();
    world::install(&client, &coracle_api::crds()).await?;
    make_namespace(&client, keys::NODE_NAMESPACE).await?;
    make_namespace(&client, keys::SYSTEM_NAMESPACE).await?;
    let alone = quiet_minute(&client).await?;

    let mut nodes = BTreeMap::new();
    for (name, subnet) in NODES {
        nodes.insert(name, node::start((name, subnet), dir.path(), cluster.kubeconfig()).await?);
    }
    until_announced(&client).await?;
    let operator = start_operator(dir.path(), cluster.kubeconfig())?;
    let vms: Api<MikromVM> = Api::namespaced(client.clone(), &cluster.namespace().await?);
    let before = api_writes(&client).await?;
    let began = Instant::now();
    let count = vm_count()?;
    let (created, running) = tokio::join!(create(&vms, count), until_running(&vms, count, |_| true));
    created?;
    running?;
    figure("fleet.create_10000_s", began.elapsed().as_secs_f64(), "s");

    sleep(IDLE).await; // a late write belongs to the way to Running, too
    let grown = api_writes(&client).await?.since(&before);
    figure(
        "fleet.writes_per_vm",
        mikromvm_writes(&grown) / f64::from(u32::try_from(count)?) - 1.0,
        "writes/VM",
    );
    figure("fleet.calls_per_vm", grown.calls / f64::from(u32::try_from(count)?), "calls/VM");
    figure("operator.rss_10000_mib", rss_mib(operator.id().context("it runs")?)?, "MiB");

    let quiet = quiet_minute(&client).await?;
    figure("fleet.quiet_writes_per_min", mikromvm_writes(&quiet), "writes/min");
    let calls = (quiet.calls - alone.calls).max(0.0) / f64::from(u32::try_from(NODES.len())?);
    figure("fleet.quiet_calls_per_min", calls, "calls/min/node");

    let (name, mut lost) = nodes.pop_last().context("a node")?;
    let on_it = vms.list(&ListParams::default()).await?;
    let on_it = on_it.iter().filter(|vm| vm.status.as_ref().is_some_and(|s| s.node_name == name)).count();
    anyhow::ensure!(on_it > count / 4, "{on_it} VMs are on node {name}");
    let due = lost_from(&client, name).await?;
    let before = api_writes(&client).await?;
    lost.kill().await?;
    until_running(&vms, count, |node| node != name).await?;
    let late = Clock::system().timestamp().duration_since(due).as_secs_f64();
    figure("fleet.node_loss_s", late, "s");
    let grown = api_writes(&client).await?.since(&before);
    figure("fleet.node_loss_calls_per_vm", grown.calls / f64::from(u32::try_from(on_it)?), "calls/VM");
    drop((operator, nodes));
    Ok(())
}

async fn make_namespace(client: &Client, name: &str) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let object = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    namespaces.create(&PostParams::default(), &object).await?;
    Ok(())
}

async fn until_announced(client: &Client) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), keys::NODE_NAMESPACE);
    let all = eventually("the nodes' Leases", async || {
        let there = leases.list(&ListParams::default()).await.ok()?;
        (there.items.len() == NODES.len()).then_some(())
    });
    all.await
}

fn start_operator(dir: &Path, kubeconfig: &Path) -> Result<Child> {
    let file = |name: &str| dir.join(name);
    let log = std::fs::File::create(file("operator.log"))?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    command.args(["operator", "--no-election", "--controllers", "mikromvm", "--log", "warn"]);
    command.arg("--kubeconfig").arg(kubeconfig).arg("--agent-ca").arg(file("ca.crt"));
    command.arg("--agent-cert").arg(file("operator.crt")).arg("--agent-key").arg(file("operator.key"));
    // Each node has the CPUs of this machine.
    command.arg("--cpu-overcommit=100000").arg(format!("--node-grace={}s", GRACE.as_secs()));
    let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true).spawn();
    Ok(child?)
}

/// Returns the requests to the API server in a minute without work.
async fn quiet_minute(client: &Client) -> Result<Writes> {
    sleep(IDLE).await;
    let before = api_writes(client).await?;
    sleep(MINUTE).await;
    Ok(api_writes(client).await?.since(&before))
}

fn mikromvm_writes(writes: &Writes) -> f64 {
    writes.objects.get(GROUP).copied().unwrap_or_default()
}

/// Returns the number of MikromVMs to create.
fn vm_count() -> Result<usize> {
    std::env::var(COUNT).map_or(Ok(VMS), |text| text.parse().with_context(|| format!("{COUNT}={text}")))
}

async fn create(vms: &Api<MikromVM>, count: usize) -> Result<()> {
    let one = |n: usize| async move {
        let object = json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": format!("vm-{n}")},
            "spec": {"image": IMAGE, "vcpuCount": 1, "memoryMB": 128},
        });
        vms.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        anyhow::Ok(())
    };
    stream::iter(0..count).map(one).buffer_unordered(AT_ONCE).try_collect().await
}

/// Waits until all VMs run on nodes that `fits` accepts.
async fn until_running(vms: &Api<MikromVM>, count: usize, fits: impl Fn(&str) -> bool) -> Result<()> {
    let began = Instant::now();
    let mut said = began;
    let runs = |vm: &MikromVM| {
        let status = vm.status.as_ref();
        status.is_some_and(|s| s.phase == Some(Phase::Running) && fits(&s.node_name))
    };
    let all = async {
        let list = vms.list(&ListParams::default()).await?;
        let mut version = list.metadata.resource_version.clone().context("a version")?;
        let mut running: std::collections::BTreeSet<_> =
            list.iter().filter(|vm| runs(vm)).map(kube::ResourceExt::name_any).collect();
        while running.len() < count {
            let mut changes = std::pin::pin!(vms.watch(&WatchParams::default(), &version).await?);
            while let Some(change) = changes.try_next().await? {
                match change {
                    WatchEvent::Added(vm) | WatchEvent::Modified(vm) => {
                        version = vm.resource_version().unwrap_or(version);
                        let name = vm.name_any();
                        if runs(&vm) {
                            running.insert(name)
                        } else {
                            running.remove(&name)
                        };
                    }
                    WatchEvent::Error(error) => anyhow::bail!("{error:?}"),
                    WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                }
                if running.len() >= count {
                    return Ok(());
                }
                if said.elapsed() > PROGRESS {
                    said = Instant::now();
                    eprintln!(
                        "{} of {count} run after {:.0} s",
                        running.len(),
                        began.elapsed().as_secs_f64()
                    );
                }
            }
        }
        Ok(())
    };
    timeout(PART, all).await.context("the VMs do not run in time")?
}

/// Returns the time from which VMs of a node that becomes silent now may move to others.
async fn lost_from(client: &Client, node: &str) -> Result<jiff::Timestamp> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), keys::NODE_NAMESPACE);
    let renewed = leases.get(node).await?.spec.and_then(|spec| spec.renew_time).context("a renewed Lease")?.0;
    Ok(renewed.checked_add(coracle_node_lease::LEASE)?.checked_add(GRACE)?)
}
