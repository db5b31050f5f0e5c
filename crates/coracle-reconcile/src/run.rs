//! Runs controllers: one leader, a work queue, reconciles with spans and metrics, retry with backoff, shutdown.
//!
//! ```text
//!  Group::run ─ leader election ─▶ Runner::run ─ WorkQueue ─▶ Reconciler::reconcile ─▶ Ok: requeue later
//!                                                                                  └▶ Err: requeue, backoff
//! ```
//! A controller crate implements [`Reconciler`] with observe, plan, execute and status; watches and other sources add objects
//! to the [`WorkQueue`].

use std::{
    collections::{HashMap, HashSet},
    fmt::{self, Debug},
    hash::Hash,
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use kube::{
    Client, Resource, ResourceExt as _,
    runtime::reflector::{ObjectRef, Store},
};
use tokio::time::Instant;
use tokio_util::{
    sync::CancellationToken,
    time::{DelayQueue, delay_queue},
};
use tracing::{Instrument as _, debug, info_span, warn};

use crate::{
    Backoffs, Clock, ControllerMetrics, Election, ElectionError, ReconcileResult, WallTime as _, WorkQueue,
};

/// Longest requeue time, because the timers of tokio are limited.
const LATEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Controllers that start and stop together, and run in one process at a time.
#[derive(Clone)]
pub struct Group {
    /// Name in metrics.
    pub name: &'static str,
    /// Leader election; `None`: this process is the only one.
    pub election: Option<Election>,
    /// Client for the Lease.
    pub client: Client,
    /// Clock for the times in the Lease.
    pub clock: Clock,
    /// Metrics that report leadership.
    pub metrics: ControllerMetrics,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Group {
    /// Runs `work` while this process leads, until `stop`. The token given to `work` is cancelled when leadership is lost;
    /// `work` is dropped before another process may lead.
    ///
    /// # Errors
    /// Election times that contradict each other; the error of `work`.
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
    /// Like [`Group::run`], for work that receives its own client and configuration with each term of leadership.
    ///
    /// # Errors
    /// The errors of [`Group::run`].
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

/// Guard that reports leadership in the metrics until it is dropped.
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

/// Controller of one kind.
pub trait Reconciler: Send + Sync + 'static {
    /// Kind of object.
    type Object: Resource + Clone + Debug + Send + Sync + 'static;
    /// Reason why a reconcile failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Reconciles one object from any state: observe, plan, execute, status. `cached` may be stale; decisions to create or
    /// destroy need a fresh read. The reconcile may be dropped at any `.await`.
    fn reconcile(
        &self,
        cached: Arc<Self::Object>,
    ) -> impl Future<Output = Result<Action, Self::Error>> + Send;

    /// Returns the delay before the next reconcile for an error that is not a failure of the object. `None`: the object's
    /// backoff.
    fn retry_after(&self, _error: &Self::Error) -> Option<Duration> {
        None
    }

    /// True for errors that resolve without intervention: they are counted, and logged at debug level only.
    fn is_expected(&self, error: &Self::Error) -> bool;

    /// Called when a queued object no longer exists.
    fn gone(&self, _object: &ObjectRef<Self::Object>)
    where
        <Self::Object as Resource>::DynamicType: Hash + Eq,
    {
    }

    /// Called at the end of a reconcile, for metrics of the controller's own.
    fn ended(&self, _outcome: ReconcileResult, _took: Duration) {}

    /// Called when the number of waiting objects has changed, for metrics of the controller's own.
    fn queued(&self, _waiting: usize) {}
}

/// Settings of one controller.
#[derive(Clone, Debug)]
pub struct Runner {
    /// Name in metrics and spans.
    pub name: &'static str,
    /// Concurrent reconciles, at most one per object.
    pub workers: u16,
    /// Triggers of one object within this time are merged, except urgent ones.
    pub debounce: Duration,
    /// Delays after failures, by UID. A success resets the delay of the object.
    pub backoffs: Arc<Backoffs<String>>,
    /// Metrics that count the reconciles.
    pub metrics: ControllerMetrics,
    /// Wall clock.
    pub clock: Clock,
}

impl Runner {
    /// Reconciles objects of `queue` until `stop`, then finishes the reconciles in progress. `objects` resolves queued names;
    /// an object that no longer exists is skipped. Dropping the future drops the reconciles.
    ///
    /// Objects are taken in the order in which they were triggered or due, also under overload, so that no object starves. (The
    /// scheduler of kube takes an arbitrary waiting object.)
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
        let run = Run { runner: self, reconciler, queue };
        async move { run.run_until(&objects, &stop).await }.boxed()
    }
}

/// Time of the next reconcile of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action(Option<Duration>);

impl Action {
    /// Reconciles again after this time, unless a trigger comes before.
    #[must_use]
    pub const fn requeue(after: Duration) -> Self {
        Self(Some(after))
    }

    /// Reconciles again only when triggered.
    #[must_use]
    pub const fn await_change() -> Self {
        Self(None)
    }
}

/// One run of a controller.
struct Run<R: Reconciler> {
    runner: Runner,
    reconciler: Arc<R>,
    queue: WorkQueue<R::Object>,
}

impl<R: Reconciler> Run<R>
where
    <R::Object as Resource>::DynamicType: Debug + Eq + Hash + Clone + Unpin + Send + Sync,
{
    async fn run_until(&self, objects: &Store<R::Object>, stop: &CancellationToken) {
        let mut passes = FuturesUnordered::new();
        let mut running = HashSet::new();
        // Objects that were triggered during their reconcile.
        let mut again = HashSet::new();
        let mut later = Later::default();
        while !stop.is_cancelled() || !passes.is_empty() {
            let is_free = passes.len() < usize::from(self.runner.workers.max(1)) && !stop.is_cancelled();
            tokio::select! {
                () = stop.cancelled(), if !stop.is_cancelled() => {}
                Some((object, Action(requeue))) = passes.next() => {
                    running.remove(&object);
                    match requeue {
                        _ if again.remove(&object) => self.queue.add(object),
                        Some(after) => later.add(object, after),
                        None => {}
                    }
                    self.report_queue_depth();
                }
                Some(object) = later.next() => self.queue.add_due(object),
                object = self.queue.next(self.runner.debounce), if is_free => {
                    if running.contains(&object) {
                        again.insert(object);
                        continue;
                    }
                    // The outcome of this reconcile determines the time of the next one.
                    later.remove(&object);
                    self.report_queue_depth();
                    match objects.get(&object) {
                        Some(cached) => {
                            running.insert(object.clone());
                            passes.push(async move { (object, self.reconcile_one(cached).await) });
                        }
                        None => {
                            debug!(%object, "object is gone, skipped");
                            self.reconciler.gone(&object);
                        }
                    }
                }
            }
        }
    }

    fn report_queue_depth(&self) {
        let waiting = self.queue.len();
        self.runner.metrics.queue_depth(self.runner.name, waiting);
        self.reconciler.queued(waiting);
    }

    async fn reconcile_one(&self, object: Arc<R::Object>) -> Action {
        let Runner { name: controller, backoffs, metrics, clock, .. } = &self.runner;
        let (ns, name) = (object.namespace(), object.name_any());
        let (running, began) = (metrics.begin(controller), Instant::now());
        let uid = object.uid().unwrap_or_default();
        let span = info_span!("reconcile", controller, ns, name, uid);
        let result = self.reconciler.reconcile(object.clone()).instrument(span).await;
        drop(running);
        let outcome = if result.is_ok() { ReconcileResult::Ok } else { ReconcileResult::Error };
        let took = began.elapsed();
        if outcome == ReconcileResult::Ok {
            backoffs.reset(&uid);
        }
        metrics.ended(controller, outcome, took, clock.timestamp());
        self.reconciler.ended(outcome, took);
        result.unwrap_or_else(|error| Action::requeue(self.retry_after(&object, &error)))
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

/// Objects whose next reconcile has a time.
struct Later<K: Resource> {
    queue: DelayQueue<ObjectRef<K>>,
    keys: HashMap<ObjectRef<K>, delay_queue::Key>,
}

impl<K: Resource> Default for Later<K> {
    fn default() -> Self {
        Self { queue: DelayQueue::new(), keys: HashMap::new() }
    }
}

impl<K> Later<K>
where
    K: Resource,
    K::DynamicType: Clone + Eq + Hash,
{
    fn add(&mut self, object: ObjectRef<K>, after: Duration) {
        self.remove(&object);
        let key = self.queue.insert(object.clone(), after.min(LATEST));
        self.keys.insert(object, key);
    }

    fn remove(&mut self, object: &ObjectRef<K>) {
        if let Some(key) = self.keys.remove(object) {
            self.queue.remove(&key);
        }
    }

    /// Waits for the next object whose time has come; `None`: no object has a time.
    async fn next(&mut self) -> Option<ObjectRef<K>> {
        let object = self.queue.next().await?.into_inner();
        self.keys.remove(&object);
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Mutex, atomic::AtomicUsize, atomic::Ordering::Relaxed},
    };

    use coracle_testkit::eventually;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::{reflector::store::Writer, watcher::Event};

    use super::*;
    use crate::Backoff;

    /// Reconciler that fails for the object `bad`.
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

    /// Reconciler with overload: each object is due again at once, and one object is reconciled at a time.
    #[derive(Default)]
    struct Busy(Mutex<HashMap<String, usize>>);

    impl Reconciler for Busy {
        type Object = ConfigMap;
        type Error = io::Error;

        async fn reconcile(&self, cached: Arc<ConfigMap>) -> Result<Action, io::Error> {
            tokio::time::sleep(Duration::from_millis(10)).await;
            *self.0.lock().unwrap().entry(cached.name_any()).or_default() += 1;
            Ok(Action::requeue(Duration::from_millis(1)))
        }

        fn is_expected(&self, _: &io::Error) -> bool {
            true
        }
    }

    #[tokio::test(start_paused = true)]
    async fn overloaded_runner_serves_all_objects_equally() {
        let mut cache = Writer::<ConfigMap>::new(());
        let queue = WorkQueue::default();
        cache.apply_watcher_event(&Event::Init);
        for n in 0..50 {
            let mut object = ConfigMap::default();
            object.metadata.name = Some(format!("object-{n}"));
            queue.add(ObjectRef::from_obj(&object));
            cache.apply_watcher_event(&Event::InitApply(object));
        }
        cache.apply_watcher_event(&Event::InitDone);
        let (busy, stop) = (Arc::new(Busy::default()), CancellationToken::new());
        let backoff = Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) };
        let runner = Runner {
            name: "test",
            workers: 1,
            debounce: Duration::from_millis(20),
            backoffs: Arc::new(Backoffs::steady_for(2, backoff)),
            metrics: ControllerMetrics::default(),
            clock: Clock::system(),
        };
        let run = runner.run(busy.clone(), cache.as_reader(), queue, stop.clone());
        let time = async {
            tokio::time::sleep(Duration::from_secs(10)).await;
            stop.cancel();
        };
        tokio::join!(run, time);
        let passes = busy.0.lock().unwrap();
        let (least, most) = (passes.values().min().unwrap(), passes.values().max().unwrap());
        assert!(
            passes.len() == 50 && most - least <= 1,
            "{} objects, {least} to {most} passes",
            passes.len()
        );
    }
}
