//! `coracle doctor --cluster`: what is wrong with an installation, and what to do about it. It reads and dials, and changes
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

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Subject, like `node n1`.
    pub check: String,
    /// How it is.
    pub state: State,
    /// What was found.
    pub detail: String,
    /// What to do about it; empty when nothing is to be done.
    pub help: String,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// As it should be.
    Good,
    /// It works now, and should be looked at.
    Limited,
    /// It does not work.
    Broken,
}

/// Looks at the installation whose operator is in `namespace`. What cannot be read is a finding.
pub async fn examine(client: &Client, namespace: &str, now: Timestamp) -> Vec<Finding> {
    judge::judge(&observe::observe(client, namespace, now).await)
}
