//! What a pool needs (pure): no I/O, no clock of its own, the same answer for the same snapshot.

use std::collections::BTreeMap;

use coracle_api::agentpool::{
    CleanupPolicy, OwnedVm, PlannedAction, VsphereAgentPool,
    names::{self, action, phase, source, why},
};
use jiff::Timestamp;

use crate::{
    demand::Counters,
    identity::{AgentFacts, label_value},
    reuse::reuses,
    rows::{Graces, Machines},
};

/// Everything that a plan is made of.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The pool.
    pub pool: &'a VsphereAgentPool,
    /// Its rows, refreshed.
    pub rows: &'a [OwnedVm],
    /// Agents of the pool.
    pub agents: &'a [AgentFacts],
    /// Which Agent is which row's.
    pub matches: &'a BTreeMap<usize, usize>,
    /// What AgentMachines add up to.
    pub demand: Counters,
    /// Machines of the pool.
    pub machines: &'a Machines,
    /// Times that decide something.
    pub graces: Graces,
    /// Now.
    pub now: Timestamp,
}

/// How an Agent is to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Preparation {
    /// The Agent.
    pub agent: AgentFacts,
    /// Host name, and name of its VM.
    pub hostname: String,
    /// Labels to set.
    pub labels: BTreeMap<String, String>,
    /// Role to set.
    pub role: String,
    /// Whether it is approved; `None`: as it is.
    pub approve: Option<bool>,
    /// Why.
    pub reason: &'static str,
}

/// A VM to be destroyed, with its Agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Removal {
    /// Its row.
    pub row: OwnedVm,
    /// Its Agent's name, if it has one.
    pub agent: Option<String>,
    /// Why.
    pub reason: &'static str,
}

/// What is decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Agents that are missing.
    pub deficit: i32,
    /// Agents of the pool, claimed, and free.
    pub matching: i32,
    /// Claimed Agents.
    pub bound: i32,
    /// Free Agents.
    pub available: i32,
    /// Free Agents that the provider would take.
    pub usable: i32,
    /// VMs whose Agent has not come.
    pub pending: i32,
    /// Agents to prepare.
    pub prepare: Vec<Preparation>,
    /// VMs to destroy.
    pub remove: Vec<Removal>,
    /// Free Agents of the pool that no row stands for, so that they cannot be prepared.
    pub unassigned: Vec<String>,
}

/// Decides.
#[must_use]
pub fn plan(s: &Snapshot<'_>) -> Plan {
    let live = || s.agents.iter().filter(|a| !a.is_going);
    let bound = whole(live().filter(|a| a.is_bound).count());
    let free = || live().filter(|a| !a.is_bound);
    let (available, usable) = (whole(free().count()), whole(free().filter(|a| is_usable(s, a)).count()));
    let pending = whole(s.rows.iter().filter(|r| r.phase == phase::PROVISIONING).count());
    Plan {
        deficit: (s.demand.waiting - usable - pending).max(0),
        matching: whole(live().count()),
        bound,
        available,
        usable,
        pending,
        prepare: prepare(s),
        remove: remove(s, available),
        unassigned: unassigned(s),
    }
}

/// Two Agents that say the same of themselves are none's: a person has to tell them apart, and the others go on.
fn unassigned(s: &Snapshot<'_>) -> Vec<String> {
    let has_row = |name: &str| {
        s.rows.iter().any(|r| r.agent_ref.as_ref().and_then(|a| a.name.as_deref()) == Some(name))
    };
    let matched = |index: usize| s.matches.values().any(|at| *at == index);
    let free =
        s.agents.iter().enumerate().filter(|(_, a)| !a.is_bound && !a.is_going && !a.hostname.is_empty());
    free.filter(|(index, a)| !matched(*index) && !has_row(&a.name)).map(|(_, a)| a.name.clone()).collect()
}

fn whole(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn is_usable(s: &Snapshot<'_>, agent: &AgentFacts) -> bool {
    agent.is_usable && (agent.approved || s.pool.spec.agent.approve == Some(true))
}

fn agent_of<'a>(s: &Snapshot<'a>, row: usize) -> Option<&'a AgentFacts> {
    s.matches.get(&row).and_then(|index| s.agents.get(*index))
}

fn prepare(s: &Snapshot<'_>) -> Vec<Preparation> {
    let owned = s.rows.iter().enumerate().filter(|(_, row)| row.source != source::DISCOVERED_AGENT);
    let pairs = owned.filter_map(|(index, row)| Some((row, agent_of(s, index)?)));
    let free = pairs.filter(|(row, agent)| !agent.is_bound && !agent.is_going && row.phase != phase::BOUND);
    free.filter_map(|(row, agent)| prepare_one(s, row, agent)).collect()
}

fn prepare_one(s: &Snapshot<'_>, row: &OwnedVm, agent: &AgentFacts) -> Option<Preparation> {
    let spec = &s.pool.spec.agent;
    let label = |key: &str| agent.labels.get(key).map(String::as_str);
    // An Agent that is used again answers to another AgentMachine than its VM was made for.
    let given = label(names::AGENT_MACHINE).filter(|v| reuses(s.pool) && !v.is_empty());
    let selected = given.map_or_else(|| label_value(&row.name), str::to_owned);
    let is_waited_for =
        s.demand.waiting > 0 && !matches!(row.phase.as_str(), phase::RELEASED | phase::ORPHANED);
    let wanted_nodepool = spec.labels.get(names::NODEPOOL).map(String::as_str);
    let reason = if agent.hostname.is_empty() {
        "HostnameMissing"
    } else if wanted_nodepool.is_some() && label(names::NODEPOOL) != wanted_nodepool {
        "NodePoolLabelDiffers"
    } else if spec.approve == Some(true) && !agent.approved {
        "NotApproved"
    } else if agent.role != spec.role || label(names::ROLE_LABEL) != Some(&spec.role) {
        "RoleDiffers"
    } else if is_waited_for && label(names::AGENT_MACHINE) != Some(&selected) {
        "SelectionLabelDiffers"
    } else {
        return None;
    };
    let is_ours = |key: &String| {
        !matches!(key.as_str(), names::ROLE_LABEL | names::AGENT_MACHINE | names::AGENT_MACHINE_REF)
    };
    let mut labels: BTreeMap<_, _> =
        spec.labels.iter().filter(|(k, _)| is_ours(k)).map(|(k, v)| (k.clone(), v.clone())).collect();
    labels.insert(names::ROLE_LABEL.into(), spec.role.clone());
    labels.insert(names::AGENT_MACHINE.into(), selected);
    Some(Preparation {
        agent: agent.clone(),
        hostname: row.name.clone(),
        labels,
        role: spec.role.clone(),
        approve: (spec.approve == Some(true)).then_some(true),
        reason,
    })
}

fn remove(s: &Snapshot<'_>, available: i32) -> Vec<Removal> {
    if s.pool.spec.cleanup_policy == CleanupPolicy::Retain {
        return Vec::new();
    }
    let mut surplus = if s.demand.waiting == 0 && s.demand.without_agent == 0 { available } else { 0 };
    let mut all = Vec::new();
    for (index, row) in s.rows.iter().enumerate().filter(|(_, r)| r.source != source::DISCOVERED_AGENT) {
        let agent = agent_of(s, index);
        let reason = match (row.phase.as_str(), row.reason.as_str()) {
            (phase::RELEASED, why::MACHINE_DELETED) => Some(why::MACHINE_DELETED),
            (phase::AVAILABLE, _) if surplus > 0 && agent.is_some_and(|a| !a.is_bound) => {
                surplus -= 1;
                Some("SurplusAvailable")
            }
            (phase::ORPHANED, why::AGENT_MISSING) if is_over(s, row) => Some(why::AGENT_MISSING),
            (phase::ORPHANED, _) if is_over(s, row) => Some(why::AGENT_DISCOVERY_EXPIRED),
            _ => None,
        };
        all.extend(reason.filter(|_| !has_machine(s, row)).map(|reason| Removal {
            row: row.clone(),
            agent: agent.map(|a| a.name.clone()),
            reason,
        }));
    }
    all
}

/// The row's Machine is still there: whatever its Agent does, the VM stays.
#[must_use]
pub fn has_machine(s: &Snapshot<'_>, row: &OwnedVm) -> bool {
    let name = row.machine_ref.as_ref().and_then(|m| m.name.as_deref());
    name.is_some_and(|name| s.machines.contains_key(name))
}

fn is_over(s: &Snapshot<'_>, row: &OwnedVm) -> bool {
    row.last_transition_time.as_ref().is_some_and(|t| s.now.duration_since(t.0) >= s.graces.orphan)
}

impl Plan {
    /// As it stands in the status: deficits, preparations, VMs, Agents; `Noop` when there is nothing.
    #[must_use]
    pub fn actions(&self) -> Vec<PlannedAction> {
        let one = |kind: &str, reason: &str, name: &str| PlannedAction {
            kind: kind.into(),
            reason: reason.into(),
            name: name.into(),
        };
        let deficit = (0..self.deficit).map(|_| one(action::DEMAND_DEFICIT, "WaitingAgentMachines", ""));
        let patches = self.prepare.iter().map(|p| one(action::PATCH_AGENT, p.reason, &p.agent.name));
        let vms = self.remove.iter().map(|r| one(action::DELETE_VM, r.reason, &r.row.name));
        let agents =
            self.remove.iter().filter_map(|r| Some(one(action::DELETE_AGENT, r.reason, r.agent.as_ref()?)));
        let all: Vec<_> = deficit.chain(patches).chain(vms).chain(agents).collect();
        if all.is_empty() { vec![one(action::NOOP, "NothingToDo", "")] } else { all }
    }
}

#[cfg(test)]
mod tests;
