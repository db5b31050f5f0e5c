//! The loop: look, decide, act, report, look again.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use coracle_api::bidnode::{BidNode, names};
use coracle_reconcile::{Outcome as Ended, apply_status};
use futures_util::{StreamExt as _, stream};
use kube::{
    Api, ResourceExt as _,
    runtime::{
        controller::{self, Action, ReconcileRequest},
        watcher,
    },
};
use tokio::{sync::mpsc::UnboundedReceiver, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span};

use crate::{
    CONTROLLER, Context, Error,
    demand::Need,
    error::api,
    execute::execute,
    mirror::{Owner, Quote},
    plan::{NodeView, Observed, Plan, plan},
    settings::{Settings, parse},
    status,
    watches::{Guarded, Ref},
};

/// Failures that wait the same time before it doubles.
const PATIENT: u32 = 3;

/// Reconciles what comes through `queue` until `stop`.
pub(crate) async fn control(cx: &Arc<Context>, queue: UnboundedReceiver<Ref>, stop: &CancellationToken) {
    let queue = stream::unfold(queue, |mut queue| async move { Some((queue.recv().await?, queue)) });
    let queue = queue.take_until(stop.clone().cancelled_owned());
    let queue = queue.map(|object| Ok::<_, watcher::Error>(ReconcileRequest::from(object)));
    controller::applier(
        |object: Arc<Guarded>, cx: Arc<Context>| Box::pin(timed(object, cx)),
        |object: Arc<Guarded>, error: &Error, cx: Arc<Context>| {
            let wait = cx.failures.failed(&object.uid().unwrap_or_default(), &cx);
            let error: &dyn std::error::Error = error;
            debug!(name = object.name_any(), ?wait, error, "to be tried again");
            Action::requeue(wait)
        },
        cx.clone(),
        cx.objects.clone(),
        Box::pin(queue),
        controller::Config::default().concurrency(cx.config.workers),
    )
    .for_each(|ended| async move {
        if let Err(error) = ended {
            // A queued object that is gone by now, or a failure that was told already.
            debug!(%error, "not reconciled");
        }
    })
    .await;
}

/// Failures in a row, by UID.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<HashMap<String, u32>>);

impl Failures {
    fn failed(&self, uid: &str, cx: &Context) -> Duration {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let n = all.entry(uid.to_owned()).or_default();
        *n = n.saturating_add(1);
        let times = &cx.config.times;
        spread(delay(*n, times.retry, times.retry_max))
    }

    pub(crate) fn reset(&self, uid: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}

/// After the n-th failure in a row: the same for the first three, then twice as long each time. Pure.
fn delay(n: u32, retry: Duration, max: Duration) -> Duration {
    retry.saturating_mul(2u32.saturating_pow(n.saturating_sub(PATIENT).min(16))).min(max)
}

/// Give or take a tenth, so that objects do not come together.
fn spread(time: Duration) -> Duration {
    time.mul_f64(0.9 + 0.2 * rand::random::<f64>())
}

async fn timed(object: Arc<Guarded>, cx: Arc<Context>) -> Result<Action, Error> {
    let running = cx.config.metrics.begin(CONTROLLER);
    let began = Instant::now();
    let span = info_span!("reconcile", kind = "BidNode", ns = object.namespace(), name = object.name_any());
    let result = reconcile(&object, &cx).instrument(span).await;
    drop(running);
    let ended = if result.is_ok() { Ended::Ok } else { Ended::Error };
    if result.is_ok() {
        cx.failures.reset(&object.uid().unwrap_or_default());
    }
    cx.config.metrics.ended(CONTROLLER, ended, began.elapsed(), cx.config.clock.now());
    cx.config.bid_metrics.reconciled(result.is_ok(), began.elapsed());
    result
}

/// All that bears on one object, at one moment.
struct Snapshot {
    settings: Result<Settings, String>,
    owner: Owner,
    quotes: BTreeMap<String, Quote>,
    synced: bool,
    nodes: Vec<NodeView>,
    need: Need,
    now_ms: i64,
}

impl Snapshot {
    fn take(cx: &Context, object: &BidNode) -> Self {
        let uid = object.uid().unwrap_or_default();
        Self {
            settings: parse(object),
            synced: cx.mirror.is_synced(),
            owner: cx.mirror.owner(&uid),
            quotes: cx.mirror.quotes_of(&object.spec.instance_type),
            nodes: cx.world.nodes(&format!(
                "{}/{}",
                object.namespace().unwrap_or_default(),
                object.name_any()
            )),
            need: cx.world.need(&uid),
            now_ms: cx.now_ms(),
        }
    }

    fn observed<'a>(&'a self, cx: &'a Context, object: &'a BidNode) -> Observed<'a> {
        Observed {
            object,
            settings: self.settings.as_ref().map_err(String::as_str),
            owner: &self.owner,
            quotes: &self.quotes,
            synced: self.synced,
            default_region: cx.config.default_region.as_deref(),
            nodes: &self.nodes,
            need: &self.need,
            now_ms: self.now_ms,
            times: &cx.config.times,
        }
    }
}

async fn reconcile(guard: &Guarded, cx: &Context) -> Result<Action, Error> {
    let Ok(cached) = &guard.0 else { return Ok(Action::await_change()) };
    let seen = Snapshot::take(cx, cached);
    let decided = plan(&seen.observed(cx, cached));
    if decided.steps.is_empty() {
        return pass(cx, cached, &seen, &decided).await;
    }
    // Caches trigger; what acts is decided on a fresh read.
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let objects: Api<BidNode> = Api::namespaced(cx.client.clone(), &namespace);
    let Some(fresh) = objects.get_opt(&name).await.map_err(api("read BidNode", &name))? else {
        return Ok(Action::await_change());
    };
    let seen = Snapshot::take(cx, &fresh);
    let decided = plan(&seen.observed(cx, &fresh));
    pass(cx, &fresh, &seen, &decided).await
}

/// Does what was decided and tells what is so.
async fn pass(cx: &Context, object: &BidNode, seen: &Snapshot, decided: &Plan) -> Result<Action, Error> {
    let (done, result) = execute(cx, object, &seen.owner, &decided.steps).await;
    if done.gone {
        return result.map(|()| Action::await_change());
    }
    let observed = seen.observed(cx, object);
    let uid = object.uid().unwrap_or_default();
    let (class, strategy, counts, cost) = status::gauged(&observed, &decided.facts);
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let metrics = &cx.config.bid_metrics;
    metrics.gauge(&uid, &namespace, &name, &object.spec.instance_type, class, strategy, counts, cost);
    report(cx, object, &observed, decided, &done.outcome).await?;
    for note in cx.mirror.take_notes(&uid) {
        cx.events.tell(object, note);
    }
    result?;
    let soon = done.stale.then_some(cx.config.times.wait);
    let again = soon.or(decided.again).unwrap_or_else(|| spread(cx.config.times.poll));
    Ok(Action::requeue(again))
}

async fn report(
    cx: &Context,
    object: &BidNode,
    observed: &Observed<'_>,
    decided: &Plan,
    outcome: &status::Outcome,
) -> Result<(), Error> {
    let status = status::derive(observed, &decided.facts, outcome);
    if object.status.as_ref() == Some(&status) {
        if decided.steps.is_empty() {
            cx.config.bid_metrics.noop();
        }
        return Ok(());
    }
    let objects: Api<BidNode> = Api::namespaced(cx.client.clone(), &object.namespace().unwrap_or_default());
    apply_status(&objects, object, object.status.as_ref(), &status, names::MANAGER).await?;
    cx.config.bid_metrics.wrote();
    let before = object.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    for note in status::news(before, &status.conditions) {
        cx.events.tell(object, note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_three_failures_wait_the_same_time() {
        let seconds = Duration::from_secs;
        for (n, want) in [(1, 30), (2, 30), (3, 30), (4, 60), (5, 120), (6, 240), (7, 300), (90, 300)] {
            assert_eq!(delay(n, seconds(30), seconds(300)), seconds(want), "failure {n}");
        }
        for _ in 0..100 {
            let wait = spread(seconds(60));
            assert!((54.0..=66.0).contains(&wait.as_secs_f64()));
        }
    }
}
