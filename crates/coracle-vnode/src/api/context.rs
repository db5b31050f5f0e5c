//! Context that the handlers share.

use std::sync::Arc;

use coracle_host::Host;
use coracle_streaming::{Limits, Tasks};
use coracle_vm_pod::ssh::Password;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::stats::Rates;
use crate::table::PodTable;

/// Context of the handlers. Clones share it.
#[derive(Clone)]
pub(super) struct Context(Arc<Shared>);

/// Content of the context.
pub(super) struct Shared {
    pub(super) host: Host,
    pub(super) pods: PodTable,
    pub(super) node: String,
    pub(super) sync_loop: watch::Receiver<bool>,
    /// Upgraded connections.
    pub(super) sessions: Tasks,
    /// Connections to ports of pods.
    pub(super) forwards: TaskTracker,
    pub(super) limits: Limits,
    pub(super) rates: Rates,
    /// Password of guests without an agent.
    pub(super) ssh: Option<Password>,
    /// Cancelled when the server stops.
    pub(super) stop: CancellationToken,
}

impl std::ops::Deref for Context {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Context {
    pub(super) fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }

    pub(super) fn now(&self) -> Timestamp {
        Timestamp::from_millisecond(self.host.clock().now().0).unwrap_or_default()
    }

    /// Waits for forwarded connections to end. Sessions have ended before.
    pub(super) async fn stop(&self) {
        self.forwards.close();
        self.forwards.wait().await;
    }
}
