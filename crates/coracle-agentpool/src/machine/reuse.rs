//! Reuse of free Agents by waiting AgentMachines (pure). The original operator pins every AgentMachine to a VM of its own name,
//! so an Agent whose AgentMachine is gone stays unused. A pool annotated `coracle.dev/reuse: "true"` gives such an Agent to the
//! next AgentMachine that waits.

use std::collections::BTreeSet;

use coracle_api::agentpool::{
    OwnedVm, VsphereAgentPool,
    foreign::AgentMachine,
    names::{self, phase, source},
};
use kube::ResourceExt as _;

use crate::{demand::is_waiting, identity::AgentFacts};

/// Agent for a waiting AgentMachine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reuse<'a> {
    /// None: a VM is created.
    Nothing,
    /// An Agent that is already selected for the AgentMachine; the provider will claim it.
    Selected(&'a AgentFacts),
    /// A free Agent, to be selected by setting its selection label.
    Free(&'a AgentFacts),
}

/// Whether the pool gives free Agents to AgentMachines of other names.
#[must_use]
pub fn reuses(pool: &VsphereAgentPool) -> bool {
    pool.annotations().get(names::REUSE).is_some_and(|v| v == "true")
}

/// Finds an Agent for the AgentMachine that is pinned to `place`. `waiting` are the places of all AgentMachines of the pool
/// that wait and have no VM of their own. Each of them takes a different Agent without coordination.
#[must_use]
pub fn reuse<'a>(
    place: &str,
    waiting: &BTreeSet<String>,
    rows: &[OwnedVm],
    agents: &'a [AgentFacts],
    machines: &[&AgentMachine],
) -> Reuse<'a> {
    let selects = |agent: &AgentFacts| agent.labels.get(names::AGENT_MACHINE).cloned().unwrap_or_default();
    let mut free: Vec<_> = agents.iter().filter(|a| is_free(a, rows)).collect();
    free.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(agent) = free.iter().find(|a| selects(a) == place) {
        return Reuse::Selected(agent);
    }
    let selected: BTreeSet<_> = free.iter().map(|a| selects(a)).collect();
    free.retain(|a| !machines.iter().any(|am| holds(am, &selects(a))));
    let rank = waiting.iter().filter(|w| !selected.contains(*w)).position(|w| w == place);
    rank.and_then(|rank| free.get(rank)).map_or(Reuse::Nothing, |agent| Reuse::Free(agent))
}

/// Whether an Agent runs in a VM of the pool, is not claimed, and would be accepted by the provider.
fn is_free(agent: &AgentFacts, rows: &[OwnedVm]) -> bool {
    let is_its = |row: &&OwnedVm| {
        row.agent_ref.as_ref().and_then(|r| r.name.as_deref()) == Some(&agent.name)
            && row.phase == phase::AVAILABLE
            && row.source != source::DISCOVERED_AGENT
    };
    let prepared = agent.approved && !agent.hostname.is_empty();
    prepared && agent.is_usable && !agent.is_bound && !agent.is_going && rows.iter().any(|r| is_its(&r))
}

/// Whether the AgentMachine still relies on the Agent with the selection label `label`: the AgentMachine is not being deleted
/// and has no other Agent. A new AgentMachine without status counts as well, because the provider may be about to claim for it.
fn holds(am: &AgentMachine, label: &str) -> bool {
    let has = am.view.status.agent_ref.as_ref().is_some_and(|r| !r.name.is_empty());
    let is_alive = am.metadata.deletion_timestamp.is_none();
    is_alive && (!has || is_waiting(am)) && am.selected(names::AGENT_MACHINE) == Some(label)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;
    use serde_json::json;

    use super::*;

    fn row(vm: &str, phase: &str, source: &str) -> OwnedVm {
        OwnedVm {
            name: vm.into(),
            phase: phase.into(),
            source: source.into(),
            agent_ref: Some(ObjectReference {
                name: Some(format!("agent-{vm}")),
                ..ObjectReference::default()
            }),
            ..OwnedVm::default()
        }
    }

    fn agent(vm: &str, selects: &str) -> AgentFacts {
        AgentFacts {
            name: format!("agent-{vm}"),
            labels: [(names::AGENT_MACHINE.to_owned(), selects.to_owned())].into(),
            approved: true,
            hostname: vm.into(),
            is_usable: true,
            ..AgentFacts::default()
        }
    }

    fn am(name: &str, agent: Option<&str>) -> AgentMachine {
        serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"agentLabelSelector": {"matchLabels": {names::AGENT_MACHINE: name}}},
            "status": agent.map_or(json!({}), |a| json!({"agentRef": {"name": a}})),
        }))
        .unwrap()
    }

    #[test]
    fn reuse_needs_available_unclaimed_unpinned_agent() {
        let ours = || row("old", phase::AVAILABLE, source::VSPHERE_AGENT);
        let free = || agent("old", "old");
        let claimed = AgentFacts { is_bound: true, ..free() };
        let going = AgentFacts { is_going: true, ..free() };
        let unfit = AgentFacts { is_usable: false, ..free() };
        let unprepared = AgentFacts { hostname: String::new(), ..free() };
        let discovered = row("old", phase::AVAILABLE, source::DISCOVERED_AGENT);
        let released = row("old", phase::RELEASED, source::VSPHERE_AGENT);
        for (why, row, agent, machines, want) in [
            ("its AgentMachine is gone", ours(), free(), vec![], true),
            ("its AgentMachine waits for it", ours(), free(), vec![am("old", None)], false),
            ("its AgentMachine has another", ours(), free(), vec![am("old", Some("agent-x"))], true),
            ("claimed", ours(), claimed, vec![], false),
            ("on its way out", ours(), going, vec![], false),
            ("the provider would not take it", ours(), unfit, vec![], false),
            ("not prepared yet", ours(), unprepared, vec![], false),
            ("not in a VM of ours", discovered, free(), vec![], false),
            ("was a node, and is cleaned up", released, free(), vec![], false),
        ] {
            let machines: Vec<_> = machines.iter().chain([&am("new", None)]).cloned().collect();
            let machines: Vec<_> = machines.iter().collect();
            let (rows, agents) = ([row], [agent]);
            let found = reuse("new", &BTreeSet::from(["new".to_owned()]), &rows, &agents, &machines);
            assert_eq!(matches!(found, Reuse::Free(_)), want, "{why}: {found:?}");
        }
    }

    #[test]
    fn waiting_machines_take_one_free_agent_each() {
        let rows = [
            row("a", phase::AVAILABLE, source::VSPHERE_AGENT),
            row("b", phase::AVAILABLE, source::VSPHERE_AGENT),
        ];
        let waiting: BTreeSet<_> = ["x", "y", "z"].map(String::from).into();
        let machines = [am("x", None), am("y", None), am("z", None)];
        let machines: Vec<_> = machines.iter().collect();
        let take = |place: &str, agents: &[AgentFacts]| match reuse(place, &waiting, &rows, agents, &machines)
        {
            Reuse::Nothing => "nothing".to_owned(),
            Reuse::Selected(a) => format!("has {}", a.name),
            Reuse::Free(a) => format!("takes {}", a.name),
        };
        let both = [agent("a", "a"), agent("b", "b")];
        assert_eq!(["x", "y", "z"].map(|p| take(p, &both)), ["takes agent-a", "takes agent-b", "nothing"]);
        let one_given = [agent("a", "x"), agent("b", "b")];
        assert_eq!(["x", "y", "z"].map(|p| take(p, &one_given)), ["has agent-a", "takes agent-b", "nothing"]);
    }
}
