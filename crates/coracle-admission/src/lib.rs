//! The validating webhook for MikromVM: what the schema cannot say, because it needs other objects. And the listener, the
//! authority and the installation of other webhooks, as [`Extension`]s.
//!
//! It answers from the fleet that the controller watches anyway, on every replica, leader or not. It makes its own
//! authority, keeps it in a Secret that the replicas share, and installs itself. It never changes what it is shown.
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

/// The authority of webhooks where the cluster has no other.
pub const WEBHOOKS: AuthorityName =
    AuthorityName { secret: "coracle-webhook-ca", common_name: "coracle webhook authority" };

/// Objects of the API server that lead it to an extension: webhook configurations, an APIService.
pub type Objects = dyn Fn(&Endpoint) -> Vec<Value> + Send + Sync;

/// Who may ask an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// The API server, as [`Config::client_ca`] says.
    ApiServer,
    /// Its router decides, by the request extension [`PeerCertificates`](coracle_access::PeerCertificates).
    Router,
}

/// More paths behind the same listener and authority.
#[derive(Clone)]
pub struct Extension {
    /// Paths and what answers them. It limits its own bodies.
    pub router: axum::Router,
    /// Who may ask it.
    pub clients: Clients,
    /// Objects to install once it can answer.
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
    /// More webhooks and APIs.
    pub extensions: Vec<Extension>,
    /// Address to listen on. Port 0: any free one.
    pub listen: SocketAddr,
    /// Address under which the API server reaches it.
    pub reach: Reach,
    /// Name of the ValidatingWebhookConfiguration.
    pub name: String,
    /// Only objects of this namespace; `None`: all.
    pub namespace: Option<String>,
    /// Namespace of the authority's Secret.
    pub system_namespace: String,
    /// The authority that signs the webhook's certificate.
    pub authority: AuthorityName,
    /// Let objects pass when the webhook cannot answer, or no node is known.
    pub fail_open: bool,
    /// Life of the authority; renewed when a third is left.
    pub authority_life: Duration,
    /// Life of the certificate; renewed when a third is left.
    pub certificate_life: Duration,
    /// PEM of the authority that signs API servers' client certificates. Whoever shows none is not answered. Without it
    /// everyone who reaches the port is.
    pub client_ca: Option<Vec<u8>>,
    /// Says whether questions can be answered: there is a certificate, and the configuration is in the API server.
    pub ready: watch::Sender<bool>,
    /// Time that reviews are answered after `stop`, while a Service still has this endpoint. Zero with a URL.
    pub drain: Duration,
    /// ClusterRole that owns the configuration: it goes when that is removed. One that does not exist owns nothing.
    pub owner: String,
    /// The wall clock.
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

/// Why the webhook does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The port.
    #[error("listen on {address}")]
    Listen {
        /// Place.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The certificates.
    #[error(transparent)]
    Authority(#[from] coracle_authority::AuthorityError),
    /// The key does not fit the certificate.
    #[error("use the webhook's certificate")]
    Tls(#[from] rustls::Error),
    /// [`Config::client_ca`] holds no certificate, or one that cannot be read.
    #[error(transparent)]
    ClientCa(#[from] coracle_access::InvalidClientCa),
    /// The API server.
    #[error("{operation}")]
    Api {
        /// Operation.
        operation: &'static str,
        /// Why it failed.
        source: Box<kube::Error>,
    },
    /// A certificate or a key of the user's.
    #[error("cannot read {path}")]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// Why not.
        source: rustls::pki_types::pem::Error,
    },
}

/// Serves until `stop`, installs the webhooks once they can answer, and renews certificates. The fleet must be kept up to
/// date by the caller; without one only extensions are served.
///
/// # Errors
/// [`Error::Listen`] and [`Error::ClientCa`] at once; what fails later is tried again.
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

/// [`run`] on an existing listener.
///
/// # Errors
/// See [`run`].
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
        () = drained(&config, &stop) => Ok(()),
        () = answer => Ok(()),
        () = renew => Ok(()),
    }
}

/// All paths, each with its guard.
fn router(config: &Config, fleet: Option<Fleet>) -> Result<axum::Router, Error> {
    let of = |clients| config.extensions.iter().filter(move |more| more.clients == clients);
    let merged = |router: axum::Router, more: &Extension| router.merge(more.router.clone());
    let own = fleet.map(|fleet| serve::router(fleet, config.fail_open)).unwrap_or_default();
    let mut webhooks = of(Clients::ApiServer).fold(own, merged);
    if let Some(pem) = &config.client_ca {
        let authority = coracle_access::ClientCa::new(pem, config.clock.clone())?;
        webhooks = serve::only_clients_of(webhooks, authority);
    }
    Ok(of(Clients::Router).fold(webhooks, merged))
}

/// Waits for `stop`, and then until the API server sends its questions elsewhere.
async fn drained(config: &Config, stop: &CancellationToken) {
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
            drained(&config, &stop).await;
            assert_eq!(began.elapsed().as_secs(), want);
            assert!(!*config.ready.borrow());
        }
    }
}
