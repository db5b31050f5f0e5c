//! The MikromVM controller: one custom resource, one microVM, through the host service or the agent service of a
//! node.
//!
//! The controller keeps no VM state of its own, and what it remembers between reconciles may be lost at any time. It never
//! calls a hypervisor. [`plan`] decides (pure), [`status`] derives the status (pure), `observe` reads, `execute` writes,
//! [`discovery`] follows nodes and declared VMs, [`placement`] chooses a node (pure), `streams` follows the agents' events.
//! Nodes lease the networks of their guests by [`subnets`].
//!
//! ```text
//!  watch ┐                 ┌─ observe ─ GetVM ─┐
//!  event ├─▶ queue ─▶ plan ┤                   ├─ again until no step is left ─▶ status
//!  30 s  ┘                 └─ execute ─ steps ─┘
//! ```

pub mod agent;
pub mod allow;
mod config;
mod context;
pub mod discovery;
mod error;
mod execute;
mod losses;
mod observe;
pub mod observed;
pub mod placement;
pub mod plan;
mod quota;
mod quota_usage;
mod reconcile;
pub mod status;
pub mod step;
mod streams;
pub mod subnets;
pub mod vm_spec;

use coracle_reconcile::Group;
use kube::Client;
use tokio_util::sync::CancellationToken;

pub use agent::{AgentTls, Connect, Deadlines};
pub use allow::AgentRule;
pub use config::{CONTROLLER, Config};
pub use discovery::{Fleet, Scope};
pub use error::Error;
pub use observed::Policy;
pub use placement::Overcommit;

use context::Context;

/// Runs the controller until `stop`: follows the fleet from the start, and reconciles while it is the leader.
///
/// # Errors
/// Only failures that a retry cannot resolve.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let (fleet, keep) = Fleet::watch(&client, &config.scope, config.overcommit, config.clock.clone());
    let keep = Box::pin(keep);
    let work = Box::pin(run_with(client, config, fleet, stop.clone()));
    tokio::select! {
        result = work => result,
        () = keep => Ok(()),
    }
}

/// Like [`run`], with a fleet that the caller keeps up to date (and shares with the webhook).
///
/// # Errors
/// The errors of [`run`].
pub async fn run_with(
    client: Client,
    config: Config,
    fleet: Fleet,
    stop: CancellationToken,
) -> Result<(), Error> {
    let cx = Context::new(&client, &config, fleet);
    let Config { election, clock, metrics, .. } = config;
    let group = Group { name: CONTROLLER, election, client, clock, metrics };
    let work = |token: CancellationToken| {
        let cx = cx.clone();
        async move {
            reconcile::control(&cx, &token).await;
            Ok(())
        }
    };
    group.run(stop, work).await
}
