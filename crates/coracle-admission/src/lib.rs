//! Validating webhook for MikromVMs: rules that the schema cannot express, because they depend on other objects. Also the
//! listener, the certificate authority and the installation of other webhooks, as [`Extension`]s.
//!
//! The webhook answers from the fleet that the controller watches anyway, on every replica, leader or not. It creates its own
//! authority, keeps it in a Secret that the replicas share, and installs itself. It never changes the reviewed objects.
//!
//! ```text
//!  API server ──TLS──▶ serve ──▶ judge (pure) ◀── Fleet
//!       ▲                ▲
//!       └── caBundle ── authority ──▶ Secret
//! ```

mod endpoint;
mod files;
mod install;
pub mod judge;
mod serve;

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use coracle_api::keys;
use coracle_authority::AuthorityName;
use coracle_microvm::Fleet;
use coracle_reconcile::Clock;
use kube::Client;
use serde_json::Value;
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

pub use endpoint::{Endpoint, Reach, SERVICE};
pub use files::serve_with_files;

/// Certificate authority of webhooks when the cluster has no other.
pub const WEBHOOKS: AuthorityName =
    AuthorityName { secret: "coracle-webhook-ca", common_name: "coracle webhook authority" };

/// Objects that register an extension with the API server: webhook configurations, or an APIService.
pub type Objects = dyn Fn(&Endpoint) -> Vec<Value> + Send + Sync;

/// Clients that may call an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// The API server, as configured by [`Config::client_ca`].
    ApiServer,
    /// Clients that the extension's router accepts, by the request extension
    /// [`PeerCertificates`](coracle_access::PeerCertificates).
    Router,
}

/// Additional paths behind the same listener and authority.
#[derive(Clone)]
pub struct Extension {
    /// Paths and their handlers. The router must limit its request bodies.
    pub router: axum::Router,
    /// Clients that may call the extension.
    pub clients: Clients,
    /// Objects to install once the extension can answer.
    pub objects: Arc<Objects>,
}

impl fmt::Debug for Extension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extension").finish_non_exhaustive()
    }
}

/// Configuration of the webhook.
#[derive(Clone, Debug)]
pub struct Config {
    /// Additional webhooks and APIs.
    pub extensions: Vec<Extension>,
    /// Address to listen on. Port 0: any free one.
    pub listen: SocketAddr,
    /// Address under which the API server reaches the listener.
    pub reach: Reach,
    /// Name of the ValidatingWebhookConfiguration.
    pub name: String,
    /// Namespace of the reviewed objects; `None`: all.
    pub namespace: Option<String>,
    /// Namespace of the authority's Secret.
    pub system_namespace: String,
    /// Authority that signs the webhook's certificate.
    pub authority: AuthorityName,
    /// Admit objects when the webhook cannot answer, or no node is known.
    pub fail_open: bool,
    /// Lifetime of the authority; it is renewed when a third is left.
    pub authority_life: Duration,
    /// Lifetime of the certificate; it is renewed when a third is left.
    pub certificate_life: Duration,
    /// PEM of the authority that signs the client certificates of API servers. Clients without such a certificate are refused.
    /// If `None`, every client that reaches the port is answered.
    pub client_ca: Option<Vec<u8>>,
    /// Set to true when reviews can be answered: the certificate exists, and the configuration is in the API server.
    pub ready: watch::Sender<bool>,
    /// Time for which reviews are answered after `stop`, while a Service still has this endpoint. Not used with a URL.
    pub drain: Duration,
    /// ClusterRole that owns the configuration, which is deleted with it. A ClusterRole that does not exist owns nothing.
    pub owner: String,
    /// Wall clock.
    pub clock: Clock,
}

impl Default for Config {
    fn default() -> Self {
        let hours = |h: u64| Duration::from_secs(3600 * h);
        Self {
            extensions: Vec::new(),
            listen: SocketAddr::from(([0, 0, 0, 0], 9443)),
            reach: Reach::Service {
                namespace: keys::SYSTEM_NAMESPACE.into(),
                name: SERVICE.into(),
                port: 443,
            },
            name: "coracle-mikromvm".into(),
            namespace: None,
            system_namespace: keys::SYSTEM_NAMESPACE.into(),
            authority: WEBHOOKS,
            fail_open: false,
            authority_life: hours(24 * 365),
            certificate_life: hours(24),
            client_ca: None,
            ready: watch::Sender::new(false),
            drain: Duration::from_secs(5),
            owner: "coracle-webhook".into(),
            clock: Clock::system(),
        }
    }
}

/// Reason why the webhook does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address could not be bound.
    #[error("listen on {address}")]
    Listen {
        /// Address to listen on.
        address: SocketAddr,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The certificate authority failed.
    #[error(transparent)]
    Authority(#[from] coracle_authority::AuthorityError),
    /// The key does not match the certificate.
    #[error("use the webhook's certificate")]
    Tls(#[from] rustls::Error),
    /// [`Config::client_ca`] contains no certificate, or one that cannot be parsed.
    #[error(transparent)]
    ClientCa(#[from] coracle_access::InvalidClientCa),
    /// A call to the API server failed.
    #[error("{operation}")]
    Api {
        /// Operation that failed.
        operation: &'static str,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
    /// A certificate or a key file of the user cannot be used.
    #[error("cannot read {path}")]
    File {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Reason why the file cannot be used.
        source: rustls::pki_types::pem::Error,
    },
}

/// Serves until `stop`, installs the webhooks once they can answer, and renews certificates. The caller must keep the fleet up
/// to date; without a fleet only extensions are served.
///
/// # Errors
/// [`Error::Listen`] and [`Error::ClientCa`] at once; later failures are retried.
pub async fn run(
    client: Client,
    config: Config,
    fleet: impl Into<Option<Fleet>>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let address = config.listen;
    let listener = TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })?;
    run_on(client, config, fleet, listener, stop).await
}

/// Like [`run`], on an existing listener.
///
/// # Errors
/// The errors of [`run`].
pub async fn run_on(
    client: Client,
    config: Config,
    fleet: impl Into<Option<Fleet>>,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), Error> {
    let address = listener.local_addr().map_err(|source| Error::Listen { address: config.listen, source })?;
    let fleet = fleet.into();
    let tls = serve::Tls::default();
    let router = router(&config, fleet.clone())?;
    let answer = serve::serve(&listener, tls.clone(), router);
    let renew = install::keep(&client, &config, address, fleet.as_ref(), &tls);
    tokio::select! {
        () = wait_drained(&config, &stop) => Ok(()),
        () = answer => Ok(()),
        () = renew => Ok(()),
    }
}

/// Returns the router of all paths, each with its guard.
fn router(config: &Config, fleet: Option<Fleet>) -> Result<axum::Router, Error> {
    let of = |clients| config.extensions.iter().filter(move |more| more.clients == clients);
    let merged = |router: axum::Router, more: &Extension| router.merge(more.router.clone());
    let own = fleet.map(|fleet| serve::router(fleet, config.fail_open)).unwrap_or_default();
    let mut webhooks = of(Clients::ApiServer).fold(own, merged);
    if let Some(pem) = &config.client_ca {
        let authority = coracle_access::ClientCa::new(pem, config.clock.clone())?;
        webhooks = serve::require_client_of(webhooks, authority);
    }
    Ok(of(Clients::Router).fold(webhooks, merged))
}

/// Waits for `stop`, and then until the API server calls other endpoints.
async fn wait_drained(config: &Config, stop: &CancellationToken) {
    stop.cancelled().await;
    config.ready.send_replace(false);
    match config.reach {
        Reach::Service { .. } => sleep(config.drain).await,
        Reach::Url { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stop_drains_only_behind_a_service() {
        let url = Reach::Url { host: "localhost".into() };
        for (reach, want) in [(Config::default().reach, 5), (url, 0)] {
            let config = Config { reach, ready: watch::Sender::new(true), ..Config::default() };
            let (stop, began) = (CancellationToken::new(), Instant::now());
            stop.cancel();
            wait_drained(&config, &stop).await;
            assert_eq!(began.elapsed().as_secs(), want);
            assert!(!*config.ready.borrow());
        }
    }
}
