//! Destruction of a VM: fence, VM, Agents. In that order, since an Agent whose VM runs would register again.

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, foreign::Agent, names};
use coracle_reconcile::Kind;
use coracle_vsphere::{FaultClass, TaskId, VsphereError};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Preconditions},
};

use super::{Done, FenceTarget, Fenced, fence};
use crate::{
    Context, Error,
    error::{Trouble, api},
    identity::AgentFacts,
    status::request_event,
    vcenters::Provider,
    vm::{Undo, VmIdentity, undo},
};

/// Most rounds of query and action in one reconcile; three are normal.
const ROUNDS_MAX: usize = 8;

/// Fences the VM, destroys it, and deletes its Agents.
pub(super) async fn destroy_vm(
    cx: &Context,
    request: &VsphereAgent,
    pool: &VsphereAgentPool,
    target: &FenceTarget,
) -> Result<Done, Error> {
    let agents = match fence(cx, target).await? {
        Fenced::Closed(agents) => agents,
        Fenced::Blocked(why) => {
            request_event(cx, request, Kind::Normal, "AgentDeleteDeferred", why).await;
            return Ok(Done::Waits(cx.config.times.blocked));
        }
    };
    let provider = match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Failed(Trouble::provider(&error))),
    };
    if let Err(trouble) = destroy(cx, request, &provider).await {
        cx.config.pool_metrics.vm("delete", false);
        return Ok(Done::Failed(trouble));
    }
    cx.config.pool_metrics.vm("delete", true);
    for (name, uid) in agents {
        if let Some(why) = delete_agent(cx, &target.namespace, &name, &uid).await? {
            request_event(cx, request, Kind::Normal, "AgentDeleteDeferred", why).await;
            return Ok(Done::Waits(cx.config.times.blocked));
        }
        request_event(cx, request, Kind::Normal, "AgentDeleted", format!("Agent {name}")).await;
    }
    Ok(Done::Settled(cx.config.times.steady))
}

/// Destroys the VM that vSphere confirms to be this object's. Waits for the task of a former process first: it may be the
/// creation.
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
    let id = VmIdentity::of(request);
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
            // Removed, or powered on or off meanwhile: query again.
            Err(error) if matches!(error.class(), FaultClass::Race | FaultClass::Gone) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(Trouble::new("VMStatusFailed", format!("VM {} was not destroyed", id.name), FaultClass::Race))
}

/// Deletes a fenced Agent. Returns the reason if it was claimed meanwhile.
async fn delete_agent(cx: &Context, ns: &str, name: &str, uid: &str) -> Result<Option<String>, Error> {
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), ns, &cx.caches.kinds.agent);
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
