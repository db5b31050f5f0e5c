//! Reconcile of one MikromVM, and the background tasks of the controller.

use std::{sync::Arc, time::Duration};

use coracle_api::MikromVM;
use coracle_reconcile::{Action, Reconciler, Runner, WallTime as _};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Preconditions},
    runtime::reflector::ObjectRef,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::subnets::free_subnets;
use crate::{
    agent::AgentError,
    config::CONTROLLER,
    context::Context,
    error::Error,
    execute::{After, execute, write_status},
    losses::wake_vms_of_lost_nodes,
    observe::{AgentConnection, observe},
    observed::AppliedSteps,
    plan::{Plan, judge, plan},
    quota_usage, status,
    step::{NodeBinding, Step},
    streams,
};

/// Largest number of rounds of one reconcile; a usual lifecycle needs four.
const ROUNDS_MAX: usize = 8;
/// Delay after too many calls of this process to one agent.
const BUSY: Duration = Duration::from_secs(1);
/// Interval between searches for Leases of nodes that are gone.
const OLD_LEASES: Duration = Duration::from_secs(3600);
/// Triggers of one object within this time are merged.
const DEBOUNCE: Duration = Duration::from_millis(5);

/// Reconciles until `stop`, then finishes the reconciles in progress.
pub(crate) async fn control(cx: &Context, stop: &CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => return,
        () = cx.fleet.ready() => cx.fleet.enqueue_all(),
    }
    cx.cluster().await; // must be known before the first creation, which sends it
    let runner = Runner {
        name: CONTROLLER,
        workers: cx.reconciles,
        debounce: DEBOUNCE,
        backoffs: cx.backoffs.clone(),
        metrics: cx.metrics.clone(),
        clock: cx.clock.clone(),
    };
    let work =
        runner.run(Arc::new(cx.clone()), cx.fleet.vms().clone(), cx.fleet.queue().clone(), stop.clone());
    let usage = quota_usage::report(cx, stop);
    let losses = wake_vms_of_lost_nodes(cx, stop);
    tokio::join!(work, streams::watch_agents(cx, stop), remove_old_leases(cx, stop), usage, losses);
}

impl Reconciler for Context {
    type Object = MikromVM;
    type Error = Error;

    async fn reconcile(&self, cached: Arc<MikromVM>) -> Result<Action, Error> {
        reconcile(&self.own_writes.latest(cached), self).await
    }

    fn retry_after(&self, error: &Error) -> Option<Duration> {
        match error {
            // No call was made, so this is not a failure; jitter separates the objects of one agent.
            Error::Agent(error) if error.is_busy() => Some(BUSY.mul_f64(0.5 + rand::random::<f64>())),
            _ => None,
        }
    }

    fn gone(&self, object: &ObjectRef<MikromVM>) {
        self.own_writes.forget(object);
    }

    fn is_expected(&self, error: &Error) -> bool {
        match error {
            Error::Agent(error) => error.is_transient(),
            Error::Apply(error) => error.is_conflict(),
            _ => false,
        }
    }
}

/// Deletes the Leases of nodes that have been gone for a day.
async fn remove_old_leases(cx: &Context, stop: &CancellationToken) {
    let leases: Api<Lease> = Api::namespaced(cx.client.clone(), &cx.node_namespace);
    while stop.run_until_cancelled(tokio::time::sleep(OLD_LEASES)).await.is_some() {
        for (name, resource_version) in cx.fleet.leases_to_remove() {
            // The precondition keeps the Lease of a node that renews it at this moment.
            let unchanged = Preconditions { resource_version, uid: None };
            let params = DeleteParams { preconditions: Some(unchanged), ..DeleteParams::default() };
            match leases.delete(&name, &params).await {
                Ok(_) => {
                    info!(name, "Lease of a gone node deleted");
                    if let Err(error) = free_subnets(&cx.client, &cx.node_namespace, &name).await {
                        let error: &dyn std::error::Error = &error;
                        warn!(name, error, "free the networks of a gone node failed");
                    }
                }
                Err(error) => debug!(name, %error, "delete Lease failed"),
            }
        }
    }
}

/// Observes, plans and executes until no step is left, then writes the status. The cached object is only a trigger: before
/// anything outside is changed the object is read again, and a write to an object that has changed is refused.
async fn reconcile(cached: &MikromVM, cx: &Context) -> Result<Action, Error> {
    let uid = cached.uid().unwrap_or_default();
    let mut vm = cached.clone();
    let mut freshness = Freshness::Cached;
    let (mut connection, mut progress) = (AgentConnection::default(), AppliedSteps::default());
    for _ in 0..ROUNDS_MAX {
        let before = cx.memo(&uid);
        let observed = observe(cx, &vm, &mut connection, before.clone(), progress).await?;
        let bound_to = observed.bound_to.clone();
        let Plan { steps, finding, retry, requeue, memo } = plan(&observed);
        let status = finding.map(|f| status::derive(&vm, &f, &bound_to, progress, cx.clock.timestamp()));
        if freshness == Freshness::Cached && steps.first().is_some_and(|step| !step.checks_version()) {
            let Some(read) = read(cx, &vm).await? else { return Ok(gone(cx, &uid)) };
            freshness = Freshness::Current;
            if read.resource_version() != vm.resource_version() {
                vm = read;
                continue;
            }
        }
        cx.remember(&uid, &memo);
        let done = match status {
            Some(status) if steps.is_empty() => {
                write_status(cx, &vm, &status, progress).await.map(|_| Round::Settled)
            }
            _ if steps.is_empty() => Ok(Round::Settled),
            _ => carry_out(cx, &mut vm, &mut connection, &steps, (&bound_to, &mut progress), freshness).await,
        };
        match done {
            Ok(Round::Settled) => {
                return retry.map_or(Ok(Action::requeue(requeue)), |error| Err(error.into()));
            }
            Ok(Round::Again(now)) => freshness = now,
            Ok(Round::Gone) => return Ok(gone(cx, &uid)),
            Err(Error::Apply(error)) if error.is_conflict() => {
                cx.remember(&uid, &before);
                let Some(read) = read(cx, &vm).await? else { return Ok(gone(cx, &uid)) };
                (vm, freshness) = (read, Freshness::Current);
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::Unsettled { namespace: vm.namespace().unwrap_or_default(), name: vm.name_any() })
}

/// Source of the object that a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freshness {
    /// From the cache: the object may have changed since.
    Cached,
    /// From a response of the API server in this reconcile.
    Current,
}

/// Outcome of a round.
enum Round {
    /// The plan has no more steps.
    Settled,
    /// Steps were carried out, or a step failed in a way that the next plan takes into account.
    Again(Freshness),
    /// The object was deleted, or is no longer managed by this controller.
    Gone,
}

/// Carries out `steps` until one fails.
async fn carry_out(
    cx: &Context,
    vm: &mut MikromVM,
    connection: &mut AgentConnection,
    steps: &[Step],
    (bound_to, progress): (&NodeBinding, &mut AppliedSteps),
    mut freshness: Freshness,
) -> Result<Round, Error> {
    for step in steps {
        match execute(cx, vm, connection, step).await {
            Ok(After::Same) => {
                progress.made |= matches!(step, Step::CreateVm(..) | Step::CreateStopped(..));
                progress.record(step, vm);
            }
            Ok(After::Written(written)) => (*vm, freshness) = (*written, Freshness::Current),
            Ok(After::Gone) => return Ok(Round::Gone),
            Err(Error::Agent(error)) => {
                handle_step_error(cx, vm, step, error, bound_to, progress).await?;
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Round::Again(freshness))
}

/// Handles a failed call. `Ok` when the next round should plan with what is known now.
async fn handle_step_error(
    cx: &Context,
    vm: &MikromVM,
    step: &Step,
    error: AgentError,
    bound_to: &NodeBinding,
    progress: &mut AppliedSteps,
) -> Result<(), Error> {
    let uid = vm.uid().unwrap_or_default();
    let verdict = judge(step, &error, &cx.memo(&uid), &cx.policy);
    cx.remember(&uid, &verdict.memo);
    if verdict.again {
        progress.record(step, vm);
        if verdict.memo.recreate {
            (progress.started, progress.powered) = (false, None);
        }
        return Ok(());
    }
    if let Some(finding) = verdict.finding {
        let status = status::derive(vm, &finding, bound_to, *progress, cx.clock.timestamp());
        write_status(cx, vm, &status, *progress).await?;
    }
    Err(error.into())
}

fn gone(cx: &Context, uid: &str) -> Action {
    cx.forget(uid);
    Action::await_change()
}

/// Reads the present object. `None`: deleted, or replaced by another object with its name.
async fn read(cx: &Context, vm: &MikromVM) -> Result<Option<MikromVM>, Error> {
    let found = cx.api(vm).get_opt(&vm.name_any()).await.map_err(|source| Error::Read {
        namespace: vm.namespace().unwrap_or_default(),
        name: vm.name_any(),
        source: Box::new(source),
    })?;
    Ok(found.filter(|found| found.uid() == vm.uid()))
}
