//! Plan of a pool. Pure: equal snapshots give equal steps.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::agentpool::{
    CleanupPolicy, OwnedVm, PlannedAction, VsphereAgent, VsphereAgentPool,
    foreign::AgentMachine,
    names::{self, action, phase, phase_reason, source},
};
use jiff::Timestamp;
use kube::ResourceExt as _;

use crate::{
    demand::Counters,
    identity::{AgentFacts, label_value},
    machine::reuse::reuses,
};

use super::rows::{Graces, Machines};

/// Everything that the plan of a pool depends on.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The pool.
    pub pool: &'a VsphereAgentPool,
    /// Rows of the pool, refreshed.
    pub rows: &'a [OwnedVm],
    /// Agents of the pool.
    pub agents: &'a [AgentFacts],
    /// Index of the Agent of each row.
    pub matches: &'a BTreeMap<usize, usize>,
    /// Counts of AgentMachines.
    pub demand: Counters,
    /// Machines of the pool.
    pub machines: &'a Machines,
    /// Selectors of AgentMachines to be pinned.
    pub pins: &'a [Pin],
    /// VsphereAgents of the pool.
    pub requests: &'a [RequestView],
    /// Selector terms that no Agent of the pool matches, as `key=value`.
    pub unmet: &'a BTreeSet<String>,
    /// VMs of discovered Agents to adopt.
    pub adoptable: &'a [Adoption],
    /// URL of the discovery image if its check is due.
    pub iso_due: Option<&'a str>,
    /// Grace periods.
    pub graces: Graces,
    /// Current time.
    pub now: Timestamp,
}

/// A VsphereAgent of the pool, reduced to the fields that its deletion needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestView {
    /// Name of the object.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// Whether it is being deleted.
    pub is_deleting: bool,
    /// BIOS UUID and MAC address that vSphere reported for its VM.
    pub hardware: Option<(String, String)>,
}

/// Pin of an AgentMachine's selector.
#[derive(Clone, Debug, PartialEq)]
pub struct Pin {
    /// Namespace of the AgentMachine.
    pub namespace: String,
    /// Name of the AgentMachine.
    pub name: String,
    /// Resource version of the AgentMachine: the pin is refused after a concurrent change.
    pub resource_version: Option<String>,
    /// Value of the selector: the name of a VM.
    pub vm: String,
}

impl Pin {
    /// Pins an AgentMachine to a VM.
    #[must_use]
    pub fn of(am: &AgentMachine, vm: String) -> Self {
        Self {
            namespace: am.namespace().unwrap_or_default(),
            name: am.name_any(),
            resource_version: am.resource_version(),
            vm,
        }
    }
}

/// VM to adopt, and the VsphereAgent that will own it.
#[derive(Clone, Debug, PartialEq)]
pub struct Adoption {
    /// VsphereAgent to create.
    pub request: VsphereAgent,
    /// Message of the event.
    pub note: String,
}

/// One effect with all its data: the executor does not read the specification.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Adds the finalizer.
    AddFinalizer,
    /// Pins the selector of an AgentMachine to its VM.
    PinSelector(Pin),
    /// Sets labels, role, host name and approval of Agents, concurrently.
    PrepareAgents(Vec<Preparation>),
    /// Fences a VM and deletes its VsphereAgent.
    RemoveVm(Box<Removal>),
    /// Creates the VsphereAgent of a VM that is older than the pool.
    AdoptVm(Box<Adoption>),
    /// Emits an event about selectors that no Agent matches.
    WarnSelectors(String),
    /// Deletes a VsphereAgent.
    DeleteRequest(RequestView),
    /// Deletes the images of the pool.
    DeleteImages,
    /// Removes the finalizer.
    RemoveFinalizer,
}

/// Desired fields of an Agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Preparation {
    /// Agent to prepare.
    pub agent: AgentFacts,
    /// Host name to set, which is the name of the VM.
    pub hostname: String,
    /// Labels to set.
    pub labels: BTreeMap<String, String>,
    /// Role to set.
    pub role: String,
    /// Approval; `None` leaves it unchanged.
    pub approve: Option<bool>,
    /// Why the Agent must be prepared.
    pub reason: &'static str,
}

/// VM to destroy, with its Agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Removal {
    /// Row of the VM.
    pub row: OwnedVm,
    /// Name of the Agent, if the VM has one.
    pub agent: Option<String>,
    /// VsphereAgent of the VM; `None` if the object is gone.
    pub request: Option<RequestView>,
    /// Namespace of the Machines that may use the VM.
    pub machines_namespace: String,
    /// Why the VM is destroyed.
    pub reason: &'static str,
}

/// Steps, and counters for status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Number of missing Agents.
    pub deficit: i32,
    /// Number of Agents of the pool.
    pub matching: i32,
    /// Number of claimed Agents.
    pub bound: i32,
    /// Number of free Agents.
    pub available: i32,
    /// Number of free Agents that the provider would accept.
    pub usable: i32,
    /// Number of VMs whose Agent has not registered.
    pub pending: i32,
    /// Steps, in order.
    pub steps: Vec<Step>,
    /// URL of the discovery image if it must be checked after the steps.
    pub check_iso: Option<String>,
    /// Free Agents of the pool without a row; they cannot be prepared.
    pub unassigned: Vec<String>,
}

/// Plans one reconcile of a pool that is not being deleted.
#[must_use]
pub fn plan(s: &Snapshot<'_>) -> Plan {
    let live = || s.agents.iter().filter(|a| !a.is_going);
    let bound = to_i32(live().filter(|a| a.is_bound).count());
    let free = || live().filter(|a| !a.is_bound);
    let (available, usable) = (to_i32(free().count()), to_i32(free().filter(|a| is_usable(s, a)).count()));
    let pending = to_i32(s.rows.iter().filter(|r| r.phase == phase::PROVISIONING).count());
    Plan {
        deficit: (s.demand.waiting - usable - pending).max(0),
        matching: to_i32(live().count()),
        bound,
        available,
        usable,
        pending,
        steps: steps(s, available),
        check_iso: s.iso_due.map(str::to_owned),
        unassigned: unassigned_agents(s),
    }
}

fn steps(s: &Snapshot<'_>, available: i32) -> Vec<Step> {
    let has_finalizer = s.pool.finalizers().iter().any(|f| f == names::POOL_FINALIZER);
    let mut steps: Vec<_> = (!has_finalizer).then_some(Step::AddFinalizer).into_iter().collect();
    steps.extend(s.pins.iter().cloned().map(Step::PinSelector));
    let preparations = prepare(s);
    if !preparations.is_empty() {
        steps.push(Step::PrepareAgents(preparations));
    }
    steps.extend(remove(s, available).into_iter().map(|removal| Step::RemoveVm(Box::new(removal))));
    steps.extend(s.adoptable.iter().cloned().map(|adoption| Step::AdoptVm(Box::new(adoption))));
    if !s.unmet.is_empty() {
        let terms = s.unmet.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        steps.push(Step::WarnSelectors(format!(
            "AgentMachines select {terms}, which spec.agent.labels does not give: no Agent of this pool fits them. Add it \
             there, or take it out of the NodePool's spec.platform.agent.agentLabelSelector"
        )));
    }
    steps
}

/// Plans the deletion of a pool: first its VsphereAgents, which wait for their Machines, then its images.
#[must_use]
pub fn plan_deletion(pool: &VsphereAgentPool, requests: &[RequestView]) -> Vec<Step> {
    if !requests.is_empty() {
        let live = requests.iter().filter(|r| !r.is_deleting);
        return live.cloned().map(Step::DeleteRequest).collect();
    }
    let deletes = pool.annotations().get(names::DELETE_ISOS).is_some_and(|v| v == "true");
    deletes.then_some(Step::DeleteImages).into_iter().chain([Step::RemoveFinalizer]).collect()
}

/// Free Agents without a row. Agents that report the same identity match no row until a user resolves that; other Agents are
/// unaffected.
fn unassigned_agents(s: &Snapshot<'_>) -> Vec<String> {
    let has_row = |name: &str| {
        s.rows.iter().any(|r| r.agent_ref.as_ref().and_then(|a| a.name.as_deref()) == Some(name))
    };
    let matched = |index: usize| s.matches.values().any(|at| *at == index);
    let free =
        s.agents.iter().enumerate().filter(|(_, a)| !a.is_bound && !a.is_going && !a.hostname.is_empty());
    free.filter(|(index, a)| !matched(*index) && !has_row(&a.name)).map(|(_, a)| a.name.clone()).collect()
}

fn to_i32(n: usize) -> i32 {
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
    // A reused Agent is selected by another AgentMachine than the one for which its VM was created.
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
            (phase::RELEASED, phase_reason::MACHINE_DELETED) => Some(phase_reason::MACHINE_DELETED),
            // An interrupted removal is completed although there is demand again: opening the fence could let the Agent be
            // claimed while its VM is destroyed.
            (phase::AVAILABLE, _) if agent.is_some_and(|a| a.is_fenced && !a.is_bound) => {
                Some("RemovalCutOff")
            }
            (phase::AVAILABLE, _) if surplus > 0 && agent.is_some_and(|a| !a.is_bound) => {
                surplus -= 1;
                Some("SurplusAvailable")
            }
            (phase::ORPHANED, phase_reason::AGENT_MISSING) if is_over(s, row) => {
                Some(phase_reason::AGENT_MISSING)
            }
            (phase::ORPHANED, _) if is_over(s, row) => Some(phase_reason::AGENT_DISCOVERY_EXPIRED),
            _ => None,
        };
        all.extend(reason.filter(|_| !has_machine(s, row)).map(|reason| Removal {
            row: row.clone(),
            agent: agent.map(|a| a.name.clone()),
            request: s.requests.iter().find(|r| r.uid == row.owner_uid).cloned(),
            machines_namespace: s.pool.spec.control_plane_namespace.clone(),
            reason,
        }));
    }
    all
}

/// Whether the Machine of the row exists. If so, the VM stays, regardless of the state of its Agent.
#[must_use]
pub fn has_machine(s: &Snapshot<'_>, row: &OwnedVm) -> bool {
    let name = row.machine_ref.as_ref().and_then(|m| m.name.as_deref());
    name.is_some_and(|name| s.machines.contains_key(name))
}

fn is_over(s: &Snapshot<'_>, row: &OwnedVm) -> bool {
    row.last_transition_time.as_ref().is_some_and(|t| s.now.duration_since(t.0) >= s.graces.orphan)
}

impl Plan {
    /// Agents to prepare.
    pub fn preparations(&self) -> impl Iterator<Item = &Preparation> {
        self.steps.iter().flat_map(|step| match step {
            Step::PrepareAgents(preparations) => preparations.as_slice(),
            _ => &[],
        })
    }

    /// VMs to destroy.
    pub fn removals(&self) -> impl Iterator<Item = &Removal> {
        self.steps.iter().filter_map(|step| match step {
            Step::RemoveVm(removal) => Some(&**removal),
            _ => None,
        })
    }

    /// Actions for the status: deficits, preparations, VMs, Agents; `Noop` if there is none.
    #[must_use]
    pub fn actions(&self) -> Vec<PlannedAction> {
        let one = |kind: &str, reason: &str, name: &str| PlannedAction {
            kind: kind.into(),
            reason: reason.into(),
            name: name.into(),
        };
        let deficit = (0..self.deficit).map(|_| one(action::DEMAND_DEFICIT, "WaitingAgentMachines", ""));
        let patches = self.preparations().map(|p| one(action::PATCH_AGENT, p.reason, &p.agent.name));
        let vms = self.removals().map(|r| one(action::DELETE_VM, r.reason, &r.row.name));
        let agents =
            self.removals().filter_map(|r| Some(one(action::DELETE_AGENT, r.reason, r.agent.as_ref()?)));
        let all: Vec<_> = deficit.chain(patches).chain(vms).chain(agents).collect();
        if all.is_empty() { vec![one(action::NOOP, "NothingToDo", "")] } else { all }
    }
}

#[cfg(test)]
mod tests;
