//! `coracle registry serve`: blobs, manifests and their names, from the state directory.

use std::time::Duration;

use coracle_registry::{Config, Metrics, Ready, S3Config, serve};
use coracle_telemetry::{Admin, LogFormat, Readiness, init_logs};
use miette::{IntoDiagnostic, WrapErr};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use crate::epoch_env;
use coracle_cli::cli::{Global, RegistryServeArgs};
use coracle_cli::tasks::Tasks;

/// Time for uploads to finish their current step.
const GRACE: Duration = Duration::from_secs(10);

pub(crate) async fn run(global: &Global, args: RegistryServeArgs) -> miette::Result<()> {
    let level = std::env::var("EPOCH_LOG_LEVEL").ok().filter(|_| args.legacy);
    init_logs(level.as_deref().unwrap_or(&args.log), LogFormat::Auto);
    let config = config(global, &args)?;
    super::make_dir(&config.dir)?;
    let mut meters = Registry::default();
    let metrics = Metrics::register(&mut meters);
    let readiness = Readiness::default();
    readiness.set("registry", false);
    let mut tasks = Tasks::new();
    if let Some(at) = args.admin_listen {
        let listener =
            TcpListener::bind(at).await.into_diagnostic().wrap_err_with(|| format!("listen on {at}"))?;
        let admin = Admin::new(meters, readiness.clone());
        tasks.spawn("admin", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    }
    let tls = config.tls.is_some();
    tasks.spawn("registry", move |stop| async move {
        let announce = move |ready: &Ready| {
            readiness.set("registry", true);
            announce(ready, tls);
        };
        Box::pin(serve(config, metrics, stop, announce)).await.into_diagnostic()
    });
    super::run(tasks, GRACE).await
}

/// Prints the address of the registry and, only once, its first token.
fn announce(ready: &Ready, tls: bool) {
    eprintln!("registry on {}://{}", if tls { "https" } else { "http" }, ready.address);
    if let Some(token) = &ready.new_token {
        eprintln!("token for writing, also in {}: {token}", ready.token_file.display());
    }
}

fn config(global: &Global, args: &RegistryServeArgs) -> miette::Result<Config> {
    let mut config = Config::new(global.state().join("registry"), args.listen);
    config.meta = args.dsn.as_deref().map(str::parse).transpose().into_diagnostic()?;
    config.s3 = args.s3_endpoint.as_ref().map(|endpoint| S3Config {
        endpoint: endpoint.clone(),
        region: args.s3_region.clone(),
        bucket: args.s3_bucket.clone().unwrap_or_default(),
        prefix: args.s3_prefix.clone(),
        access_key: args.s3_access_key.clone(),
        secret_key: args.s3_secret_key.clone(),
    });
    config.tls = args.tls_cert.clone().zip(args.tls_key.clone());
    config.private_reads = args.private_reads;
    config.open_writes = args.open_writes;
    config.public_url.clone_from(&args.public_url);
    config.allow_sparse_indexes = args.allow_sparse_indexes;
    config.limits.upload_bytes = args.upload_max;
    config.limits.quota = args.quota;
    config.limits.repository_quota = args.repository_quota;
    config.limits.upload_age = Duration::try_from(args.upload_age).into_diagnostic()?;
    config.limits.body_idle = Duration::try_from(args.idle).into_diagnostic()?;
    config.limits.head_idle = config.limits.body_idle;
    config.sweeping.every = Duration::try_from(args.gc_every).into_diagnostic()?;
    config.sweeping.grace = Duration::try_from(args.gc_grace).into_diagnostic()?;
    config.sweeping.untagged = args.gc_untagged.map(Duration::try_from).transpose().into_diagnostic()?;
    if args.legacy {
        apply_epoch_env(&mut config)?;
    }
    Ok(config)
}

/// Applies the environment variables of the original.
fn apply_epoch_env(config: &mut Config) -> miette::Result<()> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    config.s3 = epoch_env::s3()?.or_else(|| config.s3.take());
    config.empty_token = true;
    config.token = set("EPOCH_REGISTRY_TOKEN");
    config.public_url = config.public_url.take().or_else(|| set("EPOCH_PUBLIC_URL"));
    if let Some(provider) = set("SSO_PROVIDER") {
        config.private_pages = true;
        tracing::warn!(
            provider,
            "single sign-on is off: the pages and /api need a token, as the password of any user name"
        );
    }
    if let Some(dir) = set("EPOCH_UPLOAD_DIR") {
        tracing::warn!(
            dir,
            "EPOCH_UPLOAD_DIR is not used: uploads are beside the blobs, so that naming one is a rename"
        );
    }
    Ok(())
}
