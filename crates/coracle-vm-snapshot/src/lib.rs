//! VMSnapshots and VMRestores: saved states of MikromVMs as objects, with owner and retention.
//!
//! ```text
//!  VMSnapshot ─▶ observe ─▶ plan (pure) ─▶ execute ─▶ node: save, delete     VMSnapshots beyond spec.retain
//!  VMRestore  ─▶ observe ─▶ plan (pure) ─▶ execute ─▶ MikromVM: created with cloneFrom, or sent back by its own move
//! ```
//! The node of a snapshot is stored before the node is called, and the name of the snapshot on the node derives from the UID of
//! the object, so every step may be repeated. This crate calls nodes only about snapshots; VMs belong to their own controller.

mod context;
mod nodes;
mod restore;
mod snapshot;

use std::{sync::Arc, time::Duration};

use coracle_reconcile::{ControllerConfig, ElectionError};
use kube::Client;
use tokio_util::sync::CancellationToken;

pub use context::Error;
pub use nodes::{NodeError, SnapshotNodes};

use context::Context;

/// Name of the group in metrics, events and its Lease.
pub const CONTROLLER: &str = "vm-snapshot";
/// Name of the controller of VMRestores in metrics.
pub const RESTORES: &str = "vm-restore";

/// Concurrent reconciles of each kind.
const WORKERS: u16 = 4;
/// Triggers of one object within this time are merged.
const DEBOUNCE: Duration = Duration::from_millis(20);

/// Configuration of the controllers.
#[derive(Clone, Debug)]
pub struct Config {
    /// Common configuration of all controllers.
    pub common: ControllerConfig,
    /// Snapshots on the nodes.
    pub nodes: Arc<dyn SnapshotNodes>,
}

/// Reason why the controllers ended.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct RunError(#[from] ElectionError);

/// Runs both controllers until `stop`. Cancel-safe.
///
/// # Errors
/// Only times of the election that contradict each other.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), RunError> {
    config.common.group(CONTROLLER, client).run_with(&config, stop, work).await
}

async fn work(client: Client, config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let (cx, writers) = Context::new(client, config);
    let cx = Arc::new(cx);
    let runner = |name| cx.config.common.runner(name, WORKERS, DEBOUNCE);
    let controlled = async {
        if stop.run_until_cancelled(cx.ready()).await.is_some() {
            let snapshots = runner(CONTROLLER).run(
                Arc::new(snapshot::Snapshots(cx.clone())),
                cx.snapshots.clone(),
                cx.snapshot_queue.clone(),
                stop.clone(),
            );
            let restores = runner(RESTORES).run(
                Arc::new(restore::Restores(cx.clone())),
                cx.restores.clone(),
                cx.restore_queue.clone(),
                stop.clone(),
            );
            tokio::join!(snapshots, restores);
        }
    };
    tokio::select! {
        () = controlled => {}
        () = cx.watch(writers) => {}
    }
    Ok(())
}
