//! `coracle uninstall --cluster`: removes an installation in the order in which each part can still do its work. Looks, decides,
//! deletes, and looks again, until nothing is left.
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

/// Between two looks while something is being removed.
const LOOK: Duration = Duration::from_secs(1);

/// Why an installation is not removed, or not all of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UninstallError {
    /// Something must be decided by the administrator first. Nothing was removed since the last look.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The API server.
    #[error("cannot {operation}")]
    Api {
        /// What was tried.
        operation: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// What is being removed did not go.
    #[error("{waits_for} did not go within {} s", .within.as_secs())]
    Late {
        /// Kind and name.
        waits_for: String,
        /// The limit.
        within: Duration,
    },
}

/// Removes the installation. `say` hears of each step. Idempotent; what was begun is continued by the next run.
///
/// # Errors
/// [`UninstallError`]; what was removed until then stays removed.
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
