//! `coracle operator`: the controllers.

use std::sync::Arc;
use std::time::Duration;

use coracle_admission::{Clients, Extension};
use coracle_microvm::agent::{HostChannels, NodeSnapshots};
use coracle_microvm::{AgentTls, Config, Fleet};
use coracle_reconcile::{ControllerConfig, ControllerMetrics, Election};
use coracle_subresources::SubresourceApi;
use coracle_telemetry::{Admin, LogFormat, Readiness, init_logs};
use coracle_types::Clock;
use kube::Client;
use miette::{IntoDiagnostic, WrapErr, bail};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::{agentpool, bidnode, cocoon, kubeconfig, vm_metrics};
use coracle_cli::cli::{Group, OperatorArgs};
use coracle_cli::tasks::Tasks;

const GRACE: Duration = Duration::from_secs(20);

/// Runs until a signal.
pub(crate) async fn run(args: OperatorArgs) -> miette::Result<()> {
    init_logs(&args.log, LogFormat::Auto);
    let client = match kubeconfig::client(args.kubeconfig.as_deref(), args.kubeconfig.is_none()).await? {
        Some(client) => client,
        None => bail!("name a cluster with --kubeconfig"),
    };
    let mut registry = Registry::default();
    let metrics = ControllerMetrics::register(&mut registry);
    let mut tasks = Tasks::new();
    let readiness = Readiness::default();
    let mut extensions = Vec::new();
    if args.controllers.contains(&Group::CocoonSet) {
        let election = (!args.no_election).then(|| coracle_api::keys::SYSTEM_NAMESPACE.to_owned());
        let election = election.map(super::own_namespace);
        let config = cocoon::config(&args.cocoon, election.as_deref(), metrics.clone(), &mut registry)?;
        cocoon::spawn(&mut tasks, client.clone(), config);
        if args.webhook_listen.is_some() {
            extensions.push(cocoon::extension(&args, &client, &mut registry, &mut tasks));
        }
    }
    if let Some(dir) = &args.node_authority {
        let namespace = super::own_namespace(coracle_api::keys::SYSTEM_NAMESPACE.to_owned());
        let mut config = coracle_authority::Config::new(namespace.clone(), dir.clone());
        config.metrics = metrics.clone();
        config.serving.clone_from(&args.serving_certificate);
        if !args.no_election {
            let identity = super::identity();
            config.election = Some(coracle_authority::Config::election(&namespace, &identity));
        }
        let client = client.clone();
        tasks.spawn("authority", |stop| async move {
            Box::pin(coracle_authority::run(client, config, stop)).await.into_diagnostic()
        });
    }
    let mut fleet = None;
    if args.controllers.contains(&Group::MikromVm) {
        let watched = mikromvm(&args, &client, &metrics, &readiness, &mut tasks)?;
        let counted = watched.clone();
        vm_metrics::register(&mut registry, move || counted.vms().state());
        fleet = Some(watched);
        vm_services(&args, &client, &metrics, &mut tasks);
        vm_pools(&args, &client, &metrics, &mut tasks);
        vm_snapshots(&args, &client, fleet.clone(), &metrics, &mut tasks)?;
    }
    if let Some(fleet) = fleet.clone().filter(|_| args.webhook_listen.is_some()) {
        extensions.push(subresources(&args, &client, fleet, &metrics, &mut tasks)?);
    }
    if fleet.is_some() || !extensions.is_empty() {
        webhook(&args, &client, fleet, extensions, &readiness, &mut tasks)?;
    }
    if args.controllers.contains(&Group::AgentPool) {
        let election = (!args.no_election).then(|| coracle_api::keys::SYSTEM_NAMESPACE.to_owned());
        let election = election.map(super::own_namespace);
        let config = agentpool::config(&args.pools, election.as_deref(), metrics.clone(), &mut registry)?;
        agentpool::spawn(&mut tasks, client.clone(), config);
    }
    if args.controllers.contains(&Group::BidNode) {
        let election = (!args.no_election).then(|| coracle_api::keys::SYSTEM_NAMESPACE.to_owned());
        let election = election.map(super::own_namespace);
        let (flags, metrics) = (&args.bids, metrics.clone());
        let config = bidnode::config(flags, election.as_deref(), metrics, &mut registry, &mut tasks).await?;
        bidnode::spawn(&mut tasks, client.clone(), config);
    }
    if let Some(at) = args.admin_listen {
        let listener =
            TcpListener::bind(at).await.into_diagnostic().wrap_err_with(|| format!("listen on {at}"))?;
        let admin = Admin::new(registry, readiness.clone());
        tasks.spawn("admin", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    }
    readiness.set("operator", true);
    tracing::info!("operator ready");
    super::run(tasks, GRACE).await
}

fn mikromvm(
    args: &OperatorArgs,
    client: &Client,
    metrics: &ControllerMetrics,
    readiness: &Readiness,
    tasks: &mut Tasks,
) -> miette::Result<Fleet> {
    let config = config(args, metrics.clone())?;
    let (fleet, keep) = Fleet::watch(client, &config.scope, config.overcommit, config.clock.clone());
    let keep = Box::pin(keep);
    tasks.spawn("fleet", |stop| async move {
        stop.run_until_cancelled(keep).await;
        Ok(())
    });
    // Not ready until every kind has been listed once, so that a missing permission shows.
    readiness.set("fleet", false);
    let (parts, known) = (readiness.clone(), fleet.clone());
    tasks.spawn("readiness", |stop| async move {
        if stop.run_until_cancelled(known.ready()).await.is_some() {
            parts.set("fleet", true);
        }
        stop.cancelled().await;
        Ok(())
    });
    let (client, kept) = (client.clone(), fleet.clone());
    tasks.spawn("mikromvm", |stop| async move {
        Box::pin(coracle_microvm::run_with(client, config, kept, stop)).await.into_diagnostic()
    });
    Ok(fleet)
}

/// Starts the controller of Services for VMs with ports.
fn vm_services(args: &OperatorArgs, client: &Client, metrics: &ControllerMetrics, tasks: &mut Tasks) {
    let common = common(args, coracle_vm_service::CONTROLLER, metrics);
    let config = coracle_vm_service::Config { common, identity: super::identity() };
    let client = client.clone();
    tasks.spawn("vm-service", |stop| async move {
        Box::pin(coracle_vm_service::run(client, config, stop)).await.into_diagnostic()
    });
}

/// Starts the MikromVMPool controller.
fn vm_pools(args: &OperatorArgs, client: &Client, metrics: &ControllerMetrics, tasks: &mut Tasks) {
    let (client, config) = (client.clone(), common(args, coracle_vm_pool::CONTROLLER, metrics));
    tasks.spawn("vm-pool", |stop| async move {
        Box::pin(coracle_vm_pool::run(client, config, stop)).await.into_diagnostic()
    });
}

/// Starts the controllers of VMSnapshots and VMRestores.
fn vm_snapshots(
    args: &OperatorArgs,
    client: &Client,
    fleet: Option<Fleet>,
    metrics: &ControllerMetrics,
    tasks: &mut Tasks,
) -> miette::Result<()> {
    let Some(fleet) = fleet else { return Ok(()) };
    let nodes = NodeSnapshots::new(&config(args, metrics.clone())?, fleet);
    let common = common(args, coracle_vm_snapshot::CONTROLLER, metrics);
    let config = coracle_vm_snapshot::Config { common, nodes: Arc::new(nodes) };
    let client = client.clone();
    tasks.spawn("vm-snapshot", |stop| async move {
        Box::pin(coracle_vm_snapshot::run(client, config, stop)).await.into_diagnostic()
    });
    Ok(())
}

/// Returns the common configuration of a controller, except that of MikromVMs.
fn common(args: &OperatorArgs, controller: &str, metrics: &ControllerMetrics) -> ControllerConfig {
    ControllerConfig {
        election: election(args, controller),
        metrics: metrics.clone(),
        ..ControllerConfig::default()
    }
}

/// Returns the leader election of a controller, except that of MikromVMs.
fn election(args: &OperatorArgs, controller: &str) -> Option<Election> {
    let lease = format!("coracle-{controller}");
    (!args.no_election).then(|| Election::new(coracle_api::keys::SYSTEM_NAMESPACE, &lease, super::identity()))
}

/// Serves the extension API, by which users reach guests.
fn subresources(
    args: &OperatorArgs,
    client: &Client,
    fleet: Fleet,
    metrics: &ControllerMetrics,
    tasks: &mut Tasks,
) -> miette::Result<Extension> {
    let nodes = HostChannels::new(&config(args, metrics.clone())?, fleet);
    let sessions = coracle_streaming::Tasks::default();
    let api = SubresourceApi::new(client.clone(), nodes, sessions.clone(), Clock::system());
    tasks.spawn("sessions", |stop| async move {
        stop.cancelled().await;
        sessions.stop().await;
        Ok(())
    });
    let namespace = args.webhook_namespace.clone();
    Ok(Extension {
        router: api.router(),
        clients: Clients::Router,
        objects: Arc::new(move |at| coracle_subresources::objects(at, &namespace)),
    })
}

/// Serves admission webhooks on one listener: those of MikromVMs if there is a fleet, and those of extensions.
fn webhook(
    args: &OperatorArgs,
    client: &Client,
    fleet: Option<Fleet>,
    extensions: Vec<Extension>,
    readiness: &Readiness,
    tasks: &mut Tasks,
) -> miette::Result<()> {
    let Some(listen) = args.webhook_listen else { return Ok(()) };
    let mut webhook = coracle_admission::Config { listen, extensions, ..Default::default() };
    webhook.system_namespace.clone_from(&args.webhook_namespace);
    if let coracle_admission::Reach::Service { namespace, .. } = &mut webhook.reach {
        namespace.clone_from(&args.webhook_namespace);
    }
    if args.node_authority.is_some() {
        webhook.authority = coracle_authority::NODES;
    }
    if let Some(host) = args.webhook_url_host.clone() {
        webhook.reach = coracle_admission::Reach::Url { host };
    }
    if let Some(path) = &args.webhook_client_ca {
        let pem = std::fs::read(path).into_diagnostic();
        webhook.client_ca = Some(pem.wrap_err_with(|| format!("read {}", path.display()))?);
    }
    follow_readiness(readiness, "webhook", webhook.ready.subscribe(), tasks);
    let client = client.clone();
    tasks.spawn("webhook", |stop| async move {
        Box::pin(coracle_admission::run(client, webhook, fleet, stop)).await.into_diagnostic()
    });
    Ok(())
}

/// Copies `ready` to a part of the readiness.
fn follow_readiness(
    readiness: &Readiness,
    part: &'static str,
    mut ready: watch::Receiver<bool>,
    tasks: &mut Tasks,
) {
    readiness.set(part, false);
    let readiness = readiness.clone();
    tasks.spawn("webhook readiness", move |stop| async move {
        loop {
            readiness.set(part, *ready.borrow_and_update());
            match stop.run_until_cancelled(ready.changed()).await {
                Some(Ok(())) => {}
                Some(Err(_)) | None => {
                    readiness.set(part, false);
                    return Ok(());
                }
            }
        }
    });
}

fn config(args: &OperatorArgs, metrics: ControllerMetrics) -> miette::Result<Config> {
    let mut config = Config { metrics, identity: super::identity(), ..Config::default() };
    config.scope.allowed.clone_from(&args.agent_allow);
    let namespace = super::own_namespace(coracle_api::keys::SYSTEM_NAMESPACE.to_owned());
    config.scope.system_namespace.clone_from(&namespace);
    config.overcommit.cpu = args.cpu_overcommit;
    config.policy.node_grace = Duration::try_from(args.node_grace).into_diagnostic()?;
    config.tls = match (&args.agent_ca, &args.node_authority) {
        _ if args.agent_plaintext => None,
        (Some(ca), _) => {
            let identity = args.agent_cert.clone().zip(args.agent_key.clone());
            Some(AgentTls { ca: ca.clone(), identity })
        }
        (None, Some(dir)) => {
            let file = |name: &str| dir.join(name);
            Some(AgentTls { ca: file("ca.crt"), identity: Some((file("tls.crt"), file("tls.key"))) })
        }
        (None, None) => bail!(
            "nodes speak TLS: sign their certificates with --node-authority, name their authority with --agent-ca, \
             or use --agent-plaintext"
        ),
    };
    if !args.no_election {
        let identity = config.identity.clone();
        config.election = Some(Election::new(namespace, "coracle-mikromvm", identity));
    }
    Ok(config)
}
