//! Runs controllers: one leader, a work queue, reconciles with spans and metrics, a retry with backoff,
//! shutdown.
//!
//! ```text
//!  Group::run ─ leader election ─▶ Runner::run ─ WorkQueue ─▶ Reconciler::reconcile ─▶ Ok: requeue later
//!                                                                                  └▶ Err: requeue, backoff
//! ```
//! A controller crate implements [`Reconciler`], whose pass is observe, plan, execute, status; watches and
//! other sources add objects to the [`WorkQueue`].

use std::{
    collections::HashSet,
    fmt::{self, Debug},
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use kube::{
    Client, Resource, ResourceExt as _,
    runtime::{
        controller::{self, Action, ReconcileRequest},
        reflector::Store,
        watcher,
    },
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span, warn};

use crate::{
    Backoffs, Clock, ControllerMetrics, Election, ElectionError, ReconcileResult, WallTime as _, WorkQueue,
};

/// Controllers that stop and start together: they run in one process at a time.
#[derive(Clone)]
pub struct Group {
    /// Name in metrics.
    pub name: &'static str,
    /// Leader election; `None`: this process is the only one.
    pub election: Option<Election>,
    /// Where the Lease is.
    pub client: Client,
    /// Clock of the Lease's times.
    pub clock: Clock,
    /// Where leadership is shown.
    pub metrics: ControllerMetrics,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Group {
    /// Runs `work` while this process leads, until `stop`. The token given to `work` is cancelled when
    /// leadership is lost; `work` is dropped before another process may lead.
    ///
    /// # Errors
    /// Times of the election that do not fit together; the error of `work`.
    pub async fn run<F, Fut, E>(self, stop: CancellationToken, mut work: F) -> Result<(), E>
    where
        F: FnMut(CancellationToken) -> Fut,
        Fut: Future<Output = Result<(), E>>,
        E: From<ElectionError>,
    {
        let Self { name, election, client, clock, metrics } = self;
        let mut lead = |token: CancellationToken| {
            let (work, metrics) = (work(token), metrics.clone());
            async move {
                let _leading = Leading::new(metrics, name);
                work.await
            }
        };
        match election {
            Some(election) => Box::pin(election.run(&client, &clock, &stop, lead)).await,
            None => Box::pin(lead(stop)).await,
        }
    }
}

impl Group {
    /// As [`Group::run`], for work that gets the client and a configuration of its own with each term of leadership.
    ///
    /// # Errors
    /// As [`Group::run`].
    pub async fn run_with<C, F, Fut, E>(self, config: &C, stop: CancellationToken, work: F) -> Result<(), E>
    where
        C: Clone,
        F: Fn(Client, C, CancellationToken) -> Fut,
        Fut: Future<Output = Result<(), E>>,
        E: From<ElectionError>,
    {
        let client = self.client.clone();
        self.run(stop, |token| Box::pin(work(client.clone(), config.clone(), token))).await
    }
}

/// Shows leadership while it exists, however the work ends.
struct Leading(ControllerMetrics, &'static str);

impl Leading {
    fn new(metrics: ControllerMetrics, name: &'static str) -> Self {
        metrics.leads(name, true);
        Self(metrics, name)
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        self.0.leads(self.1, false);
    }
}

/// One kind's controller.
pub trait Reconciler: Send + Sync + 'static {
    /// The kind.
    type Object: Resource + Clone + Debug + Send + Sync + 'static;
    /// Why a pass failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// One pass over one object, from any state: observe, plan, execute, status. `cached` may be stale; what
    /// creates or destroys is decided on a fresh read. The pass may be dropped at any `.await`.
    fn reconcile(
        &self,
        cached: Arc<Self::Object>,
    ) -> impl Future<Output = Result<Action, Self::Error>> + Send;

    /// Delay before the next pass for an error that is not a failure of the object. `None`: the object's
    /// backoff.
    fn retry_after(&self, _error: &Self::Error) -> Option<Duration> {
        None
    }

    /// True for errors that pass without anybody's action: counted, and logged at debug level only.
    fn is_expected(&self, error: &Self::Error) -> bool;

    /// A pass ended: for metrics of the controller's own.
    fn ended(&self, _outcome: ReconcileResult, _took: Duration) {}

    /// The number of triggered objects whose pass has not begun changed: for metrics of the controller's own.
    fn queued(&self, _waiting: usize) {}
}

/// How one controller runs.
#[derive(Clone, Debug)]
pub struct Runner {
    /// Name in metrics and spans.
    pub name: &'static str,
    /// Reconciles at once, at most one for each object.
    pub workers: u16,
    /// Triggers of one object within this time are one reconcile, urgent ones excepted.
    pub debounce: Duration,
    /// Delays after failures, by UID. A success resets the object's.
    pub backoffs: Arc<Backoffs<String>>,
    /// Where reconciles are counted.
    pub metrics: ControllerMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl Runner {
    /// Reconciles objects of `queue` until `stop`, then finishes the passes under way. `objects` resolves
    /// queued names; an object that is not there any more is skipped. Dropping the future drops the passes.
    pub fn run<R>(
        self,
        reconciler: Arc<R>,
        objects: Store<R::Object>,
        queue: WorkQueue<R::Object>,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()>
    where
        R: Reconciler,
        <R::Object as Resource>::DynamicType: Debug + Eq + Hash + Clone + Unpin + Send + Sync,
    {
        // The queue debounces; kube's own debounce would delay urgent objects, too.
        let config = controller::Config::default().concurrency(self.workers);
        let run = Arc::new(Run { runner: self, reconciler, queue, taken: Mutex::default() });
        let requests = stream::unfold(run.clone(), |run| async move {
            let object = run.queue.next(run.runner.debounce).await;
            run.waits(|taken| taken.insert((object.namespace.clone(), object.name.clone())));
            Some((Ok::<_, watcher::Error>(ReconcileRequest::from(object)), run))
        });
        controller::applier(
            |object: Arc<R::Object>, run: Arc<Run<R>>| run.pass(object).boxed(),
            |object: Arc<R::Object>, error: &R::Error, run: Arc<Run<R>>| {
                Action::requeue(run.retry_after(object.as_ref(), error))
            },
            run.clone(),
            objects,
            Box::pin(requests.take_until(stop.cancelled_owned())),
            config,
        )
        .for_each(move |ended| {
            match ended {
                Ok(_) | Err(controller::Error::ReconcilerFailed(..)) => {} // logged where it happened
                Err(controller::Error::ObjectNotFound(object)) => {
                    debug!(%object, "object is gone, skipped");
                    run.waits(|taken| taken.remove(&(object.namespace, object.name)));
                }
                Err(error) => debug!(%error, "queued object skipped"),
            }
            std::future::ready(())
        })
        .boxed()
    }
}

/// Namespace and name.
type Key = (Option<String>, String);

/// One run of a controller.
struct Run<R: Reconciler> {
    runner: Runner,
    reconciler: Arc<R>,
    queue: WorkQueue<R::Object>,
    /// Objects that were taken from the queue and wait for a worker.
    taken: Mutex<HashSet<Key>>,
}

impl<R: Reconciler> Run<R> {
    /// Changes what waits, and shows how much that is.
    fn waits(&self, change: impl FnOnce(&mut HashSet<Key>) -> bool) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if change(&mut taken) {
            let waiting = self.queue.len() + taken.len();
            self.runner.metrics.queue_depth(self.runner.name, waiting);
            self.reconciler.queued(waiting);
        }
    }

    async fn pass(self: Arc<Self>, object: Arc<R::Object>) -> Result<Action, R::Error> {
        let Runner { name: controller, backoffs, metrics, clock, .. } = &self.runner;
        let (ns, name) = (object.namespace(), object.name_any());
        self.waits(|taken| taken.remove(&(ns.clone(), name.clone())));
        let (running, began) = (metrics.begin(controller), Instant::now());
        let uid = object.uid().unwrap_or_default();
        let span = info_span!("reconcile", controller, ns, name, uid);
        let result = self.reconciler.reconcile(object).instrument(span).await;
        drop(running);
        let (outcome, took) = match &result {
            Ok(_) => (ReconcileResult::Ok, began.elapsed()),
            Err(_) => (ReconcileResult::Error, began.elapsed()),
        };
        if outcome == ReconcileResult::Ok {
            backoffs.reset(&uid);
        }
        metrics.ended(controller, outcome, took, clock.timestamp());
        self.reconciler.ended(outcome, took);
        result
    }

    fn retry_after(&self, object: &R::Object, error: &R::Error) -> Duration {
        let Runner { name: controller, backoffs, .. } = &self.runner;
        let uid = object.uid().unwrap_or_default();
        let wait = self.reconciler.retry_after(error).unwrap_or_else(|| backoffs.failed(uid.clone()));
        let (ns, name, cause) = (object.namespace(), object.name_any(), error as &dyn std::error::Error);
        match self.reconciler.is_expected(error) {
            true => debug!(controller, ns, name, uid, ?wait, error = cause, "reconcile failed"),
            false => warn!(controller, ns, name, uid, ?wait, error = cause, "reconcile failed"),
        }
        wait
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::atomic::AtomicUsize, sync::atomic::Ordering::Relaxed};

    use coracle_testkit::eventually;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::{
        reflector::{ObjectRef, store::Writer},
        watcher::Event,
    };

    use super::*;
    use crate::Backoff;

    /// Fails for the object `bad`.
    #[derive(Default)]
    struct Recorder {
        passes: Mutex<Vec<String>>,
        waiting: AtomicUsize,
    }

    impl Recorder {
        fn passes_of(&self, name: &str) -> usize {
            self.passes.lock().unwrap().iter().filter(|pass| *pass == name).count()
        }
    }

    impl Reconciler for Recorder {
        type Object = ConfigMap;
        type Error = io::Error;

        async fn reconcile(&self, cached: Arc<ConfigMap>) -> Result<Action, io::Error> {
            self.passes.lock().unwrap().push(cached.name_any());
            if cached.name_any() == "bad" { Err(io::Error::other("bad")) } else { Ok(Action::await_change()) }
        }

        fn is_expected(&self, _: &io::Error) -> bool {
            true
        }

        fn queued(&self, waiting: usize) {
            self.waiting.store(waiting, Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_retried_and_gone_objects_are_not_waiting() {
        let mut cache = Writer::<ConfigMap>::new(());
        cache.apply_watcher_event(&Event::Init);
        for name in ["good", "bad"] {
            let mut object = ConfigMap::default();
            (object.metadata.name, object.metadata.uid) = (Some(name.into()), Some(format!("uid-{name}")));
            cache.apply_watcher_event(&Event::InitApply(object));
        }
        cache.apply_watcher_event(&Event::InitDone);
        let queue = WorkQueue::default();
        for name in ["good", "bad", "gone", "good"] {
            queue.add(ObjectRef::new(name));
        }
        let backoff = Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) };
        let runner = Runner {
            name: "test",
            workers: 2,
            debounce: Duration::from_millis(200),
            backoffs: Arc::new(Backoffs::steady_for(2, backoff)),
            metrics: ControllerMetrics::default(),
            clock: Clock::system(),
        };
        let (recorder, stop, began) =
            (Arc::new(Recorder::default()), CancellationToken::new(), Instant::now());
        let metrics = runner.metrics.clone();
        let run = runner.run(recorder.clone(), cache.as_reader(), queue, stop.clone());
        let test = async {
            eventually("a fifth try", async || (recorder.passes_of("bad") == 5).then_some(())).await?;
            assert_eq!(recorder.passes_of("good"), 1, "two triggers are one pass");
            assert_eq!(recorder.waiting.load(Relaxed), 0, "what is gone does not wait");
            assert_eq!(metrics.reconciles("test"), 6);
            let took = began.elapsed().as_secs_f64();
            assert!(
                (4.5..6.0).contains(&took),
                "three times 1 s, then 2 s, with a jitter of a tenth: {took}"
            );
            stop.cancel();
            anyhow::Ok(())
        };
        let ((), tested) = tokio::join!(run, test);
        tested.unwrap();
    }
}
