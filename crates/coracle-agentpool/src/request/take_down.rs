//! Destruction of a VM: fence, VM, Agents. The order matters, because an Agent whose VM runs would register again.

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, foreign::Agent};
use coracle_reconcile::Kind;
use coracle_vsphere::{FaultClass, VsphereError};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Preconditions},
};

use tokio::time::timeout;

use super::{
    Done, FenceTarget, Fenced,
    bring_up::{creation, inconclusive_reason},
    fence,
};
use crate::{
    Context, Error,
    error::{RequestFailure, api},
    identity::AgentFacts,
    status::request_event,
    vcenters::Provider,
    vm::{Undo, VmIdentity, undo},
};

/// Longest wait until the VMs of a folder are known.
const LISTED: std::time::Duration = std::time::Duration::from_secs(3);
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
    let provider = match cx.vcenters.provider_for_removal(&cx.client, pool).await {
        Ok(provider) => provider,
        Err(error) => return Ok(Done::Failed(RequestFailure::provider(&error))),
    };
    if let Err(trouble) = destroy(cx, request, &provider).await {
        cx.config.pool_metrics.vm("delete", false);
        return Ok(Done::Failed(trouble));
    }
    cx.config.pool_metrics.vm("delete", true);
    for (name, uid) in agents {
        match delete_agent(cx, &target.namespace, &name, &uid).await? {
            Removed::Yes => {
                request_event(cx, request, Kind::Normal, "AgentDeleted", format!("Agent {name}")).await;
            }
            Removed::WasGone => {}
            Removed::No(why) => {
                request_event(cx, request, Kind::Normal, "AgentDeleteDeferred", why).await;
                return Ok(Done::Waits(cx.config.times.blocked));
            }
        }
    }
    Ok(Done::Settled(cx.config.times.steady))
}

/// Destroys the VM that vSphere confirms to be this object's. First waits for the task of a former process, which may be the
/// creation.
async fn destroy(cx: &Context, request: &VsphereAgent, provider: &Provider) -> Result<(), RequestFailure> {
    let api = &provider.vcenter.api;
    let failed = |error: VsphereError| {
        provider.observe(&error);
        RequestFailure::vsphere("VMStatusFailed", &error)
    };
    let closed = || RequestFailure::new("VMStatusFailed", "the session was closed", FaultClass::Session);
    let _place = provider.vcenter.destroys.acquire().await.map_err(|_| closed())?;
    if let Some(task) = creation(cx, request, provider) {
        match api.wait_task(&task).await {
            Err(error) if error.fault().is_none() => return Err(failed(error)),
            _ => {
                cx.creations.lock().remove(&request.uid().unwrap_or_default());
            }
        }
    }
    let id = VmIdentity::of(request);
    for _ in 0..ROUNDS_MAX {
        let found = api.find(&provider.site, &id.wanted()).await.map_err(failed)?;
        let task = match undo(&id, &found, &provider.site.folder) {
            Undo::Unreadable(why) => {
                return Err(RequestFailure::new("VMStatusFailed", why, FaultClass::Other));
            }
            Undo::Gone => {
                verify_absent(&id, provider).await?;
                if id.recorded.is_empty()
                    && let Some(why) = inconclusive_reason(cx, request, provider).await.map_err(failed)?
                {
                    return Err(RequestFailure::new("VMStatusFailed", why, FaultClass::Session));
                }
                if request.vm().is_some() {
                    request_event(cx, request, Kind::Normal, "VMDeleted", format!("VM {} is gone", id.name))
                        .await;
                }
                return Ok(());
            }
            Undo::Mismatch(why) => {
                return Err(RequestFailure::new("VMOwnershipMismatch", why, FaultClass::Other));
            }
            Undo::PowerOff(object) => api.power_off(&object).await,
            Undo::Destroy(object) => api.destroy(&object).await,
        };
        let ended = match task {
            Ok(task) => api.wait_task(&task).await.map(drop),
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) => {}
            // The VM was removed, or powered on or off meanwhile: query again.
            Err(error) if matches!(error.class(), FaultClass::Race | FaultClass::Gone) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(RequestFailure::new("VMStatusFailed", format!("VM {} was not destroyed", id.name), FaultClass::Race))
}

/// Fails if an unreadable VM may be the one that a search did not find: unreadable does not mean gone.
async fn verify_absent(id: &VmIdentity, provider: &Provider) -> Result<(), RequestFailure> {
    if id.recorded.is_empty() {
        return Ok(());
    }
    let failed = |why: String| RequestFailure::new("VMStatusFailed", why, FaultClass::Other);
    let mut machines = provider.vcenter.api.machines(&provider.site);
    let Ok(Ok(seen)) = timeout(LISTED, machines.wait_for(|m| m.is_current)).await else {
        // The folder may have been removed and created again.
        provider.vcenter.api.forget();
        return Err(failed(format!("the VMs of folder {} are not known", provider.site.folder_path)));
    };
    id.hidden(&seen).map_or(Ok(()), |why| Err(failed(why)))
}

/// Result of the deletion of an Agent.
enum Removed {
    Yes,
    /// The Agent did not exist any more.
    WasGone,
    /// The Agent was claimed or changed meanwhile.
    No(String),
}

/// Deletes a fenced Agent.
async fn delete_agent(cx: &Context, ns: &str, name: &str, uid: &str) -> Result<Removed, Error> {
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), ns, &cx.caches.kinds.agent);
    let Some(agent) = agents.get_opt(name).await.map_err(api("read Agent", name))? else {
        return Ok(Removed::WasGone);
    };
    let facts = AgentFacts::of(&agent);
    if facts.uid != uid {
        return Ok(Removed::WasGone);
    }
    if facts.is_bound {
        return Ok(Removed::No(format!("Agent {name} is bound now")));
    }
    let preconditions =
        Preconditions { uid: Some(uid.to_owned()), resource_version: Some(facts.resource_version) };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match agents.delete(name, &params).await {
        Ok(_) => Ok(Removed::Yes),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Removed::WasGone),
        Err(kube::Error::Api(status)) if status.code == 409 => {
            Ok(Removed::No(format!("Agent {name} changed meanwhile")))
        }
        Err(error) => Err(api("delete Agent", name)(error)),
    }
}
