//! The wiring: triggers come in, reconciles run, failures come back later.

use std::{sync::Arc, time::Duration};

use coracle_api::MikromVM;
use coracle_reconcile::Outcome;
use futures_util::{FutureExt as _, StreamExt as _};
use kube::{
    ResourceExt as _,
    runtime::{
        controller::{self, Action, ReconcileRequest},
        watcher,
    },
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span, warn};

use crate::{
    CONTROLLER, Context, Error,
    execute::{After, execute, report},
    observe::{Wire, agent_of, observe},
    plan::{Plan, Progress, judge, plan},
    status,
};

/// Looks and acts at most this often in one reconcile; a normal life needs four.
const ROUNDS_MAX: usize = 8;
/// Until an object that found its agent busy is back.
const BUSY: Duration = Duration::from_secs(1);
/// Triggers of one object that come this close together are one.
const DEBOUNCE: Duration = Duration::from_millis(5);

/// Reconciles until `stop`; what runs then is finished, or cut off by the caller.
pub(crate) async fn control(cx: &Context, stop: &CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => return,
        () = cx.fleet.ready() => cx.fleet.enqueue_all(),
    }
    let queue = cx.fleet.queue().take_until(stop.clone().cancelled_owned()).map(|object| {
        cx.metrics.queue_depth(CONTROLLER, cx.fleet.queued());
        Ok::<_, watcher::Error>(ReconcileRequest::from(object))
    });
    let work = controller::applier(
        |vm, cx| timed(vm, cx).boxed(),
        |vm, error: &Error, cx: Arc<Context>| retry_later(&vm, error, &cx),
        Arc::new(cx.clone()),
        cx.fleet.vms().clone(),
        Box::pin(queue),
        controller::Config::default().debounce(DEBOUNCE).concurrency(cx.reconciles),
    )
    .for_each(|ended| async move {
        match ended {
            Ok(_) | Err(controller::Error::ReconcilerFailed(..)) => {}
            // A queued object that is gone by now.
            Err(error) => debug!(%error, "not reconciled"),
        }
    });
    tokio::join!(work, crate::streams::watch_agents(cx, stop));
}

fn retry_later(vm: &MikromVM, error: &Error, cx: &Context) -> Action {
    let wait = match error {
        // It was not tried, so it is no failure: back in line, not all at once.
        Error::Agent(error) if error.is_busy() => BUSY.mul_f64(0.5 + rand::random::<f64>()),
        _ => cx.backoffs.failed(vm.uid().unwrap_or_default()),
    };
    let error: &dyn std::error::Error = error;
    debug!(name = vm.name_any(), ?wait, error, "to be tried again");
    Action::requeue(wait)
}

async fn timed(vm: Arc<MikromVM>, cx: Arc<Context>) -> Result<Action, Error> {
    let running = cx.metrics.begin(CONTROLLER);
    let began = Instant::now();
    let span =
        info_span!("reconcile", kind = "MikromVM", ns = vm.namespace(), name = vm.name_any(), uid = vm.uid());
    let uid = vm.uid().unwrap_or_default();
    let result = reconcile(&vm, &cx).instrument(span).await;
    drop(running);
    let outcome = if result.is_ok() { Outcome::Ok } else { Outcome::Error };
    cx.metrics.ended(CONTROLLER, outcome, began.elapsed(), cx.clock.now());
    match &result {
        Ok(_) => cx.backoffs.reset(&uid),
        Err(error) if !is_ordinary(error) => {
            let error: &dyn std::error::Error = error;
            warn!(uid, error, "reconcile failed");
        }
        Err(_) => {}
    }
    result
}

/// Passes by itself and is counted; not worth a line each time.
fn is_ordinary(error: &Error) -> bool {
    match error {
        Error::Agent(error) => error.is_transient(),
        Error::Apply(error) => error.is_conflict(),
        _ => false,
    }
}

/// Looks, plans and acts until there is nothing left to do, then reports. The cached object only triggers: before
/// anything is written the object is read afresh.
async fn reconcile(cached: &MikromVM, cx: &Context) -> Result<Action, Error> {
    let uid = cached.uid().unwrap_or_default();
    let mut vm = cached.clone();
    let mut fresh = false;
    let (mut wire, mut progress) = (Wire::default(), Progress::default());
    for _ in 0..ROUNDS_MAX {
        let observed = observe(cx, &vm, &mut wire, cx.memo(&uid), progress).await;
        let at = observed.at.clone();
        let Plan { steps, report: said, retry, requeue, memo } = plan(&observed);
        let status = said.map(|said| status::derive(&vm, &said, &at, progress, cx.clock.now()));
        let writes = !steps.is_empty() || status.as_ref().is_some_and(|s| vm.status.as_ref() != Some(s));
        if writes && !fresh {
            let Some(read) = read(cx, &vm).await? else {
                cx.forget(&uid);
                return Ok(Action::await_change());
            };
            fresh = true;
            if read.resource_version() != vm.resource_version() {
                vm = read;
                continue;
            }
        }
        cx.remember(&uid, &memo);
        if steps.is_empty() {
            if let Some(status) = status {
                report(cx, &vm, &status, progress).await?;
            }
            return retry.map_or(Ok(Action::requeue(requeue)), |error| Err(error.into()));
        }
        let agent = agent_of(&cx.fleet, &vm).map(|(_, agent)| agent);
        for step in &steps {
            match execute(cx, &vm, &mut wire, agent.as_ref(), step).await {
                Ok(After::Same) => note(step, &vm, &mut progress),
                Ok(After::Written(written)) => vm = *written,
                Ok(After::Gone) => {
                    cx.forget(&uid);
                    return Ok(Action::await_change());
                }
                Err(Error::Agent(error)) => {
                    let verdict = judge(step, &error, &cx.memo(&uid), &cx.policy);
                    cx.remember(&uid, &verdict.memo);
                    if verdict.again {
                        note(step, &vm, &mut progress);
                        if verdict.memo.recreate {
                            progress.started = false;
                        }
                        break;
                    }
                    if let Some(said) = verdict.report {
                        let status = status::derive(&vm, &said, &at, progress, cx.clock.now());
                        report(cx, &vm, &status, progress).await?;
                    }
                    return Err(error.into());
                }
                Err(error) => return Err(error),
            }
        }
    }
    Err(Error::Unsettled { namespace: vm.namespace().unwrap_or_default(), name: vm.name_any() })
}

fn note(step: &crate::plan::Step, vm: &MikromVM, progress: &mut Progress) {
    use crate::plan::Step;
    match step {
        Step::Create | Step::Lay => progress.created = true,
        Step::Start => {
            progress.started = true;
            progress.restarted = vm.is_provisioned();
        }
        Step::Hold | Step::Bind(_) | Step::Power(_) | Step::Stop | Step::Delete | Step::Release(_) => {}
    }
}

/// The object as it is now. `None`: gone, or another one by that name.
async fn read(cx: &Context, vm: &MikromVM) -> Result<Option<MikromVM>, Error> {
    let found = cx.api(vm).get_opt(&vm.name_any()).await.map_err(|source| Error::Read {
        namespace: vm.namespace().unwrap_or_default(),
        name: vm.name_any(),
        source: Box::new(source),
    })?;
    Ok(found.filter(|found| found.uid() == vm.uid()))
}
