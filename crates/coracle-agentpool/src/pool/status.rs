//! Status, conditions and metrics of a pool.

use coracle_api::agentpool::{OwnedVm, VsphereAgent, VsphereAgentPool, VsphereAgentPoolStatus, names};
use coracle_reconcile::{ApiError, Desired};
use kube::ResourceExt as _;

use super::{execute::Applied, observe::Observed, plan::Plan};
use crate::{
    Context, Error,
    error::chain,
    status::{new_condition, pool_conditions},
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

/// Conditions after the steps. `requests` are the VsphereAgents of the pool, `siblings` other pools of its NodePool.
pub(super) fn conditions(
    observed: &Observed,
    plan: &Plan,
    applied: &Applied,
    requests: &[impl AsRef<VsphereAgent>],
    siblings: &[String],
) -> Vec<Desired> {
    let stray = plan.unassigned.iter().map(|a| format!("Agent {a} matches no VM of the pool, or several"));
    let blocked: Vec<_> = applied.blocked.iter().cloned().chain(stray).collect();
    let mut desired = pool_conditions(observed.demand, plan, &applied.failed, &blocked);
    desired.push(vsphere_ready(requests));
    if let Some(not_ready) = not_ready(applied, siblings) {
        desired.retain(|d| d.kind != "Ready");
        desired.push(not_ready);
    }
    if let Err(why) = &observed.infra_env {
        desired.retain(|d| !matches!(d.kind, "Ready" | "InfraEnvAvailable"));
        desired.push(new_condition("Ready", false, "InfraEnvUnavailable", why));
        desired.push(new_condition("InfraEnvAvailable", false, "InfraEnvUnavailable", why));
    }
    desired
}

/// Why the pool is not Ready, apart from isolated failures: a step that ended the execution, or another pool.
fn not_ready(applied: &Applied, siblings: &[String]) -> Option<Desired> {
    if let Some(error) = applied.error.as_ref().filter(|error| !error.is_conflict()) {
        let is_pin = matches!(error, Error::Api(ApiError { operation: "pin AgentMachine", .. }));
        let reason = if is_pin { "AgentMachinePatchFailed" } else { "ApplyFailed" };
        return Some(new_condition("Ready", false, reason, chain(error)));
    }
    let names = siblings.join(", ");
    let message = format!(
        "VsphereAgentPools {names} serve the same NodePool, and no VM is created: remove all but one"
    );
    (!siblings.is_empty()).then(|| new_condition("Ready", false, "SeveralPools", message))
}

/// Whether vCenter carries out requests, from the conditions of the pool's VsphereAgents.
fn vsphere_ready(requests: &[impl AsRef<VsphereAgent>]) -> Desired {
    let troubles = ["ProviderUnavailable", "VMCreateFailed", "VMStatusFailed"];
    for request in requests.iter().map(AsRef::as_ref) {
        let conditions = request.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
        let ready = coracle_reconcile::find(conditions, "Ready");
        if let Some(c) = ready.filter(|c| c.status == "False" && troubles.contains(&c.reason.as_str())) {
            return new_condition("VsphereReady", false, "Error", format!("{}: {}", c.reason, c.message));
        }
    }
    new_condition("VsphereReady", true, "Ready", "")
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

/// Counts the VMs whose Agent has registered or was claimed since the last status.
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
            stages.iter().for_each(|stage| cx.record_stage(request, stage));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_not_ready_after_a_failed_step_or_beside_another_pool() {
        let refused = |operation| {
            let denied =
                kube::core::Status::failure("agentmachines is forbidden", "Forbidden").with_code(403);
            let source = Box::new(kube::Error::Api(denied.boxed()));
            Applied {
                error: Some(ApiError { operation, object: "ns/w-0".into(), source }.into()),
                ..Applied::default()
            }
        };
        for (why, applied, siblings, want) in [
            ("all is well", Applied::default(), vec![], None),
            ("a right is missing", refused("pin AgentMachine"), vec![], Some("AgentMachinePatchFailed")),
            ("another step failed", refused("create VsphereAgent"), vec![], Some("ApplyFailed")),
            ("another pool of the NodePool", Applied::default(), vec!["b".to_owned()], Some("SeveralPools")),
        ] {
            let said = not_ready(&applied, &siblings);
            assert_eq!(said.as_ref().map(|d| (d.status, d.reason)), want.map(|r| (Some(false), r)), "{why}");
        }
    }
}
