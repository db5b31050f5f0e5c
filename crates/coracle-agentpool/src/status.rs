//! Conditions and events of pools and VsphereAgents, and writes of their status.

use coracle_api::agentpool::{
    IsoEjection, IsoStatus, OwnedVm, VsphereAgent, VsphereAgentPool, VsphereAgentPoolStatus,
    VsphereAgentStatus,
};
use coracle_reconcile::{ApplyError, Desired, Event, Kind, WallTime as _, apply_status, find, merge};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Resource as _, ResourceExt as _,
    api::{Patch, PatchParams},
};

use crate::{Context, Error, ISO_MANAGER, POOL_MANAGER, REQUEST_MANAGER, demand::Counters, pool::plan::Plan};

/// Creates a condition.
pub(crate) fn new_condition(
    kind: &'static str,
    status: bool,
    reason: &'static str,
    message: impl Into<String>,
) -> Desired {
    Desired { kind, status: Some(status), reason, message: message.into() }
}

/// Conditions after a reconcile that could observe everything. `failed` names what could not be applied.
#[must_use]
pub fn pool_conditions(demand: Counters, plan: &Plan, failed: &[String], blocked: &[String]) -> Vec<Desired> {
    let ready = if failed.is_empty() {
        let note =
            if blocked.is_empty() { String::new() } else { format!("waiting: {}", blocked.join("; ")) };
        new_condition("Ready", true, "Reconciled", note)
    } else {
        new_condition("Ready", false, "ApplyFailed", failed.join("; "))
    };
    let Counters { all, waiting, unready, without_agent } = demand;
    let seen = format!(
        "agentMachines={all} waitingForAgents={waiting} unready={unready} withoutAgent={without_agent}"
    );
    let numbers = format!(
        "agentMachines={all} waitingAgentMachines={waiting} unreadyAgentMachines={unready} \
         agentMachinesWithoutAgent={without_agent} matchingAgents={} pendingOwnedVMs={} boundAgents={} availableAgents={}",
        plan.matching, plan.pending, plan.bound, plan.usable
    );
    let capacity = if plan.deficit == 0 {
        new_condition("CapacitySatisfied", true, "Satisfied", "")
    } else {
        new_condition("CapacitySatisfied", false, "Deficit", numbers)
    };
    vec![
        ready,
        new_condition("AgentMachineDemandFound", true, "Observed", seen),
        new_condition("InfraEnvAvailable", true, "Available", ""),
        capacity,
    ]
}

fn apis<K>(cx: &Context, object: &K) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(cx.client.clone(), &object.namespace().unwrap_or_default())
}

/// Writes a pool's status except the ISO and its condition, which have another writer.
pub(crate) async fn report_pool(
    cx: &Context,
    pool: &VsphereAgentPool,
    mut status: VsphereAgentPoolStatus,
    desired: &[Desired],
) -> Result<(), Error> {
    let api = apis(cx, pool);
    let stored = pool.status.clone().unwrap_or_default();
    let ours: Vec<_> = stored.conditions.iter().filter(|c| c.type_ != "ISOReady").cloned().collect();
    status.conditions = merge(&ours, desired, pool.metadata.generation, cx.config.clock.timestamp());
    status.observed_generation = pool.metadata.generation;
    let mut whole = stored;
    whole.conditions.retain(|c| c.type_ != "ISOReady");
    whole.conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    whole.iso = None;
    status.iso = None;
    emit_pool_warning(cx, pool, desired).await;
    // Fields that another field manager stored stay under server-side apply unless a merge patch removes them.
    let mut emptied = serde_json::Map::new();
    if status.owned_vms.is_empty() && !whole.owned_vms.is_empty() {
        emptied.insert("ownedVMs".into(), serde_json::Value::Null);
    }
    if status.planned_actions.is_empty() && !whole.planned_actions.is_empty() {
        emptied.insert("plannedActions".into(), serde_json::Value::Null);
    }
    if !emptied.is_empty() {
        let patch = serde_json::json!({"metadata": {"uid": pool.uid()}, "status": emptied});
        match api.patch_status(&pool.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            other => drop(other.map_err(crate::error::api("clear the status of", pool.name_any()))?),
        }
    }
    Ok(apply_status(&api, pool, Some(&whole), &status, POOL_MANAGER).await.map(drop)?)
}

/// Emits a warning if the condition Ready became False, or False for another reason.
async fn emit_pool_warning(cx: &Context, pool: &VsphereAgentPool, desired: &[Desired]) {
    let stored = pool.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    for d in desired.iter().filter(|d| d.kind == "Ready" && d.status == Some(false)) {
        let is_new = find(stored, d.kind).is_none_or(|c| c.status != "False" || c.reason != d.reason);
        if is_new {
            pool_event(cx, pool, Kind::Warning, d.reason, d.message.clone()).await;
        }
    }
}

pub(crate) async fn pool_event(
    cx: &Context,
    pool: &VsphereAgentPool,
    kind: Kind,
    reason: &'static str,
    note: String,
) {
    cx.pool_events.publish(&Event { kind, reason, action: reason, note }, &pool.object_ref(&())).await;
}

pub(crate) async fn request_event(
    cx: &Context,
    r: &VsphereAgent,
    kind: Kind,
    reason: &'static str,
    note: String,
) {
    let object: ObjectReference = r.object_ref(&());
    cx.request_events.publish(&Event { kind, reason, action: reason, note }, &object).await;
}

/// Writes the ISO of a pool and its condition.
pub(crate) async fn report_iso(
    cx: &Context,
    pool: &VsphereAgentPool,
    iso: Option<&IsoStatus>,
    desired: Desired,
) -> Result<(), ApplyError> {
    let api = apis(cx, pool);
    let stored = pool.status.clone().unwrap_or_default();
    let ours: Vec<_> = find(&stored.conditions, "ISOReady").cloned().into_iter().collect();
    let conditions = merge(&ours, &[desired], pool.metadata.generation, cx.config.clock.timestamp());
    let same = conditions == ours && iso == stored.iso.as_ref();
    if same {
        return Ok(());
    }
    let patch = serde_json::json!({
        "apiVersion": VsphereAgentPool::api_version(&()), "kind": VsphereAgentPool::kind(&()),
        "metadata": {"name": pool.name_any(), "uid": pool.uid()},
        "status": {"iso": iso.or(stored.iso.as_ref()), "conditions": conditions},
    });
    let params = PatchParams::apply(ISO_MANAGER).force();
    match api.patch_status(&pool.name_any(), &params, &Patch::Apply(&patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(source) => Err(ApplyError::Api {
            operation: "apply ISO status",
            kind: "VsphereAgentPool".into(),
            namespace: pool.namespace().unwrap_or_default(),
            name: pool.name_any(),
            source: Box::new(source),
        }),
    }
}

/// Writes the status of a VsphereAgent, and emits an event if Ready became False or its reason changed.
pub(crate) async fn report_request(
    cx: &Context,
    request: &VsphereAgent,
    vm: Option<OwnedVm>,
    ready: Desired,
) -> Result<(), Error> {
    let api = apis(cx, request);
    let stored = request.status.clone().unwrap_or_default();
    let warn = ready.status == Some(false)
        && find(&stored.conditions, "Ready").is_none_or(|c| c.status != "False" || c.reason != ready.reason);
    let (reason, note) = (ready.reason, ready.message.clone());
    if vm.is_none() && request.vm().is_some() {
        // Fields that another field manager stored stay under server-side apply unless a merge patch removes them.
        let patch = serde_json::json!({"metadata": {"uid": request.uid()}, "status": {"vm": null}});
        let params = PatchParams::default();
        api.patch_status(&request.name_any(), &params, &Patch::Merge(&patch))
            .await
            .map_err(crate::error::api("clear the VM of VsphereAgent", request.name_any()))?;
    }
    let status = VsphereAgentStatus {
        observed_generation: request.metadata.generation,
        vm,
        conditions: merge(
            &stored.conditions,
            &[ready],
            request.metadata.generation,
            cx.config.clock.timestamp(),
        ),
        iso_ejection: stored.iso_ejection.clone(),
    };
    apply_status(&api, request, request.status.as_ref(), &status, REQUEST_MANAGER).await?;
    if warn {
        request_event(cx, request, Kind::Warning, reason, note).await;
    }
    Ok(())
}

/// Writes the progress of an ejection and its condition; the rest of the status stays.
pub(crate) async fn report_ejection(
    cx: &Context,
    request: &VsphereAgent,
    record: Option<&IsoEjection>,
    desired: Desired,
) -> Result<(), Error> {
    let api = apis(cx, request);
    // Read now, because the same reconcile has written this status.
    let read = api.get_opt(&request.name_any()).await;
    let Some(fresh) = read.map_err(crate::error::api("read VsphereAgent", request.name_any()))? else {
        return Ok(());
    };
    let stored = fresh.status.clone().unwrap_or_default();
    if record.is_none() && stored.iso_ejection.is_some() {
        // Another implementation may have begun the ejection; its fields stay unless a merge patch removes them.
        let patch = serde_json::json!({"metadata": {"uid": fresh.uid()}, "status": {"isoEjection": null}});
        api.patch_status(&fresh.name_any(), &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .map_err(crate::error::api("clear the ejection of VsphereAgent", fresh.name_any()))?;
    }
    let conditions =
        merge(&stored.conditions, &[desired], fresh.metadata.generation, cx.config.clock.timestamp());
    let status = VsphereAgentStatus { iso_ejection: record.cloned(), conditions, ..stored };
    apply_status(&api, &fresh, fresh.status.as_ref(), &status, REQUEST_MANAGER).await?;
    Ok(())
}

/// Time in whole seconds, the resolution of Kubernetes.
pub(crate) fn seconds(now: Timestamp) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        Timestamp::from_second(now.as_second()).unwrap_or(now),
    )
}
