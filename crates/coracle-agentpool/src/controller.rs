//! Work queue and reconcile loop, shared by the controllers of all three kinds.

use std::{fmt::Debug, hash::Hash, sync::Arc, time::Duration};

use coracle_reconcile::{Action, Backoffs, ReconcileResult, Reconciler, Runner, WorkQueue};
use futures_util::future::BoxFuture;
use kube::{Resource, runtime::reflector::Store};
use tokio_util::sync::CancellationToken;

use crate::{Context, Error};

/// Reconcile of one object.
pub(crate) type Reconcile<K> = fn(Arc<K>, Arc<Context>) -> BoxFuture<'static, Result<Action, Error>>;

/// Reconciles objects from `queue` until `stop`. Running reconciles finish unless the caller drops the future.
pub(crate) async fn run<K>(
    cx: &Arc<Context>,
    name: &'static str,
    store: Store<K>,
    queue: WorkQueue<K>,
    workers: u16,
    stop: &CancellationToken,
    reconcile: Reconcile<K>,
) where
    K: Resource + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Debug + Eq + Hash + Clone + Unpin + Send + Sync,
{
    let runner = Runner {
        name,
        workers,
        debounce: cx.config.times.debounce,
        // Backoffs of reconciles that end in an error. Reconciles that report a failure use `Context::backoffs`.
        backoffs: Arc::new(Backoffs::new(cx.config.backoff)),
        metrics: cx.config.metrics.clone(),
        clock: cx.config.clock.clone(),
    };
    let controller = Controller { name, cx: cx.clone(), reconcile };
    runner.run(Arc::new(controller), store, queue, stop.clone()).await;
}

/// Controller of one kind.
struct Controller<K> {
    name: &'static str,
    cx: Arc<Context>,
    reconcile: Reconcile<K>,
}

impl<K> Reconciler for Controller<K>
where
    K: Resource + Clone + Debug + Send + Sync + 'static,
{
    type Object = K;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<K>) -> Result<Action, Error> {
        (self.reconcile)(cached, self.cx.clone()).await
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_conflict()
    }

    fn ended(&self, outcome: ReconcileResult, took: Duration) {
        self.cx.config.pool_metrics.record_reconcile(self.name, outcome == ReconcileResult::Ok, took);
    }

    fn queued(&self, waiting: usize) {
        self.cx.config.pool_metrics.set_queue_depth(self.name, waiting);
    }
}
