//! `coracle uninstall --cluster`: removes an installation in an order in which each part can still do its work. It observes,
//! plans and deletes repeatedly until nothing is left.
//!
//! ```text
//!  objects of users ─▶ webhooks ─▶ operators and nodes ─▶ policy, rights ─▶ namespaces, requests ─▶ definitions
//!  (their operator ends VMs and removes finalizers)
//! ```

mod execute;
mod observe;
mod plan;

use std::time::Duration;

use kube::Client;
use tokio::time::{Instant, sleep};

use plan::Plan;
pub use plan::{Options, Refusal};

/// Interval between observations while an object is being removed.
const LOOK: Duration = Duration::from_secs(1);

/// Reason why an installation was not removed, or only in part.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UninstallError {
    /// The administrator must make a decision first. Nothing was removed since the last observation.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A call to the API server failed.
    #[error("cannot {operation}")]
    Api {
        /// Operation that failed.
        operation: String,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
    /// An object was not removed in time.
    #[error("{waits_for} did not go within {} s", .within.as_secs())]
    Late {
        /// Kind and name of the object.
        waits_for: String,
        /// Time limit.
        within: Duration,
    },
}

/// Removes the installation. `say` is called for each step. Idempotent; the next run continues an incomplete removal.
///
/// # Errors
/// [`UninstallError`]; objects that were removed before stay removed.
pub async fn uninstall(
    client: &Client,
    options: &Options,
    limit: Duration,
    mut say: impl FnMut(&str),
) -> Result<(), UninstallError> {
    let deadline = Instant::now() + limit;
    let mut said = String::new();
    loop {
        let seen = observe::observe(client, options).await?;
        let (waits_for, pause) = match plan::plan(&seen, options)? {
            Plan::Done => return Ok(()),
            Plan::Wait(what) => (what, LOOK),
            Plan::Delete(targets) => {
                for target in &targets {
                    say(&format!("deleting {target}"));
                    execute::delete(client, target).await?;
                }
                (names(&targets), Duration::ZERO)
            }
            Plan::Abandon(targets) => {
                for target in &targets {
                    say(&format!("removing the finalizers of {target}"));
                    execute::abandon(client, target).await?;
                }
                (names(&targets), Duration::ZERO)
            }
        };
        if Instant::now() >= deadline {
            return Err(UninstallError::Late { waits_for, within: limit });
        }
        if pause > Duration::ZERO && waits_for != said {
            say(&format!("waiting for {waits_for}"));
            said = waits_for;
        }
        sleep(pause).await;
    }
}

fn names(targets: &[plan::Target]) -> String {
    targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
