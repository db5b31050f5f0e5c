//! The Service of a MikromVM with `spec.ports`, and the EndpointSlice that follows its address.
//!
//! ```text
//!  MikromVM ──────┐
//!  Service ───────┼─▶ observe ─▶ plan (pure) ─▶ execute
//!  EndpointSlice ─┘
//! ```
//! Both have the name of the VM, and the VM as their owner. A Service or EndpointSlice of another owner is never
//! changed; an Event of the VM reports it. Where no garbage collector runs, both go with the VM all the same.

mod config;
mod observe;
mod plan;
mod reconcile;

use std::{sync::Arc, time::Duration};

use coracle_reconcile::{Backoffs, ElectionError, Group, Runner};
use kube::Client;
use tokio_util::sync::CancellationToken;

pub use config::{CONTROLLER, Config};
pub use observe::Error;

use observe::Context;
use reconcile::Services;

/// Triggers of one object that come this close together are one.
const DEBOUNCE: Duration = Duration::from_millis(20);

/// Why the controller ended.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct RunError(#[from] ElectionError);

/// Runs the controller until `stop`. Cancel-safe.
///
/// # Errors
/// Only times of the election that do not fit together.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let (election, clock, metrics) = (config.election.clone(), config.clock.clone(), config.metrics.clone());
    let group = Group { name: CONTROLLER, election, client, clock, metrics };
    group.run_with(&config, stop, work).await
}

async fn work(client: Client, config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let (cx, writers) = Context::new(client, &config);
    let cx = Arc::new(cx);
    let runner = Runner {
        name: CONTROLLER,
        workers: 8,
        debounce: DEBOUNCE,
        backoffs: Arc::new(Backoffs::new(config.backoff)),
        metrics: config.metrics.clone(),
        clock: config.clock.clone(),
    };
    let controlled = async {
        if stop.run_until_cancelled(cx.ready()).await.is_some() {
            let runs =
                runner.run(Arc::new(Services(cx.clone())), cx.vms.clone(), cx.queue.clone(), stop.clone());
            tokio::join!(runs, cx.remove_orphans(&stop));
        }
    };
    tokio::select! {
        () = controlled => {}
        () = cx.watch(writers) => {}
    }
    Ok(())
}
