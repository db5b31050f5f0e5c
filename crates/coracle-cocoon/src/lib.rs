//! CocoonSets and CocoonHibernations: VMs behind pods, for clusters with nodes that have the taint
//! `virtual-kubelet.io/provider` and run their pods as VMs.
//!
//! ```text
//!  CocoonSet ─────────┐                                   ┌─▶ pods: create, annotate, delete
//!  CocoonHibernation ─┼─▶ observe ─▶ plan (pure) ─▶ execute ─▶ registry: look up and remove saved states
//!  pods ──────────────┘                   └─▶ status
//! ```
//! Annotations that the controllers write to the pods specify the VMs, and annotations that the node writes report their state
//! (`coracle_api::cocoon`). This crate never calls a node, a driver or a guest, and never moves the state of a VM.

mod config;
mod context;
mod error;
mod hibernation;
pub mod manifests;
mod metrics;
mod registry;
mod set;
mod webhook;

use std::sync::Arc;

use coracle_reconcile::{Election, Group, Runner};
use kube::Client;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

pub use config::{Config, HIBERNATIONS, SETS, Settings, Times};
pub use error::Error;
pub use manifests::{NAMESPACE, manifests};
pub use metrics::CocoonMetrics;
pub use registry::{InvalidRegistry, NoTags, OciTags, RegistryError, SnapshotTags};
pub use webhook::{Webhook, WebhookMetrics, WebhookSettings, configurations, reap, router};

use context::Context;
use hibernation::reconcile::Hibernations;
use set::reconcile::Sets;

/// Triggers of one object within this time are merged.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// Runs both controllers until `stop`. Cancel-safe: the next run continues where this one was cancelled.
///
/// # Errors
/// Only times of the election that contradict each other.
pub async fn run(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let group = Group {
        name: SETS,
        election: config.election.clone(),
        client,
        clock: config.clock.clone(),
        metrics: config.metrics.clone(),
    };
    group.run_with(&config, stop, work).await
}

async fn work(client: Client, config: Config, stop: CancellationToken) -> Result<(), Error> {
    let (cx, writers) = Context::new(client, config);
    let cx = Arc::new(cx);
    let runner = |name, workers| Runner {
        name,
        workers,
        debounce: DEBOUNCE,
        backoffs: cx.backoffs.clone(),
        metrics: cx.config.metrics.clone(),
        clock: cx.config.clock.clone(),
    };
    let controlled = async {
        if stop.run_until_cancelled(cx.ready()).await.is_none() {
            return;
        }
        let sets = runner(SETS, cx.config.set_workers).run(
            Arc::new(Sets(cx.clone())),
            cx.sets.clone(),
            cx.set_queue.clone(),
            stop.clone(),
        );
        let hibernations = runner(HIBERNATIONS, cx.config.hibernation_workers).run(
            Arc::new(Hibernations(cx.clone())),
            cx.hibernations.clone(),
            cx.hibernation_queue.clone(),
            stop.clone(),
        );
        tokio::join!(sets, hibernations);
    };
    tokio::select! {
        () = controlled => {}
        () = cx.watch(writers) => {}
    }
    Ok(())
}

/// Returns the leader election on the original's Lease.
#[must_use]
pub fn election(namespace: &str, identity: &str) -> Election {
    Election::new(namespace, coracle_api::cocoon::keys::LEASE, identity)
}
