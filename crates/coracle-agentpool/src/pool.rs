//! Pools: looks at everything, plans, prepares Agents, lets go of what is over, tells.

use std::{collections::BTreeSet, sync::Arc};

use coracle_api::agentpool::{
    OwnedVm, VsphereAgent, VsphereAgentPool, VsphereAgentPoolStatus,
    foreign::{Agent, AgentMachine},
    names::{self, why},
};
use coracle_reconcile::{Desired, Kind, add_finalizer, remove_finalizer};
use futures_util::{StreamExt as _, stream};
use jiff::SignedDuration;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    runtime::{controller::Action, reflector::ObjectRef},
};
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;

use crate::{
    Context, Error, POOL_MANAGER, act, adopt,
    demand::{Counters, belongs, count, is_of, is_waiting, place, unmet},
    error::{api, chain},
    identity::{AgentFacts, Identity},
    iso,
    machine::pin_selector,
    plan::{Plan, Preparation, Removal, Snapshot, plan},
    request::{Fenced, fence, infra_env_url},
    rows::{Graces, Machines, discovered, is_candidate, matches, refresh, rows},
    status::{pool_conditions, pool_event, report_pool, say},
};

/// Agents that are prepared at once.
const PATCHES: usize = 8;

/// Reconciles until `stop`.
pub(crate) async fn control(
    cx: &Arc<Context>,
    queue: UnboundedReceiver<ObjectRef<VsphereAgentPool>>,
    stop: &CancellationToken,
) {
    let (store, workers) = (cx.caches.pools.clone(), cx.config.workers[0]);
    act::control(cx, "vsphereagentpool", store, queue, workers, stop, |p, cx| Box::pin(reconcile(p, cx)))
        .await;
}

async fn reconcile(cached: Arc<VsphereAgentPool>, cx: Arc<Context>) -> Result<Action, Error> {
    let (ns, name) = (cached.namespace().unwrap_or_default(), cached.name_any());
    let pools: Api<VsphereAgentPool> = Api::namespaced(cx.client.clone(), &ns);
    let Some(pool) = pools.get_opt(&name).await.map_err(api("read VsphereAgentPool", &name))? else {
        cx.config.pool_metrics.forget(&ns, &name);
        return Ok(Action::await_change());
    };
    if pool.metadata.deletion_timestamp.is_some() {
        return end(&cx, &pools, &pool).await;
    }
    let held = pool.finalizers().iter().any(|f| f == names::POOL_FINALIZER);
    let pool = match held {
        true => pool,
        false => match add_finalizer(&pools, &pool, names::POOL_FINALIZER, POOL_MANAGER).await? {
            Some(pool) => pool,
            None => return Ok(Action::await_change()),
        },
    };
    let url = infra_env_url(&cx, &pool).await?;
    let look = look(&cx, &pool);
    stages(&cx, &pool, &look);
    pin_all(&cx, &pool).await?;
    let mut rows = look.rows.clone();
    let snapshot = Snapshot {
        pool: &pool,
        rows: &look.rows,
        agents: &look.agents,
        matches: &look.matches,
        demand: look.demand,
        machines: &look.machines,
        graces: graces(&cx, &pool),
        now: cx.config.clock.now(),
    };
    let plan = plan(&snapshot);
    let applied = apply(&cx, &pool, &plan, &mut rows).await;
    let (mut desired, again) = told(&cx, &look, &plan, &applied);
    desired.push(vsphere_ready(&cx, &pool));
    if let Err(why) = &url {
        desired.retain(|d| !matches!(d.kind, "Ready" | "InfraEnvAvailable"));
        desired.push(say("Ready", false, "InfraEnvUnavailable", why));
        desired.push(say("InfraEnvAvailable", false, "InfraEnvUnavailable", why));
    }
    adopt::take_over(&cx, &pool, &rows).await?;
    warn_of_selectors(&cx, &pool).await;
    let status = status(&pool, &look, &plan, rows);
    gauge(&cx, &pool, &look, &plan);
    report_pool(&cx, &pool, status, &desired).await?;
    if let Ok(url) = url {
        check_iso(&cx, &pool, &url).await;
    }
    Ok(Action::requeue(again))
}

fn told(cx: &Context, look: &Look, plan: &Plan, applied: &Applied) -> (Vec<Desired>, std::time::Duration) {
    let stray =
        plan.unassigned.iter().map(|a| format!("Agent {a}: no VM of the pool is its, or several are"));
    let blocked: Vec<_> = applied.blocked.iter().cloned().chain(stray).collect();
    let desired = pool_conditions(look.demand, plan, &applied.failed, &blocked);
    let waits = !applied.failed.is_empty() || !applied.blocked.is_empty();
    (desired, if waits { cx.config.times.blocked } else { cx.config.times.pool })
}

/// A deleted pool waits for its VsphereAgents, and they for their Machines.
async fn end(cx: &Context, pools: &Api<VsphereAgentPool>, pool: &VsphereAgentPool) -> Result<Action, Error> {
    let ns = pool.namespace().unwrap_or_default();
    let requests: Api<VsphereAgent> = Api::namespaced(cx.client.clone(), &ns);
    let all = requests.list(&Default::default()).await.map_err(api("list VsphereAgents in", &ns))?;
    let ours: Vec<_> = all.into_iter().filter(|r| crate::watches::pool_of(r) == pool.name_any()).collect();
    for request in ours.iter().filter(|r| r.metadata.deletion_timestamp.is_none()) {
        delete_request(&requests, request).await?;
    }
    if !ours.is_empty() {
        // Their ends trigger the next pass.
        return Ok(Action::requeue(cx.config.times.blocked.min(std::time::Duration::from_secs(10))));
    }
    if pool.annotations().get(names::DELETE_ISOS).is_some_and(|v| v == "true")
        && let Err(why) = delete_isos(cx, pool).await
    {
        pool_event(cx, pool, Kind::Warning, "ISOPruneFailed", why).await;
        return Ok(Action::requeue(cx.config.times.blocked));
    }
    remove_finalizer(pools, pool, names::POOL_FINALIZER, POOL_MANAGER).await?;
    cx.config.pool_metrics.forget(&ns, &pool.name_any());
    Ok(Action::await_change())
}

/// The images of a pool go with it; why not, otherwise.
async fn delete_isos(cx: &Context, pool: &VsphereAgentPool) -> Result<(), String> {
    let provider = cx.vcenters.provider(&cx.client, pool).await.map_err(|e| chain(&e))?;
    let count = iso::delete_all(pool, &provider).await.map_err(|e| chain(&e))?;
    cx.config.pool_metrics.iso("delete", "success");
    tracing::info!(pool = pool.name_any(), count, "ISO images deleted with their pool");
    Ok(())
}

async fn delete_request(requests: &Api<VsphereAgent>, request: &VsphereAgent) -> Result<(), Error> {
    let preconditions = Preconditions { uid: request.uid(), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match requests.delete(&request.name_any(), &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("delete VsphereAgent", request.name_any())(error)),
    }
}

/// What there is.
struct Look {
    rows: Vec<OwnedVm>,
    agents: Vec<AgentFacts>,
    matches: std::collections::BTreeMap<usize, usize>,
    demand: Counters,
    machines: Machines,
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

fn look(cx: &Context, pool: &VsphereAgentPool) -> Look {
    let (now, graces) = (cx.config.clock.now(), graces(cx, pool));
    let previous = pool.status.as_ref().map(|s| s.owned_vms.clone()).unwrap_or_default();
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
    let rows = rows(requests.iter().map(AsRef::as_ref), &previous);
    let agents = agents(cx, pool, &rows);
    let found = matches(&rows, &agents);
    let machine_of = |agent: &AgentFacts| {
        let reference = agent.labels.get(names::AGENT_MACHINE_REF)?;
        let am = agent_machines.iter().find(|am| am.name_any() == *reference);
        Some(am.and_then(|am| am.machine()).unwrap_or(reference).to_owned())
    };
    let mut next: Vec<_> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| {
            let agent = found.get(&index).and_then(|i| agents.get(*i));
            refresh(row, agent.map(|a| (a, machine_of(a))), pool, &machines, now, &graces)
        })
        .collect();
    // Agents that were there before: reported under their host names.
    let mut names: BTreeSet<_> = next.iter().map(|r| r.name.clone()).collect();
    let known: BTreeSet<_> = found.values().copied().collect();
    for (_, agent) in agents.iter().enumerate().filter(|(i, a)| !known.contains(i) && !a.is_going) {
        let name = agent.known_hostname().to_owned();
        let is_candidate = is_candidate(agent, pool);
        if !name.is_empty() && is_candidate && names.insert(name) {
            next.push(discovered(agent, machine_of(agent), pool, &previous, &machines, now, &graces));
        }
    }
    let demand = count(agent_machines.iter().copied());
    Look { rows: next, agents, matches: found, demand, machines }
}

/// Counts the VMs whose Agent came, or was claimed, since the last pass.
fn stages(cx: &Context, pool: &VsphereAgentPool, look: &Look) {
    let before = pool.status.as_ref().map(|s| s.owned_vms.as_slice()).unwrap_or_default();
    let requests = cx.caches.requests_of(pool);
    for row in &look.rows {
        let was = before.iter().find(|r| r.name == row.name).map(|r| r.phase.as_str()).unwrap_or_default();
        let stages: &[&'static str] = match (was, row.phase.as_str()) {
            (names::phase::PROVISIONING, names::phase::AVAILABLE) => &["discovered"],
            (names::phase::PROVISIONING, names::phase::BOUND) => &["discovered", "bound"],
            (names::phase::AVAILABLE, names::phase::BOUND) => &["bound"],
            _ => continue,
        };
        if let Some(request) = requests.iter().find(|r| r.uid().as_deref() == Some(&row.owner_uid)) {
            stages.iter().for_each(|stage| cx.reached(request, stage));
        }
    }
}

/// Agents of the pool: those of its rows whatever their labels; others by labels, and when no other pool has them.
fn agents(cx: &Context, pool: &VsphereAgentPool, rows: &[OwnedVm]) -> Vec<AgentFacts> {
    let ns = pool.namespace();
    let all = cx.caches.agents.state();
    let facts = all.iter().filter(|a| a.namespace() == ns).map(|a| AgentFacts::of(a));
    let others: Vec<_> = cx.caches.requests.state();
    let others: Vec<_> = others
        .iter()
        .filter(|r| r.namespace() == ns && crate::watches::pool_of(r) != pool.name_any())
        .filter(|r| r.metadata.deletion_timestamp.is_none())
        .filter_map(|r| r.vm().map(Identity::of_row))
        .collect();
    let is_owned = |a: &AgentFacts| {
        rows.iter().any(|row| {
            let id = Identity::of_row(row);
            let named = row.agent_ref.as_ref().and_then(|r| r.name.as_deref()) == Some(&a.name);
            let selected =
                a.labels.get(names::AGENT_MACHINE) == Some(&crate::identity::label_value(&row.name));
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

/// Pins every AgentMachine of the pool to its own Agent, waiting or not.
async fn pin_all(cx: &Context, pool: &VsphereAgentPool) -> Result<(), Error> {
    let requests = cx.caches.requests_of(pool);
    for am in cx.caches.agent_machines.state() {
        if am.metadata.deletion_timestamp.is_some() || !is_of(&am, pool) {
            continue;
        }
        let wanted = place(&am, pool, requests.iter().map(AsRef::as_ref));
        let selected = am.selected(names::AGENT_MACHINE);
        // One that has its Agent keeps what it was pinned to.
        if selected.is_none() || (selected != Some(&wanted) && is_waiting(&am)) {
            pin_selector(cx, &am, &wanted).await?;
        }
    }
    Ok(())
}

/// Warns of AgentMachines whose selector no Agent of this pool can ever fit.
async fn warn_of_selectors(cx: &Context, pool: &VsphereAgentPool) {
    let all = cx.caches.agent_machines.state();
    let terms: BTreeSet<_> = all.iter().filter(|am| is_of(am, pool)).flat_map(|am| unmet(am, pool)).collect();
    if !terms.is_empty() {
        let terms = terms.into_iter().collect::<Vec<_>>().join(", ");
        let note = format!(
            "AgentMachines select {terms}, which spec.agent.labels does not give: no Agent of this pool fits them. Add it \
             there, or take it out of the NodePool's spec.platform.agent.agentLabelSelector"
        );
        pool_event(cx, pool, Kind::Warning, "SelectorMismatch", note).await;
    }
}

#[derive(Debug, Default)]
struct Applied {
    failed: Vec<String>,
    blocked: Vec<String>,
}

/// Does what was planned; every item for itself.
async fn apply(cx: &Context, pool: &VsphereAgentPool, plan: &Plan, rows: &mut Vec<OwnedVm>) -> Applied {
    let mut applied = Applied::default();
    let prepared: Vec<_> = stream::iter(plan.prepare.clone())
        .map(|p| async move {
            let result = prepare(cx, pool, &p).await;
            (p, result)
        })
        .buffer_unordered(PATCHES)
        .collect()
        .await;
    for (preparation, result) in prepared {
        match result {
            Ok(()) => {
                let row = rows
                    .iter_mut()
                    .find(|r| r.name == preparation.hostname && r.phase == names::phase::AVAILABLE);
                if let Some(row) = row {
                    row.reason = why::AGENT_PREPARED.into();
                }
            }
            Err(error) => applied.failed.push(format!("Agent {}: {}", preparation.agent.name, chain(&error))),
        }
    }
    for removal in &plan.remove {
        match let_go(cx, pool, removal).await {
            Ok(None) => rows.retain(|r| r.name != removal.row.name),
            Ok(Some(why)) => {
                pool_event(cx, pool, Kind::Normal, "AgentDeleteDeferred", why.clone()).await;
                applied.blocked.push(why);
            }
            Err(error) => applied.failed.push(format!("VM {}: {}", removal.row.name, chain(&error))),
        }
    }
    if !applied.failed.is_empty() {
        pool_event(cx, pool, Kind::Warning, "ApplyPlanFailed", applied.failed.join("; ")).await;
    } else if !plan.prepare.is_empty() || !plan.remove.is_empty() {
        let note = format!("prepared {} Agents, removed {} VMs", plan.prepare.len(), plan.remove.len());
        pool_event(cx, pool, Kind::Normal, "PlanApplied", note).await;
    }
    applied
}

/// Prepares an Agent. One that changed meanwhile is left to the next pass, which that change triggers.
async fn prepare(cx: &Context, pool: &VsphereAgentPool, p: &Preparation) -> Result<(), Error> {
    let ns = pool.namespace().unwrap_or_default();
    let agents: Api<Agent> = Api::namespaced_with(cx.client.clone(), &ns, &cx.caches.kinds.agent);
    let mut spec = json!({"role": p.role, "hostname": p.hostname});
    if p.approve == Some(true) {
        spec["approved"] = true.into();
    }
    let patch = json!({
        "metadata": {"resourceVersion": p.agent.resource_version, "labels": p.labels},
        "spec": spec,
    });
    match agents.patch(&p.agent.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(api("prepare Agent", &p.agent.name)(error)),
    }
}

/// Deletes the VsphereAgent of a row, once nobody can use its VM any more; why not, otherwise.
async fn let_go(cx: &Context, pool: &VsphereAgentPool, removal: &Removal) -> Result<Option<String>, Error> {
    let ns = pool.namespace().unwrap_or_default();
    let requests = cx.caches.requests_of(pool);
    let Some(request) = requests.iter().find(|r| r.uid().as_deref() == Some(&removal.row.owner_uid)) else {
        return Ok(Some(format!("VM {} has no VsphereAgent", removal.row.name)));
    };
    // Rows carry what Agents say of themselves; the fence wants what vSphere said.
    let mut row = removal.row.clone();
    if let Some(vm) = request.vm() {
        (row.bios_uuid, row.mac_address) = (vm.bios_uuid.clone(), vm.mac_address.clone());
    }
    match fence(cx, pool, &row).await? {
        Fenced::Blocked(why) => Ok(Some(format!("VM {}: {why}", row.name))),
        Fenced::Closed(_) => {
            delete_request(&Api::namespaced(cx.client.clone(), &ns), request).await?;
            Ok(None)
        }
    }
}

fn status(pool: &VsphereAgentPool, look: &Look, plan: &Plan, rows: Vec<OwnedVm>) -> VsphereAgentPoolStatus {
    let stored = pool.status.clone().unwrap_or_default();
    VsphereAgentPoolStatus {
        desired_replicas: look.demand.all,
        agent_machines: look.demand.all,
        waiting_agent_machines: look.demand.waiting,
        unready_agent_machines: look.demand.unready,
        agent_machines_without_agent: look.demand.without_agent,
        matching_agents: plan.matching,
        bound_agents: plan.bound,
        available_agents: plan.available,
        owned_vms: rows,
        planned_actions: plan.actions(),
        ..stored
    }
}

fn gauge(cx: &Context, pool: &VsphereAgentPool, look: &Look, plan: &Plan) {
    let d = look.demand;
    let values = [
        d.all,
        d.all,
        d.waiting,
        d.unready,
        d.without_agent,
        plan.matching,
        plan.bound,
        plan.usable,
        plan.pending,
        plan.deficit,
    ];
    let t = &pool.spec.template;
    let size = [i64::from(t.num_cpus), i64::from(t.memory_mib) << 20, i64::from(t.disk_gib) << 30];
    cx.config.pool_metrics.pool(&pool.namespace().unwrap_or_default(), &pool.name_any(), values, size);
}

/// From the conditions of the pool's VsphereAgents: whether vCenter does what is asked of it.
fn vsphere_ready(cx: &Context, pool: &VsphereAgentPool) -> Desired {
    let troubles = ["ProviderUnavailable", "VMCreateFailed", "VMStatusFailed"];
    for request in cx.caches.requests_of(pool) {
        let conditions = request.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
        let ready = coracle_reconcile::find(conditions, "Ready");
        if let Some(c) = ready.filter(|c| c.status == "False" && troubles.contains(&c.reason.as_str())) {
            return say("VsphereReady", false, "Error", format!("{}: {}", c.reason, c.message));
        }
    }
    say("VsphereReady", true, "Ready", "")
}

/// Looks after the ISO of a pool that has one, without waiting for a VM to be made.
async fn check_iso(cx: &Context, pool: &VsphereAgentPool, url: &str) {
    let has = pool.status.as_ref().is_some_and(|s| s.iso.is_some());
    if !has || iso::due(pool, url, cx.config.clock.now()) == iso::Due::No {
        return;
    }
    match cx.vcenters.provider(&cx.client, pool).await {
        Ok(provider) => {
            let seen = provider.vcenter.api.machines(&provider.site).borrow().clone();
            // It has told what went wrong.
            let _ = iso::ensure(cx, pool, &provider, url, &seen).await;
        }
        Err(error) => tracing::debug!(error = chain(&error), "ISO not checked"),
    }
}
