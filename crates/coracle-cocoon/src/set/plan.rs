//! Plans the next steps of a set. Pure.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::CocoonSet;
use coracle_api::cocoon::{LifecycleState, Mode, SetPhase, keys};
use coracle_reconcile::Kind;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::{
    deletion, drift,
    members::{Member, Members},
    pods::{self, ForkSource, Restore},
    rebuild, release,
    step::{Plan, Step},
};
use crate::config::Settings;

/// Input of a plan.
#[derive(Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) set: &'a CocoonSet,
    /// Pods that the set owns.
    pub(crate) pods: &'a [Pod],
    /// Pods that a CocoonHibernation keeps hibernated.
    pub(crate) held: &'a BTreeSet<String>,
    /// For each VM that [`questions`] names: whether its saved state is in the registry.
    pub(crate) saved: &'a BTreeMap<String, bool>,
    /// VM names of other pods, with the names of those pods.
    pub(crate) taken: &'a BTreeMap<String, String>,
    pub(crate) settings: &'a Settings,
    pub(crate) now: Timestamp,
}

impl Observed<'_> {
    /// True when the saved state of the VM is in the registry.
    pub(crate) fn is_saved(&self, member: &Member<'_>) -> bool {
        self.saved.get(&member.spec.vm_name).copied().unwrap_or(false)
    }

    /// True when the VM is saved and removed.
    pub(crate) fn is_hibernated(&self, member: &Member<'_>) -> bool {
        self.is_saved(member) && member.reports_hibernated()
    }

    pub(crate) fn annotation(&self, key: &str) -> Option<&str> {
        self.set.annotations().get(key).map(String::as_str).filter(|value| !value.is_empty())
    }
}

/// Returns the VMs whose saved state the next plan needs.
pub(crate) fn questions(set: &CocoonSet, pods: &[Pod], settings: &Settings) -> Vec<String> {
    if set.metadata.deletion_timestamp.is_some() {
        return Vec::new();
    }
    let members = Members::sort(pods);
    if release::is_released(set) && members.main.is_none() {
        return vec![release::main_vm(set)];
    }
    let waits = match set.spec.suspend {
        true => !settings.suspended_at_once || release::is_policy(set),
        false => release::migrates(set, &members, settings),
    };
    let annotated = |member: &&Member<'_>| waits && member.spec.managed && member.spec.hibernate;
    members.live().filter(annotated).map(|member| member.spec.vm_name.clone()).collect()
}

/// Plans the next steps, from any state.
pub(crate) fn plan(o: &Observed<'_>) -> Plan {
    if o.set.metadata.deletion_timestamp.is_some() {
        return deletion::plan(o);
    }
    if !o.set.finalizers().iter().any(|finalizer| finalizer == keys::SET_FINALIZER) {
        let mut plan = Plan::new(SetPhase::Pending, o.settings.times.poll);
        plan.steps.push(Step::AddFinalizer);
        return plan;
    }
    let members = Members::sort(o.pods);
    if let Some(main) = members.main.as_ref().filter(|main| main.phase() == "Failed") {
        return plan_failed(o, main);
    }
    if o.set.spec.suspend { plan_suspended(o, &members) } else { plan_active(o, &members) }
}

/// Plans for a failed main agent. It stays so that its user can inspect it, unless it differs from the spec.
fn plan_failed(o: &Observed<'_>, main: &Member<'_>) -> Plan {
    let mut plan = Plan::new(SetPhase::Failed, o.settings.times.resync);
    let wanted = pods::main_pod(o.set, None);
    if o.settings.drift && wanted.is_ok_and(|wanted| drift::first_difference(main.pod, &wanted).is_some()) {
        plan.event(Kind::Normal, "RecoveredFromFailure", format!("pod {} is replaced", main.id().name));
        plan.steps.push(Step::DeletePod(main.id()));
        return plan;
    }
    plan.problems.push(format!("main agent pod {} failed", main.id().name));
    plan.event(Kind::Warning, "MainAgentFailed", format!("pod {} failed", main.id().name));
    plan
}

/// Plans for a suspended set: every managed VM is hibernated.
fn plan_suspended(o: &Observed<'_>, members: &Members<'_>) -> Plan {
    let times = &o.settings.times;
    let mut plan = Plan::new(SetPhase::Suspending, times.poll);
    if members.main.is_none() {
        if release::is_released(o.set) {
            return Plan::new(SetPhase::Suspended, times.resync);
        }
        create(o, members, pods::main_pod(o.set, None), &mut plan);
        return plan;
    }
    let (mut without, mut unsaved) = (false, false);
    for member in members.live().filter(|member| member.spec.managed) {
        if member.spec.hibernate {
            unsaved |= !o.is_hibernated(member);
        } else if member.phase() == "Running" {
            plan.steps.push(Step::Hibernate(member.id()));
            unsaved = true;
        } else {
            // A VM that does not run yet has no state to save: it is hibernated once it runs.
            without |= !member.is_terminal();
        }
    }
    let at_once = o.settings.suspended_at_once && !release::is_policy(o.set);
    if !without && (at_once || !unsaved) {
        (plan.phase, plan.requeue) = (SetPhase::Suspended, times.resync);
    }
    if release::is_policy(o.set) && !without && !unsaved {
        release::release_pods(o, members, &mut plan);
    }
    plan
}

/// Plans for an active set: every VM runs.
fn plan_active(o: &Observed<'_>, members: &Members<'_>) -> Plan {
    let mut plan = Plan::new(SetPhase::Pending, o.settings.times.poll);
    if release::migrates(o.set, members, o.settings) {
        return release::migrate(o, members);
    }
    let mut wakes = false;
    for member in members.live().filter(|member| member.spec.managed && member.spec.hibernate) {
        if !o.held.contains(&member.id().name) {
            plan.steps.push(Step::Wake(member.id()));
            wakes = true;
        }
    }
    let Some(main) = &members.main else {
        create_main(o, members, &mut plan);
        return plan;
    };
    if replace_main(o, main, &mut plan) {
        return plan;
    }
    if !main.is_ready() || !is_forkable(main) {
        wait_for(o, main, wakes, &mut plan);
        return plan;
    }
    release::finish_wake(o, main, &mut plan);
    sub_agents(o, members, main, &mut plan);
    toolboxes(o, members, &mut plan);
    settle(o, members, &mut plan);
    plan
}

/// Creates the main agent: from its image, or from its saved state when it released its place on the node.
fn create_main(o: &Observed<'_>, members: &Members<'_>, plan: &mut Plan) {
    if !release::is_released(o.set) {
        create(o, members, pods::main_pod(o.set, None), plan);
    } else if o.saved.get(&release::main_vm(o.set)).copied().unwrap_or(false) {
        let node = o.annotation(keys::HIBERNATED_ON_NODE).map(str::to_owned);
        create(o, members, pods::main_pod(o.set, Some(&Restore { node })), plan);
        plan.phase = if o.settings.later_phases { SetPhase::Waking } else { SetPhase::Pending };
    } else {
        // A start from the image would lose the state that the user suspended.
        plan.problems.push(format!(
            "saved state {}:{} not found: remove the annotation {} to start from the image",
            release::main_vm(o.set),
            keys::TAG_HIBERNATE,
            keys::HIBERNATED_ON_NODE
        ));
        plan.phase = SetPhase::Failed;
    }
    if !plan.problems.is_empty() {
        plan.phase = SetPhase::Failed;
    }
}

/// Deletes a main agent that differs from the spec. A hibernated agent is kept for now: its state would be lost.
fn replace_main(o: &Observed<'_>, main: &Member<'_>, plan: &mut Plan) -> bool {
    if !o.settings.drift || main.spec.hibernate {
        return false;
    }
    let Ok(wanted) = pods::main_pod(o.set, None) else { return false };
    let Some(what) = drift::first_difference(main.pod, &wanted) else { return false };
    plan.event(Kind::Normal, "Replacing", format!("pod {}: {what} changed", main.id().name));
    plan.steps.push(Step::DeletePod(main.id()));
    true
}

/// True when the main VM can be forked. A VM that is or will be saved is not forked: the fork would be older than the VM that
/// runs next.
fn is_forkable(main: &Member<'_>) -> bool {
    let state = main.runtime.lifecycle_state;
    !main.spec.hibernate && state.is_none_or(|state| state == LifecycleState::Ready)
}

fn wait_for(o: &Observed<'_>, main: &Member<'_>, wakes: bool, plan: &mut Plan) {
    let state = main.runtime.lifecycle_state;
    if state == Some(LifecycleState::Failed) {
        let note = format!("main agent pod {}: {}", main.id().name, main.runtime.lifecycle_state_message);
        plan.event(Kind::Warning, "PodLifecycleFailed", note.clone());
        plan.problems.push(note);
        plan.phase = SetPhase::Failed;
    } else if o.settings.later_phases && (wakes || state == Some(LifecycleState::Hibernated)) {
        plan.phase = SetPhase::Waking;
    }
    release::report_capacity(main, plan);
}

fn sub_agents(o: &Observed<'_>, members: &Members<'_>, main: &Member<'_>, plan: &mut Plan) {
    let replicas = u32::try_from(o.set.spec.agent.replicas).unwrap_or(0);
    for (_, extra) in members.subs.range(replicas.saturating_add(1)..) {
        plan.steps.push(Step::DeletePod(extra.id()));
    }
    rebuild::plan(o, members, replicas, plan);
    let source = ForkSource { vm: main.spec.vm_name.clone(), node: main.node().map(str::to_owned) };
    let absent = (1..=replicas).filter(|slot| !members.subs.contains_key(slot));
    for slot in absent.take(o.settings.creates_max) {
        create(o, members, pods::sub_agent_pod(o.set, slot, &source), plan);
    }
    if o.settings.drift {
        for (slot, member) in members.subs.range(..=replicas) {
            replace(member, pods::sub_agent_pod(o.set, *slot, &source), plan);
        }
    }
}

fn toolboxes(o: &Observed<'_>, members: &Members<'_>, plan: &mut Plan) {
    let wanted = &o.set.spec.toolboxes;
    for (name, member) in &members.toolboxes {
        if !wanted.iter().any(|toolbox| toolbox.name == *name) {
            plan.steps.push(Step::DeletePod(member.id()));
        }
    }
    for toolbox in wanted {
        let agent = &o.set.spec.agent;
        let backend = toolbox.backend.unwrap_or(agent.backend);
        let problem = match toolbox.mode {
            Mode::Static => None,
            Mode::Clone | Mode::Run => {
                pods::unsupported_reason(toolbox.os, backend, toolbox.mode, &toolbox.image)
            }
        };
        let pod = match problem {
            Some(problem) => Err(format!("toolbox {:?}: {problem}", toolbox.name)),
            None => pods::toolbox_pod(o.set, toolbox),
        };
        match members.toolboxes.get(&toolbox.name) {
            None => create(o, members, pod, plan),
            Some(member) if o.settings.drift => replace(member, pod, plan),
            Some(_) => {}
        }
    }
}

fn replace(member: &Member<'_>, wanted: Result<Pod, String>, plan: &mut Plan) {
    let differs = wanted.ok().and_then(|wanted| drift::first_difference(member.pod, &wanted));
    if let Some(what) = differs.filter(|_| !member.spec.hibernate) {
        plan.event(Kind::Normal, "Replacing", format!("pod {}: {what} changed", member.id().name));
        plan.steps.push(Step::DeletePod(member.id()));
    }
}

/// Adds a step that creates `pod`, unless its name or the name of its VM is taken.
fn create(o: &Observed<'_>, members: &Members<'_>, pod: Result<Pod, String>, plan: &mut Plan) {
    let pod = match pod {
        Ok(pod) => pod,
        Err(problem) => return plan.problems.push(problem),
    };
    let vm = pod.annotations().get(keys::VM_NAME).cloned().unwrap_or_default();
    if let Some(other) = o.taken.get(&vm) {
        let problem = format!("VM name {vm:?} belongs to pod {other}: rename one of the two");
        plan.event(Kind::Warning, "VMNameTaken", problem.clone());
        plan.problems.push(problem);
    } else if !members.is_ending(&pod.name_any()) {
        plan.steps.push(Step::CreatePod(Box::new(pod)));
    }
}

/// Sets the phase to Running when all wanted members are ready.
fn settle(o: &Observed<'_>, members: &Members<'_>, plan: &mut Plan) {
    let replicas = u32::try_from(o.set.spec.agent.replicas).unwrap_or(0);
    let is_ready = |member: Option<&Member<'_>>| member.is_some_and(Member::is_ready);
    let agents = (1..=replicas).all(|slot| is_ready(members.subs.get(&slot)));
    let toolboxes = o.set.spec.toolboxes.iter().all(|toolbox| is_ready(members.toolboxes.get(&toolbox.name)));
    let is_done = agents && toolboxes && plan.steps.is_empty() && plan.problems.is_empty();
    (plan.phase, plan.requeue) = match is_done {
        true => (SetPhase::Running, o.settings.times.resync),
        false => (SetPhase::Scaling, o.settings.times.poll),
    };
}
