//! `agent-forge-operator`: the pool controllers under the name, the flags and the ports of the original.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coracle_access::review_token;
use coracle_reconcile::ControllerMetrics;
use coracle_telemetry::{Access, Admin, Guard, LogFormat, Readiness, TlsListener, init_logs};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use kube::{Client, Config};
use miette::{IntoDiagnostic, WrapErr, bail};
use prometheus_client::registry::Registry;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::{agentpool, kubeconfig};
use coracle_cli::cli::AgentForgeArgs;
use coracle_cli::tasks::Tasks;

/// Grace period of the original.
const GRACE: Duration = Duration::from_secs(10);
/// Default namespace of the original.
const NAMESPACE: &str = "agent-forge-operator-system";
/// Time limit of an access review by the API server; after it, the scrape is refused.
const REVIEW: Duration = Duration::from_secs(10);

/// Runs until a signal.
pub(crate) async fn run(args: AgentForgeArgs) -> miette::Result<()> {
    init_logs(level(&args), format(&args)?);
    let client = match &args.kubeconfig {
        Some(_) => kubeconfig::client(args.kubeconfig.as_deref(), false).await?,
        None => {
            let config = Config::infer().await.into_diagnostic().wrap_err("find a cluster")?;
            Some(Client::try_from(config).into_diagnostic()?)
        }
    };
    let Some(client) = client else { bail!("name a cluster with --kubeconfig") };
    let mut registry = Registry::default();
    let metrics = ControllerMetrics::register(&mut registry);
    let namespace = args.leader_elect.then(|| super::own_namespace(NAMESPACE.to_owned()));
    let config = agentpool::config(&args.pools, namespace.as_deref(), metrics, &mut registry)?;
    let mut tasks = Tasks::new();
    let readiness = Readiness::default();
    let (listed, mut blocked) = (readiness.clone(), config.blocked.subscribe());
    tasks.spawn("readiness", |stop| async move {
        // Without the kinds of Cluster API and the Agent provider the controllers reconcile nothing.
        let follow = async {
            loop {
                listed.set("kinds", !*blocked.borrow_and_update());
                if blocked.changed().await.is_err() {
                    return;
                }
            }
        };
        stop.run_until_cancelled(follow).await;
        Ok(())
    });
    agentpool::spawn(&mut tasks, client.clone(), config);
    let admin = Admin::new(registry, readiness.clone());
    serve(&args, client, admin, &mut tasks).await?;
    readiness.set("operator", true);
    tracing::info!("operator ready");
    super::run(tasks, GRACE).await
}

/// Serves health on one port and metrics on the other.
async fn serve(args: &AgentForgeArgs, client: Client, admin: Admin, tasks: &mut Tasks) -> miette::Result<()> {
    if let Some(listener) = bind(&args.health_probe_bind_address).await? {
        let admin = admin.clone();
        let serve = |stop| async move { admin.serve_health(listener, stop).await.into_diagnostic() };
        tasks.spawn("health", serve);
    }
    let Some(listener) = bind(&args.metrics_bind_address).await? else { return Ok(()) };
    if args.metrics_secure {
        let listener = TlsListener::new(listener, tls(args)?);
        let admin = admin.guarded(Arc::new(Reviews { client }));
        tasks.spawn("metrics", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    } else {
        tasks.spawn("metrics", |stop| async move { admin.serve(listener, stop).await.into_diagnostic() });
    }
    Ok(())
}

/// Parses a listen address of Go: `:8081` is any address, `0` none. Pure.
fn address(text: &str) -> miette::Result<Vec<SocketAddr>> {
    if matches!(text, "0" | "") {
        return Ok(vec![]);
    }
    if let Some(port) = text.strip_prefix(':') {
        let port = port.parse().into_diagnostic().wrap_err_with(|| format!("address {text}"))?;
        // One socket for both families, or an IPv4 socket if there is no IPv6.
        return Ok(vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]);
    }
    let text = text.replacen("localhost:", "127.0.0.1:", 1);
    Ok(vec![text.parse().into_diagnostic().wrap_err_with(|| format!("address {text}"))?])
}

/// Listens at an address of Go. `None`: the address selects no listener.
pub(super) async fn bind(text: &str) -> miette::Result<Option<TcpListener>> {
    let all = address(text)?;
    if all.is_empty() {
        return Ok(None);
    }
    let bound = TcpListener::bind(all.as_slice()).await;
    bound.map(Some).into_diagnostic().wrap_err_with(|| format!("listen on {text}"))
}

/// Loads the certificate that the flags name, or makes one for this process.
fn tls(args: &AgentForgeArgs) -> miette::Result<Arc<ServerConfig>> {
    let (chain, key) = if args.metrics_cert_path.is_empty() {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), super::hostname()]);
        let made = made.into_diagnostic().wrap_err("make a certificate for metrics")?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        (vec![made.cert.der().clone()], PrivateKeyDer::from(key))
    } else {
        let dir = Path::new(&args.metrics_cert_path);
        let (chain, key) = (dir.join(&args.metrics_cert_name), dir.join(&args.metrics_cert_key));
        let read = || {
            let certificates = CertificateDer::pem_file_iter(&chain)?.collect::<Result<_, _>>()?;
            Ok::<_, rustls::pki_types::pem::Error>((certificates, PrivateKeyDer::from_pem_file(&key)?))
        };
        read().into_diagnostic().wrap_err_with(|| format!("read {} and its key", chain.display()))?
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .into_diagnostic()?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .into_diagnostic()
        .wrap_err("use the metrics' certificate")?;
    Ok(Arc::new(config))
}

/// Asks the API server which callers may read metrics: those who may GET /metrics.
struct Reviews {
    client: Client,
}

impl std::fmt::Debug for Reviews {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reviews").finish_non_exhaustive()
    }
}

impl Reviews {
    async fn review(&self, token: &str) -> Result<Access, kube::Error> {
        let Some(user) = review_token(&self.client, token, None).await? else { return Ok(Access::Unknown) };
        let what = NonResourceAttributes { path: Some("/metrics".to_owned()), verb: Some("get".to_owned()) };
        let spec = SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(what),
            resource_attributes: None,
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let allowed = api.create(&PostParams::default(), &review).await?.status.is_some_and(|s| s.allowed);
        Ok(if allowed { Access::Granted } else { Access::Denied })
    }
}

#[async_trait]
impl Guard for Reviews {
    async fn check(&self, token: &str) -> Access {
        match timeout(REVIEW, self.review(token)).await {
            Ok(Ok(access)) => access,
            Ok(Err(error)) => {
                tracing::warn!(%error, "reader of metrics not reviewed");
                Access::Unavailable
            }
            Err(_) => Access::Unavailable,
        }
    }
}

/// Converts a log level of the original. Pure.
fn level(args: &AgentForgeArgs) -> &'static str {
    match args.zap_log_level.as_str() {
        "" if args.zap_devel => "debug",
        "" | "info" => "info",
        "error" | "panic" | "fatal" => "error",
        "warn" => "warn",
        "debug" | "1" => "debug",
        n if n.parse::<u32>().is_ok() => "trace",
        _ => "info",
    }
}

fn format(args: &AgentForgeArgs) -> miette::Result<LogFormat> {
    match args.zap_encoder.as_str() {
        "" if args.zap_devel => Ok(LogFormat::Text),
        "" | "json" => Ok(LogFormat::Json),
        "console" => Ok(LogFormat::Text),
        other => bail!("--zap-encoder is json or console, not {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_address_is_parsed_as_in_go() {
        let shown = |text: &str| {
            let all = address(text).map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>());
            all.map_err(|e| e.to_string())
        };
        assert_eq!(shown("0"), Ok(vec![]));
        assert_eq!(shown(":8081"), Ok(vec!["[::]:8081".into(), "0.0.0.0:8081".into()]));
        assert_eq!(shown("127.0.0.1:9"), Ok(vec!["127.0.0.1:9".into()]));
        assert_eq!(shown("localhost:9"), Ok(vec!["127.0.0.1:9".into()]));
        assert_eq!(shown(":http"), Err("address :http".into()));
    }
}
