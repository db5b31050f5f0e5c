//! Execution of a VsphereAgent's steps. A step that waits or fails ends the execution.

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::{OwnedVm, VsphereAgent, VsphereAgentPool, names};
use coracle_reconcile::{Kind, add_finalizer, remove_finalizer};
use coracle_vsphere::{Change, FaultClass, SiteVms, Vm};
use kube::ResourceExt as _;
use tracing::info;

use super::{
    Done, EJECTING, bring_up, ejection,
    observe::{Observed, infra_env_url},
    plan::{CreateVm, EjectSpec, Step},
    requests,
    status::was_lost,
    take_down,
};
use crate::{
    Context, Error, REQUEST_MANAGER,
    error::RequestFailure,
    iso,
    status::{new_condition, report_request, request_event},
    vcenters::Provider,
    vm::{Undo, VmIdentity, undo},
};

/// Executes the steps in order, until one of them ends the execution.
pub(super) async fn execute(cx: &Arc<Context>, observed: &Observed, steps: &[Step]) -> Result<Done, Error> {
    let mut done = Done::Settled(cx.config.times.steady);
    for step in steps {
        match execute_one(cx, observed, step).await? {
            Done::Settled(again) => done = Done::Settled(again),
            ended => return Ok(ended),
        }
    }
    Ok(done)
}

async fn execute_one(cx: &Arc<Context>, observed: &Observed, step: &Step) -> Result<Done, Error> {
    let request = &observed.request;
    let settled = Done::Settled(cx.config.times.steady);
    let api = requests(cx, &request.namespace().unwrap_or_default());
    // All other steps need vCenter, whose address and credentials the pool has.
    let pool = match (step, &observed.pool) {
        (Step::AddFinalizer, _) => {
            let added = add_finalizer(&api, request, names::AGENT_FINALIZER, REQUEST_MANAGER).await?;
            return Ok(if added.is_some() { settled } else { Done::Gone });
        }
        (Step::RemoveFinalizer, _) => {
            remove_finalizer(&api, request, names::AGENT_FINALIZER, REQUEST_MANAGER).await?;
            return Ok(if observed.pool.is_some() { settled } else { Done::Gone });
        }
        (Step::ReportPoolMissing { note, is_deleted }, _) => {
            return report_pool_missing(cx, request, note, *is_deleted).await;
        }
        (_, Some(pool)) => pool,
        (_, None) => return Ok(settled),
    };
    match step {
        Step::FinishEjection(spec) => finish_ejection(cx, request, pool, spec).await,
        Step::DestroyVm(target) => take_down::destroy_vm(cx, request, pool, target).await,
        Step::AdoptVm => match cx.vcenters.provider(&cx.client, pool).await {
            Ok(provider) => bring_up::adopt(cx, request, &provider).await,
            Err(error) => Ok(Done::Failed(RequestFailure::provider(&error))),
        },
        Step::CreateVm(vm) => create(cx, request, pool, vm).await,
        Step::CheckVm { vm, adopted } => check(cx, request, pool, vm, *adopted).await,
        Step::EjectIso(spec) => eject(cx, request, pool, spec).await,
        Step::AddFinalizer | Step::RemoveFinalizer | Step::ReportPoolMissing { .. } => Ok(settled),
    }
}

async fn report_pool_missing(
    cx: &Context,
    request: &VsphereAgent,
    note: &str,
    is_deleted: bool,
) -> Result<Done, Error> {
    if is_deleted {
        let note = format!("{note}; its VM stays");
        request_event(cx, request, Kind::Warning, "PoolNotFound", note).await;
        return Ok(Done::Settled(cx.config.times.pool));
    }
    let vm = request.status.as_ref().and_then(|s| s.vm.clone());
    report_request(cx, request, vm, new_condition("Ready", false, "PoolNotFound", note)).await?;
    Ok(Done::Waits(cx.config.times.pool))
}

/// Completes an ejection. An unreachable vCenter is not reported here: the next step needs vCenter as well and reports the
/// cause.
async fn finish_ejection(
    cx: &Context,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
    spec: &EjectSpec,
) -> Result<Done, Error> {
    let done = Done::Settled(cx.config.times.steady);
    match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) if !ejection::eject(cx, request, spec, &provider).await? => {
            Ok(schedule_ejection(cx, request))
        }
        Ok(_) | Err(_) => Ok(done),
    }
}

/// Schedules the next step of an ejection, with a growing delay.
fn schedule_ejection(cx: &Context, request: &VsphereAgent) -> Done {
    Done::Waits(cx.backoffs.failed(request.uid().unwrap_or_default()).max(EJECTING))
}

async fn eject(
    cx: &Context,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
    spec: &EjectSpec,
) -> Result<Done, Error> {
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Failed(RequestFailure::provider(&error))),
    };
    if !ejection::eject(cx, request, spec, &provider).await? {
        return Ok(schedule_ejection(cx, request));
    }
    let is_current = provider.vcenter.api.machines(&provider.site).borrow().is_current;
    Ok(Done::Settled(if is_current { cx.config.times.steady } else { cx.config.times.machine }))
}

/// Uploads the image if necessary, then creates the VM.
async fn create(
    cx: &Arc<Context>,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
    vm: &CreateVm,
) -> Result<Done, Error> {
    let url = match infra_env_url(cx, pool).await? {
        Ok(url) => url,
        Err(why) => {
            let vm = request.status.as_ref().and_then(|s| s.vm.clone());
            report_request(cx, request, vm, new_condition("Ready", false, "InfraEnvUnavailable", why))
                .await?;
            return Ok(Done::Waits(cx.config.times.blocked));
        }
    };
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Failed(RequestFailure::provider(&error))),
    };
    let seen = provider.vcenter.api.machines(&provider.site).borrow().clone();
    let iso = match iso::ensure(cx, pool, &provider, &url, &seen).await {
        Ok(path) => format!("[{}] {path}", provider.site.iso.name),
        Err(error) => {
            let class = match &*error {
                // The image is uploaded in the background, and the end of the upload triggers a reconcile.
                iso::IsoError::Pending { .. } => return Ok(Done::Waits(cx.config.times.blocked)),
                iso::IsoError::Vsphere(error) => {
                    provider.observe(error);
                    error.class()
                }
                iso::IsoError::Download { .. } | iso::IsoError::Refused { .. } => FaultClass::Other,
            };
            return Ok(Done::Failed(RequestFailure::new(
                "ISORefreshFailed",
                crate::error::chain(&*error),
                class,
            )));
        }
    };
    match bring_up::bring_up(cx, request, vm, &provider, &iso).await? {
        Ok(vm) => {
            cx.config.pool_metrics.vm("create", true);
            bring_up::record(cx, request, &vm).await
        }
        Err(trouble) => {
            cx.config.pool_metrics.vm("create", false);
            // The missing object may be the image.
            if trouble.class == FaultClass::Gone {
                cx.iso.record_lost_image(pool, &provider);
            }
            Ok(Done::Failed(trouble))
        }
    }
}

/// Checks that the recorded VM still exists, and reports it.
async fn check(
    cx: &Arc<Context>,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
    vm: &OwnedVm,
    adopted: bool,
) -> Result<Done, Error> {
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Failed(RequestFailure::provider(&error))),
    };
    let machines = provider.vcenter.api.machines(&provider.site);
    let seen = machines.borrow().clone();
    cx.follow(pool, &provider, machines);
    if seen.is_current
        && let Some(done) = compare(cx, request, vm, adopted, &provider, &seen).await?
    {
        return Ok(done);
    }
    if was_lost(request) {
        let note = format!("VM {} ({}) is as recorded again", vm.name, vm.bios_uuid);
        request_event(cx, request, Kind::Normal, "VMRecovered", note).await;
    }
    let reason = if adopted { "VMAdopted" } else { "VMCreated" };
    report_request(cx, request, Some(vm.clone()), new_condition("Ready", true, reason, "")).await?;
    Ok(Done::Settled(cx.config.times.steady))
}

/// Why a VM is not changed.
fn undo_failure(undo: Undo) -> Option<RequestFailure> {
    match undo {
        Undo::Mismatch(why) => Some(RequestFailure::new("VMOwnershipMismatch", why, FaultClass::Other)),
        Undo::Unreadable(why) => Some(RequestFailure::new("VMStatusFailed", why, FaultClass::Other)),
        Undo::Gone | Undo::PowerOff(_) | Undo::Destroy(_) => None,
    }
}

/// Writes the owner's note into a VM of this VsphereAgent that has no note, such as the VMs of older operators.
async fn write_owner_note(provider: &Provider, vm: &Vm, note: &Change) -> Result<Option<Done>, Error> {
    let api = &provider.vcenter.api;
    let ended = match api.reconfigure(&vm.object, note).await {
        Ok(task) => api.wait_task(&task).await.map(drop),
        Err(error) => Err(error),
    };
    match ended {
        Ok(()) => info!(vm = vm.name, "owner written into the notes of a VM"),
        // Another client is changing the VM; the next reconcile tries again.
        Err(error) if error.class() == FaultClass::Race => {}
        Err(error) => return Ok(Some(Done::Failed(RequestFailure::vsphere("VMStatusFailed", &error)))),
    }
    Ok(None)
}

/// Powers on a VM whose Agent has never been seen.
async fn start(provider: &Provider, vm: &OwnedVm, shown: &Vm) -> Result<(), RequestFailure> {
    if shown.powered_on || vm.phase != names::phase::PROVISIONING {
        return Ok(());
    }
    if let Some(question) = &shown.question {
        return Err(bring_up::question_failure(&shown.name, question));
    }
    bring_up::power_on(provider, &shown.object).await.map(drop)
}

/// Compares the record with vSphere; `None`: they agree.
async fn compare(
    cx: &Context,
    request: &VsphereAgent,
    vm: &OwnedVm,
    adopted: bool,
    provider: &Provider,
    seen: &SiteVms,
) -> Result<Option<Done>, Error> {
    use names::phase::{BOUND, RELEASED};
    let (id, folder) = (VmIdentity::of(request), &provider.site.folder);
    let shown = seen
        .by_uuid(&id.recorded)
        .filter(|shown| !matches!(undo(&id, &[shown.as_ref().clone()], folder), Undo::Gone));
    if let Some(shown) = shown {
        if let Some(trouble) = undo_failure(undo(&id, &[shown.as_ref().clone()], folder)) {
            return Ok(Some(Done::Failed(trouble)));
        }
        if let Some(note) = id.missing_note(shown, folder) {
            return write_owner_note(provider, shown, &note).await;
        }
        return Ok(start(provider, vm, shown).await.err().map(Done::Failed));
    }
    if let Some(why) = id.hidden(seen) {
        return Ok(Some(Done::Failed(RequestFailure::new("VMStatusFailed", why, FaultClass::Other))));
    }
    // The watch may be out of date: a second VM is created only after a query.
    let found = match provider.vcenter.api.find(&provider.site, &id.wanted()).await {
        Ok(found) => found,
        Err(error) => {
            provider.observe(&error);
            return Ok(Some(Done::Failed(RequestFailure::vsphere("VMStatusFailed", &error))));
        }
    };
    match undo(&id, &found, folder) {
        Undo::Gone => {}
        Undo::PowerOff(_) | Undo::Destroy(_) => return Ok(None),
        other => return Ok(undo_failure(other).map(Done::Failed)),
    }
    let note = format!("VM {} ({}) is gone from vSphere", vm.name, vm.bios_uuid);
    let ready = new_condition("Ready", false, "VMNotFound", note);
    // A new VM would register a new Agent, which the Machine of the former VM could not use.
    if adopted || matches!(vm.phase.as_str(), BOUND | RELEASED) {
        report_request(cx, request, Some(vm.clone()), ready).await?;
        return Ok(Some(Done::Waits(cx.config.times.pool)));
    }
    report_request(cx, request, None, ready).await?;
    Ok(Some(Done::Waits(Duration::ZERO)))
}
