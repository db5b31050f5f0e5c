//! Rows of a pool's VMs: VsphereAgent, Agent, Machine and phase of each VM (pure).

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::agentpool::{
    OwnedVm, VsphereAgent, VsphereAgentPool,
    names::{self, phase, phase_reason, source},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{api::core::v1::ObjectReference, apimachinery::pkg::apis::meta::v1::Time};
use kube::ResourceExt as _;

use crate::identity::{AgentFacts, HardwareId, vm_name};

/// Machines of a pool: name → whether it is being deleted.
pub type Machines = BTreeMap<String, bool>;

/// One row for each live VsphereAgent, merged with the data of the previous row.
#[must_use]
pub fn rows<'a>(agents: impl IntoIterator<Item = &'a VsphereAgent>, previous: &[OwnedVm]) -> Vec<OwnedVm> {
    let mut all: Vec<OwnedVm> = Vec::new();
    for agent in agents.into_iter().filter(|a| a.metadata.deletion_timestamp.is_none()) {
        let mut row = agent.vm().cloned().unwrap_or_else(|| OwnedVm {
            name: vm_name(agent),
            phase: phase::PROVISIONING.into(),
            reason: phase_reason::VM_CREATE_PENDING.into(),
            ..OwnedVm::default()
        });
        row.owner_uid = agent.uid().unwrap_or_default();
        row.source = source::VSPHERE_AGENT.into();
        // Two VsphereAgents of the same VM make one row.
        let twin =
            all.iter().any(|r| r.name == row.name || HardwareId::of_row(r).is(&HardwareId::of_row(&row)));
        if twin {
            continue;
        }
        if let Some(old) = find_previous(&row, previous) {
            merge(&mut row, old);
        }
        all.push(row);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Finds the previous row: by name, else UUID, else MAC address, and never a row that certainly belongs to another VM.
fn find_previous<'a>(row: &OwnedVm, previous: &'a [OwnedVm]) -> Option<&'a OwnedVm> {
    let id = HardwareId::of_row(row);
    let fits = |old: &&OwnedVm| {
        let other = HardwareId::of_row(old);
        let uuid_differs = !id.uuid.is_empty() && !other.uuid.is_empty() && id.uuid != other.uuid;
        let owner_differs = !old.owner_uid.is_empty() && old.owner_uid != row.owner_uid;
        old.source != source::DISCOVERED_AGENT && !uuid_differs && !owner_differs
    };
    let by = |test: &dyn Fn(&OwnedVm) -> bool| previous.iter().filter(fits).find(|old| test(old));
    by(&|old| old.name == row.name)
        .or_else(|| by(&|old| !id.uuid.is_empty() && HardwareId::of_row(old).uuid == id.uuid))
        .or_else(|| by(&|old| !id.mac.is_empty() && HardwareId::of_row(old).mac == id.mac))
}

fn merge(row: &mut OwnedVm, old: &OwnedVm) {
    let was_pending = old.reason == phase_reason::VM_CREATE_PENDING;
    let is_pending = row.reason == phase_reason::VM_CREATE_PENDING;
    // If the VM was created or removed since, the phase of the VsphereAgent counts.
    if was_pending == is_pending && !old.phase.is_empty() {
        row.phase.clone_from(&old.phase);
        row.reason.clone_from(&old.reason);
        row.last_transition_time.clone_from(&old.last_transition_time);
    }
    row.agent_ref = old.agent_ref.clone().or(row.agent_ref.take());
    row.machine_ref = old.machine_ref.clone().or(row.machine_ref.take());
    if row.bios_uuid.is_empty() && !is_pending {
        row.bios_uuid.clone_from(&old.bios_uuid);
    }
    if row.mac_address.is_empty() && !is_pending {
        row.mac_address.clone_from(&old.mac_address);
    }
}

/// Whether an Agent belongs to the pool, apart from the Agents that rows already name.
#[must_use]
pub fn is_candidate(agent: &AgentFacts, pool: &VsphereAgentPool) -> bool {
    let spec = &pool.spec;
    let fits = |(key, value): (&String, &String)| {
        matches!(key.as_str(), names::ROLE_LABEL | names::NODEPOOL) || agent.labels.get(key) == Some(value)
    };
    let discriminator = (spec.agent.labels.get(names::NODEPOOL), agent.labels.get(names::NODEPOOL));
    spec.agent.labels.iter().all(fits)
        && agent.infra_env == spec.infra_env_ref.name
        && (agent.cluster.is_empty() || agent.cluster == spec.hosted_cluster_ref.name)
        && match discriminator {
            (None, theirs) => theirs.is_none(),
            (Some(ours), theirs) => theirs == Some(ours),
        }
}

/// Matches rows to Agents by index: by UUID, then MAC address, then host name without conflict, then the recorded Agent without
/// conflict. A value that two Agents share is ignored. A row without a VM has no Agent, even if an Agent has its name.
#[must_use]
pub fn matches(rows: &[OwnedVm], agents: &[AgentFacts]) -> BTreeMap<usize, usize> {
    let ids: Vec<_> = rows.iter().map(HardwareId::of_row).collect();
    let mut found = BTreeMap::new();
    let mut taken = BTreeSet::new();
    let keys: [&dyn Fn(&AgentFacts) -> String; 3] =
        [&|a| a.identity.uuid.clone(), &|a| a.identity.mac.clone(), &|a| a.known_hostname().to_owned()];
    for (level, key) in keys.iter().enumerate() {
        let mut owners: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (index, agent) in agents.iter().enumerate() {
            owners.entry(key(agent)).or_default().push(index);
        }
        for (row, id) in ids.iter().enumerate() {
            let wanted = match level {
                0 => &id.uuid,
                1 => &id.mac,
                _ => &rows[row].name,
            };
            let Some([agent]) = owners.get(wanted).map(Vec::as_slice).filter(|_| !wanted.is_empty()) else {
                continue;
            };
            let conflict = level > 0 && id.conflicts(&agents[*agent].identity);
            if has_vm(&rows[row]) && !found.contains_key(&row) && !taken.contains(agent) && !conflict {
                found.insert(row, *agent);
                taken.insert(*agent);
            }
        }
    }
    for (row, id) in ids.iter().enumerate() {
        let Some(name) = rows[row].agent_ref.as_ref().and_then(|r| r.name.as_ref()) else { continue };
        let agent = agents.iter().position(|a| a.name == *name && !id.conflicts(&a.identity));
        if let Some(agent) = agent.filter(|a| !taken.contains(a) && !found.contains_key(&row)) {
            found.insert(row, agent);
            taken.insert(agent);
        }
    }
    found
}

fn has_vm(row: &OwnedVm) -> bool {
    row.reason != phase_reason::VM_CREATE_PENDING
}

/// Grace periods of the phases.
#[derive(Clone, Copy, Debug)]
pub struct Graces {
    /// Longest time until an Agent registers.
    pub discovery: SignedDuration,
    /// Time that an orphaned VM is kept.
    pub orphan: SignedDuration,
}

/// Updates phase, reason and references of one row.
#[must_use]
pub fn refresh(
    row: &OwnedVm,
    agent: Option<(&AgentFacts, Option<String>)>,
    pool: &VsphereAgentPool,
    machines: &Machines,
    now: Timestamp,
    graces: &Graces,
) -> OwnedVm {
    let mut next = row.clone();
    let recorded = row.machine_ref.as_ref().and_then(|m| m.name.clone());
    let (phase, reason) = match &agent {
        None => without_agent(row, recorded.as_deref(), machines, now, graces),
        Some((agent, machine)) => {
            next.agent_ref = Some(agent_ref(pool, &agent.name));
            if next.bios_uuid.is_empty() {
                next.bios_uuid.clone_from(&agent.identity.uuid);
            }
            if next.mac_address.is_empty() {
                next.mac_address.clone_from(&agent.identity.mac);
            }
            if agent.is_bound && row.reason != phase_reason::MACHINE_DELETING {
                next.machine_ref = machine.as_deref().map(|m| machine_ref(pool, m)).or(next.machine_ref);
            }
            let recorded = next.machine_ref.as_ref().and_then(|m| m.name.clone());
            with_agent(row, agent, recorded.as_deref(), machines)
        }
    };
    if next.phase != phase || next.reason != reason || next.last_transition_time.is_none() {
        next.last_transition_time = Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now)));
    }
    (next.phase, next.reason) = (phase.to_owned(), reason.to_owned());
    next
}

fn without_agent<'a>(
    row: &'a OwnedVm,
    recorded: Option<&str>,
    machines: &Machines,
    now: Timestamp,
    graces: &Graces,
) -> (&'a str, &'a str) {
    let same = (row.phase.as_str(), row.reason.as_str());
    match recorded.map(|m| machines.get(m)) {
        Some(Some(true)) => return (phase::RELEASED, phase_reason::MACHINE_DELETING),
        Some(Some(false)) => return same,
        Some(None)
            if matches!(
                row.reason.as_str(),
                phase_reason::MACHINE_DELETING | phase_reason::MACHINE_DELETED
            ) =>
        {
            return (phase::RELEASED, phase_reason::MACHINE_DELETED);
        }
        Some(None) | None => {}
    }
    let had_one = row.agent_ref.is_some()
        || matches!(row.phase.as_str(), phase::AVAILABLE | phase::BOUND | phase::RELEASED);
    let since = |grace: SignedDuration| {
        row.last_transition_time.as_ref().is_some_and(|t| now.duration_since(t.0) >= grace)
    };
    match row.phase.as_str() {
        phase::ORPHANED => same,
        _ if had_one => (phase::ORPHANED, phase_reason::AGENT_MISSING),
        // The time limit for discovery starts when the VM exists.
        _ if row.reason == phase_reason::VM_CREATE_PENDING => {
            (phase::PROVISIONING, phase_reason::VM_CREATE_PENDING)
        }
        _ if row.reason == phase_reason::AGENT_NOT_DISCOVERED && since(graces.discovery) => {
            (phase::ORPHANED, phase_reason::AGENT_DISCOVERY_EXPIRED)
        }
        _ => (phase::PROVISIONING, phase_reason::AGENT_NOT_DISCOVERED),
    }
}

fn with_agent(
    row: &OwnedVm,
    agent: &AgentFacts,
    recorded: Option<&str>,
    machines: &Machines,
) -> (&'static str, &'static str) {
    let machine = recorded.map(|m| machines.get(m));
    let was_deleting = row.reason == phase_reason::MACHINE_DELETING;
    match machine {
        Some(None) if was_deleting => return (phase::RELEASED, phase_reason::MACHINE_DELETED),
        Some(Some(true)) => return (phase::RELEASED, phase_reason::MACHINE_DELETING),
        _ if was_deleting => return (phase::RELEASED, phase_reason::MACHINE_DELETING),
        Some(_) | None => {}
    }
    if agent.is_bound {
        return (phase::BOUND, phase_reason::AGENT_BOUND);
    }
    match row.phase.as_str() {
        // The Machine was deleted between two reconciles.
        phase::BOUND | phase::RELEASED if machine == Some(None) => {
            (phase::RELEASED, phase_reason::MACHINE_DELETED)
        }
        phase::BOUND | phase::RELEASED => (phase::RELEASED, phase_reason::AGENT_RELEASED),
        _ if row.reason == phase_reason::AGENT_PREPARED => (phase::AVAILABLE, phase_reason::AGENT_PREPARED),
        _ => (phase::AVAILABLE, phase_reason::AGENT_AVAILABLE),
    }
}

/// Row for an Agent that is older than the pool: for the report only, never a VM to destroy.
#[must_use]
pub fn discovered_row(
    agent: &AgentFacts,
    machine: Option<String>,
    pool: &VsphereAgentPool,
    previous: &[OwnedVm],
    machines: &Machines,
    now: Timestamp,
    graces: &Graces,
) -> OwnedVm {
    let name = agent.known_hostname().to_owned();
    let old = previous.iter().find(|r| r.source == source::DISCOVERED_AGENT && r.name == name);
    let row = old.cloned().unwrap_or_else(|| OwnedVm {
        name,
        source: source::DISCOVERED_AGENT.into(),
        bios_uuid: agent.identity.uuid.clone(),
        mac_address: agent.identity.mac.clone(),
        ..OwnedVm::default()
    });
    refresh(&row, Some((agent, machine)), pool, machines, now, graces)
}

/// Reference to an Agent in the form of the original operator.
#[must_use]
pub fn agent_ref(pool: &VsphereAgentPool, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("agent-install.openshift.io/v1beta1".into()),
        kind: Some("Agent".into()),
        namespace: pool.namespace(),
        name: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

/// Reference to a Machine; always v1beta1, regardless of the served version.
#[must_use]
pub fn machine_ref(pool: &VsphereAgentPool, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("cluster.x-k8s.io/v1beta1".into()),
        kind: Some("Machine".into()),
        namespace: Some(pool.spec.control_plane_namespace.clone()),
        name: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}
