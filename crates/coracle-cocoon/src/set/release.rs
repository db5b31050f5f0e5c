//! Saved main agents without a pod: the release policy, and moves to another node. Pure.
//!
//! ```text
//! suspend:  hibernate ─▶ saved ─▶ node and VM names on the set ─▶ delete the pod
//! resume:   create a pod that restores the saved state ─▶ it runs ─▶ remove the tag, then the node's name
//! ```
//! The annotation with the node's name records that the main agent must continue from the state in the registry. It is written
//! before the pod is deleted, and removed after the tag, so the image is never started instead.

use coracle_api::CocoonSet;
use coracle_api::cocoon::{HibernatePolicy, SetPhase, agent_vm_name, keys};
use coracle_reconcile::Kind;
use kube::ResourceExt as _;

use super::{
    deletion,
    members::{Member, Members},
    plan::Observed,
    step::{Plan, Step},
};
use crate::config::Settings;

/// True when the set has the hibernate policy `release`.
pub(super) fn is_policy(set: &CocoonSet) -> bool {
    set.spec.hibernate_policy == Some(HibernatePolicy::Release)
}

/// True when the main agent continues from the registry once its pod is created again.
pub(super) fn is_released(set: &CocoonSet) -> bool {
    set.annotations().get(keys::HIBERNATED_ON_NODE).is_some_and(|node| !node.is_empty())
}

pub(super) fn main_vm(set: &CocoonSet) -> String {
    agent_vm_name(&set.namespace().unwrap_or_default(), &set.name_any(), 0)
}

/// Deletes the pods of a suspended set whose VMs are saved.
pub(super) fn release_pods(o: &Observed<'_>, members: &Members<'_>, plan: &mut Plan) {
    plan.phase = SetPhase::Suspending;
    for member in members.live().filter(|member| member.spec.managed) {
        release_pod(o, member, plan);
    }
}

fn release_pod(o: &Observed<'_>, member: &Member<'_>, plan: &mut Plan) {
    if !is_released(o.set) {
        // A pod that was never bound has no node. The placeholder stands for any node of the pool.
        let node = member.node().unwrap_or("-").to_owned();
        plan.steps.push(Step::RecordVms(deletion::merge_recorded(o.set, [member.spec.vm_name.clone()])));
        plan.steps.push(Step::Annotate(keys::HIBERNATED_ON_NODE, Some(node)));
    }
    if !member.spec.keep_snapshot_on_delete {
        plan.steps.push(Step::KeepSnapshot(member.id()));
    }
    plan.steps.push(Step::DeletePod(member.id()));
}

/// True when the main agent runs on another node than `spec.nodeName`.
pub(super) fn migrates(set: &CocoonSet, members: &Members<'_>, settings: &Settings) -> bool {
    let wanted = set.spec.node_name.as_str();
    let node = members.main.as_ref().and_then(Member::node);
    settings.migrate && !wanted.is_empty() && node.is_some_and(|node| node != wanted)
}

/// Saves the main agent and deletes its pod; the next pass creates it on the other node.
pub(super) fn migrate(o: &Observed<'_>, members: &Members<'_>) -> Plan {
    let mut plan = Plan::new(SetPhase::Migrating, o.settings.times.poll);
    let Some(main) = &members.main else { return plan };
    if main.spec.hibernate {
        if o.is_hibernated(main) {
            release_pod(o, main, &mut plan);
        }
    } else if main.phase() == "Running" {
        plan.steps.push(Step::Hibernate(main.id()));
    }
    plan
}

/// Removes the saved state of a main agent that runs again.
pub(super) fn finish_wake(o: &Observed<'_>, main: &Member<'_>, plan: &mut Plan) {
    let has_vm = main.is_running() && !main.runtime.id.is_empty();
    if is_released(o.set) && has_vm {
        plan.steps.push(Step::DeleteTag { vm: main.spec.vm_name.clone(), tag: keys::TAG_HIBERNATE });
        plan.steps.push(Step::Annotate(keys::HIBERNATED_ON_NODE, None));
    }
}

/// Reports that no node has resources for a main agent that is to be restored.
pub(super) fn report_capacity(main: &Member<'_>, plan: &mut Plan) {
    let conditions = main.pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let refused = conditions.into_iter().flatten().find(|condition| {
        condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
    });
    if let Some(refused) = refused.filter(|_| main.spec.restore_from_hibernate) {
        let note = refused.message.clone().unwrap_or_default();
        plan.event(Kind::Warning, "WakeNoCapacity", note.clone());
        plan.problems.push(format!("no node has room for pod {}: {note}", main.id().name));
    }
}
