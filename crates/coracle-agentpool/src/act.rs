//! What all three controllers do alike: a queue, a reconcile, and a later one after a failure.

use std::{fmt::Debug, hash::Hash, sync::Arc};

use coracle_reconcile::Outcome;
use futures_util::{StreamExt as _, future::BoxFuture, stream};
use kube::{
    Resource, ResourceExt as _,
    runtime::{
        controller::{self, Action, ReconcileRequest},
        reflector::{ObjectRef, Store},
        watcher,
    },
};
use tokio::{sync::mpsc::UnboundedReceiver, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span};

use crate::{Context, Error};

/// One pass over one object.
pub(crate) type Reconcile<K> = fn(Arc<K>, Arc<Context>) -> BoxFuture<'static, Result<Action, Error>>;

/// Reconciles what comes through `queue` until `stop`; what runs then is finished, or cut off by the caller.
pub(crate) async fn control<K>(
    cx: &Arc<Context>,
    name: &'static str,
    store: Store<K>,
    queue: UnboundedReceiver<ObjectRef<K>>,
    workers: u16,
    stop: &CancellationToken,
    reconcile: Reconcile<K>,
) where
    K: Resource + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Debug + Eq + Hash + Clone + Unpin + Send + Sync,
{
    let queue = stream::unfold(queue, |mut queue| async move { Some((queue.recv().await?, queue)) });
    let queue = queue.take_until(stop.clone().cancelled_owned());
    let queue = queue.map(|object| Ok::<_, watcher::Error>(ReconcileRequest::from(object)));
    controller::applier(
        move |object: Arc<K>, cx: Arc<Context>| Box::pin(timed(name, object, cx, reconcile)),
        |object: Arc<K>, error: &Error, cx: Arc<Context>| {
            let wait = cx.backoffs.failed(object.uid().unwrap_or_default());
            let error: &dyn std::error::Error = error;
            debug!(name = object.name_any(), ?wait, error, "to be tried again");
            Action::requeue(wait)
        },
        cx.clone(),
        store,
        Box::pin(queue),
        controller::Config::default().debounce(cx.config.times.debounce).concurrency(workers),
    )
    .for_each(|ended| async move {
        if let Err(error) = ended {
            // A queued object that is gone by now, or a failure that was told already.
            debug!(%error, "not reconciled");
        }
    })
    .await;
}

async fn timed<K>(
    name: &'static str,
    object: Arc<K>,
    cx: Arc<Context>,
    reconcile: Reconcile<K>,
) -> Result<Action, Error>
where
    K: Resource + Send + Sync,
{
    let running = cx.config.metrics.begin(name);
    let began = Instant::now();
    let span = info_span!("reconcile", controller = name, ns = object.namespace(), name = object.name_any());
    let result = reconcile(object, cx.clone()).instrument(span).await;
    drop(running);
    let outcome = if result.is_ok() { Outcome::Ok } else { Outcome::Error };
    cx.config.metrics.ended(name, outcome, began.elapsed(), cx.config.clock.now());
    result
}
