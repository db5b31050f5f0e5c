//! `coracle doctor --cluster`: reports the problems of an installation and their remedies. It reads and dials, and changes
//! nothing.
//!
//! ```text
//!  API server, nodes ─▶ observe ─▶ Observed ─▶ judge (pure) ─▶ findings
//! ```

mod dial;
mod judge;
mod observe;
mod rights;

use jiff::Timestamp;
use kube::Client;

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Subject of the check, like `node n1`.
    pub check: String,
    /// State of the subject.
    pub state: State,
    /// Observed details.
    pub detail: String,
    /// Remedy; empty when no action is needed.
    pub help: String,
}

/// State of a checked subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The subject works as intended.
    Good,
    /// The subject works now, but needs attention.
    Limited,
    /// The subject does not work.
    Broken,
}

/// Checks the installation whose operator is in `namespace`. A failed read is a finding.
pub async fn examine(client: &Client, namespace: &str, now: Timestamp) -> Vec<Finding> {
    judge::judge(&observe::observe(client, namespace, now).await)
}
