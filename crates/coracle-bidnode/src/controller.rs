//! The controller: `observe`, `plan`, `execute` and `status`, in this order. Steps that a preemption notice needs are executed
//! first, in a reconcile of their own.

use std::{sync::Arc, time::Duration};

use coracle_api::bidnode::{BidNode, names};
use coracle_reconcile::{Action, ReconcileResult, Reconciler, Runner, apply_status, spread};
use kube::{Api, ResourceExt as _};
use tokio_util::sync::CancellationToken;

use crate::{
    Context, Error,
    context::CONTROLLER,
    error::api,
    execute::execute,
    observe::Snapshot,
    plan::{Observed, Plan, plan},
    status,
    triggers::Guarded,
};

/// Reconciles queued objects until `stop`.
pub(crate) async fn run(cx: &Arc<Context>, stop: &CancellationToken) {
    let runner = Runner {
        name: CONTROLLER,
        workers: cx.config.workers,
        debounce: cx.config.times.debounce,
        backoffs: cx.backoffs.clone(),
        metrics: cx.config.metrics.clone(),
        clock: cx.config.clock.clone(),
    };
    runner.run(cx.clone(), cx.objects.clone(), cx.triggers.queue.clone(), stop.clone()).await;
}

impl Reconciler for Context {
    type Object = Guarded;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<Guarded>) -> Result<Action, Error> {
        reconcile(&cached, self).await
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_transient()
    }

    fn ended(&self, outcome: ReconcileResult, took: Duration) {
        self.config.bid_metrics.observe_reconcile(outcome == ReconcileResult::Ok, took);
    }
}

async fn reconcile(guard: &Guarded, cx: &Context) -> Result<Action, Error> {
    let Ok(cached) = &guard.0 else { return Ok(Action::await_change()) };
    let snapshot = Snapshot::take(cx, cached);
    let planned = plan(&snapshot.observed(cx, cached));
    if planned.steps.is_empty() {
        return carry_out(cx, cached, &snapshot, &planned).await;
    }
    if execute_notice_steps(cx, cached, &snapshot, &planned).await {
        return Ok(Action::requeue(cx.config.times.wait));
    }
    // Caches only trigger reconciles; steps are planned on a fresh read.
    let (namespace, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let objects: Api<BidNode> = Api::namespaced(cx.client.clone(), &namespace);
    let Some(fresh) = objects.get_opt(&name).await.map_err(api("read BidNode", &name))? else {
        return Ok(Action::await_change());
    };
    let snapshot = Snapshot::take(cx, &fresh);
    let planned = plan(&snapshot.observed(cx, &fresh));
    carry_out(cx, &fresh, &snapshot, &planned).await
}

/// Executes the steps of a plan that respond to preemption notices. A Node under notice has only seconds, so the notices of all
/// BidNodes are handled before bids and status of any. The cache is fresh enough for this, because the patch of a Node names
/// the resource version that was seen. Returns false when there was no such step, or when a step failed: then the whole plan is
/// executed, so that no other Node waits for the failed one.
async fn execute_notice_steps(cx: &Context, object: &BidNode, snapshot: &Snapshot, planned: &Plan) -> bool {
    let steps: Vec<_> = planned.steps.iter().filter(|step| step.is_of_notice()).cloned().collect();
    !steps.is_empty() && execute(cx, object, &snapshot.owner, &steps).await.1.is_ok()
}

/// Executes the steps and writes the status.
async fn carry_out(
    cx: &Context,
    object: &BidNode,
    snapshot: &Snapshot,
    planned: &Plan,
) -> Result<Action, Error> {
    let (done, result) = execute(cx, object, &snapshot.owner, &planned.steps).await;
    if done.gone {
        return result.map(|()| Action::await_change());
    }
    let observed = snapshot.observed(cx, object);
    let uid = object.uid().unwrap_or_default();
    let (class, strategy, counts, cost) = status::gauge_values(&observed, &planned.facts);
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let metrics = &cx.config.bid_metrics;
    metrics.gauge(&uid, &namespace, &name, &object.spec.instance_type, class, strategy, counts, cost);
    write_status(cx, object, &observed, planned, &done.outcome).await?;
    for event in cx.mirror.take_events(&uid) {
        cx.events.emit(object, event);
    }
    result?;
    let soon = done.stale.then_some(cx.config.times.wait);
    let again = soon.or(planned.again).unwrap_or_else(|| spread(cx.config.times.poll));
    Ok(Action::requeue(again))
}

async fn write_status(
    cx: &Context,
    object: &BidNode,
    observed: &Observed<'_>,
    planned: &Plan,
    outcome: &status::MarketReply,
) -> Result<(), Error> {
    let status = status::derive(observed, &planned.facts, outcome);
    if object.status.as_ref() == Some(&status) {
        if planned.steps.is_empty() {
            cx.config.bid_metrics.count_noop();
        }
        return Ok(());
    }
    let objects: Api<BidNode> = Api::namespaced(cx.client.clone(), &object.namespace().unwrap_or_default());
    apply_status(&objects, object, object.status.as_ref(), &status, names::MANAGER).await?;
    cx.config.bid_metrics.count_write();
    let before = object.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    for event in status::condition_events(before, &status.conditions) {
        cx.events.emit(object, event);
    }
    Ok(())
}
