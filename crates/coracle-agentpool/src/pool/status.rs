//! Status, conditions and metrics of a pool.

use coracle_api::agentpool::{OwnedVm, VsphereAgent, VsphereAgentPool, VsphereAgentPoolStatus, names};
use coracle_reconcile::Desired;
use kube::ResourceExt as _;

use super::{execute::Applied, observe::Observed, plan::Plan};
use crate::{
    Context,
    status::{pool_conditions, say},
};

/// Status after the steps.
pub(super) fn derive(
    pool: &VsphereAgentPool,
    observed: &Observed,
    plan: &Plan,
    rows: Vec<OwnedVm>,
) -> VsphereAgentPoolStatus {
    let stored = pool.status.clone().unwrap_or_default();
    VsphereAgentPoolStatus {
        desired_replicas: observed.demand.all,
        agent_machines: observed.demand.all,
        waiting_agent_machines: observed.demand.waiting,
        unready_agent_machines: observed.demand.unready,
        agent_machines_without_agent: observed.demand.without_agent,
        matching_agents: plan.matching,
        bound_agents: plan.bound,
        available_agents: plan.available,
        owned_vms: rows,
        planned_actions: plan.actions(),
        ..stored
    }
}

/// Conditions after the steps. `requests` are the VsphereAgents of the pool.
pub(super) fn conditions(
    observed: &Observed,
    plan: &Plan,
    applied: &Applied,
    requests: &[impl AsRef<VsphereAgent>],
) -> Vec<Desired> {
    let stray = plan.unassigned.iter().map(|a| format!("Agent {a} matches no VM of the pool, or several"));
    let blocked: Vec<_> = applied.blocked.iter().cloned().chain(stray).collect();
    let mut desired = pool_conditions(observed.demand, plan, &applied.failed, &blocked);
    desired.push(vsphere_ready(requests));
    if let Err(why) = &observed.infra_env {
        desired.retain(|d| !matches!(d.kind, "Ready" | "InfraEnvAvailable"));
        desired.push(say("Ready", false, "InfraEnvUnavailable", why));
        desired.push(say("InfraEnvAvailable", false, "InfraEnvUnavailable", why));
    }
    desired
}

/// From the conditions of the pool's VsphereAgents: whether vCenter carries out the requests.
fn vsphere_ready(requests: &[impl AsRef<VsphereAgent>]) -> Desired {
    let troubles = ["ProviderUnavailable", "VMCreateFailed", "VMStatusFailed"];
    for request in requests.iter().map(AsRef::as_ref) {
        let conditions = request.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
        let ready = coracle_reconcile::find(conditions, "Ready");
        if let Some(c) = ready.filter(|c| c.status == "False" && troubles.contains(&c.reason.as_str())) {
            return say("VsphereReady", false, "Error", format!("{}: {}", c.reason, c.message));
        }
    }
    say("VsphereReady", true, "Ready", "")
}

/// Sets the gauges of a pool.
pub(super) fn gauge(cx: &Context, pool: &VsphereAgentPool, observed: &Observed, plan: &Plan) {
    let d = observed.demand;
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

/// Counts the VMs whose Agent registered, or was claimed, since the last status.
pub(super) fn count_stages(cx: &Context, pool: &VsphereAgentPool, observed: &Observed) {
    let before = pool.status.as_ref().map(|s| s.owned_vms.as_slice()).unwrap_or_default();
    let requests = cx.caches.requests_of(pool);
    for row in &observed.rows {
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
