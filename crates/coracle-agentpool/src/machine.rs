//! AgentMachines: who waits gets a VsphereAgent.

use std::{sync::Arc, time::Duration};

use coracle_api::agentpool::{
    VsphereAgent, VsphereAgentPool,
    foreign::{Agent, AgentMachine},
    names,
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    runtime::{controller::Action, reflector::ObjectRef},
};
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;

use crate::{
    Context, Error, act,
    demand::{self, Demand, is_of, is_waiting, plan, request},
    error::api,
    identity::AgentFacts,
    reuse::{Reuse, reuse, reuses},
};

/// An Agent that changed while it was taken is in the cache after so long.
const RACED: Duration = Duration::from_millis(500);

/// Reconciles until `stop`.
pub(crate) async fn control(
    cx: &Arc<Context>,
    queue: UnboundedReceiver<ObjectRef<AgentMachine>>,
    stop: &CancellationToken,
) {
    let store = cx.caches.agent_machines.clone();
    let workers = cx.config.workers[1];
    act::control(cx, "agentmachine", store, queue, workers, stop, |am, cx| Box::pin(reconcile(am, cx))).await;
}

async fn reconcile(cached: Arc<AgentMachine>, cx: Arc<Context>) -> Result<Action, Error> {
    let again = Ok(Action::requeue(cx.config.times.machine));
    let pools: Vec<_> = cx.caches.pools.state();
    let pools: Vec<&VsphereAgentPool> = pools
        .iter()
        .map(AsRef::as_ref)
        .filter(|p| p.metadata.deletion_timestamp.is_none() && is_of(&cached, p))
        .collect();
    let requests: Vec<_> = pools.iter().flat_map(|p| cx.caches.requests_of(p)).collect();
    let Demand { pin, vm, create, note } = plan(&cached, &pools, requests.iter().map(AsRef::as_ref));
    if let Some(note) = note {
        tracing::debug!(name = cached.name_any(), note, "no VM is made");
        return if pools.is_empty() { Ok(Action::await_change()) } else { again };
    }
    let Some(pool) = pools.first() else { return again };
    if let Some(wanted) = pin {
        pin_selector(&cx, &cached, &wanted).await?;
    }
    if !create.is_empty() && reuses(pool) {
        match take_free(&cx, &cached, &vm, pool, &requests).await? {
            Taken::Nothing => {}
            Taken::One => return again,
            Taken::Raced => return Ok(Action::requeue(RACED)),
        }
    }
    let api_of: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), &pool.namespace().unwrap_or_default());
    for name in create {
        let wanted = request(&name, &vm, &cached, pool);
        match api_of
            .create(
                &PostParams { field_manager: Some(crate::REQUEST_MANAGER.into()), ..PostParams::default() },
                &wanted,
            )
            .await
        {
            Ok(_) => break,
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // The cache may be late: an object that serves this AgentMachine already is as good as a new one.
                let there = api_of.get_opt(&name).await.map_err(api("read VsphereAgent", &name))?;
                let is_ours = |a: &VsphereAgent| {
                    a.spec.pool_ref == wanted.spec.pool_ref && crate::demand::serves(a, &cached)
                };
                if there.as_ref().is_some_and(is_ours) {
                    break;
                }
            }
            Err(error) => return Err(api("create VsphereAgent", &name)(error)),
        }
    }
    again
}

/// What came of the look for a free Agent.
enum Taken {
    Nothing,
    One,
    /// Someone else changed it at the same moment.
    Raced,
}

/// Gives the AgentMachine a free Agent of the pool, if there is one, by selecting it.
async fn take_free(
    cx: &Context,
    am: &AgentMachine,
    place: &str,
    pool: &VsphereAgentPool,
    requests: &[Arc<VsphereAgent>],
) -> Result<Taken, Error> {
    let ns = pool.namespace().unwrap_or_default();
    let agents = cx.caches.agents.state();
    let facts: Vec<_> =
        agents.iter().filter(|a| a.namespace().as_ref() == Some(&ns)).map(|a| AgentFacts::of(a)).collect();
    let machines = cx.caches.agent_machines.state();
    let machines: Vec<&AgentMachine> =
        machines.iter().map(AsRef::as_ref).filter(|m| is_of(m, pool)).collect();
    let of_pool = || requests.iter().map(AsRef::as_ref);
    let served = |m: &AgentMachine| of_pool().any(|r| crate::demand::serves(r, m));
    let waiting =
        machines.iter().filter(|m| is_waiting(m) && !served(m)).map(|m| demand::place(m, pool, of_pool()));
    let rows = pool.status.as_ref().map(|s| s.owned_vms.as_slice()).unwrap_or_default();
    let agent = match reuse(place, &waiting.collect(), rows, &facts, &machines) {
        Reuse::Nothing => return Ok(Taken::Nothing),
        Reuse::Selected(_) => return Ok(Taken::One),
        Reuse::Free(agent) => agent,
    };
    let api_of: Api<Agent> = Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.agent);
    let patch = json!({"metadata": {"resourceVersion": agent.resource_version, "labels": {names::AGENT_MACHINE: place}}});
    match api_of.patch(&agent.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => {
            tracing::info!(agent = agent.name, machine = am.name_any(), "a free Agent is used again");
            Ok(Taken::One)
        }
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Taken::Raced),
        Err(error) => Err(api("select Agent", &agent.name)(error)),
    }
}

/// Pins an AgentMachine's selector to the name of a VM; its other terms stay.
pub(crate) async fn pin_selector(cx: &Context, am: &AgentMachine, wanted: &str) -> Result<(), Error> {
    let (ns, name) = (am.namespace().unwrap_or_default(), am.name_any());
    let api_of: Api<AgentMachine> =
        Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.agent_machine);
    let patch = json!({
        "metadata": {"resourceVersion": am.resource_version()},
        "spec": {"agentLabelSelector": {"matchLabels": {names::AGENT_MACHINE: wanted}}},
    });
    match api_of.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        // It changed or went meanwhile: that change triggers the next pass.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("pin AgentMachine", format!("{ns}/{name}"))(error)),
    }
}
