//! A thousand MikromVMs on an agent with VMMs in memory: memory and writes of the operator when nothing changes.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use coracle_api::MikromVM;
use coracle_frontends::{AgentMetrics, AgentOptions, AgentService};
use coracle_host::{Host, HostConfig};
use coracle_hypervisor_testing::AddressOnly;
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines};
use coracle_image::{Source, Store, StoreOptions};
use coracle_oci::NoProgress;
use coracle_proto::firecracker::firecracker_agent_server::FirecrackerAgentServer;
use coracle_testkit::cluster::Cluster;
use coracle_testkit::figures::{api_writes, rss_mib};
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_types::Clock;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

const OBJECTS: usize = 1000;
const IMAGE: &str = "localhost/bench/empty:1";
/// Time limit from the first create until all are Running.
const LIMIT: Duration = Duration::from_secs(600);
const IDLE: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_secs(60);

pub(crate) struct Quiet {
    pub(crate) rss_mib: f64,
    pub(crate) writes_per_min: f64,
}

pub(crate) async fn measure(dir: &Path) -> Result<Quiet> {
    let cluster = Cluster::start().await?;
    let client = cluster.client();
    install(&client).await?;
    let mut servers = JoinSet::new();
    let agent = serve_agent(&dir.join("fleet"), &mut servers).await?;
    let mut operator = start_operator(dir, cluster.kubeconfig())?;
    let outcome = observe(&client, &agent, operator.id().context("the operator's pid")?).await;
    operator.kill().await?;
    servers.shutdown().await;
    outcome.with_context(|| {
        let log = std::fs::read_to_string(dir.join("operator.log")).unwrap_or_default();
        format!("the operator's log ends: {}", log.lines().last().unwrap_or_default())
    })
}

async fn observe(client: &Client, agent: &str, operator: u32) -> Result<Quiet> {
    let vms: Api<MikromVM> = Api::default_namespaced(client.clone());
    let began = Instant::now();
    for n in 0..OBJECTS {
        let object = serde_json::from_value(serde_json::json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM",
            "metadata": {"name": format!("vm-{n:04}"), "labels": {"app": "fleet", "tier": "bench"},
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x".repeat(400)}},
            "spec": {"image": IMAGE, "vcpuCount": 1, "memoryMB": 128, "agentAddress": agent},
        }))?;
        vms.create(&PostParams::default(), &object).await?;
    }
    loop {
        let running =
            vms.list(&ListParams::default()).await?.items.iter().filter(|vm| is_running(vm)).count();
        if running == OBJECTS {
            break;
        }
        if began.elapsed() > LIMIT {
            bail!("{running} of {OBJECTS} Running within {LIMIT:?}");
        }
        sleep(Duration::from_secs(1)).await;
    }
    eprintln!("{OBJECTS} Running {:.1} s after the first create", began.elapsed().as_secs_f64());
    sleep(IDLE).await;
    let rss = rss_mib(operator)?;
    let before = api_writes(client).await?;
    sleep(QUIET).await;
    let grown = api_writes(client).await?.since(&before);
    eprintln!("writes of a quiet minute: {grown:?}");
    Ok(Quiet { rss_mib: rss, writes_per_min: grown.total() })
}

fn is_running(vm: &MikromVM) -> bool {
    let phase = vm.status.as_ref().and_then(|status| status.phase.as_ref());
    phase.is_some_and(|phase| serde_json::to_value(phase).is_ok_and(|p| p == "Running"))
}

async fn install(client: &Client) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for crd in coracle_api::crds() {
        let name = crd.metadata.name.clone().unwrap_or_default();
        definitions.create(&PostParams::default(), &crd).await?;
        let established = kube::runtime::wait::conditions::is_crd_established();
        kube::runtime::wait::await_condition(definitions.clone(), &name, established).await?;
    }
    for name in [coracle_api::keys::SYSTEM_NAMESPACE, coracle_api::keys::NODE_NAMESPACE] {
        let namespace = serde_json::from_value(serde_json::json!({"metadata": {"name": name}}))?;
        Api::<k8s_openapi::api::core::v1::Namespace>::all(client.clone())
            .create(&PostParams::default(), &namespace)
            .await?;
    }
    Ok(())
}

fn start_operator(dir: &Path, kubeconfig: &Path) -> Result<Child> {
    let log = std::fs::File::create(dir.join("operator.log"))?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    command
        .args(["operator", "--agent-plaintext", "--agent-allow=127.0.0.1", "--kubeconfig"])
        .arg(kubeconfig);
    Ok(command.stdout(log.try_clone()?).stderr(log).kill_on_drop(true).spawn()?)
}

/// Serves the real agent service with VMMs in memory; returns its address.
async fn serve_agent(dir: &Path, servers: &mut JoinSet<()>) -> Result<String> {
    let state = dir.join("state");
    std::fs::create_dir_all(&state)?;
    let images = Store::open(state.join("images"), StoreOptions::default())?;
    let layer = LayerTar::new().file("bin/true", 0o755, b"").finish();
    let spec = ImageSpec { cmd: vec!["/bin/true".into()], ..ImageSpec::default() };
    write_layout(&dir.join("layout"), &[layer], &spec, "1")?;
    let source: Source = format!("oci:{}:1", dir.join("layout").display()).parse()?;
    images.import(&source, Some(&IMAGE.parse()?), Arc::new(NoProgress)).await?;
    let mut config = HostConfig::new(state, "/nowhere".into(), "/nowhere".into());
    config.run_dir = dir.join("run");
    config.disk_mib = 16;
    config.memory_overcommit = 1000.0;
    config.boots_at_once = 100;
    let driver = Arc::new(FakeDriver::new(FakeMachines::new()));
    let network = Arc::new(AddressOnly::new("10.100.0.0/16".parse()?));
    let host = Host::open(config, driver, network, Arc::new(images), Clock::system()).await?;
    let metrics = AgentMetrics::new(&mut Registry::default(), &host);
    let service = AgentService::new(host, AgentOptions::default(), metrics);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = listener.local_addr()?.to_string();
    servers.spawn(async move {
        let server = Server::builder().add_service(FirecrackerAgentServer::new(service));
        if let Err(error) = server.serve_with_incoming(TcpListenerStream::new(listener)).await {
            eprintln!("agent: {error}");
        }
    });
    Ok(at)
}
