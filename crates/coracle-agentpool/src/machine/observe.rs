//! Observation of an AgentMachine, from caches only.

use std::sync::Arc;

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, foreign::AgentMachine};
use kube::ResourceExt as _;

use super::plan::Snapshot;
use crate::{Context, demand::is_of, identity::AgentFacts};

/// Pools of an AgentMachine, and all objects that belong to them.
pub(super) struct Observed {
    pools: Vec<Arc<VsphereAgentPool>>,
    requests: Vec<Arc<VsphereAgent>>,
    agents: Vec<AgentFacts>,
    machines: Vec<Arc<AgentMachine>>,
}

/// Reads the caches.
pub(super) fn observe(cx: &Context, am: &AgentMachine) -> Observed {
    let live = |p: &Arc<VsphereAgentPool>| p.metadata.deletion_timestamp.is_none() && is_of(am, p);
    let pools: Vec<_> = cx.caches.pools.state().into_iter().filter(live).collect();
    let namespace = pools.first().and_then(|p| p.namespace());
    let agents = cx.caches.agents.state();
    let of_pool = |m: &Arc<AgentMachine>| pools.first().is_some_and(|p| is_of(m, p));
    Observed {
        requests: pools.iter().flat_map(|p| cx.caches.requests_of(p)).collect(),
        agents: agents.iter().filter(|a| a.namespace() == namespace).map(|a| AgentFacts::of(a)).collect(),
        machines: cx.caches.agent_machines.state().into_iter().filter(of_pool).collect(),
        pools,
    }
}

impl Observed {
    /// Input of the planner.
    pub(super) fn snapshot<'a>(&'a self, am: &'a AgentMachine) -> Snapshot<'a> {
        Snapshot {
            am,
            pools: self.pools.iter().map(AsRef::as_ref).collect(),
            requests: self.requests.iter().map(AsRef::as_ref).collect(),
            agents: &self.agents,
            machines: self.machines.iter().map(AsRef::as_ref).collect(),
        }
    }
}
