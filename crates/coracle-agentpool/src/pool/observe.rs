//! Observation of a pool: the object, the InfraEnv, and the caches of all objects that belong to it. Writes nothing.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::agentpool::{OwnedVm, VsphereAgent, VsphereAgentPool, foreign::AgentMachine, names};
use coracle_reconcile::WallTime as _;
use jiff::{SignedDuration, Timestamp};
use kube::{Api, ResourceExt as _};

use super::{
    adopt,
    plan::{Adoption, Pin, RequestView, Snapshot},
    rows::{Graces, Machines, discovered_row, is_candidate, matches, refresh, rows},
};
use crate::{
    Context, Error,
    demand::{Counters, belongs, count, is_of, is_waiting, place, unmet_terms},
    error::api,
    identity::{AgentFacts, HardwareId, label_value},
    iso,
    request::infra_env_url,
};

/// State of a pool and all objects that belong to it, at one moment.
pub(super) struct Observed {
    /// Address of the discovery image, or why there is none.
    pub(super) infra_env: Result<String, String>,
    pub(super) rows: Vec<OwnedVm>,
    pub(super) demand: Counters,
    agents: Vec<AgentFacts>,
    matches: BTreeMap<usize, usize>,
    machines: Machines,
    pins: Vec<Pin>,
    requests: Vec<RequestView>,
    unmet: BTreeSet<String>,
    adoptable: Vec<Adoption>,
    iso_due: bool,
    graces: Graces,
    now: Timestamp,
}

impl Observed {
    /// Input of the planner.
    pub(super) fn snapshot<'a>(&'a self, pool: &'a VsphereAgentPool) -> Snapshot<'a> {
        Snapshot {
            pool,
            rows: &self.rows,
            agents: &self.agents,
            matches: &self.matches,
            demand: self.demand,
            machines: &self.machines,
            pins: &self.pins,
            requests: &self.requests,
            unmet: &self.unmet,
            adoptable: &self.adoptable,
            iso_due: self.infra_env.as_deref().ok().filter(|_| self.iso_due),
            graces: self.graces,
            now: self.now,
        }
    }
}

/// Reads the InfraEnv and the caches.
pub(super) async fn observe(cx: &Context, pool: &VsphereAgentPool) -> Result<Observed, Error> {
    let infra_env = infra_env_url(cx, pool).await?;
    let (now, graces) = (cx.config.clock.timestamp(), graces(cx, pool));
    let requests = cx.caches.requests_of(pool);
    let agent_machines: Vec<_> = cx.caches.agent_machines.state();
    let agent_machines: Vec<&AgentMachine> =
        agent_machines.iter().map(AsRef::as_ref).filter(|am| is_of(am, pool)).collect();
    let machines: Machines = cx
        .caches
        .machines
        .state()
        .iter()
        .filter(|m| belongs(m.namespace().as_deref(), m.annotations().get(names::NODEPOOL_ANNOTATION), pool))
        .map(|m| (m.name_any(), m.is_deleting()))
        .collect();
    let previous = pool.status.as_ref().map(|s| s.owned_vms.clone()).unwrap_or_default();
    let rows = rows(requests.iter().map(AsRef::as_ref), &previous);
    let agents = agents(cx, pool, &rows);
    let found = matches(&rows, &agents);
    let sources = Sources { pool, agent_machines: &agent_machines, machines: &machines, graces, now };
    let rows = sources.refresh_rows(&rows, &previous, &agents, &found);
    Ok(Observed {
        adoptable: adopt::adoptable(cx, pool, &rows).await,
        pins: pins(pool, &agent_machines, requests.iter().map(AsRef::as_ref)),
        unmet: agent_machines.iter().flat_map(|am| unmet_terms(am, pool)).collect(),
        requests: requests.iter().map(|r| request_view(r)).collect(),
        iso_due: infra_env.as_ref().is_ok_and(|url| is_iso_due(pool, url, now)),
        demand: count(agent_machines.iter().copied()),
        infra_env,
        rows,
        agents,
        matches: found,
        machines,
        graces,
        now,
    })
}

/// VsphereAgents of a pool that is being deleted, read from the API server.
pub(super) async fn observe_deletion(
    cx: &Context,
    pool: &VsphereAgentPool,
) -> Result<Vec<RequestView>, Error> {
    let ns = pool.namespace().unwrap_or_default();
    let requests: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), &ns);
    let all = requests.list(&Default::default()).await.map_err(api("list VsphereAgents in", &ns))?;
    let ours = all.iter().filter(|r| crate::watches::pool_of(r) == pool.name_any());
    Ok(ours.map(request_view).collect())
}

fn request_view(request: &VsphereAgent) -> RequestView {
    RequestView {
        name: request.name_any(),
        uid: request.uid().unwrap_or_default(),
        is_deleting: request.metadata.deletion_timestamp.is_some(),
        hardware: request.vm().map(|vm| (vm.bios_uuid.clone(), vm.mac_address.clone())),
    }
}

/// Whether the image of a pool must be checked now, without waiting until a VM is created.
fn is_iso_due(pool: &VsphereAgentPool, url: &str, now: Timestamp) -> bool {
    let has_image = pool.status.as_ref().is_some_and(|s| s.iso.is_some());
    has_image && iso::due(pool, url, now, false) != iso::Due::No
}

fn graces(cx: &Context, pool: &VsphereAgentPool) -> Graces {
    let of = |key: &str, default: SignedDuration| {
        pool.annotations().get(key).and_then(|text| iso::go_duration(text)).unwrap_or(default)
    };
    Graces {
        discovery: of(names::DISCOVERY_TIMEOUT, cx.config.times.discovery),
        orphan: of(names::ORPHAN_GRACE, cx.config.times.orphan),
    }
}

/// Pins for AgentMachines of the pool that are not pinned to their VM yet, whether they wait or not.
fn pins<'a>(
    pool: &VsphereAgentPool,
    agent_machines: &[&AgentMachine],
    requests: impl Iterator<Item = &'a VsphereAgent> + Clone,
) -> Vec<Pin> {
    let live = agent_machines.iter().filter(|am| am.metadata.deletion_timestamp.is_none());
    live.filter_map(|am| {
        let vm = place(am, pool, requests.clone());
        let selected = am.selected(names::AGENT_MACHINE);
        // An AgentMachine that has an Agent keeps its pin.
        let is_due = selected.is_none() || (selected != Some(&vm) && is_waiting(am));
        is_due.then(|| Pin::of(am, vm))
    })
    .collect()
}

/// Objects that rows are refreshed from.
struct Sources<'a> {
    pool: &'a VsphereAgentPool,
    agent_machines: &'a [&'a AgentMachine],
    machines: &'a Machines,
    graces: Graces,
    now: Timestamp,
}

impl Sources<'_> {
    /// Name of the Machine that an Agent is bound to.
    fn machine_of(&self, agent: &AgentFacts) -> Option<String> {
        let reference = agent.labels.get(names::AGENT_MACHINE_REF)?;
        let am = self.agent_machines.iter().find(|am| am.name_any() == *reference);
        Some(am.and_then(|am| am.machine()).unwrap_or(reference).to_owned())
    }

    /// Rows with the present state of their Agents, and a row for each Agent that is older than the pool.
    fn refresh_rows(
        &self,
        rows: &[OwnedVm],
        previous: &[OwnedVm],
        agents: &[AgentFacts],
        found: &BTreeMap<usize, usize>,
    ) -> Vec<OwnedVm> {
        let Self { pool, machines, graces, now, .. } = self;
        let mut next: Vec<_> = rows
            .iter()
            .enumerate()
            .map(|(index, row)| {
                let agent = found.get(&index).and_then(|i| agents.get(*i));
                refresh(row, agent.map(|a| (a, self.machine_of(a))), pool, machines, *now, graces)
            })
            .collect();
        // Discovered Agents are reported under their host names.
        let mut names: BTreeSet<_> = next.iter().map(|r| r.name.clone()).collect();
        let known: BTreeSet<_> = found.values().copied().collect();
        for (_, agent) in agents.iter().enumerate().filter(|(i, a)| !known.contains(i) && !a.is_going) {
            let name = agent.known_hostname().to_owned();
            if !name.is_empty() && is_candidate(agent, pool) && names.insert(name) {
                next.push(discovered_row(
                    agent,
                    self.machine_of(agent),
                    pool,
                    previous,
                    machines,
                    *now,
                    graces,
                ));
            }
        }
        next
    }
}

/// Agents of the pool: those of its rows, regardless of labels, and others by labels unless another pool owns them.
fn agents(cx: &Context, pool: &VsphereAgentPool, rows: &[OwnedVm]) -> Vec<AgentFacts> {
    let ns = pool.namespace();
    let all = cx.caches.agents.state();
    let facts = all.iter().filter(|a| a.namespace() == ns).map(|a| AgentFacts::of(a));
    let others: Vec<_> = cx.caches.requests.state();
    let others: Vec<_> = others
        .iter()
        .filter(|r| r.namespace() == ns && crate::watches::pool_of(r) != pool.name_any())
        .filter(|r| r.metadata.deletion_timestamp.is_none())
        .filter_map(|r| r.vm().map(HardwareId::of_row))
        .collect();
    // Parsed once, because there may be hundreds of rows and of Agents.
    let ids: Vec<_> = rows.iter().map(|row| (row, HardwareId::of_row(row), label_value(&row.name))).collect();
    let is_owned = |a: &AgentFacts| {
        ids.iter().any(|(row, id, label)| {
            let named = row.agent_ref.as_ref().and_then(|r| r.name.as_deref()) == Some(&a.name);
            let selected = a.labels.get(names::AGENT_MACHINE) == Some(label);
            let same_host = a.known_hostname() == row.name;
            id.is(&a.identity) || ((named || selected || same_host) && !id.conflicts(&a.identity))
        })
    };
    let is_others = |a: &AgentFacts| others.iter().any(|id| id.is(&a.identity));
    let mut found: Vec<_> =
        facts.filter(|a| is_owned(a) || (is_candidate(a, pool) && !is_others(a))).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}
