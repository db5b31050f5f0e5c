//! Before a VM goes: nobody uses it, and nobody can begin to. Every read is past the caches.

use coracle_api::agentpool::{
    OwnedVm, VsphereAgentPool,
    foreign::{Agent, Machine},
    names,
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    Context, Error,
    error::api,
    identity::{AgentFacts, Identity},
};

/// What a fence came to.
#[derive(Debug)]
pub(crate) enum Fenced {
    /// These Agents, by name and UID, go with the VM; none of them can be claimed any more.
    Closed(Vec<(String, String)>),
    /// Someone uses it.
    Blocked(String),
}

/// Closes the fence around the VM of `row`.
pub(crate) async fn fence(cx: &Context, pool: &VsphereAgentPool, row: &OwnedVm) -> Result<Fenced, Error> {
    if let Some(machine) = row.machine_ref.as_ref().and_then(|m| m.name.as_deref()) {
        let cp = &pool.spec.control_plane_namespace;
        let machines: Api<Machine> = Api::namespaced_with(cx.client.clone(), cp, &cx.caches.kinds.machine);
        if machines.get_opt(machine).await.map_err(api("read Machine", machine))?.is_some() {
            return Ok(Fenced::Blocked(format!("Machine {cp}/{machine} still exists")));
        }
    }
    let ns = pool.namespace().unwrap_or_default();
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.agent);
    // All of them: labels may have been edited.
    let all = agents.list(&ListParams::default()).await.map_err(api("list Agents in", &ns))?;
    let facts: Vec<_> = all.iter().map(AgentFacts::of).filter(|a| is_of(a, row)).collect();
    if let Some(bound) = facts.iter().find(|a| a.is_bound) {
        return Ok(Fenced::Blocked(format!("Agent {} is bound", bound.name)));
    }
    for agent in &facts {
        let patch = json!({
            "metadata": {
                "resourceVersion": agent.resource_version,
                "annotations": {names::CLEANUP_VM: row.name},
            },
            "spec": {"approved": false},
        });
        match agents.patch(&agent.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            // It changed since it was read, and might be bound by now.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                return Ok(Fenced::Blocked(format!("Agent {} changed meanwhile", agent.name)));
            }
            Err(error) => return Err(api("fence Agent", &agent.name)(error)),
        }
    }
    Ok(Fenced::Closed(facts.into_iter().map(|a| (a.name, a.uid)).collect()))
}

/// The Agent is the VM's: by identity; or by name and nothing against it.
fn is_of(agent: &AgentFacts, row: &OwnedVm) -> bool {
    let id = Identity::of_row(row);
    let named = row.agent_ref.as_ref().and_then(|r| r.name.as_deref()) == Some(&agent.name);
    let same_host = !row.name.is_empty() && agent.known_hostname() == row.name;
    id.is(&agent.identity) || ((named || same_host) && !id.conflicts(&agent.identity))
}
