//! CocoonSet controllers and the webhook for their pods: configured by the operator's flags, or under the names
//! `cocoon-operator` and `cocoon-webhook` by the flags, variables and ports of the originals.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coracle_admission::{Clients, Extension};
use coracle_api::cocoon::keys;
use coracle_cocoon::{
    CocoonMetrics, Config, NoTags, OciTags, Settings, SnapshotTags, Webhook, WebhookMetrics, WebhookSettings,
    configurations, election, reap, router,
};
use coracle_reconcile::{Clock, ControllerMetrics};
use coracle_telemetry::{Admin, LogFormat, Readiness, init_logs};
use jiff::SignedDuration;
use kube::Client;
use miette::{IntoDiagnostic, WrapErr, bail};
use prometheus_client::registry::Registry;

use super::agent_forge::bind;
use super::{identity, kubeconfig};
use coracle_cli::cli::{CocoonFlags, CocoonOperatorArgs, CocoonWebhookArgs, OperatorArgs};
use coracle_cli::tasks::Tasks;

/// Grace period of the originals.
const GRACE: Duration = Duration::from_secs(10);
/// Name of the webhook configurations.
pub(super) const WEBHOOKS: &str = "coracle-cocoon";

/// Returns the configuration of the controllers. `namespace` is that of their Lease; `None` runs them without leader election.
pub(super) fn config(
    flags: &CocoonFlags,
    namespace: Option<&str>,
    metrics: ControllerMetrics,
    registry: &mut Registry,
) -> miette::Result<Config> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let url = flags.cocoon_registry.clone().filter(|url| !url.is_empty()).or_else(|| variable("EPOCH_URL"));
    let token = flags.cocoon_registry_token.clone().or_else(|| variable("EPOCH_TOKEN"));
    let ca = flags.cocoon_registry_ca.as_deref();
    let mut config = Config::new(tags(url.as_deref(), token.as_deref(), ca)?);
    config.settings = Settings {
        drift: flags.cocoon_drift,
        rebuild: flags.cocoon_rebuild,
        migrate: flags.cocoon_migrate,
        keep_snapshots: flags.cocoon_keep_snapshots,
        ..Settings::default()
    };
    config.identity = identity();
    config.election = namespace.map(|namespace| election(namespace, &config.identity));
    config.metrics = metrics;
    config.cocoon_metrics = CocoonMetrics::register(registry);
    Ok(config)
}

fn tags(url: Option<&str>, token: Option<&str>, ca: Option<&Path>) -> miette::Result<Arc<dyn SnapshotTags>> {
    let Some(url) = url else {
        tracing::warn!("no registry of saved VMs: suspended CocoonSets stay Suspending");
        return Ok(Arc::new(NoTags));
    };
    let trust = match ca {
        Some(path) => {
            std::fs::read(path).into_diagnostic().wrap_err_with(|| format!("read {}", path.display()))?
        }
        None => Vec::new(),
    };
    Ok(Arc::new(OciTags::new(url, token, trust).into_diagnostic()?))
}

/// Runs the controllers as a task of the process.
pub(super) fn spawn(tasks: &mut Tasks, client: Client, config: Config) {
    tasks.spawn("cocoonset", |stop| async move {
        Box::pin(coracle_cocoon::run(client, config, stop)).await.into_diagnostic()
    });
}

/// Returns the webhook that is served beside that of MikromVMs.
pub(super) fn extension(
    args: &OperatorArgs,
    client: &Client,
    registry: &mut Registry,
    tasks: &mut Tasks,
) -> Extension {
    let flags = &args.cocoon;
    let settings = WebhookSettings {
        namespace: args.webhook_namespace.clone(),
        sticky: !flags.cocoon_no_sticky,
        strict: flags.cocoon_strict,
        every_pod: flags.cocoon_image_annotation,
        image_annotation: flags.cocoon_image_annotation,
        ..WebhookSettings::default()
    };
    let hook = Webhook::new(client.clone(), settings, WebhookMetrics::register(registry), Clock::system());
    let reaper = hook.clone();
    tasks.spawn("reaper", |stop| async move {
        reap(reaper, stop).await;
        Ok(())
    });
    Extension {
        router: router(hook),
        clients: Clients::ApiServer,
        objects: Arc::new(|at| configurations(WEBHOOKS, None, &|path| at.client_config(path))),
    }
}

/// `cocoon-operator`. Runs until a signal.
pub(crate) async fn run_operator(args: CocoonOperatorArgs) -> miette::Result<()> {
    init_logs(&args.log, LogFormat::Auto);
    let client = client(args.kubeconfig.as_deref()).await?;
    let mut registry = Registry::default();
    let url = args.oci_registry.as_deref().filter(|url| !url.is_empty()).unwrap_or(&args.epoch_url);
    let mut config =
        Config::new(tags(Some(url), args.epoch_token.as_deref(), args.epoch_ca_cert.as_deref())?);
    config.settings = Settings::original();
    config.set_workers = args.cocoonset_concurrency.max(1);
    config.hibernation_workers = args.hibernation_concurrency.max(1);
    config.identity = identity();
    if args.leader_elect {
        let namespace = super::own_namespace(keys::SYSTEM_NAMESPACE.to_owned());
        config.election = Some(election(&namespace, &config.identity));
    }
    config.metrics = ControllerMetrics::register(&mut registry);
    config.cocoon_metrics = CocoonMetrics::register(&mut registry);
    let (mut tasks, readiness) = (Tasks::new(), Readiness::default());
    let admin = Admin::new(registry, readiness.clone());
    if let Some(listener) = bind(&args.health_probe_bind_address).await? {
        let admin = admin.clone();
        tasks.spawn(
            "health",
            |stop| async move { admin.serve_health(listener, stop).await.into_diagnostic() },
        );
    }
    if let Some(listener) = bind(&args.metrics_bind_address).await? {
        tasks.spawn("metrics", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    }
    spawn(&mut tasks, client, config);
    readiness.set("operator", true);
    tracing::info!(registry = url, "operator ready");
    super::run(tasks, GRACE).await
}

/// `cocoon-webhook`. Runs until a signal. The user creates the webhook configurations that refer to it.
pub(crate) async fn run_webhook(args: CocoonWebhookArgs) -> miette::Result<()> {
    init_logs(&args.log, LogFormat::Auto);
    let client = client(args.kubeconfig.as_deref()).await?;
    let mut registry = Registry::default();
    let defaults = WebhookSettings::default();
    // Only later releases of the original have the variable, and those accept only pods of CocoonSets.
    let strict = !args.pod_creators.is_empty();
    let settings = WebhookSettings {
        strict,
        every_pod: true,
        pod_creators: if strict { args.pod_creators.clone() } else { defaults.pod_creators.clone() },
        reaper_interval: duration(args.reaper_interval, "REAPER_INTERVAL")?,
        reaper_grace: duration(args.reaper_grace, "REAPER_GRACE")?,
        ..defaults
    };
    let hook = Webhook::new(client, settings, WebhookMetrics::register(&mut registry), Clock::system());
    let (mut tasks, readiness) = (Tasks::new(), Readiness::default());
    let Some(listener) = bind(&args.listen).await? else { bail!("invalid LISTEN_ADDR {:?}", args.listen) };
    let (reaper, certificate, key) = (hook.clone(), args.tls_cert.clone(), args.tls_key.clone());
    tasks.spawn("webhook", |stop| async move {
        let served = coracle_admission::serve_with_files(listener, certificate, key, router(hook), stop);
        Box::pin(served).await.into_diagnostic()
    });
    tasks.spawn("reaper", |stop| async move {
        reap(reaper, stop).await;
        Ok(())
    });
    if let Some(listener) = bind(&args.metrics).await? {
        let admin = Admin::new(registry, readiness.clone());
        tasks.spawn("metrics", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    }
    readiness.set("webhook", true);
    tracing::info!("webhook ready");
    super::run(tasks, GRACE).await
}

fn duration(value: SignedDuration, name: &str) -> miette::Result<Duration> {
    let duration = Duration::try_from(value).into_diagnostic().wrap_err_with(|| format!("invalid {name}"))?;
    if duration.is_zero() {
        bail!("invalid {name}: must be longer than 0s");
    }
    Ok(duration)
}

/// Returns a client of the cluster of the kubeconfig, or of the cluster of this Pod.
async fn client(kubeconfig: Option<&Path>) -> miette::Result<Client> {
    let kubeconfig = kubeconfig.filter(|path| !path.as_os_str().is_empty());
    match kubeconfig::client(kubeconfig, kubeconfig.is_none()).await? {
        Some(client) => Ok(client),
        None => bail!("name a cluster with KUBECONFIG"),
    }
}
