//! The authority of a cluster: it signs the certificates of nodes on request, publishes itself for them, and gives the
//! operator the certificate that it shows to nodes.
//!
//! ```text
//!  node ─ CertificateSigningRequest, signer coracle.dev/node ─▶ decide (pure) ─▶ approved, signed
//!   ▲                                                               ▲
//!   └── ConfigMap coracle-ca ◀── publish ── authority ── Secret ────┘
//!                                               ├─▶ files of the operator: ca.crt, tls.crt, tls.key
//!                                               └─▶ Secrets of servers in the cluster: the same keys
//! ```
//!
//! The requester's node comes from its token, which the API server checks: a node gets its own name and no other.

mod authority;
mod decide;
mod publish;
mod serving;
mod sign;

use std::path::PathBuf;
use std::time::Duration;

use coracle_reconcile::{Clock, ControllerMetrics, Election, ElectionError};
use kube::Client;
use tokio_util::sync::CancellationToken;

pub use authority::{Authority, AuthorityName, Holder, Leaf, authority};
pub use decide::{Decision, TOKEN_NODE, decide};
pub use serving::{InvalidServing, Serving};

/// The authority of nodes.
pub const NODES: AuthorityName =
    AuthorityName { secret: "coracle-ca", common_name: "coracle node authority" };
/// Name of the controller that signs, and of its Lease.
const CONTROLLER: &str = "coracle-authority";

/// Configuration of the authority.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where its Secret and its ConfigMap are.
    pub namespace: String,
    /// One replica signs; `None`: this one.
    pub election: Option<Election>,
    /// Common name of the operator's certificate.
    pub client_name: String,
    /// Where the operator's files are written, for this process alone.
    pub client_dir: PathBuf,
    /// Certificates of servers in the cluster, each kept in a Secret of the namespace.
    pub serving: Vec<Serving>,
    /// Life of the authority; replaced after two thirds.
    pub authority_life: Duration,
    /// Life of certificates; nodes renew theirs after 80 % of it, the operator after two thirds.
    pub certificate_life: Duration,
    /// Where reconciles are counted.
    pub metrics: ControllerMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl Config {
    /// A year for the authority, thirty days for certificates.
    #[must_use]
    pub fn new(namespace: String, client_dir: PathBuf) -> Self {
        let days = |days: u64| Duration::from_secs(86400 * days);
        Self {
            namespace,
            election: None,
            client_name: "coracle-operator".to_owned(),
            client_dir,
            serving: Vec::new(),
            authority_life: days(365),
            certificate_life: days(30),
            metrics: ControllerMetrics::default(),
            clock: Clock::system(),
        }
    }

    /// Election for the replica that signs.
    #[must_use]
    pub fn election(namespace: &str, identity: &str) -> Election {
        Election::new(namespace, CONTROLLER, identity)
    }
}

/// Why the authority cannot do its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// A certificate cannot be made.
    #[error("cannot {operation}")]
    Certificate {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: rcgen::Error,
    },
    /// The API server.
    #[error("cannot {operation}")]
    Api {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// The Secret is another's.
    #[error("Secret {name} holds no authority")]
    Secret {
        /// Its name.
        name: String,
    },
    /// A file of the operator's certificate.
    #[error("cannot write {}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// Times of the election.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

/// Publishes, issues and signs until `stop`. Failures are logged and tried again. Cancel-safe.
///
/// # Errors
/// Only times of the election that do not fit together.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), AuthorityError> {
    let keep = async {
        stop.run_until_cancelled(publish::keep(&client, &config)).await;
        Ok(())
    };
    tokio::try_join!(keep, Box::pin(sign::run(&client, &config, &stop))).map(|((), ())| ())
}
