//! `cargo xtask bench agentpool`: fifty waiting AgentMachines become VMs, and five hundred VMs are idle.
//!
//! The operator is the real program, the API server and etcd are real, and the vCenter is govmomi's simulator with its own
//! count of calls. The API server counts writes; the writes by which this process simulates the rest of the cluster are
//! subtracted.

#![allow(dead_code, reason = "the simulated cluster is that of the tests, and serves more there")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark reports by panicking")]

#[path = "../../../coracle-agentpool/tests/api/image.rs"]
mod image;
#[path = "../../../coracle-agentpool/tests/api/objects.rs"]
mod objects;
#[path = "../../../coracle-agentpool/tests/api/sims.rs"]
mod sims;

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use coracle_api::agentpool::{
    VsphereAgent, VsphereAgentPool,
    foreign::{INFRA_ENV, InfraEnv},
};
use coracle_testkit::world;
use coracle_testkit::{
    cluster::Cluster,
    figures::{Writes, api_writes, cpu_seconds, figure, no_figure, rss_mib},
    netns,
    vcsim::Vcsim,
};
use coracle_vsphere::{Credentials, SoapOptions, SoapVsphere, Vsphere as _, VsphereMetrics};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{
    Api, Client,
    api::{ListParams, PostParams},
};
use serde_json::json;
use tokio::{task::JoinSet, time::sleep};

use image::ImageService;
use objects::{POOL, definitions, machine, pool_object, secret, site_spec};
use sims::{Style, apis, create, set};

const NS: &str = "bench";
/// Number of VMs of the first figures.
const FIFTY: usize = 50;
/// Number of idle VMs.
const FLEET: usize = 500;
/// Interval of the simulated guests and Agent provider.
const TICK: Duration = Duration::from_millis(40);
/// Time limit of every step.
const LIMIT: Duration = Duration::from_secs(600);
/// Longest time without one more VM.
const STALL: Duration = Duration::from_secs(120);
/// Idle time before memory is read.
const IDLE: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);
/// Writes of this process for each waiting AgentMachine: Machine, AgentMachine, its status.
const OWN_WRITES: f64 = 3.0;

const FIGURES: [(&str, &str); 5] = [
    ("agentpool.fifty_s", "s"),
    ("agentpool.vcenter_calls_per_vm", "calls"),
    ("agentpool.api_writes_per_vm", "writes"),
    ("agentpool.rss_mib", "MiB"),
    ("agentpool.steady_calls_per_min", "calls/min"),
];

fn main() {
    let _the_only_one = rustls::crypto::aws_lc_rs::default_provider().install_default();
    netns::run_within(Duration::from_secs(1800), || async {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut told = Vec::new();
        if let Err(error) = measure(dir.path(), &mut told).await {
            let log = std::fs::read_to_string(dir.path().join("operator.log")).unwrap_or_default();
            let last: Vec<_> = log.lines().rev().take(20).collect();
            eprintln!("agentpool: {error:#}\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n"));
            for (name, unit) in FIGURES.iter().filter(|(name, _)| !told.contains(name)) {
                no_figure(name, &format!("{error:#}"), unit);
            }
        }
    });
}

/// Process that ends with the benchmark.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn measure(dir: &Path, told: &mut Vec<&'static str>) -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.client();
    let vcsim = Vcsim::start_or_skip(&[])?.context("no vcsim: cargo xtask setup")?;
    let image = ImageService::start().await?;
    prepare(&client, &vcsim, &image).await?;
    let log = std::fs::File::create(dir.join("operator.log"))?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    command.args(["operator", "--controllers=agentpool", "--kubeconfig"]).arg(cluster.kubeconfig());
    let operator = Owned(command.stdout(log.try_clone()?).stderr(log).spawn()?);
    // The first VM opens the session and puts the ISO on the datastore.
    demand(&client, 0..1).await?;
    until_recorded(&client, 1).await?;

    let (before, _) = (api_writes(&client).await?, vcsim.reset()?);
    let began = Instant::now();
    demand(&client, 1..FIFTY + 1).await?;
    until_recorded(&client, FIFTY + 1).await?;
    let took = began.elapsed().as_secs_f64();
    let calls = vcsim.calls()?;
    // Includes the writes that follow at once, such as clearing the stored task and the pool's own status.
    sleep(Duration::from_secs(3)).await;
    let writes = api_writes(&client).await?.since(&before);
    figure("agentpool.fifty_s", took, "s");
    figure("agentpool.vcenter_calls_per_vm", sum(&calls) / count(FIFTY), "calls");
    let ours = writes.total() / count(FIFTY) - OWN_WRITES;
    figure("agentpool.api_writes_per_vm", ours, "writes");
    told.extend(["agentpool.fifty_s", "agentpool.vcenter_calls_per_vm", "agentpool.api_writes_per_vm"]);
    eprintln!("calls: {calls:?}\nwrites, with {OWN_WRITES} of this process each: {writes:?}");
    eprintln!("goals: at most 8 calls and 6 writes");

    demand(&client, FIFTY + 1..FLEET).await?;
    until_recorded(&client, FLEET).await?;
    bind(&client, &vcsim, &before).await?;
    until_idle(&client).await?;
    let pid = operator.0.id();
    let (rss, cpu, _) = (rss_mib(pid)?, cpu_seconds(pid)?, vcsim.reset()?);
    figure("agentpool.rss_mib", rss, "MiB");
    told.push("agentpool.rss_mib");
    let before = api_writes(&client).await?;
    sleep(MINUTE).await;
    let (calls, writes) = (vcsim.calls()?, api_writes(&client).await?.since(&before));
    figure("agentpool.steady_calls_per_min", sum(&calls), "calls/min");
    told.push("agentpool.steady_calls_per_min");
    let cpu = cpu_seconds(pid)? - cpu;
    eprintln!("a minute of {FLEET} VMs: {cpu:.2} CPU seconds, calls {calls:?}, writes {writes:?}");
    eprintln!("goals: at most 60 MiB and 10 calls");
    Ok(())
}

fn sum(calls: &BTreeMap<String, u64>) -> f64 {
    calls.values().map(|n| f64::from(u32::try_from(*n).unwrap_or(u32::MAX))).sum()
}

fn count(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

/// Creates definitions, namespaces, the Secret, an InfraEnv with an image, and the pool.
async fn prepare(client: &Client, vcsim: &Vcsim, image: &ImageService) -> Result<()> {
    world::install(client, &definitions(&["v1beta2", "v1beta1"])).await?;
    for name in [NS, coracle_api::keys::SYSTEM_NAMESPACE] {
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        Api::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    }
    let mut object =
        Secret { string_data: Some(secret(vcsim.url(), vcsim.thumbprint())), ..Secret::default() };
    object.metadata.name = Some("vsphere-credentials".into());
    Api::<Secret>::namespaced(client.clone(), NS).create(&PostParams::default(), &object).await?;
    create(client, NS, &INFRA_ENV, json!({"metadata": {"name": "demo"}, "spec": {}})).await?;
    let envs: Api<InfraEnv> = Api::namespaced_with(client.clone(), NS, &INFRA_ENV.resource("v1beta1"));
    set(&envs, "demo", json!({"status": {"isoDownloadURL": image.url()}}), true).await?;
    Api::<VsphereAgentPool>::namespaced(client.clone(), NS)
        .create(&PostParams::default(), &pool_object(NS))
        .await?;
    Ok(())
}

/// Creates waiting Machines in the state in which the Agent provider leaves them.
async fn demand(client: &Client, range: std::ops::Range<usize>) -> Result<()> {
    let condition = json!({"type": "Ready", "status": "False", "reason": "NoSuitableAgents"});
    let waits = json!({"status": {"conditions": [condition]}});
    stream::iter(range.map(|i| format!("w-{i}")))
        .map(|name| {
            let waits = waits.clone();
            async move {
                machine(client, NS, &name).await?;
                set(&apis(client, NS).1, &name, waits, true).await
            }
        })
        .buffer_unordered(8)
        .try_collect::<Vec<_>>()
        .await?;
    Ok(())
}

/// Waits until `n` VMs run and their identity is recorded. Fails after a while without one more, and prints the missing VMs
/// with the status of their objects.
async fn until_recorded(client: &Client, n: usize) -> Result<()> {
    let api: Api<VsphereAgent> = Api::namespaced(client.clone(), NS);
    let (began, mut last) = (Instant::now(), (0, Instant::now()));
    loop {
        let all = api.list(&ListParams::default()).await?.items;
        let is_recorded = |r: &&VsphereAgent| {
            r.vm().is_some_and(|vm| !vm.bios_uuid.is_empty() && !vm.mac_address.is_empty())
        };
        let recorded = all.iter().filter(is_recorded).count();
        if recorded == n {
            return Ok(());
        }
        if recorded != last.0 {
            last = (recorded, Instant::now());
        }
        if began.elapsed() > LIMIT || last.1.elapsed() > STALL {
            let missing = all.iter().filter(|r| !is_recorded(r));
            let said = missing.map(|r| {
                let conditions = r.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
                let said = conditions
                    .iter()
                    .map(|c| format!("{}={} {}: {}", c.type_, c.status, c.reason, c.message));
                format!(
                    "{} ({})",
                    r.metadata.name.as_deref().unwrap_or_default(),
                    said.collect::<Vec<_>>().join("; ")
                )
            });
            let said: Vec<_> = said.collect();
            bail!(
                "{recorded} of {n} VMs are recorded after {:?}; missing: {}",
                began.elapsed(),
                said.join(", ")
            );
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until nothing has been written for [`IDLE`]: the status of VsphereAgents follows their pool.
async fn until_idle(client: &Client) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        let before = api_writes(client).await?;
        sleep(IDLE).await;
        if api_writes(client).await?.since(&before).objects.values().all(|n| *n < 0.5) {
            return Ok(());
        }
    }
    bail!("objects are still written {LIMIT:?} after the last VM was bound")
}

/// Simulates guests and provider until every VM is a node, and prints the cost.
async fn bind(client: &Client, vcsim: &Vcsim, before: &Writes) -> Result<()> {
    let data = secret(vcsim.url(), vcsim.thumbprint());
    let credentials = Credentials::parse(&data.into_iter().map(|(k, v)| (k, v.into_bytes())).collect())?;
    let eyes = SoapVsphere::open(&credentials, SoapOptions::default(), VsphereMetrics::default()).await?;
    let site = eyes.site(&site_spec()).await?;
    let mut machines = eyes.machines(&site);
    let seen = machines.wait_for(|m| m.is_current && m.vms.len() >= FLEET).await?.clone();
    let running = seen.vms.values().filter(|vm| vm.powered_on).count();
    anyhow::ensure!(running == FLEET, "{running} VMs run, not {FLEET}: as many as there are AgentMachines");
    let vms: Vec<_> = seen.vms.values().map(|vm| vm.as_ref().clone()).collect();
    let mut sims = JoinSet::new();
    sims.spawn(sims::guests(client.clone(), NS.into(), TICK, async move || vms.clone()));
    sims.spawn(sims::provider(client.clone(), NS.into(), Style::Old, TICK));
    let pools: Api<VsphereAgentPool> = Api::namespaced(client.clone(), NS);
    let began = Instant::now();
    loop {
        let rows = pools.get(POOL).await?.status.unwrap_or_default().owned_vms;
        let bound = rows.iter().filter(|row| row.phase == "Bound").count();
        if bound == FLEET {
            break;
        }
        if began.elapsed() > LIMIT {
            bail!("{bound} of {FLEET} VMs are bound within {LIMIT:?}");
        }
        sleep(Duration::from_millis(500)).await;
    }
    sims.shutdown().await;
    eyes.close().await;
    let writes = api_writes(client).await?.since(before);
    eprintln!("{FLEET} VMs bound; all writes until then, with those of the simulations: {writes:?}");
    Ok(())
}
