//! The validating webhook for MikromVM: what the schema cannot say, because it needs other objects.
//!
//! It answers from the fleet that the controller watches anyway, on every replica, leader or not. It makes its own
//! authority, keeps it in a Secret that the replicas share, and installs itself. It never changes what it is shown.
//!
//! ```text
//!  API server ──TLS──▶ serve ──▶ judge (pure) ◀── Fleet
//!       ▲                ▲
//!       └── caBundle ── pki ──▶ Secret
//! ```

mod install;
pub mod judge;
mod pki;
mod serve;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use coracle_api::keys;
use coracle_microvm::Fleet;
use coracle_reconcile::{Clock, SystemClock};
use kube::Client;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// How the API server reaches the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// At `https://HOST:PORT` of the listener: the API server and we are on one machine.
    Url {
        /// A name or address that the API server can dial.
        host: String,
    },
    /// Through a Service.
    Service {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its port.
        port: u16,
    },
}

/// What the webhook is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen. Port 0: any.
    pub listen: SocketAddr,
    /// How the API server gets there.
    pub reach: Reach,
    /// Name of the ValidatingWebhookConfiguration.
    pub name: String,
    /// Only objects of this namespace; `None`: all.
    pub namespace: Option<String>,
    /// Where the authority's Secret is.
    pub system_namespace: String,
    /// Let objects pass when the webhook cannot answer, or no node is known.
    pub fail_open: bool,
    /// Life of the authority; renewed when a third is left.
    pub authority_life: Duration,
    /// Life of the certificate; renewed when a third is left.
    pub certificate_life: Duration,
    /// The wall clock.
    pub clock: Arc<dyn Clock>,
}

impl Default for Config {
    fn default() -> Self {
        let hours = |h: u64| Duration::from_secs(3600 * h);
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 9443)),
            reach: Reach::Service {
                namespace: keys::SYSTEM_NAMESPACE.into(),
                name: "coracle-webhook".into(),
                port: 443,
            },
            name: "coracle-mikromvm".into(),
            namespace: None,
            system_namespace: keys::SYSTEM_NAMESPACE.into(),
            fail_open: false,
            authority_life: hours(24 * 365),
            certificate_life: hours(24),
            clock: Arc::new(SystemClock),
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
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The certificates.
    #[error("{operation}")]
    Certificate {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        source: rcgen::Error,
    },
    /// The key does not fit the certificate.
    #[error("use the webhook's certificate")]
    Tls(#[from] rustls::Error),
    /// The API server.
    #[error("{operation}")]
    Api {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        source: Box<kube::Error>,
    },
    /// The Secret is not ours.
    #[error("Secret {name} holds no authority")]
    Secret {
        /// Its name.
        name: String,
    },
}

/// Serves until `stop`, installs the webhook once it can answer, and renews certificates. The fleet must be kept up to
/// date by the caller.
///
/// # Errors
/// [`Error::Listen`] at once; what fails later is tried again.
pub async fn run(client: Client, config: Config, fleet: Fleet, stop: CancellationToken) -> Result<(), Error> {
    let address = config.listen;
    let listener = TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })?;
    run_on(client, config, fleet, listener, stop).await
}

/// As [`run`], on a listener that the caller made.
///
/// # Errors
/// As [`run`].
pub async fn run_on(
    client: Client,
    config: Config,
    fleet: Fleet,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), Error> {
    let address = listener.local_addr().map_err(|source| Error::Listen { address: config.listen, source })?;
    let tls = serve::Tls::default();
    let answer = serve::serve(&listener, tls.clone(), fleet.clone(), config.fail_open);
    let renew = install::keep(&client, &config, address, &fleet, &tls);
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        () = answer => Ok(()),
        () = renew => Ok(()),
    }
}
