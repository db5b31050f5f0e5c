//! Decides the steps for one MikromVM. Pure: an observation comes in, data goes out.
//!
//! ```text
//!  no finalizer ─▶ AddFinalizer
//!  unbound ─▶ Bind ─▶ CreateVm ─▶ StartVm ─▶ (observe again) ─▶ vmID, Running
//!  deleted ─▶ StopVm ─▶ DeleteVm ─▶ (observe again: no VM) ─▶ RemoveFinalizer
//! ```
//! The intent is stored before anything outside is changed: `AddFinalizer` before `Bind`, `Bind` before `CreateVm`. After its
//! effects the reconcile observes and plans again, so that the status contains what was observed and not what was assumed.

mod drain;
mod failure;
mod migration;
mod power;

use std::time::Duration;

use coracle_api::{Migration, MikromVM, PowerState, RestartPolicy, keys};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;

pub use failure::{Consequences, judge};

use crate::{
    agent::{AgentAddress, AgentError, Fence, Origin, State, VmInfo},
    observed::{AgentView, BindingError, Memo, Observed, Policy},
    status::{self, Finding},
    step::{NodeBinding, Step, VmRef},
    vm_spec::{VmSpec, spec_hash},
};
use power::{Transition, hibernation_due, transition, wanted_power_state};

/// Time until the next reconcile of a VM whose agent answers before a call has taken effect.
const ASYNCHRONOUS: Duration = Duration::from_secs(1);
/// Calls in a row without a response from an address that no node announces, before the status reports it.
const UNKNOWN_SILENT_MAX: u32 = 2;

/// Steps to carry out, content of the status, and time of the next reconcile.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Effects, in order.
    pub steps: Vec<Step>,
    /// Finding for the status when no step is left. `None`: leave the status unchanged.
    pub finding: Option<Finding>,
    /// Error of a call without a response: retry with backoff.
    pub retry: Option<AgentError>,
    /// Time until the next reconcile.
    pub requeue: Duration,
    /// Memo to store.
    pub memo: Memo,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Intent {
    /// The object is no longer managed by this controller.
    Ignore,
    /// The object gets the finalizer first.
    Adopt,
    /// The VM shall exist.
    Keep,
    /// The VM shall be removed.
    Remove,
}

fn intent(vm: &MikromVM) -> Intent {
    let has_finalizer = vm.finalizers().iter().any(|f| f == keys::MIKROMVM_FINALIZER);
    match (vm.metadata.deletion_timestamp.is_some(), has_finalizer) {
        (true, false) => Intent::Ignore,
        (true, true) => Intent::Remove,
        (false, false) => Intent::Adopt,
        (false, true) => Intent::Keep,
    }
}

/// Plans the next steps. A VM with missing inputs is not created, and its plan has no steps that only make sense with the
/// creation.
#[must_use]
pub fn plan(o: &Observed<'_>) -> Plan {
    let plan = decide(o);
    let creates = plan.steps.iter().any(|step| matches!(step, Step::CreateVm(..) | Step::CreateStopped(..)));
    match &o.inputs {
        Err(why) if creates => report(o, Finding::ConfigError(why.clone())),
        _ => plan,
    }
}

/// True when [`plan`] may create the VM, which needs its inputs.
#[must_use]
pub fn may_create(vm: &MikromVM, view: &AgentView, memo: &Memo) -> bool {
    intent(vm) == Intent::Keep
        && match view {
            AgentView::Answered(None) => true,
            AgentView::Answered(Some(info)) => {
                memo.recreate || (!vm.is_provisioned() && is_outdated(vm, info))
            }
            AgentView::Unbound | AgentView::Refused(_) | AgentView::Unreachable { .. } => false,
        }
}

fn decide(o: &Observed<'_>) -> Plan {
    match intent(o.vm) {
        Intent::Ignore => execute(o, vec![]),
        Intent::Adopt => execute(o, vec![Step::AddFinalizer]), // nothing outside exists before the finalizer is stored
        Intent::Keep => keep(o),
        Intent::Remove => remove(o),
    }
}

fn keep(o: &Observed<'_>) -> Plan {
    if let Some(plan) = current_migration(o).and_then(|migration| migration::plan(o, migration)) {
        return plan;
    }
    match &o.view {
        AgentView::Unbound => bind(o),
        AgentView::Refused(error) => report(o, Finding::Refused(error.clone())),
        AgentView::Answered(Some(vm)) if is_foreign(o, vm) => report(o, Finding::Conflict(vm.uid.clone())),
        AgentView::Answered(vm) if o.vm.is_provisioned() => follow(o, vm.as_ref()),
        AgentView::Answered(vm) => provision(o, vm.as_ref()),
        AgentView::Unreachable { error, gone_since, announced } => {
            unreachable(o, error, *gone_since, *announced)
        }
    }
}

/// Returns the move that is in progress.
fn current_migration<'a>(o: &Observed<'a>) -> Option<&'a Migration> {
    o.vm.status.as_ref()?.migration.as_ref()
}

/// Stores the node of an unbound object; the next round calls its agent.
fn bind(o: &Observed<'_>) -> Plan {
    match &o.candidate {
        Ok(binding) => execute(o, vec![Step::Bind(binding.clone())]),
        Err(BindingError::Unschedulable(why)) => report(o, Finding::Unschedulable(why.clone())),
        Err(BindingError::NotAllowed(address)) => report(o, Finding::NotAllowed(address.clone())),
    }
}

/// True when the node has refused often enough a VM that never existed there, and the VM may be bound to another node.
#[must_use]
pub fn is_refused(vm: &MikromVM, memo: &Memo, policy: &Policy) -> bool {
    memo.refusals >= policy.refusals_max && !vm.is_provisioned() && is_unpinned(vm)
}

/// True when the spec names neither node nor agent.
fn is_unpinned(vm: &MikromVM) -> bool {
    vm.spec.agent_address.is_empty() && vm.spec.node_name.is_empty()
}

/// Returns the binding that the spec names, when it differs from the present one.
fn changed_binding<'a>(o: &'a Observed<'_>) -> Option<&'a NodeBinding> {
    let spec = &o.vm.spec;
    o.candidate.as_ref().ok().filter(|binding| {
        let named = match spec.agent_address.as_str() {
            "" => !spec.node_name.is_empty() && spec.node_name == binding.node,
            address => address == binding.address,
        };
        named && is_elsewhere(o.vm, binding)
    })
}

/// Binds the VM to another node, and avoids the node that refused it for a while.
fn leave_node(o: &Observed<'_>, binding: &NodeBinding) -> Plan {
    let mut avoid = o.memo.avoid.clone();
    avoid.retain(|(_, until)| o.now < *until);
    let node = o.vm.status.as_ref().map(|s| s.node_name.clone()).unwrap_or_default();
    avoid.push((node, add(o.now, o.policy.avoid_for)));
    let memo = Memo { refusals: 0, avoid, ..o.memo.clone() };
    Plan { memo, ..execute(o, vec![Step::Bind(binding.clone())]) }
}

/// Plans for a VM that is bound, but was never confirmed to exist. The contract's order is create, then start, also when
/// another process has created the VM.
fn provision(o: &Observed<'_>, vm: Option<&VmInfo>) -> Plan {
    let Some(vm) = vm else { return provision_absent(o) };
    if o.memo.recreate {
        recreate(o)
    } else if is_outdated(o.vm, vm) {
        replace(o)
    } else if is_created_stopped(o.vm) || o.progress.started {
        report(o, Finding::Vm(vm.clone()))
    } else {
        execute(o, vec![Step::StartVm(vm_ref(o))])
    }
}

fn provision_absent(o: &Observed<'_>) -> Plan {
    let created = o.progress.created;
    match (&o.candidate, changed_binding(o)) {
        (Ok(binding), _)
            if !created && is_refused(o.vm, &o.memo, o.policy) && is_elsewhere(o.vm, binding) =>
        {
            leave_node(o, binding)
        }
        (_, Some(binding)) if !created => execute(o, vec![Step::Bind(binding.clone())]),
        _ if o.progress.started => retry(o, inconsistent(o, "is not there although it was started")),
        // The agent answers "already exists" and returns no VM.
        _ if created => execute(o, vec![Step::StartVm(vm_ref(o))]),
        _ => execute(o, create(o)),
    }
}

/// Returns the steps that create the VM and bring it into its initial state.
fn create(o: &Observed<'_>) -> Vec<Step> {
    let (vm, spec) = (vm_ref(o), vm_spec(o));
    match is_created_stopped(o.vm) {
        true => vec![Step::CreateStopped(vm, spec)],
        false => create_and_start(vm, spec),
    }
}

fn create_and_start(vm: VmRef, spec: VmSpec) -> Vec<Step> {
    vec![Step::CreateVm(vm.clone(), spec), Step::StartVm(vm)]
}

/// True when the VM is created powered off. A clone runs first in every power state, because it continues from its snapshot.
fn is_created_stopped(vm: &MikromVM) -> bool {
    vm.spec.power_state == Some(PowerState::Stopped) && vm.spec.clone_from.is_empty()
}

/// True when the VM was created from an older version of the spec. Unknown for agents that keep no metadata.
fn is_outdated(vm: &MikromVM, info: &VmInfo) -> bool {
    info.spec.as_ref().is_some_and(|hash| *hash != spec_hash(vm))
}

/// Creates the VM again from the present spec. The VM was never confirmed, so it contains nothing worth keeping.
fn replace(o: &Observed<'_>) -> Plan {
    if o.progress.deleted {
        return retry(o, inconsistent(o, "is made from an older spec although it was deleted"));
    }
    execute(o, [vec![Step::DeleteVm(vm_ref(o))], create(o)].concat())
}

/// Deletes and creates the VM, because the agent cannot start it a second time.
fn recreate(o: &Observed<'_>) -> Plan {
    let memo = Memo { recreate: false, ..o.memo.clone() };
    let (vm, spec) = (vm_ref(o), vm_spec(o));
    let steps = [vec![Step::DeleteVm(vm.clone())], create_and_start(vm, spec)].concat();
    Plan { memo, ..execute(o, steps) }
}

/// Plans for a VM that was confirmed to exist earlier: the status follows the agent; power state and restart policy are
/// applied.
fn follow(o: &Observed<'_>, vm: Option<&VmInfo>) -> Plan {
    use State::{Creating, Deleting, Error, Running, Stopped, Stopping, Unspecified};
    let Some(vm) = vm else { return plan_restart(o, Finding::Vanished, true) };
    let due = hibernation_due(o);
    let wanted = drain::power_state(o, wanted_power_state(o, vm, due));
    if let Some(plan) = drain::begin_move(o, vm) {
        return plan;
    }
    let powered_off = status::is_powered_off(o.vm) && o.progress.powered.is_none();
    let found = || drain::vm_finding(o, vm);
    match transition(wanted, vm, powered_off) {
        Transition::To(PowerState::Running) if o.memo.recreate => return recreate(o),
        Transition::To(state) if o.progress.powered == Some(state) => {
            return Plan { requeue: ASYNCHRONOUS, ..report(o, found()) };
        }
        Transition::To(state) => return execute(o, vec![Step::SetPowerState(vm_ref(o), state)]),
        Transition::AsWanted => return report(o, found()),
        Transition::Unsupported => {
            let why = format!("the agent cannot make it {}", wanted.as_str());
            return report(o, Finding::PowerFailed(why));
        }
        Transition::ByPolicy => {}
    }
    match vm.state {
        Running => {
            let Memo { streak, unmovable_until, .. } = o.memo;
            let memo = Memo { streak, unmovable_until, ..Memo::default() };
            let plan = report(o, found());
            let wait = due.and_then(|at| Duration::try_from(at.duration_since(o.now)).ok());
            Plan { memo, requeue: wait.unwrap_or(plan.requeue).min(plan.requeue), ..plan }
        }
        Creating | Stopping | Deleting | Unspecified => report(o, found()),
        Stopped => plan_restart(o, found(), false),
        Error => plan_restart(o, found(), true),
    }
}

/// Plans for a VM that is down unexpectedly: reports it, and starts it again when policy and backoff allow.
fn plan_restart(o: &Observed<'_>, finding: Finding, failed: bool) -> Plan {
    let restarts = match o.vm.spec.restart_policy {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => failed,
        RestartPolicy::Never => false,
    };
    if !restarts {
        return report(o, finding);
    }
    let since = o.memo.down_since.unwrap_or(o.now);
    let streak = if was_healthy(o) { 0 } else { o.memo.streak };
    let memo = Memo { down_since: Some(since), streak, ..o.memo.clone() };
    let due = add(since, o.policy.restart.delay(streak));
    if o.memo.recreate {
        return recreate(o);
    }
    if o.now < due {
        let wait = Duration::try_from(due.duration_since(o.now)).unwrap_or_default();
        return Plan { requeue: wait.min(o.policy.resync), memo, ..report(o, finding) };
    }
    let steps = match (&o.view, o.progress.created) {
        (AgentView::Answered(None), false) => create_and_start(vm_ref(o), vm_spec(o)),
        _ => vec![Step::StartVm(vm_ref(o))],
    };
    Plan { memo: Memo { streak: streak.saturating_add(1), ..memo }, ..execute(o, steps) }
}

/// True when the VM went down only now, after a long healthy time.
fn was_healthy(o: &Observed<'_>) -> bool {
    let ready = status::ready_since(o.vm);
    o.memo.down_since.is_none() && ready.is_some_and(|since| o.now >= add(since, o.policy.healthy_after))
}

fn unreachable(o: &Observed<'_>, error: &AgentError, gone_since: Option<Timestamp>, announced: bool) -> Plan {
    if error.is_local() {
        return retry(o, error.clone()); // it says nothing about the agent
    }
    let memo = Memo { silent: o.memo.silent.saturating_add(1), ..o.memo.clone() };
    if let (Some(binding), false, false) = (changed_binding(o), o.vm.is_provisioned(), announced) {
        return execute(o, vec![Step::Bind(binding.clone())]); // the user corrected an address that never answered
    }
    if is_lost(o, gone_since) {
        let movable = is_unpinned(o.vm)
            && !o.vm.spec.image.is_empty() // the root disk can be created again from it
            && o.vm.spec.restart_policy != RestartPolicy::Never;
        return match (&o.candidate, movable) {
            (Ok(binding), true) if is_elsewhere(o.vm, binding) => {
                Plan { memo, ..execute(o, vec![Step::Bind(binding.clone())]) }
            }
            (Err(why), true) => Plan { memo, ..report(o, Finding::NodeLost(why.to_string())) },
            _ => Plan { memo, ..report(o, Finding::NodeLost("the VM is tied to it".into())) },
        };
    }
    // An address that no node announces, and where no VM ever existed, is likely mistyped and is reported sooner.
    let enough = if announced || o.vm.is_provisioned() { o.policy.silent_max } else { UNKNOWN_SILENT_MAX };
    let finding = (error.is_silence() && memo.silent >= enough.min(o.policy.silent_max))
        .then(|| Finding::Unreachable(error.clone()));
    Plan { finding, memo, ..retry(o, error.clone()) }
}

fn remove(o: &Observed<'_>) -> Plan {
    if let Some(plan) = current_migration(o).and_then(|migration| migration::remove(o, migration)) {
        return plan;
    }
    let bound = o.vm.status.as_ref().is_some_and(|s| !s.agent_address.is_empty());
    match &o.view {
        // The agent confirmed that no VM of this object is left.
        AgentView::Unbound | AgentView::Answered(None) => release(o, None),
        AgentView::Answered(Some(vm)) if is_foreign(o, vm) => release(o, None),
        AgentView::Answered(Some(_)) if o.progress.deleted => {
            Plan { requeue: ASYNCHRONOUS, ..execute(o, vec![]) }
        }
        AgentView::Answered(Some(_)) => execute(o, vec![Step::StopVm(vm_ref(o)), Step::DeleteVm(vm_ref(o))]),
        AgentView::Refused(_) | AgentView::Unreachable { .. } if is_abandoned(o.vm) => {
            release(o, Some("abandoned as asked"))
        }
        AgentView::Refused(error) => report(o, Finding::Refused(error.clone())),
        AgentView::Unreachable { error, .. } if error.is_local() => retry(o, error.clone()),
        // The object was never bound, so it cannot have a VM there: the address comes only from the user's spec.
        AgentView::Unreachable { .. } if !bound => {
            release(o, Some("never created, and its agent does not answer"))
        }
        AgentView::Unreachable { gone_since, .. } if is_lost(o, *gone_since) => {
            release(o, Some("its node is gone"))
        }
        AgentView::Unreachable { error, .. } => {
            let memo = Memo { silent: o.memo.silent.saturating_add(1), ..o.memo.clone() };
            let finding = (memo.silent >= o.policy.silent_max).then(|| Finding::Unreachable(error.clone()));
            Plan { finding, memo, ..retry(o, error.clone()) }
        }
    }
}

fn release(o: &Observed<'_>, unconfirmed: Option<&str>) -> Plan {
    execute(o, vec![Step::RemoveFinalizer { unconfirmed: unconfirmed.map(str::to_owned) }])
}

fn is_lost(o: &Observed<'_>, gone_since: Option<Timestamp>) -> bool {
    gone_since.is_some_and(|since| o.policy.is_lost(since, o.now))
}

fn is_abandoned(vm: &MikromVM) -> bool {
    vm.annotations().get(keys::ABANDON).is_some_and(|v| v == "true")
}

/// True for a VM of another object, or of none. A VM without a UID belongs to this object when it was confirmed before, when
/// this reconcile created it at an agent that keeps no metadata, or when its creator marked it for adoption.
fn is_foreign(o: &Observed<'_>, vm: &VmInfo) -> bool {
    if vm.uid.is_some() {
        return vm.uid != o.vm.uid();
    }
    let marked = vm.adopt.as_ref() == Some(&o.vm.object_name());
    !(o.vm.is_provisioned() || o.progress.made || marked)
}

/// True when the object is bound to another node or agent, or to none.
fn is_elsewhere(vm: &MikromVM, binding: &NodeBinding) -> bool {
    vm.status.as_ref().is_none_or(|s| s.agent_address != binding.address || s.node_name != binding.node)
}

fn vm_ref(o: &Observed<'_>) -> VmRef {
    vm_ref_at(o, &o.agent)
}

/// Returns the VM at another agent than the one that was called.
fn vm_ref_at(o: &Observed<'_>, agent: &AgentAddress) -> VmRef {
    let seconds = o.vm.spec.termination_grace_period_seconds;
    let grace = seconds.map(|seconds| Duration::from_secs(seconds.max(0).unsigned_abs()));
    VmRef { agent: agent.clone(), id: o.vm.vm_id(), fence: Fence::of(o.vm), grace }
}

fn vm_spec(o: &Observed<'_>) -> VmSpec {
    VmSpec::of(o.vm, o.cluster.as_deref(), o.inputs.clone().unwrap_or_default())
}

/// Returns the error for an answer of the agent that contradicts the previous call.
fn inconsistent(o: &Observed<'_>, what: &str) -> AgentError {
    AgentError {
        operation: "GetVM",
        address: o.vm.status.as_ref().map(|s| s.agent_address.clone()).unwrap_or_default(),
        code: tonic::Code::Aborted,
        message: format!("VM {} {what}", o.vm.vm_id()),
        failure: String::new(),
        origin: Origin::Agent,
    }
}

fn add(t: Timestamp, by: Duration) -> Timestamp {
    t.saturating_add(SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX)).unwrap_or(Timestamp::MAX)
}

fn execute(o: &Observed<'_>, steps: Vec<Step>) -> Plan {
    Plan { steps, finding: None, retry: None, requeue: o.policy.resync, memo: o.memo.clone() }
}

fn report(o: &Observed<'_>, finding: Finding) -> Plan {
    let memo = Memo { silent: 0, ..o.memo.clone() };
    Plan { finding: Some(finding), memo, ..execute(o, vec![]) }
}

fn retry(o: &Observed<'_>, error: AgentError) -> Plan {
    Plan { retry: Some(error), ..execute(o, vec![]) }
}
