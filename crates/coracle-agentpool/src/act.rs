//! What all three controllers do alike: a queue, a reconcile, and a later one after a failure.

use std::{
    collections::HashSet,
    fmt::Debug,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

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
    let waiting = Arc::new(Waiting { name, cx: cx.clone(), objects: Mutex::default() });
    let came = waiting.clone();
    let queue = queue
        .inspect(move |object| came.note(|all| all.insert(named(&object.name, object.namespace.as_deref()))));
    let queue = queue.map(|object| Ok::<_, watcher::Error>(ReconcileRequest::from(object)));
    controller::applier(
        move |object: Arc<K>, cx: Arc<Context>| {
            waiting.note(|all| all.remove(&named(&object.name_any(), object.namespace().as_deref())));
            Box::pin(timed(name, object, cx, reconcile))
        },
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

/// Objects that were triggered and whose reconcile has not begun.
struct Waiting {
    name: &'static str,
    cx: Arc<Context>,
    objects: Mutex<HashSet<String>>,
}

impl Waiting {
    fn note(&self, change: impl FnOnce(&mut HashSet<String>) -> bool) {
        let mut all = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        if change(&mut all) {
            self.cx.config.pool_metrics.waiting(self.name, all.len());
            self.cx.config.metrics.queue_depth(self.name, all.len());
        }
    }
}

fn named(name: &str, namespace: Option<&str>) -> String {
    format!("{}/{name}", namespace.unwrap_or_default())
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
    cx.config.pool_metrics.reconciled(name, result.is_ok(), began.elapsed());
    cx.config.metrics.ended(name, outcome, began.elapsed(), cx.config.clock.now());
    result
}
