//! Reconcile of one set.

use std::sync::Arc;

use coracle_api::CocoonSet;
use coracle_api::cocoon::SetPhase;
use coracle_reconcile::{Action, Reconciler, WallTime as _, apply_status, spread};
use kube::{Resource as _, ResourceExt as _};

use super::{
    execute::{MANAGER, execute},
    observe::{Snapshot, Source, observe},
    plan::{Observed, plan},
    status,
    step::{Plan, Step},
};
use crate::context::{Context, SetGuard};
use crate::error::Error;

/// Controller of sets.
#[derive(Debug)]
pub(crate) struct Sets(pub(crate) Arc<Context>);

impl Reconciler for Sets {
    type Object = SetGuard;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<SetGuard>) -> Result<Action, Error> {
        match &cached.0 {
            Ok(set) => reconcile(&self.0, set).await,
            Err(_) => Ok(Action::await_change()),
        }
    }

    fn is_expected(&self, error: &Error) -> bool {
        error.is_transient()
    }
}

/// Plans on the caches. Steps are planned again on what the API server returns.
async fn reconcile(cx: &Context, cached: &CocoonSet) -> Result<Action, Error> {
    for from in [Source::Cache, Source::Server] {
        let Some(snapshot) = observe(cx, cached, from).await? else { break };
        let planned = plan(&observed(cx, &snapshot));
        let status = derive(cx, &snapshot, &planned);
        if from == Source::Server || (planned.steps.is_empty() && snapshot.set.status == Some(status)) {
            return carry_out(cx, snapshot, &planned).await;
        }
    }
    cx.forget(&cached.uid().unwrap_or_default());
    Ok(Action::await_change())
}

fn observed<'a>(cx: &'a Context, snapshot: &'a Snapshot) -> Observed<'a> {
    Observed {
        set: &snapshot.set,
        pods: &snapshot.pods,
        held: &snapshot.held,
        saved: &snapshot.saved,
        taken: &snapshot.taken,
        settings: &cx.config.settings,
        now: cx.config.clock.timestamp(),
    }
}

fn derive(cx: &Context, snapshot: &Snapshot, planned: &Plan) -> coracle_api::cocoon::CocoonSetStatus {
    let Snapshot { set, pods, .. } = snapshot;
    status::derive(set, pods, planned.phase, &planned.problems, cx.config.clock.timestamp())
}

/// Carries out the steps in order and writes the status. A failure is returned after the status was written.
async fn carry_out(cx: &Context, mut snapshot: Snapshot, planned: &Plan) -> Result<Action, Error> {
    let mut outcome = Ok(());
    for step in &planned.steps {
        match execute(cx, snapshot.set.clone(), step).await {
            Ok(Some(set)) => snapshot.set = set,
            Ok(None) => {
                cx.forget(&snapshot.set.uid().unwrap_or_default());
                return Ok(Action::await_change());
            }
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    publish(cx, &snapshot.set, planned).await;
    let mut report = planned.clone();
    if let Err(error) = &outcome
        && !error.is_transient()
    {
        report.problems.push(chain(error));
        if matches!(error, Error::NameTaken { .. }) && planned.steps.iter().any(is_main) {
            report.phase = SetPhase::Failed;
        }
    }
    // An object that is being deleted keeps its status, which contains the names of its pods' VMs.
    if snapshot.set.metadata.deletion_timestamp.is_none() {
        let status = derive(cx, &snapshot, &report);
        let api = cx.api::<CocoonSet>(&snapshot.set.namespace().unwrap_or_default());
        apply_status(&api, &snapshot.set, snapshot.set.status.as_ref(), &status, MANAGER).await?;
    }
    outcome?;
    Ok(Action::requeue(spread(planned.requeue)))
}

fn is_main(step: &Step) -> bool {
    matches!(step, Step::CreatePod(pod) if pod.name_any().ends_with("-0"))
}

async fn publish(cx: &Context, set: &CocoonSet, planned: &Plan) {
    let object = set.object_ref(&());
    for event in &planned.events {
        match event.reason {
            "PodLifecycleFailed" => cx.config.cocoon_metrics.count_failed_state(planned.phase.as_str()),
            "WakeNoCapacity" => cx.config.cocoon_metrics.count_unschedulable_wake(),
            _ => {}
        }
        cx.recorder.publish(event, &object).await;
    }
}

/// Formats an error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
