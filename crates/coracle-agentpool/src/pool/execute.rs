//! Execution of a pool's steps. Failures of preparations and removals are isolated; any other failure ends the execution.

use std::{collections::HashSet, sync::Arc};

use coracle_api::agentpool::{
    OwnedVm, VsphereAgent, VsphereAgentPool,
    foreign::Agent,
    names::{self, phase, phase_reason},
};
use coracle_reconcile::{Kind, add_finalizer, remove_finalizer};
use coracle_vsphere::SiteVms;
use futures_util::{StreamExt as _, stream};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::json;

use super::plan::{Adoption, Preparation, Removal, RequestView, Step};
use crate::{
    Context, Error, POOL_MANAGER,
    error::{api, chain},
    identity::owner_note,
    iso,
    machine::pin_selector,
    request::{FenceTarget, Fenced, fence},
    status::pool_event,
};

/// Number of Agents that are prepared concurrently.
const PATCHES: usize = 8;

/// Result of an execution.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// Messages of failed preparations and removals.
    pub(super) failed: Vec<String>,
    /// Messages of removals that are blocked by another object.
    pub(super) blocked: Vec<String>,
    /// Names of rows whose Agent was prepared.
    pub(super) prepared: Vec<String>,
    /// Names of rows whose VsphereAgent was deleted.
    pub(super) removed: Vec<String>,
    /// The pool is gone or its finalizer is removed, so there is no status to write.
    pub(super) gone: bool,
    /// Whether a step could not be completed; the next reconcile repeats it.
    pub(super) stopped: bool,
    /// Error that ended the execution.
    pub(super) error: Option<Error>,
}

impl Applied {
    /// Rows after the steps.
    pub(super) fn rows(&self, mut rows: Vec<OwnedVm>) -> Vec<OwnedVm> {
        rows.retain(|row| !self.removed.contains(&row.name));
        for row in rows.iter_mut().filter(|row| row.phase == phase::AVAILABLE) {
            if self.prepared.contains(&row.name) {
                row.reason = phase_reason::AGENT_PREPARED.into();
            }
        }
        rows
    }
}

/// Executes the steps in order.
pub(super) async fn execute(cx: &Context, pool: &VsphereAgentPool, steps: &[Step]) -> Applied {
    let mut applied = Applied::default();
    for step in steps {
        match execute_one(cx, pool, step, &mut applied).await {
            Ok(()) if applied.gone || applied.stopped => return applied,
            Ok(()) => {}
            Err(error) => {
                applied.error = Some(error);
                break;
            }
        }
    }
    report(cx, pool, steps, &applied).await;
    applied
}

async fn execute_one(
    cx: &Context,
    pool: &VsphereAgentPool,
    step: &Step,
    applied: &mut Applied,
) -> Result<(), Error> {
    let ns = pool.namespace().unwrap_or_default();
    let pools: Api<VsphereAgentPool> = Api::namespaced(cx.client.clone(), &ns);
    match step {
        Step::AddFinalizer => {
            let added = add_finalizer(&pools, pool, names::POOL_FINALIZER, POOL_MANAGER).await?;
            applied.gone = added.is_none();
        }
        Step::PinSelector(pin) => pin_selector(cx, pin).await?,
        Step::PrepareAgents(preparations) => prepare_all(cx, &ns, preparations, applied).await,
        Step::RemoveVm(removal) => remove(cx, pool, &ns, removal, applied).await,
        Step::AdoptVm(adoption) => adopt(cx, pool, adoption).await?,
        Step::WarnSelectors(note) => {
            pool_event(cx, pool, Kind::Warning, "SelectorMismatch", note.clone()).await;
        }
        Step::DeleteRequest(request) => delete_request(cx, &ns, request).await?,
        Step::DeleteImages => {
            if let Err(why) = delete_images(cx, pool).await {
                pool_event(cx, pool, Kind::Warning, "ISOPruneFailed", why.clone()).await;
                applied.stopped = true;
            }
        }
        Step::RemoveFinalizer => {
            remove_finalizer(&pools, pool, names::POOL_FINALIZER, POOL_MANAGER).await?;
            applied.gone = true;
        }
    }
    Ok(())
}

async fn prepare_all(cx: &Context, ns: &str, preparations: &[Preparation], applied: &mut Applied) {
    let prepared: Vec<_> = stream::iter(preparations.to_vec())
        .map(|p| async move {
            let result = prepare(cx, ns, &p).await;
            (p, result)
        })
        .buffer_unordered(PATCHES)
        .collect()
        .await;
    for (preparation, result) in prepared {
        match result {
            Ok(()) => applied.prepared.push(preparation.hostname.clone()),
            Err(error) => applied.failed.push(format!("Agent {}: {}", preparation.agent.name, chain(&error))),
        }
    }
}

/// Prepares an Agent. A concurrent change of the Agent triggers the next reconcile.
async fn prepare(cx: &Context, ns: &str, p: &Preparation) -> Result<(), Error> {
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), ns, &cx.caches.kinds.agent);
    let mut spec = json!({"role": p.role, "hostname": p.hostname});
    if p.approve == Some(true) {
        spec["approved"] = true.into();
    }
    let patch = json!({
        "metadata": {"resourceVersion": p.agent.resource_version, "labels": p.labels},
        "spec": spec,
    });
    match agents.patch(&p.agent.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("prepare Agent", &p.agent.name)(error)),
    }
}

async fn remove(cx: &Context, pool: &VsphereAgentPool, ns: &str, removal: &Removal, applied: &mut Applied) {
    match delete_fenced(cx, ns, removal).await {
        Ok(None) => applied.removed.push(removal.row.name.clone()),
        Ok(Some(why)) => {
            pool_event(cx, pool, Kind::Normal, "AgentDeleteDeferred", why.clone()).await;
            applied.blocked.push(why);
        }
        Err(error) => applied.failed.push(format!("VM {}: {}", removal.row.name, chain(&error))),
    }
}

/// Closes the fence around a VM and deletes its VsphereAgent. Returns the reason if the VM is still in use.
async fn delete_fenced(cx: &Context, ns: &str, removal: &Removal) -> Result<Option<String>, Error> {
    let Some(request) = &removal.request else {
        return Ok(Some(format!("VM {} has no VsphereAgent", removal.row.name)));
    };
    // A row contains what the Agent reports; the fence needs what vSphere reported.
    let mut row = removal.row.clone();
    if let Some((uuid, mac)) = &request.hardware {
        (row.bios_uuid, row.mac_address) = (uuid.clone(), mac.clone());
    }
    let name = row.name.clone();
    let target =
        FenceTarget { namespace: ns.to_owned(), machines_namespace: removal.machines_namespace.clone(), row };
    match fence(cx, &target).await? {
        Fenced::Blocked(why) => Ok(Some(format!("VM {name}: {why}"))),
        Fenced::Closed(_) => delete_request(cx, ns, request).await.map(|()| None),
    }
}

async fn delete_request(cx: &Context, ns: &str, request: &RequestView) -> Result<(), Error> {
    let requests: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), ns);
    let preconditions = Preconditions { uid: Some(request.uid.clone()), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match requests.delete(&request.name, &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("delete VsphereAgent", &request.name)(error)),
    }
}

async fn adopt(cx: &Context, pool: &VsphereAgentPool, adoption: &Adoption) -> Result<(), Error> {
    let ns = pool.namespace().unwrap_or_default();
    let requests: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), &ns);
    match requests.create(&PostParams::default(), &adoption.request).await {
        Ok(_) => pool_event(cx, pool, Kind::Normal, "VMAdopted", adoption.note.clone()).await,
        // The object exists: the cache is out of date, or another pool owns the object and shows it in its row.
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => return Err(api("create VsphereAgent", adoption.request.name_any())(error)),
    }
    Ok(())
}

/// Deletes the images of a pool. Returns the error message of a failure.
async fn delete_images(cx: &Context, pool: &VsphereAgentPool) -> Result<(), String> {
    let provider = cx.vcenters.provider_for_removal(&cx.client, pool).await.map_err(|e| chain(&e))?;
    let count = iso::delete_all(pool, &provider).await.map_err(|e| chain(&e))?;
    cx.config.pool_metrics.iso("delete", "success");
    tracing::info!(pool = pool.name_any(), count, "ISO images deleted with their pool");
    Ok(())
}

/// Emits one event about preparations and removals.
async fn report(cx: &Context, pool: &VsphereAgentPool, steps: &[Step], applied: &Applied) {
    let (mut prepared, mut removed) = (0, 0);
    for step in steps {
        match step {
            Step::PrepareAgents(preparations) => prepared += preparations.len(),
            Step::RemoveVm(_) => removed += 1,
            _ => {}
        }
    }
    if !applied.failed.is_empty() {
        pool_event(cx, pool, Kind::Warning, "ApplyPlanFailed", applied.failed.join("; ")).await;
    } else if prepared + removed > 0 {
        let note = format!("prepared {prepared} Agents, removed {removed} VMs");
        pool_event(cx, pool, Kind::Normal, "PlanApplied", note).await;
    }
}

/// Counts VMs whose notes name an owner that does not exist, if the folder of the pool is watched. For pools that share a
/// folder, only the first by name counts them.
pub(super) async fn count_unowned(cx: &Context, pool: &VsphereAgentPool) {
    let Some(folder) = cx.watched_folder(pool) else { return };
    let seen = folder.borrow().clone();
    if !seen.is_current {
        return;
    }
    let notes: HashSet<_> =
        cx.caches.requests.state().iter().filter_map(|r| r.uid()).map(|uid| owner_note(&uid)).collect();
    let pools = cx.caches.pools.state();
    let sharing =
        pools.iter().filter(|p| cx.watched_folder(p).is_some_and(|other| other.same_channel(&folder)));
    let first = sharing.map(|p| (p.namespace(), p.name_any())).min();
    let is_first = first.is_none_or(|first| first == (pool.namespace(), pool.name_any()));
    let count = if is_first { unowned(&seen, &notes) } else { 0 };
    cx.config.pool_metrics.set_unowned(&pool.namespace().unwrap_or_default(), &pool.name_any(), count);
}

/// Number of VMs whose notes name an owner that does not exist.
fn unowned(seen: &SiteVms, owners: &HashSet<String>) -> usize {
    let ours = seen.vms.values().filter(|vm| vm.annotation.starts_with(names::OWNER_NOTE));
    ours.filter(|vm| !owners.contains(&vm.annotation)).count()
}

/// Checks the image of a pool; `iso::ensure` reports failures.
pub(super) async fn check_iso(cx: &Arc<Context>, pool: &VsphereAgentPool, url: &str) {
    match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => {
            let machines = provider.vcenter.api.machines(&provider.site).borrow().clone();
            let _ = iso::ensure(cx, pool, &provider, url, &machines).await;
        }
        Err(error) => tracing::warn!(pool = pool.name_any(), error = chain(&error), "check ISO failed"),
    }
}
