//! Plan for an AgentMachine. Pure.

use coracle_api::agentpool::{VsphereAgent, VsphereAgentPool, foreign::AgentMachine};
use kube::ResourceExt as _;

use super::reuse::{Reuse, reuse, reuses};
use crate::{
    demand::{self, Demand, is_waiting, place, request, serves},
    identity::AgentFacts,
    pool::plan::Pin,
};

/// Everything that the plan of an AgentMachine depends on.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The AgentMachine.
    pub am: &'a AgentMachine,
    /// Live pools of its NodePool.
    pub pools: Vec<&'a VsphereAgentPool>,
    /// VsphereAgents of these pools.
    pub requests: Vec<&'a VsphereAgent>,
    /// Agents in the namespace of the pool.
    pub agents: &'a [AgentFacts],
    /// AgentMachines of the pool.
    pub machines: Vec<&'a AgentMachine>,
}

/// One effect with all its data.
#[derive(Clone, Debug)]
pub enum Step {
    /// Pins the selector of the AgentMachine to its VM.
    PinSelector(Pin),
    /// Labels a free Agent, so that the AgentMachine selects it.
    SelectAgent {
        /// Namespace of the Agent.
        namespace: String,
        /// Agent to select.
        agent: Box<AgentFacts>,
        /// Value of the Agent's selection label.
        vm: String,
    },
    /// Creates the first of these VsphereAgents whose name is free.
    CreateRequest {
        /// Objects to try, in order.
        candidates: Vec<VsphereAgent>,
        /// AgentMachine: an existing VsphereAgent that serves it is as good as a new one.
        machine: Box<AgentMachine>,
    },
}

/// Trigger of the next reconcile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Again {
    /// After the poll interval.
    #[default]
    Poll,
    /// When an object changes.
    OnChange,
}

/// Steps, and the trigger of the next reconcile.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Steps, in order.
    pub steps: Vec<Step>,
    /// Trigger of the next reconcile.
    pub again: Again,
}

/// Plans one reconcile.
#[must_use]
pub fn plan(s: &Snapshot<'_>) -> Plan {
    let Demand { pin, vm, create, note } = demand::plan(s.am, &s.pools, s.requests.iter().copied());
    if note.is_some() {
        let again = if s.pools.is_empty() { Again::OnChange } else { Again::Poll };
        return Plan { again, ..Plan::default() };
    }
    let Some(pool) = s.pools.first() else { return Plan::default() };
    let mut steps: Vec<_> = pin.map(|vm| Step::PinSelector(Pin::of(s.am, vm))).into_iter().collect();
    if !create.is_empty() {
        steps.extend(obtain(s, pool, vm, create));
    }
    Plan { steps, again: Again::Poll }
}

/// Selects a free Agent if the pool reuses Agents, or creates a VsphereAgent. Returns `None` if an Agent is selected already.
fn obtain(s: &Snapshot<'_>, pool: &VsphereAgentPool, vm: String, create: Vec<String>) -> Option<Step> {
    let served = |m: &AgentMachine| s.requests.iter().any(|r| serves(r, m));
    let waiting = s.machines.iter().filter(|m| is_waiting(m) && !served(m));
    let waiting = waiting.map(|m| place(m, pool, s.requests.iter().copied())).collect();
    let rows = pool.status.as_ref().map(|status| status.owned_vms.as_slice()).unwrap_or_default();
    let found = match reuses(pool) {
        true => reuse(&vm, &waiting, rows, s.agents, &s.machines),
        false => Reuse::Nothing,
    };
    match found {
        Reuse::Selected(_) => None,
        Reuse::Free(agent) => Some(Step::SelectAgent {
            namespace: pool.namespace().unwrap_or_default(),
            agent: Box::new(agent.clone()),
            vm,
        }),
        Reuse::Nothing => Some(Step::CreateRequest {
            candidates: create.iter().map(|name| request(name, &vm, s.am, pool)).collect(),
            machine: Box::new(s.am.clone()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use coracle_api::agentpool::{NameRef, OwnedVm, names};
    use k8s_openapi::api::core::v1::ObjectReference;
    use serde_json::json;

    use super::*;

    fn pool(name: &str, reuses: bool) -> VsphereAgentPool {
        let mut pool = VsphereAgentPool::default();
        (pool.metadata.name, pool.metadata.namespace) = (Some(name.into()), Some("ns".into()));
        pool.spec.control_plane_namespace = "cp".into();
        pool.spec.node_pool_ref = NameRef { name: "np".into() };
        if reuses {
            pool.annotations_mut().insert(names::REUSE.into(), "true".into());
        }
        let row = OwnedVm {
            name: "old".into(),
            phase: names::phase::AVAILABLE.into(),
            source: names::source::VSPHERE_AGENT.into(),
            agent_ref: Some(ObjectReference { name: Some("agent-old".into()), ..Default::default() }),
            ..OwnedVm::default()
        };
        pool.status.get_or_insert_default().owned_vms = vec![row];
        pool
    }

    fn am(reason: &str, pinned: bool) -> AgentMachine {
        let selector = if pinned { json!({"matchLabels": {names::AGENT_MACHINE: "w-0"}}) } else { json!({}) };
        serde_json::from_value(json!({
            "metadata": {"name": "w-0", "namespace": "cp", "uid": "uid-w-0",
                "annotations": {"hypershift.openshift.io/nodePool": "ns/np"}},
            "spec": {"agentLabelSelector": selector},
            "status": {"conditions": [{"type": "Ready", "status": "False", "reason": reason}]},
        }))
        .unwrap()
    }

    fn agent(selects: &str) -> AgentFacts {
        AgentFacts {
            name: "agent-old".into(),
            labels: [(names::AGENT_MACHINE.to_owned(), selects.to_owned())].into(),
            approved: true,
            hostname: "old".into(),
            is_usable: true,
            ..AgentFacts::default()
        }
    }

    fn verbs(plan: &Plan) -> String {
        let verb = |step: &Step| match step {
            Step::PinSelector(pin) => format!("pin:{}", pin.vm),
            Step::SelectAgent { agent, vm, .. } => format!("select:{}={vm}", agent.name),
            Step::CreateRequest { candidates, .. } => format!("create:{}", candidates[0].name_any()),
        };
        plan.steps.iter().map(verb).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn plan_table() {
        let waits = "NoSuitableAgents";
        for (why, am, pools, agents, want, again) in [
            ("it does not wait", am("Other", true), vec![pool("a", false)], vec![], "", Again::Poll),
            ("no pool serves it", am(waits, true), vec![], vec![], "", Again::OnChange),
            (
                "two pools serve it",
                am(waits, true),
                vec![pool("a", false), pool("b", false)],
                vec![],
                "",
                Again::Poll,
            ),
            (
                "pin before anything is created",
                am(waits, false),
                vec![pool("a", false)],
                vec![],
                "pin:w-0 create:w-0",
                Again::Poll,
            ),
            ("pinned already", am(waits, true), vec![pool("a", false)], vec![], "create:w-0", Again::Poll),
            (
                "a pool without reuse ignores free Agents",
                am(waits, true),
                vec![pool("a", false)],
                vec![agent("old")],
                "create:w-0",
                Again::Poll,
            ),
            (
                "a pool with reuse selects a free Agent",
                am(waits, true),
                vec![pool("a", true)],
                vec![agent("old")],
                "select:agent-old=w-0",
                Again::Poll,
            ),
            (
                "an Agent is selected already",
                am(waits, true),
                vec![pool("a", true)],
                vec![agent("w-0")],
                "",
                Again::Poll,
            ),
        ] {
            let snapshot = Snapshot {
                am: &am,
                pools: pools.iter().collect(),
                requests: vec![],
                agents: &agents,
                machines: vec![&am],
            };
            let plan = plan(&snapshot);
            assert_eq!((verbs(&plan).as_str(), plan.again), (want, again), "{why}");
        }
    }
}
