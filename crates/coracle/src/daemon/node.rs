//! `coracle node`: the host core and its frontends.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_cloud_hypervisor::{CloudHypervisorConfig, CloudHypervisorDriver};
use coracle_cri::{CriOptions, CriServer, PodEvents};
use coracle_firecracker::{FirecrackerConfig, FirecrackerDriver};
use coracle_frontends::{AgentMetrics, AgentOptions, AgentService, ErrorStyle, HostService, LegacyConfig};
use coracle_host::{Host, HostConfig, TemplatePolicy, WarmPoolPolicy};
use coracle_hypervisor::{Accelerator, Drivers, KvmProbe};
use coracle_image::{Store, StoreOptions};
use coracle_net::{BridgeNetwork, CniNetwork, Network, Reach, Sources, Subnet, UserNetwork};
use coracle_node_lease::{Endpoints, announce};
use coracle_oci::Registries;
use coracle_pod::NamespaceKeys;
use coracle_proto::firecracker::firecracker_agent_server::FirecrackerAgentServer;
use coracle_proto::host::host_server::HostServer;
use coracle_qemu::{QemuConfig, QemuDriver};
use coracle_telemetry::{Admin, LogFormat, Readiness, init_logs};
use coracle_types::Clock;
use coracle_vnode::{image_policy, pod_events::Recorder};
use kube::Client;
use miette::{IntoDiagnostic, WrapErr, bail};
use prometheus_client::registry::Registry;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::Router;

use super::guest_subnet::GuestSubnet;
use super::limits::{self, Connections};
use super::pod_routes::PodRouter;
use super::service_tls::ServiceTls;
use super::{default_tools, kubeconfig, kvm_probe_of, make_dir, virtual_node};
use coracle_cli::cli::{AcceleratorChoice, Global, NetworkMode, NodeArgs, ReachChoice};
use coracle_cli::error::{Failure, of_host as failure};
use coracle_cli::registries;
use coracle_cli::tasks::Tasks;

/// Time for running calls to end when the daemon stops.
const GRACE: Duration = Duration::from_secs(30);

/// Cluster settings of the guest network: its subnet, and the addresses of the API server.
type Cluster = (Option<Subnet>, Vec<SocketAddrV4>);

/// Runs until a signal. Guests keep running.
pub(crate) async fn run(global: &Global, mut args: NodeArgs) -> miette::Result<()> {
    let legacy = legacy(&mut args)?;
    let provider = virtual_node::Provider::of(&mut args, |name| std::env::var(name).ok())?;
    let format = match legacy.as_ref().map(|l| l.log.format.as_str()) {
        Some("json") => LogFormat::Json,
        Some(_) => LogFormat::Text,
        None => LogFormat::Auto,
    };
    init_logs(&args.log, format);
    let state = match &legacy {
        Some(config) if global.state.is_none() => config.storage.vms_dir.clone(),
        _ => global.state(),
    };
    raise_file_limit();
    let in_cluster = GuestSubnet::of(&args, network_mode(&args)).await?;
    let cluster = match &in_cluster {
        Some(guests) => (guests.initial_subnet(&state).await, guests.api_server().await),
        None => (None, vec![]),
    };
    let host = open_host(&state, &args, cluster).await?;
    let mut registry = Registry::default();
    let readiness = Readiness::default();
    let mut tasks = Tasks::new();
    serve_socket(&mut tasks, &host, &global.socket(), &state).await?;
    let client = kubeconfig::client(args.kubeconfig.as_deref(), args.in_cluster).await?;
    let tls = match args.host_listen.is_some() || (args.agent_listen.is_some() && !args.agent_plaintext) {
        true => ServiceTls::of(&mut tasks, &args, &state, host.clock(), client.clone()).await?,
        false => None,
    };
    let host_bound = match args.host_listen {
        Some(at) => {
            Some(serve_host(&mut tasks, require_tls(tls.as_ref(), "--host-listen")?, at, &host).await?)
        }
        None => None,
    };
    if let Some(at) = args.agent_listen {
        let mut options = legacy.as_ref().map(AgentOptions::from).unwrap_or_default();
        if args.agent_inband_errors {
            options.error_style = ErrorStyle::Inband;
        }
        let metrics = AgentMetrics::new(&mut registry, &host);
        let service = AgentService::new(host.clone(), options, metrics);
        let secured = match args.agent_plaintext {
            true => None,
            false => Some(require_tls(tls.as_ref(), "--agent-listen")?),
        };
        let bound = serve_agent(&mut tasks, secured, at, service).await?;
        if let Some(client) = client.clone() {
            let name = tls.and_then(|tls| tls.server_name);
            announce_node(&mut tasks, &args, client, &host, (bound, host_bound, name), in_cluster);
        }
    }
    route_pods(&mut tasks, &args, client.as_ref());
    if let Some(socket) = &args.cri_listen {
        serve_cri(&mut tasks, &host, &args, socket, client.clone())?;
    }
    if let Some(name) = &args.virtual_node {
        virtual_node::run(&mut tasks, &host, &args, name, (provider, &mut registry)).await?;
    }
    if let Some(at) = args.admin_listen {
        let listener = listen(at).await?;
        let admin = Admin::new(registry, readiness.clone());
        tasks.spawn("admin", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    }
    readiness.set("host", true);
    tracing::info!(state = %state.display(), vms = host.list().len(), "node ready");
    let outcome = super::run(tasks, GRACE).await;
    host.shutdown().await;
    outcome
}

/// Applies the configuration file and the defaults of the original agent, if the program has its name.
fn legacy(args: &mut NodeArgs) -> miette::Result<Option<LegacyConfig>> {
    if !args.legacy {
        return Ok(None);
    }
    let text = match &args.config {
        Some(path) => std::fs::read_to_string(path)
            .into_diagnostic()
            .wrap_err_with(|| format!("read {}", path.display()))?,
        None => String::new(),
    };
    let config = LegacyConfig::parse(&text).into_diagnostic()?;
    args.agent_listen.get_or_insert(SocketAddr::new(config.server.host.into(), config.server.port));
    args.agent_plaintext = true;
    if config.monitoring.enabled {
        args.admin_listen.get_or_insert(SocketAddr::from(([0, 0, 0, 0], config.monitoring.metrics_port)));
    }
    args.log.clone_from(&config.log.level);
    if args.subnet.is_none() {
        args.subnet = Some(subnet_of(&config.network.bridge_ip)?);
    }
    if let Some(dir) = Path::new(&config.firecracker.kernel_path).parent().filter(|d| d.is_absolute()) {
        args.kernel_dir.push(dir.to_owned());
    }
    Ok(Some(config))
}

/// Returns the subnet around the bridge's address, such as `172.16.0.1/24`.
fn subnet_of(bridge_ip: &str) -> miette::Result<Subnet> {
    let (address, prefix) = bridge_ip.split_once('/').unwrap_or((bridge_ip, "24"));
    match (address.parse(), prefix.parse()) {
        (Ok(address), Ok(prefix @ 8..=30)) => Ok(Subnet::around(address, prefix)),
        _ => bail!("invalid network.bridge_ip {bridge_ip:?}: want an address with a prefix"),
    }
}

/// Raises the limit of open files to the maximum: files of shared directories that guests hold open are open in this process.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

async fn open_host(state: &Path, args: &NodeArgs, cluster: Cluster) -> miette::Result<Host> {
    coracle_host::ensure_state_dir(state).map_err(failure)?;
    let (kernel, initrd) = boot_files(args.boot.as_deref())?;
    let mut config = HostConfig::new(state.to_owned(), kernel, initrd);
    config.kernel_dirs.clone_from(&args.kernel_dir);
    config.volume_dirs.clone_from(&args.volume_dir);
    config.disk_classes = args.disk_class.iter().cloned().collect();
    config.memory_overcommit = args.memory_overcommit;
    config.guest_reach = Reach {
        guests: args.guest_reach.contains(&ReachChoice::Guests),
        node: args.guest_reach.contains(&ReachChoice::Node),
    };
    config.user_network_open = network_mode(args) == NetworkMode::UserOpen;
    config.templates = TemplatePolicy {
        enabled: !args.no_templates,
        count_max: args.templates_max,
        age_max: Duration::try_from(args.templates_max_age)
            .map_err(|_| Failure::usage("--templates-max-age is not negative"))?,
        bytes_max: args.templates_max_mib.saturating_mul(1 << 20),
    };
    config.warm_pool = WarmPoolPolicy {
        shapes_max: args.warm_pool,
        depth_min: args.warm_pool_min.unwrap_or(config.warm_pool.depth_min),
        clones_max: args.warm_pool_max,
        idle_max: Duration::try_from(args.warm_pool_max_idle)
            .map_err(|_| Failure::usage("--warm-pool-max-idle must not be negative"))?,
    };
    config.registries = registries_of(args)?;
    virtual_node::reach_registry(&mut config, args);
    let kvm = (args.accelerator == AcceleratorChoice::Auto)
        .then(|| kvm_probe_of(Some(state.join("accelerator.json"))));
    let drivers = drivers(args, kvm);
    let options = StoreOptions { registries: config.registries.clone(), ..StoreOptions::default() };
    let images =
        Store::open(state.join("images"), options).map_err(|e| Failure::new(e.code(), e.to_string()))?;
    let network = network(state, args, cluster).await?;
    let host =
        Host::open(config, drivers, network, Arc::new(images), Clock::system()).await.map_err(failure)?;
    for (at, (driver, probe)) in host.probes().iter().enumerate() {
        let (version, reason) = (&probe.version, &probe.reason);
        match probe.accelerator {
            Some(accelerator) => {
                tracing::info!(driver, version, accelerator = accelerator.as_str(), reason, "driver");
            }
            None if at == 0 => tracing::warn!(driver, reason, "driver not available"),
            None => tracing::debug!(driver, reason, "driver not available"),
        }
    }
    Ok(host)
}

/// Loads the registry configuration, which is read once.
fn registries_of(args: &NodeArgs) -> Result<Registries, Failure> {
    let warn = |warning: &str| tracing::warn!(warning, "registry configuration has an unknown part");
    Ok(registries::load(&args.registries, warn)?.deny_private(args.registry_deny_private))
}

/// Returns the drivers: QEMU, which runs everywhere, and the drivers that VMs may ask for.
fn drivers(args: &NodeArgs, kvm: Option<KvmProbe>) -> Drivers {
    // Without a probe KVM counts as absent; these two drivers require it.
    let switched_off = KvmProbe { device: "/dev/null".into(), command: vec![], kept: None };
    let proof = kvm.clone().or(Some(switched_off));
    let firecracker = FirecrackerConfig { program: args.firecracker.clone(), kvm: proof.clone() };
    let cloud_hypervisor = CloudHypervisorConfig { program: args.cloud_hypervisor.clone(), kvm: proof };
    Drivers::new(
        Arc::new(QemuDriver::new(QemuConfig { program: args.qemu.clone(), kvm })),
        vec![
            Arc::new(FirecrackerDriver::new(firecracker)),
            Arc::new(CloudHypervisorDriver::new(cloud_hypervisor)),
        ],
    )
}

/// Returns kernel and initramfs of guests, from `dir` or from the tool cache.
fn boot_files(dir: Option<&Path>) -> miette::Result<(PathBuf, PathBuf)> {
    let dir = match dir {
        Some(dir) => dir.to_owned(),
        None => default_tools().unwrap_or_default().join("guest/current"),
    };
    let (kernel, initrd) = (dir.join("vmlinuz"), dir.join("initrd"));
    for file in [&kernel, &initrd] {
        if !file.is_file() {
            let message =
                format!("no guest {} in {}", file.file_name().unwrap_or_default().display(), dir.display());
            let help = "name the directory with --boot DIR; in a checkout `cargo xtask setup` makes it";
            return Err(Failure::new("COR-CFG-001", message).help(help).into());
        }
    }
    Ok((kernel, initrd))
}

fn network_mode(args: &NodeArgs) -> NetworkMode {
    let root = rustix::process::geteuid().is_root();
    args.network.unwrap_or(if root { NetworkMode::Bridge } else { NetworkMode::User })
}

async fn network(
    state: &Path,
    args: &NodeArgs,
    (assigned, api_server): Cluster,
) -> miette::Result<Arc<dyn Network>> {
    match network_mode(args) {
        NetworkMode::Bridge => {
            let sources = Sources {
                flag: args.subnet,
                cluster: assigned,
                range: Some(args.subnet_range),
                ..Sources::default()
            };
            let network = BridgeNetwork::open_with(state, sources)
                .await
                .into_diagnostic()
                .wrap_err("open the bridge network (--network user needs no privilege)")?;
            let network = network.with_api_server(api_server).with_pod_networks(args.pod_network.clone());
            Ok(Arc::new(network))
        }
        NetworkMode::Cni => {
            let network = CniNetwork::open(state, args.cni_conf_dir.clone(), args.cni_bin_dir.clone());
            Ok(Arc::new(network.into_diagnostic().wrap_err("open the CNI networks")?))
        }
        NetworkMode::User | NetworkMode::UserOpen => Ok(Arc::new(UserNetwork)),
    }
}

async fn listen(at: SocketAddr) -> miette::Result<TcpListener> {
    TcpListener::bind(at).await.into_diagnostic().wrap_err_with(|| format!("listen on {at}"))
}

/// Serves the local control socket, which only its owner may use.
async fn serve_socket(tasks: &mut Tasks, host: &Host, socket: &Path, state: &Path) -> miette::Result<()> {
    let listener = private_socket(socket)?;
    let link = state.join("host.sock");
    if link != socket {
        let _absent = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(socket, &link).into_diagnostic()?;
    }
    let service = HostServer::new(HostService::new(host.clone())).max_encoding_message_size(16 << 20);
    let stopping = host.stopping();
    tasks.spawn("host socket", move |stop| async move {
        Server::builder()
            .add_service(service)
            .serve_with_incoming_shutdown(
                UnixListenerStream::new(listener),
                cancel_host_on_stop(stop, stopping),
            )
            .await
            .into_diagnostic()
    });
    Ok(())
}

/// Serves the kubelet's socket, which only root may use.
fn serve_cri(
    tasks: &mut Tasks,
    host: &Host,
    args: &NodeArgs,
    socket: &Path,
    client: Option<Client>,
) -> miette::Result<()> {
    let image_keys = match args.cri_image_policy.clone() {
        Some(namespace) => follow_image_policy(tasks, namespace, client.clone())?,
        None => NamespaceKeys::default(),
    };
    let events = client.map_or_else(PodEvents::default, |client| {
        let node = super::node_name(args);
        let (recorder, sender) = Recorder::new(client, node, host.clock().clone());
        tasks.spawn("pod events", |stop| async move {
            sender.run(stop).await;
            Ok(())
        });
        PodEvents::to(move |pod, event| recorder.take(pod, event))
    });
    let listener = private_socket(socket)?;
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    // A second emulated vCPU makes every boot slower.
    let emulated =
        host.probes().first().is_some_and(|(_, probe)| probe.accelerator == Some(Accelerator::Tcg));
    let options = CriOptions {
        handlers: args.cri_handlers.clone(),
        vcpus: if emulated { 1 } else { CriOptions::default().vcpus },
        vcpus_max: processors,
        systemd_cgroups: Path::new("/run/systemd/system").is_dir(),
        image_keys,
        events,
        ..CriOptions::default()
    };
    let server = CriServer::new(host.clone(), options);
    tasks.spawn("cri", |stop| async move { server.serve(listener, stop).await.into_diagnostic() });
    Ok(())
}

fn follow_image_policy(
    tasks: &mut Tasks,
    namespace: String,
    client: Option<Client>,
) -> miette::Result<NamespaceKeys> {
    let needs = "--cri-image-policy needs a cluster: give --kubeconfig or --in-cluster";
    let client = client.ok_or_else(|| Failure::usage(needs))?;
    let (policy, known) = watch::channel(None);
    tasks.spawn("image policy", |stop| async move {
        image_policy::follow(client, namespace, policy, stop).await;
        Ok(())
    });
    Ok(image_policy::keys(known))
}

/// Creates a socket that only its owner can use. This process holds the lock of the host, so an existing socket is stale.
fn private_socket(socket: &Path) -> miette::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    if let Some(dir) = socket.parent() {
        make_dir(dir)?;
    }
    let _absent = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)
        .into_diagnostic()
        .wrap_err_with(|| format!("listen on {}", socket.display()))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600)).into_diagnostic()?;
    Ok(listener)
}

/// Ends a server, and with it the streaming answers of the host.
async fn cancel_host_on_stop(stop: CancellationToken, host: CancellationToken) {
    stop.cancelled().await;
    host.cancel();
}

async fn serve_agent(
    tasks: &mut Tasks,
    tls: Option<ServiceTls>,
    at: SocketAddr,
    service: AgentService,
) -> miette::Result<SocketAddr> {
    let listener = listen(at).await?;
    let bound = listener.local_addr().into_diagnostic()?;
    let reflection = coracle_frontends::reflection().into_diagnostic()?;
    let router = limits::server().add_service(FirecrackerAgentServer::new(service)).add_service(reflection);
    if tls.is_none() {
        tracing::warn!(%at, "FirecrackerAgent is served without TLS and without authentication");
    }
    tasks.spawn("agent", move |stop| async move {
        serve(router, listener, tls, stop.clone(), stop.cancelled_owned()).await
    });
    Ok(bound)
}

/// Serves the host service to the command line through the cluster. Requires certificates.
async fn serve_host(
    tasks: &mut Tasks,
    tls: ServiceTls,
    at: SocketAddr,
    host: &Host,
) -> miette::Result<SocketAddr> {
    let listener = listen(at).await?;
    let bound = listener.local_addr().into_diagnostic()?;
    let service = HostServer::new(HostService::new(host.clone())).max_encoding_message_size(16 << 20);
    let router = limits::server().add_service(service);
    let stopping = host.stopping();
    tasks.spawn("host", move |stop| async move {
        serve(router, listener, Some(tls), stop.clone(), cancel_host_on_stop(stop, stopping)).await
    });
    Ok(bound)
}

/// Serves until `ended`. `stop` cancels the wait for a certificate.
async fn serve(
    router: Router,
    listener: TcpListener,
    tls: Option<ServiceTls>,
    stop: CancellationToken,
    ended: impl Future<Output = ()>,
) -> miette::Result<()> {
    let accepted = limits::incoming(listener, Connections::default());
    match tls {
        None => router.serve_with_incoming_shutdown(accepted, ended).await.into_diagnostic(),
        Some(tls) => match stop.run_until_cancelled(tls.accept(accepted)).await {
            Some(shaken) => router.serve_with_incoming_shutdown(shaken?, ended).await.into_diagnostic(),
            None => Ok(()),
        },
    }
}

/// Returns the certificates of a listener that requires them.
fn require_tls(tls: Option<&ServiceTls>, flag: &str) -> miette::Result<ServiceTls> {
    let missing = || {
        let message = format!("{flag} needs a certificate");
        let help = "name --tls-cert, --tls-key and --tls-client-ca, or a cluster whose operator signs one \
                    (--kubeconfig, --in-cluster); old clients without TLS need --agent-plaintext";
        Failure::usage(message).help(help).into()
    };
    tls.cloned().ok_or_else(missing)
}

/// Maintains routes to Pods of other nodes, if Pod networks are configured.
fn route_pods(tasks: &mut Tasks, args: &NodeArgs, client: Option<&Client>) {
    if args.pod_network.is_empty() {
        return;
    }
    let Some(client) = client.cloned() else {
        return tracing::warn!("no cluster is named: routes to Pods of other nodes are not kept here");
    };
    let node = super::node_object(args);
    let router = PodRouter { client, node, networks: args.pod_network.clone() };
    tasks.spawn("pod routes", |stop| router.maintain(stop));
}

fn announce_node(
    tasks: &mut Tasks,
    args: &NodeArgs,
    client: Client,
    host: &Host,
    (bound, host_bound, server_name): (SocketAddr, Option<SocketAddr>, Option<String>),
    guests: Option<GuestSubnet>,
) {
    let node = super::node_name(args);
    let endpoints = Endpoints {
        agent: args.advertise.clone().unwrap_or_else(|| bound.to_string()),
        host: host_bound.map(|bound| frontend_address(args.advertise.as_deref(), bound)),
        server_name,
    };
    let host = host.clone();
    tasks.spawn("announce", move |stop| async move {
        announce(client, (&node, &endpoints), &host, guests, &stop).await;
        Ok(())
    });
}

/// Returns the address of one frontend: its own port at the host name that another frontend advertises.
fn frontend_address(advertised: Option<&str>, bound: SocketAddr) -> String {
    match advertised.and_then(|a| a.rsplit_once(':')) {
        Some((host, _)) => format!("{host}:{}", bound.port()),
        None => bound.to_string(),
    }
}
