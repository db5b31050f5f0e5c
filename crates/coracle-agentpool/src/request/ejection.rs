//! Ejection of the ISO from the drive of a VM, in recorded steps.

use coracle_api::agentpool::{IsoEjection, VsphereAgent};
use coracle_reconcile::{Desired, WallTime as _, find};
use coracle_vsphere::{Change, FaultClass, Vsphere, VsphereError};
use kube::ResourceExt as _;
use tokio::time::timeout;

use super::{
    eject::{Eject, Step, next},
    plan::EjectSpec,
};
use crate::{
    Context, Error,
    error::chain,
    identity::{AgentFacts, HardwareId},
    status::{new_condition, report_ejection, seconds},
    vcenters::Provider,
    vm::{Undo, VmIdentity, undo},
};

/// Most rounds of query and action in one reconcile; a whole ejection needs six.
const ROUNDS_MAX: usize = 10;
/// Longest wait for a disconnection; afterwards vCenter may have a question.
const ASKS: std::time::Duration = std::time::Duration::from_secs(3);
const EJECTED: &str = "ISOEjected";

/// Executes the steps of an ejection while they are possible. Returns false if more remain.
pub(super) async fn eject(
    cx: &Context,
    request: &VsphereAgent,
    spec: &EjectSpec,
    provider: &Provider,
) -> Result<bool, Error> {
    let stored = request.status.clone().unwrap_or_default();
    let is_wanted = spec.is_wanted;
    let reported = find(&stored.conditions, EJECTED);
    let is_done = reported.is_some_and(|c| c.status == "True");
    let mut record = stored.iso_ejection;
    if record.is_none() && (is_done || !is_wanted) {
        // There is no condition where an ejection was never requested.
        if !is_wanted && reported.is_some_and(|c| c.reason != "Disabled") {
            report_ejection(cx, request, None, new_condition(EJECTED, false, "Disabled", "")).await?;
        }
        return Ok(true);
    }
    let is_installed = is_installed(cx, request);
    if record.is_none() && !is_installed {
        let waits = new_condition(EJECTED, false, "WaitingForInstallation", "");
        return report_ejection(cx, request, None, waits).await.map(|()| true);
    }
    let owner = request.uid().unwrap_or_default();
    let id = VmIdentity::of(request);
    let api = &provider.vcenter.api;
    for _ in 0..ROUNDS_MAX {
        let found = match api.find(&provider.site, &id.wanted()).await {
            Ok(found) => found,
            Err(error) => return report_eject_failure(cx, request, record.as_ref(), chain(&error)).await,
        };
        let ours = match undo(&id, &found, &provider.site.folder) {
            Undo::PowerOff(object) | Undo::Destroy(object) => Some(object),
            Undo::Unreadable(why) => return report_eject_failure(cx, request, record.as_ref(), why).await,
            Undo::Gone | Undo::Mismatch(_) => None,
        };
        let vm = found.iter().find(|vm| Some(&vm.object) == ours.as_ref());
        let now = seconds(cx.config.clock.timestamp());
        let datacenter = &spec.datacenter;
        let known = Eject {
            is_wanted,
            is_done,
            is_installed,
            owner: &owner,
            datacenter,
            record: record.as_ref(),
            vm,
            now,
        };
        let done = match next(&known) {
            Step::Disabled | Step::Wait => return Ok(true),
            Step::Done => {
                cx.config.pool_metrics.iso("eject", "success");
                return report_ejection(cx, request, None, new_condition(EJECTED, true, "Ejected", ""))
                    .await
                    .map(|()| true);
            }
            Step::Gone(why) => return report_eject_failure(cx, request, None, why).await,
            Step::Failed(why) => return report_eject_failure(cx, request, record.as_ref(), why).await,
            Step::Record(next) => {
                report_ejection(cx, request, Some(&next), in_progress_condition()).await?;
                record = Some(next);
                Ok(())
            }
            Step::Disconnect(object, drive) => {
                change(api.as_ref(), &object, &Change::Disconnect(drive)).await
            }
            Step::Answer { object, question, choice } => api.answer(&object, &question, &choice).await,
            Step::Empty(object, drive) => change(api.as_ref(), &object, &Change::Empty(drive)).await,
        };
        match done {
            Ok(()) => {}
            Err(error) if matches!(error.class(), FaultClass::Race | FaultClass::Gone) => return Ok(false),
            Err(error) => return report_eject_failure(cx, request, record.as_ref(), chain(&error)).await,
        }
    }
    Ok(false)
}

fn in_progress_condition() -> Desired {
    new_condition(EJECTED, false, "EjectionInProgress", "")
}

async fn report_eject_failure(
    cx: &Context,
    request: &VsphereAgent,
    record: Option<&IsoEjection>,
    why: String,
) -> Result<bool, Error> {
    cx.config.pool_metrics.iso("eject", "error");
    report_ejection(cx, request, record, new_condition(EJECTED, false, "EjectionFailed", why))
        .await
        .map(|()| true)
}

/// Starts a change and waits for its end or for a question of vCenter, which the next query shows.
async fn change(
    api: &dyn Vsphere,
    object: &coracle_vsphere::Object,
    change: &Change,
) -> Result<(), VsphereError> {
    let task = api.reconfigure(object, change).await?;
    match timeout(ASKS, api.wait_task(&task)).await {
        Ok(ended) => ended.map(drop),
        Err(_) => Ok(()),
    }
}

/// Whether the Agent of the VM, found by UUID or MAC, reports that it is installed.
fn is_installed(cx: &Context, request: &VsphereAgent) -> bool {
    let Some(vm) = request.vm() else { return false };
    let id = HardwareId::of_row(vm);
    let agents = cx.caches.agents.state();
    let mut ours = agents.iter().filter(|a| a.namespace() == request.namespace()).map(|a| AgentFacts::of(a));
    ours.any(|a| id.is(&a.identity) && !a.is_going && a.is_installed)
}
