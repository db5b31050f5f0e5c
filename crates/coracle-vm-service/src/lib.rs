//! The Service of a MikromVM with `spec.ports`, and the EndpointSlice that follows its address.
//!
//! ```text
//!  MikromVM ──────┐
//!  Service ───────┼─▶ observe ─▶ plan (pure) ─▶ execute
//!  EndpointSlice ─┘
//! ```
//! Both objects have the name of the VM, and the VM as their owner. A Service or EndpointSlice of another owner is never
//! changed; an Event of the VM reports it. Where no garbage collector runs, this controller deletes both with the VM.

mod config;
mod execute;
mod observe;
mod orphans;
mod plan;
mod reconcile;

use std::{sync::Arc, time::Duration};

use coracle_reconcile::ElectionError;
use kube::Client;
use tokio_util::sync::CancellationToken;

pub use config::{CONTROLLER, Config};

use observe::Context;
use reconcile::Services;

/// Number of concurrent reconciles.
const WORKERS: u16 = 8;
/// Triggers of one object within this time are merged.
const DEBOUNCE: Duration = Duration::from_millis(20);

/// Reason why the controller ended.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct RunError(#[from] ElectionError);

/// Runs the controller until `stop`. Cancel-safe.
///
/// # Errors
/// Only times of the election that contradict each other.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), RunError> {
    config.common.group(CONTROLLER, client).run_with(&config, stop, work).await
}

async fn work(client: Client, config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let (cx, writers) = Context::new(client, &config);
    let cx = Arc::new(cx);
    let controlled = async {
        if stop.run_until_cancelled(cx.ready()).await.is_some() {
            let runner = config.common.runner(CONTROLLER, WORKERS, DEBOUNCE);
            let services = Arc::new(Services(cx.clone()));
            let runs = runner.run(services, cx.vms.clone(), cx.queue.clone(), stop.clone());
            tokio::join!(runs, cx.remove_orphans(&stop));
        }
    };
    tokio::select! {
        () = controlled => {}
        () = cx.watch(writers) => {}
    }
    Ok(())
}
