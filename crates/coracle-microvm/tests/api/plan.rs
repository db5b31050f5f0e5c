//! Table of the planner's decisions, one line per case.

use std::{sync::Arc, time::Duration};

use coracle_api::{
    MikromVM, MikromVMSpec, MikromVMStatus, PowerState, RestartPolicy, condition, keys, reason,
};
use coracle_microvm::{
    agent::{AgentAddress, AgentError, Fence, Origin, State, VmInfo},
    observed::{AgentView, AppliedSteps, BindingError, Memo, Observed, Policy},
    plan::{Consequences, Plan, judge, may_create, plan},
    status::Finding,
    step::{NodeBinding, Step, VmRef},
    vm_spec::{VmSpec, spec_hash},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt as _;
use tonic::Code;

mod drain;
mod inputs;
mod power;

const NOW: i64 = 100_000;
/// Time until the next observation of a VM whose agent answers before a call has taken effect.
const ASYNCHRONOUS: Duration = Duration::from_secs(1);
/// UID of [`object`].
const OWN: Option<&str> = Some("uid-1");

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn error(code: Code) -> AgentError {
    AgentError {
        operation: "GetVM",
        address: "a:1".into(),
        code,
        message: "no".into(),
        failure: String::new(),
        origin: Origin::Agent,
    }
}

/// Object in one of the stages of its lifecycle.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    New,
    Held,
    Bound,
    Live,
    LiveDeleted,
    BoundDeleted,
    HeldDeleted,
    ForeignDeleted,
}

fn object(stage: Stage) -> MikromVM {
    use Stage::*;
    let mut vm = MikromVM::new(
        "web",
        MikromVMSpec { image: "i:1".into(), vcpu_count: 1, memory_mib: 128, ..Default::default() },
    );
    vm.metadata.namespace = Some("default".into());
    vm.metadata.uid = Some("uid-1".into());
    if !matches!(stage, New | ForeignDeleted) {
        vm.metadata.finalizers = Some(vec![keys::MIKROMVM_FINALIZER.into()]);
    }
    if matches!(stage, LiveDeleted | BoundDeleted | HeldDeleted | ForeignDeleted) {
        vm.metadata.deletion_timestamp = Some(Time(at(NOW)));
    }
    if matches!(stage, Bound | Live | LiveDeleted | BoundDeleted) {
        let vm_id = if matches!(stage, Live | LiveDeleted) { vm.vm_id() } else { String::new() };
        let ready = Condition {
            type_: condition::READY.into(),
            status: if vm_id.is_empty() { "False" } else { "True" }.into(),
            reason: reason::VM_RUNNING.into(),
            message: String::new(),
            observed_generation: None,
            last_transition_time: Time(at(NOW - 60)),
        };
        let (agent_address, node_name) = ("a:1".into(), "n1".into());
        vm.status = Some(MikromVMStatus {
            vm_id,
            agent_address,
            node_name,
            conditions: vec![ready],
            ..Default::default()
        });
    }
    vm
}

fn vm_in(state: State, uid: Option<&str>) -> AgentView {
    let uid = uid.map(str::to_owned);
    AgentView::Answered(Some(VmInfo { state, ip: "10.0.0.2".into(), uid, ..VmInfo::default() }))
}

fn silent(gone_for: Option<i64>, announced: bool) -> AgentView {
    AgentView::Unreachable {
        error: error(Code::Unavailable),
        gone_since: gone_for.map(|s| at(NOW - s)),
        announced,
    }
}

fn observed<'a>(vm: &'a MikromVM, view: AgentView, policy: &'a Policy) -> Observed<'a> {
    let agent = AgentAddress { address: "a:1".into(), ..AgentAddress::default() };
    Observed {
        vm,
        view,
        bound_to: NodeBinding { node: "n1".into(), address: agent.address.clone() },
        agent,
        candidate: Ok(NodeBinding { node: "n2".into(), address: "b:2".into() }),
        inputs: Ok(Arc::default()),
        drain: None,
        migration_ends: None,
        cluster: Some("cluster-1".into()),
        memo: Memo::default(),
        progress: AppliedSteps::default(),
        now: at(NOW),
        policy,
    }
}

/// Returns the VM of [`object`] at its agent.
fn target() -> VmRef {
    let fence = Fence { uid: "uid-1".into(), object: "default/web".into(), generation: 0 };
    VmRef {
        agent: AgentAddress { address: "a:1".into(), ..AgentAddress::default() },
        id: "default-web".into(),
        fence,
        grace: None,
    }
}

fn create() -> Step {
    Step::CreateVm(target(), VmSpec::default())
}

fn create_stopped() -> Step {
    Step::CreateStopped(target(), VmSpec::default())
}

/// Returns steps and finding in a few words.
fn verbs(plan: &Plan) -> String {
    let step = |step: &Step| match step {
        Step::Bind(binding) => format!("bind:{}", binding.node),
        Step::SetPowerState(_, state) => format!("power:{}", state.as_str()),
        Step::RemoveFinalizer { unconfirmed: Some(_) } => "remove-finalizer!".into(),
        step => step.name().to_owned(),
    };
    let mut words: Vec<_> = plan.steps.iter().map(step).collect();
    if let Some(finding) = &plan.finding {
        let name = format!("{finding:?}");
        words.push(format!("report:{}", name.split(['(', ' ']).next().unwrap_or_default()));
    }
    if plan.retry.is_some() {
        words.push("retry".into());
    }
    words.join(" ")
}

#[test]
fn plan_table() {
    use {AgentView::*, Stage::*, State::*};
    let own = Some("uid-1");
    let policy = Policy::default();
    for (why, stage, view, want) in [
        ("new object: finalizer before any effect", New, Unbound, "add-finalizer"),
        ("store the node before anything exists there", Held, Unbound, "bind:n2"),
        ("bound: create and start", Bound, Answered(None), "create start"),
        ("create was interrupted before the status", Bound, vm_in(Running, own), "start"),
        ("create was interrupted before start", Bound, vm_in(Creating, own), "start"),
        ("created by hand: refused", Bound, vm_in(Stopped, None), "report:Conflict"),
        ("confirmed, at an agent without metadata", Live, vm_in(Running, None), "report:Vm"),
        (
            "created by hand: not deleted with the object",
            BoundDeleted,
            vm_in(Running, None),
            "remove-finalizer",
        ),
        ("created for another object: refused", Bound, vm_in(Running, Some("uid-2")), "report:Conflict"),
        ("also after it was confirmed", Live, vm_in(Running, Some("uid-2")), "report:Conflict"),
        ("the agent refuses GetVM", Bound, Refused(error(Code::PermissionDenied)), "report:Refused"),
        ("no answer: try again", Bound, silent(None, true), "retry"),
        ("steady state is silent", Live, vm_in(Running, own), "report:Vm"),
        ("state in between", Live, vm_in(Stopping, own), "report:Vm"),
        ("unknown state", Live, vm_in(Unspecified, own), "report:Vm"),
        ("stopped: reported first, started after the delay", Live, vm_in(Stopped, own), "report:Vm"),
        ("failed: reported first", Live, vm_in(Error, own), "report:Vm"),
        ("vanished: reported first", Live, Answered(None), "report:Vanished"),
        ("one failed call while it runs", Live, silent(None, true), "retry"),
        ("node gone, within grace", Live, silent(Some(299), false), "retry"),
        (
            "node gone beyond grace: moves, its disk comes from the image",
            Live,
            silent(Some(300), false),
            "bind:n2",
        ),
        ("the same before it was confirmed", Bound, silent(Some(300), false), "bind:n2"),
        ("deleted, without our finalizer: nothing", ForeignDeleted, Unbound, ""),
        ("deleted before it was bound", HeldDeleted, Unbound, "remove-finalizer"),
        ("deleted: stop by force, then delete", LiveDeleted, vm_in(Running, own), "stop delete"),
        ("the same for a stopped one", LiveDeleted, vm_in(Stopped, own), "stop delete"),
        ("left by a crash before the status", BoundDeleted, vm_in(Running, own), "stop delete"),
        ("confirmed to be gone: remove the finalizer", LiveDeleted, Answered(None), "remove-finalizer"),
        ("VM of another object stays", LiveDeleted, vm_in(Running, Some("uid-2")), "remove-finalizer"),
        ("agent down, node there: wait", LiveDeleted, silent(None, true), "retry"),
        ("node gone, within grace: wait", LiveDeleted, silent(Some(10), false), "retry"),
        (
            "node gone beyond grace: remove the finalizer, with an event",
            LiveDeleted,
            silent(Some(300), false),
            "remove-finalizer!",
        ),
        ("never bound: remove the finalizer", HeldDeleted, silent(None, false), "remove-finalizer!"),
    ] {
        let vm = object(stage);
        assert_eq!(verbs(&plan(&observed(&vm, view, &policy))), want, "{why}");
    }
}

#[test]
fn status_after_effects_is_observed_not_assumed() {
    let policy = Policy::default();
    let (bound, live) = (object(Stage::Bound), object(Stage::Live));
    let done = AppliedSteps { created: true, started: true, ..AppliedSteps::default() };
    let plan_with = |vm, view, progress| verbs(&plan(&Observed { progress, ..observed(vm, view, &policy) }));
    assert_eq!(plan_with(&bound, vm_in(State::Running, Some("uid-1")), done), "report:Vm");
    assert_eq!(plan_with(&bound, AgentView::Answered(None), done), "retry", "started, and absent");
    let exists = AppliedSteps { created: true, ..AppliedSteps::default() };
    assert_eq!(
        plan_with(&bound, AgentView::Answered(None), exists),
        "start",
        "the agent answers already exists, and shows no VM"
    );
    assert_eq!(plan_with(&live, vm_in(State::Running, Some("uid-1")), done), "report:Vm");
}

#[test]
fn spec_edited_during_creation_replaces_the_vm() {
    let policy = Policy::default();
    let made_from = |spec: Option<String>| VmInfo {
        spec,
        uid: OWN.map(str::to_owned),
        state: State::Running,
        ..VmInfo::default()
    };
    let now = spec_hash(&object(Stage::Bound));
    let deleted = AppliedSteps { deleted: true, ..AppliedSteps::default() };
    let calm = AppliedSteps::default();
    for (why, stage, spec, progress, off, want) in [
        ("created from the present spec", Stage::Bound, Some(now), calm, false, "start"),
        ("an agent that keeps no metadata", Stage::Bound, None, calm, false, "start"),
        ("edited since", Stage::Bound, Some("old".into()), calm, false, "delete create start"),
        (
            "edited since, begins powered off",
            Stage::Bound,
            Some("old".into()),
            calm,
            true,
            "delete create-stopped",
        ),
        ("the agent does not delete it", Stage::Bound, Some("old".into()), deleted, false, "retry"),
        ("a confirmed VM is never replaced", Stage::Live, Some("old".into()), calm, false, "report:Vm"),
    ] {
        let mut vm = object(stage);
        vm.spec.power_state = off.then_some(PowerState::Stopped);
        let view = AgentView::Answered(Some(made_from(spec)));
        let plan = plan(&Observed { progress, ..observed(&vm, view, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn asynchronous_call_is_made_once_a_pass() {
    use PowerState::{Hibernated, Paused, Running};
    let policy = Policy::default();
    let pass = |vm: &MikromVM, view: AgentView, progress| {
        let plan = plan(&Observed { progress, ..observed(vm, view, &policy) });
        (verbs(&plan), plan.requeue)
    };
    let deleted = AppliedSteps { deleted: true, ..AppliedSteps::default() };
    let going = pass(&object(Stage::LiveDeleted), vm_in(State::Stopping, OWN), deleted);
    assert_eq!(going, (String::new(), ASYNCHRONOUS), "observed again, not called again");
    let mut vm = object(Stage::Live);
    vm.spec.power_state = Some(Paused);
    let to = |state| AppliedSteps { powered: Some(state), ..AppliedSteps::default() };
    let up = || powered(State::Running, Some(Running));
    assert_eq!(pass(&vm, up(), to(Paused)), ("report:Vm".into(), ASYNCHRONOUS));
    let asleep = powered(State::Stopped, Some(Hibernated));
    assert_eq!(pass(&vm, asleep, AppliedSteps::default()).0, "power:Running");
    assert_eq!(pass(&vm, up(), to(Running)).0, "power:Paused", "another call is made in the same pass");
}

#[test]
fn unowned_vm_is_not_adopted_without_mark() {
    let policy = Policy::default();
    let made = AppliedSteps { created: true, made: true, ..AppliedSteps::default() };
    let existed = AppliedSteps { created: true, ..AppliedSteps::default() };
    let calm = AppliedSteps::default();
    for (why, mark, progress, want) in [
        ("created by hand", None, calm, "report:Conflict"),
        ("the agent answered already exists", None, existed, "report:Conflict"),
        ("created a moment ago at an agent without metadata", None, made, "start"),
        ("marked for this object", Some("default/web"), calm, "start"),
        ("marked for another", Some("default-web/x"), calm, "report:Conflict"),
    ] {
        let vm = object(Stage::Bound);
        let adopt = mark.map(str::to_owned);
        let view = AgentView::Answered(Some(VmInfo { adopt, state: State::Running, ..VmInfo::default() }));
        let plan = plan(&Observed { progress, ..observed(&vm, view, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn restart_table() {
    use {RestartPolicy::*, State::*};
    let policy = Policy::default();
    for (why, restart, view, streak, down_for, want) in [
        ("at once is too soon", Always, vm_in(Stopped, OWN), 0, 0, "report:Vm"),
        ("after a second", Always, vm_in(Stopped, OWN), 0, 1, "start"),
        ("the third time after four", Always, vm_in(Stopped, OWN), 2, 3, "report:Vm"),
        ("the third time after four seconds", Always, vm_in(Stopped, OWN), 2, 4, "start"),
        ("at most after five minutes", Always, vm_in(Error, OWN), 30, 300, "start"),
        ("vanished: created again", Always, AgentView::Answered(None), 0, 1, "create start"),
        ("a clean end is not a failure", OnFailure, vm_in(Stopped, OWN), 0, 99, "report:Vm"),
        ("an error is", OnFailure, vm_in(Error, OWN), 0, 99, "start"),
        ("vanishing is", OnFailure, AgentView::Answered(None), 0, 99, "create start"),
        ("never", Never, vm_in(Error, OWN), 0, 99, "report:Vm"),
        ("never", Never, AgentView::Answered(None), 0, 99, "report:Vanished"),
    ] {
        let mut vm = object(Stage::Live);
        vm.spec.restart_policy = restart;
        let memo = Memo { streak, down_since: Some(at(NOW - down_for)), ..Memo::default() };
        let plan = plan(&Observed { memo, ..observed(&vm, view, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
        if want.contains("start") {
            assert_eq!(plan.memo.streak, streak + 1, "{why}");
        }
    }
}

/// Returns the error for certificates of the operator that cannot be read.
fn unconfigured() -> AgentError {
    AgentError { origin: Origin::Configuration, ..error(Code::FailedPrecondition) }
}

#[test]
fn local_error_does_not_mark_the_agent_unreachable() {
    let policy = Policy::default();
    for stage in [Stage::Bound, Stage::Live, Stage::LiveDeleted, Stage::BoundDeleted] {
        for error in [AgentError::busy("a:1"), unconfigured()] {
            assert!(error.is_transient() && !error.is_silence(), "{error}");
            let vm = object(stage);
            let view = AgentView::Unreachable { error, gone_since: Some(at(0)), announced: false };
            let plan = plan(&observed(&vm, view, &policy));
            assert_eq!((verbs(&plan).as_str(), plan.memo.silent), ("retry", 0), "{stage:?}");
        }
    }
}

#[test]
fn local_or_fenced_failure_is_not_reported() {
    let policy = Policy::default();
    let stale = AgentError { failure: "COR-VM-006".into(), ..error(Code::PermissionDenied) };
    for step in [
        create(),
        Step::StartVm(target()),
        Step::SetPowerState(target(), PowerState::Paused),
        Step::StopVm(target()),
        Step::DeleteVm(target()),
    ] {
        for (why, error) in [("certificates", unconfigured()), ("a stale leader", stale.clone())] {
            let before = Memo { silent: 2, internal: 2, ..Memo::default() };
            let verdict = judge(&step, &error, &before, &policy);
            assert_eq!(
                (verdict.finding, verdict.again, verdict.memo),
                (None, false, before),
                "{why}, {step:?}"
            );
        }
    }
}

#[test]
fn long_healthy_vm_restarts_with_the_first_delay() {
    let policy = Policy::default();
    let mut vm = object(Stage::Live);
    for (healthy_for, want) in [(599, 5), (600, 0)] {
        vm.status.as_mut().unwrap().conditions[0].last_transition_time = Time(at(NOW - healthy_for));
        let memo = Memo { streak: 5, ..Memo::default() };
        let plan = plan(&Observed { memo, ..observed(&vm, vm_in(State::Stopped, OWN), &policy) });
        assert_eq!(
            (plan.memo.streak, plan.memo.down_since),
            (want, Some(at(NOW))),
            "healthy for {healthy_for} s"
        );
        assert!(plan.requeue <= policy.restart.delay(want));
    }
}

#[test]
fn vm_that_cannot_restart_is_recreated() {
    let policy = Policy::default();
    let refusal = AgentError { message: "VM x must be recreated".into(), ..error(Code::FailedPrecondition) };
    let verdict = judge(&Step::StartVm(target()), &refusal, &Memo::default(), &policy);
    assert!(verdict.again && verdict.finding.is_none());
    for stage in [Stage::Bound, Stage::Live] {
        let vm = object(stage);
        let plan = plan(&Observed {
            memo: verdict.memo.clone(),
            ..observed(&vm, vm_in(State::Stopped, OWN), &policy)
        });
        assert_eq!((verbs(&plan).as_str(), plan.memo.recreate), ("delete create start", false), "{stage:?}");
    }
}

#[test]
fn lost_vm_moves_if_unpinned_and_with_an_image() {
    let policy = Policy::default();
    let tie = |change: fn(&mut MikromVM)| {
        let mut vm = object(Stage::Live);
        change(&mut vm);
        verbs(&plan(&observed(&vm, silent(Some(300), false), &policy)))
    };
    assert_eq!(tie(|_| {}), "bind:n2");
    assert_eq!(tie(|vm| vm.spec.node_name = "n1".into()), "report:NodeLost");
    assert_eq!(tie(|vm| vm.spec.agent_address = "a:1".into()), "report:NodeLost");
    assert_eq!(tie(|vm| vm.spec.image.clear()), "report:NodeLost");
    assert_eq!(tie(|vm| vm.spec.restart_policy = RestartPolicy::Never), "report:NodeLost");
    let vm = object(Stage::Live);
    let nowhere = Observed {
        candidate: Err(BindingError::Unschedulable("no room".into())),
        ..observed(&vm, silent(Some(300), false), &policy)
    };
    assert_eq!(verbs(&plan(&nowhere)), "report:NodeLost");
}

#[test]
fn mistyped_address_can_be_corrected() {
    let policy = Policy::default();
    let mut vm = object(Stage::Bound);
    vm.spec.agent_address = "b:2".into();
    for (why, view, want) in [
        ("no agent is known there", silent(None, false), "bind:n2"),
        ("a known agent that is down may have created it", silent(None, true), "retry"),
        ("it answers that no VM exists", AgentView::Answered(None), "bind:n2"),
        ("it has created the VM: never redirected", vm_in(State::Running, OWN), "start"),
    ] {
        assert_eq!(verbs(&plan(&observed(&vm, view, &policy))), want, "{why}");
    }
    let mut live = object(Stage::Live);
    live.spec.agent_address = "b:2".into();
    assert_eq!(
        verbs(&plan(&observed(&live, silent(None, false), &policy))),
        "retry",
        "a live VM is never redirected"
    );
}

#[test]
fn vm_refused_by_its_node_is_rescheduled() {
    let policy = Policy::default();
    let refused = |n| Memo { refusals: n, ..Memo::default() };
    let no_room = || Err(BindingError::Unschedulable("no room".to_owned()));
    for (why, stage, change, memo, elsewhere, want) in [
        ("refused twice: again", Stage::Bound, None, refused(2), true, "create start"),
        ("refused three times", Stage::Bound, None, refused(3), true, "bind:n2"),
        ("no other node accepts it", Stage::Bound, None, refused(3), false, "create start"),
        ("tied to its node", Stage::Bound, Some("n1"), refused(3), true, "create start"),
        ("it existed: for restartPolicy", Stage::Live, None, refused(3), true, "report:Vanished"),
    ] {
        let mut vm = object(stage);
        vm.spec.node_name = change.unwrap_or_default().into();
        let view = AgentView::Answered(None);
        let mut world = Observed { memo, ..observed(&vm, view, &policy) };
        if !elsewhere {
            world.candidate = no_room();
        }
        let plan = plan(&world);
        assert_eq!(verbs(&plan), want, "{why}");
        if want == "bind:n2" {
            assert_eq!((plan.memo.refusals, plan.memo.avoided(&vm, at(NOW + 599))), (0, vec!["n1".into()]));
            assert_eq!(plan.memo.avoided(&vm, at(NOW + 600)), [] as [String; 0], "for a time only");
        }
    }
}

#[test]
fn slow_creation_is_not_an_unreachable_agent() {
    let policy = Policy::default();
    let mut memo = Memo::default();
    for step in [create(), create_stopped(), Step::StartVm(target())].iter().cycle().take(3 * 5) {
        let verdict = judge(step, &error(Code::DeadlineExceeded), &memo, &policy);
        assert_eq!((verdict.finding, verdict.memo.silent), (None, 0), "{step:?}");
        memo = verdict.memo;
    }
    let stop = judge(&Step::StopVm(target()), &error(Code::DeadlineExceeded), &memo, &policy);
    assert_eq!(stop.memo.silent, 1, "a call that is quick");
}

#[test]
fn refusals_of_the_node_are_counted() {
    let policy = Policy::default();
    for (why, step, code, failure, want) in [
        ("the disk is full", create(), Code::ResourceExhausted, "COR-IMG-010", 1),
        ("no memory is left", create_stopped(), Code::ResourceExhausted, "COR-VM-007", 1),
        ("no such driver", create(), Code::InvalidArgument, "COR-VM-004", 1),
        ("no such kernel", create(), Code::FailedPrecondition, "COR-VM-009", 1),
        ("no such image anywhere", create(), Code::FailedPrecondition, "COR-IMG-004", 0),
        ("registry unavailable", create(), Code::Unavailable, "COR-IMG-011", 0),
        ("no answer", create(), Code::Unavailable, "", 0),
        ("it exists already", create(), Code::AlreadyExists, "COR-VM-003", 0),
        ("a stale leader", create(), Code::PermissionDenied, "COR-VM-006", 0),
        ("not a creation", Step::StartVm(target()), Code::ResourceExhausted, "COR-VM-007", 0),
    ] {
        let error = AgentError { failure: failure.into(), ..error(code) };
        assert_eq!(judge(&step, &error, &Memo::default(), &policy).memo.refusals, want, "{why}");
    }
}

#[test]
fn node_named_before_creation_is_followed() {
    let policy = Policy::default();
    for (stage, view, want) in [
        (Stage::Bound, AgentView::Answered(None), "bind:n2"),
        (Stage::Bound, vm_in(State::Running, OWN), "start"),
        (Stage::Live, vm_in(State::Running, OWN), "report:Vm"),
    ] {
        let mut vm = object(stage);
        vm.spec.node_name = "n2".into();
        assert_eq!(verbs(&plan(&observed(&vm, view, &policy))), want, "{stage:?}");
    }
}

#[test]
fn agent_that_is_not_allowed_is_never_bound() {
    let policy = Policy::default();
    let held = object(Stage::Held);
    let candidate = Err(BindingError::NotAllowed("169.254.169.254:80".into()));
    let world = Observed { candidate, ..observed(&held, AgentView::Unbound, &policy) };
    assert_eq!(verbs(&plan(&world)), "report:NotAllowed");
    let mut bound = object(Stage::Bound);
    bound.spec.agent_address = "169.254.169.254:80".into();
    let candidate = Err(BindingError::NotAllowed(bound.spec.agent_address.clone()));
    let world = Observed { candidate, ..observed(&bound, AgentView::Answered(None), &policy) };
    assert_eq!(verbs(&plan(&world)), "create start", "it stays where it is bound");
}

#[test]
fn unreachable_agent_is_reported_after_some_calls() {
    let policy = Policy::default();
    for (stage, what) in [(Stage::Live, "live"), (Stage::Bound, "bound"), (Stage::LiveDeleted, "deleted")] {
        let vm = object(stage);
        let mut memo = Memo::default();
        for n in 1..=6 {
            let plan = plan(&Observed { memo: memo.clone(), ..observed(&vm, silent(None, true), &policy) });
            let want = if n < policy.silent_max { "retry" } else { "report:Unreachable retry" };
            assert_eq!(verbs(&plan), want, "{what}, call {n}");
            memo = plan.memo;
        }
        let answered = plan(&Observed { memo, ..observed(&vm, vm_in(State::Running, OWN), &policy) });
        assert!(answered.memo.silent == 0 || answered.finding.is_none());
    }
}

#[test]
fn abandoned_object_loses_its_finalizer() {
    let policy = Policy::default();
    let mut vm = object(Stage::LiveDeleted);
    vm.annotations_mut().insert(keys::ABANDON.into(), "true".into());
    assert_eq!(verbs(&plan(&observed(&vm, silent(None, true), &policy))), "remove-finalizer!");
    let refused = AgentView::Refused(error(Code::PermissionDenied));
    assert_eq!(verbs(&plan(&observed(&vm, refused, &policy))), "remove-finalizer!");
    let seen = vm_in(State::Running, OWN);
    assert_eq!(verbs(&plan(&observed(&vm, seen, &policy))), "stop delete", "removed while the agent answers");
}

#[test]
fn verdict_table() {
    let policy = Policy { internal_max: 3, ..Policy::default() };
    let found = |verdict: &Consequences| {
        verdict
            .finding
            .as_ref()
            .map(|r| format!("{r:?}").split(['(', ' ']).next().unwrap_or_default().to_owned())
    };
    for (why, step, code, before, want, again) in [
        ("already exists counts as created", create(), Code::AlreadyExists, Memo::default(), None, true),
        ("a first INTERNAL passes", create(), Code::Internal, Memo::default(), None, false),
        (
            "the third in a row is reported",
            create(),
            Code::Internal,
            Memo { internal: 2, ..Memo::default() },
            Some("Internal"),
            false,
        ),
        (
            "on start it only passes",
            Step::StartVm(target()),
            Code::Internal,
            Memo { internal: 9, ..Memo::default() },
            None,
            false,
        ),
        ("unavailable passes", create(), Code::Unavailable, Memo::default(), None, false),
        ("full passes", create(), Code::ResourceExhausted, Memo::default(), None, false),
        (
            "vanished between create and start: again",
            Step::StartVm(target()),
            Code::NotFound,
            Memo::default(),
            None,
            false,
        ),
        (
            "a bad argument is the user's",
            create(),
            Code::InvalidArgument,
            Memo::default(),
            Some("Refused"),
            false,
        ),
        (
            "so is a missing image",
            create(),
            Code::FailedPrecondition,
            Memo::default(),
            Some("Refused"),
            false,
        ),
        (
            "a refused delete is reported",
            Step::DeleteVm(target()),
            Code::PermissionDenied,
            Memo::default(),
            Some("Refused"),
            false,
        ),
    ] {
        let verdict = judge(&step, &error(code), &before, &policy);
        assert_eq!((found(&verdict).as_deref(), verdict.again), (want, again), "{why}");
    }
}

#[test]
fn explained_failure_is_reported_at_once_and_retried() {
    let policy = Policy::default();
    let found = |step: Step, code: Code, failure: &str| {
        let error = AgentError { failure: failure.into(), ..error(code) };
        let verdict = judge(&step, &error, &Memo::default(), &policy);
        assert!(!verdict.again);
        verdict.finding
    };
    for (why, step, code, failure, want) in [
        ("the disk is full", create(), Code::ResourceExhausted, "COR-IMG-010", true),
        ("no memory is left", create(), Code::ResourceExhausted, "COR-VM-007", true),
        ("registry unavailable", create(), Code::Unavailable, "COR-IMG-011", true),
        ("the guest does not boot", Step::StartVm(target()), Code::Internal, "COR-GST-002", true),
        ("the node is stopping", create(), Code::Unavailable, "COR-VM-010", false),
        ("an old agent that is full", create(), Code::ResourceExhausted, "", false),
    ] {
        let finding = found(step, code, failure);
        assert_eq!(matches!(finding, Some(Finding::Waiting(_))), want, "{why}: {finding:?}");
    }
}

#[test]
fn unannounced_address_is_reported_sooner() {
    let policy = Policy::default();
    let vm = object(Stage::Bound);
    let report = |announced, before| {
        let observed = Observed {
            memo: Memo { silent: before, ..Memo::default() },
            ..observed(&vm, silent(None, announced), &policy)
        };
        plan(&observed).finding
    };
    assert_eq!(report(false, 0), None);
    assert!(matches!(report(false, 1), Some(Finding::Unreachable(_))));
    assert_eq!(report(true, 1), None);
    assert!(matches!(report(true, 4), Some(Finding::Unreachable(_))));
}

/// Returns the agent's answer with this state and power state.
fn powered(state: State, power: Option<PowerState>) -> AgentView {
    match vm_in(state, OWN) {
        AgentView::Answered(Some(vm)) => AgentView::Answered(Some(VmInfo { power, ..vm })),
        view => view,
    }
}

#[test]
fn steps_carry_agent_fence_and_spec() {
    let policy = Policy::default();
    let mut vm = object(Stage::Bound);
    vm.metadata.generation = Some(7);
    vm.spec.clone_from = "snap-1".into();
    vm.annotations_mut().insert(keys::vm::DRIVER.into(), "qemu".into());
    let steps = plan(&observed(&vm, AgentView::Answered(None), &policy)).steps;
    let fence = Fence { generation: 7, ..target().fence };
    let to = VmRef { fence, ..target() };
    let spec = VmSpec {
        namespace: "default".into(),
        name: "web".into(),
        cluster: Some("cluster-1".into()),
        image: "i:1".into(),
        vcpus: 1,
        memory_mib: 128,
        clone_from: "snap-1".into(),
        driver: Some("qemu".into()),
        hash: spec_hash(&vm),
        ..VmSpec::default()
    };
    assert_eq!(steps, [Step::CreateVm(to.clone(), spec), Step::StartVm(to)]);
}
