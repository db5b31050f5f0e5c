//! Fence around a VM before it is destroyed: makes sure that the VM is not in use and cannot be claimed. Reads the API server,
//! not the caches.

use coracle_api::agentpool::{
    OwnedVm,
    foreign::{Agent, Machine},
    names,
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    Context, Error,
    error::api,
    identity::{AgentFacts, HardwareId},
};

/// Result of a fence.
#[derive(Debug)]
pub(crate) enum Fenced {
    /// Name and UID of the VM's Agents, none of which can be claimed any more.
    Closed(Vec<(String, String)>),
    /// The VM is in use, for this reason.
    Blocked(String),
}

/// VM to be fenced.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FenceTarget {
    /// Namespace of the Agents.
    pub(crate) namespace: String,
    /// Namespace of the Machines.
    pub(crate) machines_namespace: String,
    /// VM with the identity that vSphere reported.
    pub(crate) row: OwnedVm,
}

/// Closes the fence around a VM: afterwards, no Agent of the VM can be claimed.
pub(crate) async fn fence(cx: &Context, target: &FenceTarget) -> Result<Fenced, Error> {
    let FenceTarget { namespace: ns, machines_namespace: cp, row } = target;
    if let Some(machine) = row.machine_ref.as_ref().and_then(|m| m.name.as_deref()) {
        let machines: Api<Machine> = Api::namespaced_with(cx.client.clone(), cp, &cx.caches.kinds.machine);
        if machines.get_opt(machine).await.map_err(api("read Machine", machine))?.is_some() {
            return Ok(Fenced::Blocked(format!("Machine {cp}/{machine} still exists")));
        }
    }
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), ns, &cx.caches.kinds.agent);
    // List all Agents, because labels may have been edited.
    let all = agents.list(&ListParams::default()).await.map_err(api("list Agents in", ns))?;
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
            // The Agent changed since it was read, and might be bound by now.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                return Ok(Fenced::Blocked(format!("Agent {} changed meanwhile", agent.name)));
            }
            Err(error) => return Err(api("fence Agent", &agent.name)(error)),
        }
    }
    Ok(Fenced::Closed(facts.into_iter().map(|a| (a.name, a.uid)).collect()))
}

/// Whether the Agent runs in the VM: by identity, or by name without a conflicting identity.
fn is_of(agent: &AgentFacts, row: &OwnedVm) -> bool {
    let id = HardwareId::of_row(row);
    let named = row.agent_ref.as_ref().and_then(|r| r.name.as_deref()) == Some(&agent.name);
    let same_host = !row.name.is_empty() && agent.known_hostname() == row.name;
    id.is(&agent.identity) || ((named || same_host) && !id.conflicts(&agent.identity))
}
