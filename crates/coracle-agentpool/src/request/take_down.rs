//! From a request that goes to no VM: fence, VM, Agents, finalizer. In that order, since an Agent whose VM runs registers
//! again.

use coracle_api::agentpool::{CleanupPolicy, OwnedVm, VsphereAgent, VsphereAgentPool, foreign::Agent, names};
use coracle_reconcile::{Kind, remove_finalizer};
use coracle_vsphere::{FaultClass, TaskId, VsphereError};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Preconditions},
};

use super::{Done, Fenced, fence, requests, row_of};
use crate::{
    Context, Error, REQUEST_MANAGER,
    error::{Trouble, api},
    identity::{AgentFacts, Identity as Known, vm_name},
    status::request_event,
    vcenters::Provider,
    vm::{Identity, Undo, undo},
};

/// Looks and acts at most this often in one pass; a normal end needs three.
const ROUNDS_MAX: usize = 8;

/// Removes the VM of `request` and then lets the object go.
pub(super) async fn remove(
    cx: &Context,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
) -> Result<Done, Error> {
    if !request.finalizers().iter().any(|f| f == names::AGENT_FINALIZER) {
        return Ok(Done::Well(cx.config.times.steady));
    }
    if pool.spec.cleanup_policy == CleanupPolicy::Retain || is_shared(cx, request, pool) {
        return release(cx, request).await;
    }
    let row = row(request, pool);
    let agents = match fence(cx, pool, &row).await? {
        Fenced::Closed(agents) => agents,
        Fenced::Blocked(why) => {
            request_event(cx, request, Kind::Normal, "AgentDeleteDeferred", why).await;
            return Ok(Done::Waits(cx.config.times.blocked));
        }
    };
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Trouble(Trouble::provider(&error))),
    };
    if let Err(trouble) = destroy(cx, request, &provider).await {
        cx.config.pool_metrics.vm("delete", false);
        return Ok(Done::Trouble(trouble));
    }
    cx.config.pool_metrics.vm("delete", true);
    for (name, uid) in agents {
        if let Some(why) = delete_agent(cx, pool, &name, &uid).await? {
            request_event(cx, request, Kind::Normal, "AgentDeleteDeferred", why).await;
            return Ok(Done::Waits(cx.config.times.blocked));
        }
        request_event(cx, request, Kind::Normal, "AgentDeleted", format!("Agent {name}")).await;
    }
    release(cx, request).await
}

async fn release(cx: &Context, request: &VsphereAgent) -> Result<Done, Error> {
    let api = requests(cx, &request.namespace().unwrap_or_default());
    remove_finalizer(&api, request, names::AGENT_FINALIZER, REQUEST_MANAGER).await?;
    Ok(Done::Well(cx.config.times.steady))
}

/// What the pool and the object know of the VM; the pool's references, and vSphere's identity.
fn row(request: &VsphereAgent, pool: &VsphereAgentPool) -> OwnedVm {
    let mut row =
        request.vm().cloned().unwrap_or_else(|| OwnedVm { name: vm_name(request), ..OwnedVm::default() });
    let uid = request.uid().unwrap_or_default();
    if let Some(told) = row_of(pool, &row, &uid) {
        row.machine_ref = told.machine_ref.clone().or(row.machine_ref);
        row.agent_ref = told.agent_ref.clone().or(row.agent_ref);
    }
    row
}

/// Another live VsphereAgent manages the same VM.
fn is_shared(cx: &Context, request: &VsphereAgent, pool: &VsphereAgentPool) -> bool {
    let Some(vm) = request.vm() else { return false };
    let others = cx.caches.requests_of(pool);
    others.iter().any(|other| {
        other.uid() != request.uid()
            && other.metadata.deletion_timestamp.is_none()
            && other
                .vm()
                .is_some_and(|o| Known::of_row(o).uuid == Known::of_row(vm).uuid && o.name == vm.name)
    })
}

/// Destroys the VM that is this object's for certain. A task of an earlier life is waited for first: it may be making it.
async fn destroy(cx: &Context, request: &VsphereAgent, provider: &Provider) -> Result<(), Trouble> {
    let api = &provider.vcenter.api;
    let failed = |error: VsphereError| Trouble::vsphere("VMStatusFailed", &error);
    let closed = || Trouble::new("VMStatusFailed", "the session was closed", FaultClass::Session);
    let _place = provider.vcenter.destroys.acquire().await.map_err(|_| closed())?;
    let pending = request.annotations().get(names::PENDING_TASK).and_then(|note| {
        let (instance, rest) = note.split_once('/')?;
        (instance == api.instance()).then(|| TaskId(rest.split('/').next().unwrap_or_default().to_owned()))
    });
    if let Some(task) = pending {
        match api.ended(&task).await {
            Err(error) if error.fault().is_none() => return Err(failed(error)),
            _ => {}
        }
    }
    let id = Identity::of(request);
    for _ in 0..ROUNDS_MAX {
        let found = api.find(&provider.site, &id.wanted()).await.map_err(failed)?;
        let task = match undo(&id, &found) {
            Undo::Gone => {
                if request.vm().is_some() {
                    request_event(cx, request, Kind::Normal, "VMDeleted", format!("VM {} is gone", id.name))
                        .await;
                }
                return Ok(());
            }
            Undo::Mismatch(why) => return Err(Trouble::new("VMOwnershipMismatch", why, FaultClass::Other)),
            Undo::PowerOff(object) => api.power_off(&object).await,
            Undo::Destroy(object) => api.destroy(&object).await,
        };
        let ended = match task {
            Ok(task) => api.ended(&task).await.map(drop),
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) => {}
            // Gone, on or off meanwhile: look again.
            Err(error) if matches!(error.class(), FaultClass::Race | FaultClass::Gone) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(Trouble::new("VMStatusFailed", format!("VM {} does not go", id.name), FaultClass::Race))
}

/// Deletes a fenced Agent; why not, if it was claimed meanwhile.
async fn delete_agent(
    cx: &Context,
    pool: &VsphereAgentPool,
    name: &str,
    uid: &str,
) -> Result<Option<String>, Error> {
    let ns = pool.namespace().unwrap_or_default();
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.agent);
    let Some(agent) = agents.get_opt(name).await.map_err(api("read Agent", name))? else { return Ok(None) };
    let facts = AgentFacts::of(&agent);
    if facts.uid != uid {
        return Ok(None);
    }
    if facts.is_bound {
        return Ok(Some(format!("Agent {name} is bound now")));
    }
    let preconditions =
        Preconditions { uid: Some(uid.to_owned()), resource_version: Some(facts.resource_version) };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match agents.delete(name, &params).await {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(kube::Error::Api(status)) if status.code == 409 => {
            Ok(Some(format!("Agent {name} changed meanwhile")))
        }
        Err(error) => Err(api("delete Agent", name)(error)),
    }
}
