//! Owner of the tasks of connections.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Owner of the tasks of upgraded connections. Clones share the tasks.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    /// Returns an owner without tasks. All tasks end when `stop` is cancelled.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { tracker: TaskTracker::new(), stop }
    }

    /// Closes all connections and waits for their tasks. Idempotent; cancel-safe. Sessions end at once, and their connections
    /// within the limits `last_message` and `linger` of [`crate::Limits`].
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Returns the number of connections that are open or being closed.
    #[must_use]
    pub fn open(&self) -> usize {
        self.tracker.len()
    }

    /// Runs the task of one connection, which ends soon after its token is cancelled.
    pub(crate) fn spawn<F>(&self, task: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.tracker.spawn(task(self.stop.child_token()));
    }
}
