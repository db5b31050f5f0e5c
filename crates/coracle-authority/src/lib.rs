//! Certificate authority of a cluster. It signs the certificates of nodes on request, publishes its own certificate for them,
//! and issues the operator's client certificate for nodes.
//!
//! ```text
//!  node ─ CertificateSigningRequest, signer coracle.dev/node ─▶ decide (pure) ─▶ approved, signed
//!   ▲                                                               ▲
//!   └── ConfigMap coracle-ca ◀── publish ── authority ── Secret ────┘
//!                                               ├─▶ files of the operator: ca.crt, tls.crt, tls.key
//!                                               └─▶ Secrets of servers in the cluster: the same keys
//! ```
//!
//! The requester's node comes from its token, which the API server verifies: a node receives a certificate for its own name and
//! no other.

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

/// Certificate authority of nodes.
pub const NODES: AuthorityName =
    AuthorityName { secret: "coracle-ca", common_name: "coracle node authority" };
/// Name of the signing controller, and of its Lease.
const CONTROLLER: &str = "coracle-authority";

/// Configuration of the authority.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the authority's Secret and ConfigMap.
    pub namespace: String,
    /// Leader election of the replica that signs; `None`: this process signs.
    pub election: Option<Election>,
    /// Common name of the operator's certificate.
    pub client_name: String,
    /// Directory of the operator's certificate files, for this process alone.
    pub client_dir: PathBuf,
    /// Certificates of servers in the cluster, each stored in a Secret of the namespace.
    pub serving: Vec<Serving>,
    /// Lifetime of the authority; it is replaced after two thirds.
    pub authority_life: Duration,
    /// Lifetime of certificates; nodes renew theirs after 80 % of it, the operator after two thirds.
    pub certificate_life: Duration,
    /// Metrics that count the reconciles.
    pub metrics: ControllerMetrics,
    /// Wall clock.
    pub clock: Clock,
}

impl Config {
    /// Returns a configuration with a year for the authority and thirty days for certificates.
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

    /// Returns the leader election of the replica that signs.
    #[must_use]
    pub fn election(namespace: &str, identity: &str) -> Election {
        Election::new(namespace, CONTROLLER, identity)
    }
}

/// Reason why the authority failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// A certificate cannot be issued.
    #[error("cannot {operation}")]
    Certificate {
        /// Operation that failed.
        operation: &'static str,
        /// Reason of the failure.
        source: rcgen::Error,
    },
    /// A call to the API server failed.
    #[error("cannot {operation}")]
    Api {
        /// Operation that failed.
        operation: &'static str,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
    /// The Secret does not contain an authority.
    #[error("Secret {name} holds no authority")]
    Secret {
        /// Name of the Secret.
        name: String,
    },
    /// A file of the operator's certificate cannot be written.
    #[error("cannot write {}", .path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The times of the election contradict each other.
    #[error(transparent)]
    Election(#[from] ElectionError),
}

/// Publishes, issues and signs until `stop`. Failures are logged and retried. Cancel-safe.
///
/// # Errors
/// Only times of the election that contradict each other.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), AuthorityError> {
    let keep = async {
        stop.run_until_cancelled(publish::keep(&client, &config)).await;
        Ok(())
    };
    tokio::try_join!(keep, Box::pin(sign::run(&client, &config, &stop))).map(|((), ())| ())
}
