//! MikromVMPools: a number of VMs from one template, replaced one after the other when the template changes.
//!
//! ```text
//!  MikromVMPool ─┐
//!  MikromVM ─────┴─▶ observe ─▶ plan (pure) ─▶ execute: create, delete and annotate MikromVMs ─▶ status
//! ```
//! The controller counts the VMs that it owns on a list from the API server before it creates or deletes, so a reconcile may be
//! interrupted at any point. Names of VMs derive from the template and a number, so a repeated creation creates no second VM.
//! The controller never calls a node.

mod execute;
mod observe;
mod plan;
mod reconcile;
mod status;
#[cfg(test)]
mod testing;

use std::{sync::Arc, time::Duration};

use coracle_reconcile::{ControllerConfig, ElectionError};
use kube::Client;
use tokio_util::sync::CancellationToken;

pub use reconcile::Error;

use observe::Context;
use reconcile::Pools;

/// Name of this controller in metrics, events and its Lease.
pub const CONTROLLER: &str = "vm-pool";

/// Number of concurrent reconciles.
const WORKERS: u16 = 4;
/// Triggers of one object within this time are merged.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// Reason why the controller ended.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct RunError(#[from] ElectionError);

/// Runs the controller until `stop`. Cancel-safe.
///
/// # Errors
/// Only times of the election that contradict each other.
pub async fn run(client: Client, config: ControllerConfig, stop: CancellationToken) -> Result<(), RunError> {
    config.group(CONTROLLER, client).run_with(&config, stop, work).await
}

async fn work(client: Client, config: ControllerConfig, stop: CancellationToken) -> Result<(), RunError> {
    let (cx, writer) = Context::new(client, &config);
    let cx = Arc::new(cx);
    let controlled = async {
        if stop.run_until_cancelled(cx.ready()).await.is_some() {
            let runner = config.runner(CONTROLLER, WORKERS, DEBOUNCE);
            runner.run(Arc::new(Pools(cx.clone())), cx.pools.clone(), cx.queue.clone(), stop.clone()).await;
        }
    };
    tokio::select! {
        () = controlled => {}
        () = cx.watch(writer) => {}
    }
    Ok(())
}
