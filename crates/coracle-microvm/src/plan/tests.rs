//! The table of `microvm.md` §2, one line a case.

use coracle_api::{MikromVMSpec, MikromVMStatus, condition, reason};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tonic::Code;

use super::*;

const NOW: i64 = 100_000;

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
    }
}

/// An object in one of the stages of its life.
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

fn machine(state: State, uid: Option<&str>) -> Look {
    let uid = uid.map(str::to_owned);
    Look::Seen(Some(Machine {
        state,
        ip: "10.0.0.2".into(),
        uid,
        image_digest: String::new(),
        created_at: 0,
        power: None,
    }))
}

fn silent(gone_for: Option<i64>, announced: bool) -> Look {
    Look::Silent { error: error(Code::Unavailable), gone_since: gone_for.map(|s| at(NOW - s)), announced }
}

fn observed<'a>(vm: &'a MikromVM, look: Look, policy: &'a Policy) -> Observed<'a> {
    let place = Place { node: "n2".into(), address: "b:2".into() };
    let here = Place { node: "n1".into(), address: "a:1".into() };
    Observed {
        vm,
        look,
        at: here,
        place: Ok(place),
        memo: Memo::default(),
        progress: Progress::default(),
        now: at(NOW),
        policy,
    }
}

/// Steps and report in a few words.
fn verbs(plan: &Plan) -> String {
    let step = |step: &Step| match step {
        Step::Hold => "hold".to_owned(),
        Step::Bind(place) => format!("bind:{}", place.node),
        Step::Create => "create".into(),
        Step::Lay => "lay".into(),
        Step::Start => "start".into(),
        Step::Power(state) => format!("power:{}", state.as_str()),
        Step::Stop => "stop".into(),
        Step::Delete => "delete".into(),
        Step::Release(None) => "release".into(),
        Step::Release(Some(_)) => "release!".into(),
    };
    let mut words: Vec<_> = plan.steps.iter().map(step).collect();
    if let Some(report) = &plan.report {
        let name = format!("{report:?}");
        words.push(format!("say:{}", name.split(['(', ' ']).next().unwrap_or_default()));
    }
    if plan.retry.is_some() {
        words.push("retry".into());
    }
    words.join(" ")
}

#[test]
fn plan_table() {
    use {Look::*, Stage::*, State::*};
    let own = Some("uid-1");
    let policy = Policy::default();
    for (why, stage, look, want) in [
        ("new object: hold before touching anything", New, Nowhere, "hold"),
        ("held: store where it goes before anything is there", Held, Nowhere, "bind:n2"),
        ("bound: create and start", Bound, Seen(None), "create start"),
        ("create was interrupted before the status", Bound, machine(Running, own), "start"),
        ("create was interrupted before start", Bound, machine(Creating, own), "start"),
        ("made by an operator without UIDs: ours by name", Bound, machine(Stopped, None), "start"),
        ("made for another object: refused", Bound, machine(Running, Some("uid-2")), "say:Conflict"),
        ("and refused later too", Live, machine(Running, Some("uid-2")), "say:Conflict"),
        ("the agent refuses the question", Bound, Refused(error(Code::PermissionDenied)), "say:Refused"),
        ("nobody answers: untouched, again", Bound, silent(None, true), "retry"),
        ("steady state is silent", Live, machine(Running, own), "say:Machine"),
        ("on its way", Live, machine(Stopping, own), "say:Machine"),
        ("unknown state", Live, machine(Unspecified, own), "say:Machine"),
        ("stopped: said first, started after the delay", Live, machine(Stopped, own), "say:Machine"),
        ("failed: said first", Live, machine(Error, own), "say:Machine"),
        ("vanished: said first", Live, Seen(None), "say:Vanished"),
        ("a blip while it runs", Live, silent(None, true), "retry"),
        ("node gone, within grace", Live, silent(Some(299), false), "retry"),
        (
            "node gone beyond grace: moves, since the image makes its disk",
            Live,
            silent(Some(300), false),
            "bind:n2",
        ),
        ("the same before it was confirmed", Bound, silent(Some(300), false), "bind:n2"),
        ("deleted, not held by us: nothing", ForeignDeleted, Nowhere, ""),
        ("deleted before it was bound", HeldDeleted, Nowhere, "release"),
        ("deleted: stop by force, then delete", LiveDeleted, machine(Running, own), "stop delete"),
        ("the same for a stopped one", LiveDeleted, machine(Stopped, own), "stop delete"),
        ("left by a crash before the status", BoundDeleted, machine(Running, own), "stop delete"),
        ("seen to be gone: let go", LiveDeleted, Seen(None), "release"),
        ("another's VM stays", LiveDeleted, machine(Running, Some("uid-2")), "release"),
        ("agent down, node there: wait", LiveDeleted, silent(None, true), "retry"),
        ("node gone, within grace: wait", LiveDeleted, silent(Some(10), false), "retry"),
        ("node gone beyond grace: let go, with an event", LiveDeleted, silent(Some(300), false), "release!"),
        ("never bound by us: let go", HeldDeleted, silent(None, false), "release!"),
    ] {
        let vm = object(stage);
        assert_eq!(verbs(&plan(&observed(&vm, look, &policy))), want, "{why}");
    }
}

#[test]
fn after_effects_the_status_says_what_is_seen() {
    let policy = Policy::default();
    let (bound, live) = (object(Stage::Bound), object(Stage::Live));
    let done = Progress { created: true, started: true, restarted: false };
    let plan_with = |vm, look, progress| verbs(&plan(&Observed { progress, ..observed(vm, look, &policy) }));
    assert_eq!(plan_with(&bound, machine(State::Running, Some("uid-1")), done), "say:Machine");
    assert_eq!(plan_with(&bound, Look::Seen(None), done), "retry", "started, and not there");
    let exists = Progress { created: true, ..Progress::default() };
    assert_eq!(
        plan_with(&bound, Look::Seen(None), exists),
        "start",
        "an agent that says it exists and shows none"
    );
    assert_eq!(plan_with(&live, machine(State::Running, Some("uid-1")), done), "say:Machine");
}

#[test]
fn restart_table() {
    use {RestartPolicy::*, State::*};
    let policy = Policy::default();
    for (why, restart, look, streak, down_for, want) in [
        ("at once is too soon", Always, machine(Stopped, None), 0, 0, "say:Machine"),
        ("after a second", Always, machine(Stopped, None), 0, 1, "start"),
        ("the third time after four", Always, machine(Stopped, None), 2, 3, "say:Machine"),
        ("the third time after four seconds", Always, machine(Stopped, None), 2, 4, "start"),
        ("never later than five minutes", Always, machine(Error, None), 30, 300, "start"),
        ("vanished: made anew", Always, Look::Seen(None), 0, 1, "create start"),
        ("a clean end is no failure", OnFailure, machine(Stopped, None), 0, 99, "say:Machine"),
        ("an error is", OnFailure, machine(Error, None), 0, 99, "start"),
        ("vanishing is", OnFailure, Look::Seen(None), 0, 99, "create start"),
        ("never", Never, machine(Error, None), 0, 99, "say:Machine"),
        ("never", Never, Look::Seen(None), 0, 99, "say:Vanished"),
    ] {
        let mut vm = object(Stage::Live);
        vm.spec.restart_policy = restart;
        let memo = Memo { streak, down_since: Some(at(NOW - down_for)), ..Memo::default() };
        let plan = plan(&Observed { memo, ..observed(&vm, look, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
        if want.contains("start") {
            assert_eq!(plan.memo.streak, streak + 1, "{why}");
        }
    }
}

#[test]
fn our_own_crowd_says_nothing_of_the_agent() {
    let policy = Policy::default();
    for stage in [Stage::Bound, Stage::Live, Stage::LiveDeleted, Stage::BoundDeleted] {
        let vm = object(stage);
        let look = Look::Silent { error: AgentError::busy("a:1"), gone_since: Some(at(0)), announced: false };
        let plan = plan(&observed(&vm, look, &policy));
        assert_eq!((verbs(&plan).as_str(), plan.memo.silent), ("retry", 0), "{stage:?}");
    }
}

#[test]
fn a_long_healthy_time_starts_the_delays_anew() {
    let policy = Policy::default();
    let mut vm = object(Stage::Live);
    for (healthy_for, want) in [(599, 5), (600, 0)] {
        vm.status.as_mut().unwrap().conditions[0].last_transition_time = Time(at(NOW - healthy_for));
        let memo = Memo { streak: 5, ..Memo::default() };
        let plan = plan(&Observed { memo, ..observed(&vm, machine(State::Stopped, None), &policy) });
        assert_eq!(
            (plan.memo.streak, plan.memo.down_since),
            (want, Some(at(NOW))),
            "healthy for {healthy_for} s"
        );
        assert!(plan.requeue <= policy.restart.delay(want));
    }
}

#[test]
fn an_agent_that_cannot_restart_is_given_a_new_one() {
    let policy = Policy::default();
    let refusal = AgentError { message: "VM x must be recreated".into(), ..error(Code::FailedPrecondition) };
    let verdict = judge(&Step::Start, &refusal, &Memo::default(), &policy);
    assert!(verdict.again && verdict.report.is_none());
    for stage in [Stage::Bound, Stage::Live] {
        let vm = object(stage);
        let plan = plan(&Observed {
            memo: verdict.memo.clone(),
            ..observed(&vm, machine(State::Stopped, None), &policy)
        });
        assert_eq!((verbs(&plan).as_str(), plan.memo.recreate), ("delete create start", false), "{stage:?}");
    }
}

#[test]
fn moving_needs_freedom_and_an_image() {
    let policy = Policy::default();
    let tie = |change: fn(&mut MikromVM)| {
        let mut vm = object(Stage::Live);
        change(&mut vm);
        verbs(&plan(&observed(&vm, silent(Some(300), false), &policy)))
    };
    assert_eq!(tie(|_| {}), "bind:n2");
    assert_eq!(tie(|vm| vm.spec.node_name = "n1".into()), "say:NodeLost");
    assert_eq!(tie(|vm| vm.spec.agent_address = "a:1".into()), "say:NodeLost");
    assert_eq!(tie(|vm| vm.spec.image.clear()), "say:NodeLost");
    assert_eq!(tie(|vm| vm.spec.restart_policy = RestartPolicy::Never), "say:NodeLost");
    let vm = object(Stage::Live);
    let nowhere =
        Observed { place: Err("no room".into()), ..observed(&vm, silent(Some(300), false), &policy) };
    assert_eq!(verbs(&plan(&nowhere)), "say:NodeLost");
}

#[test]
fn a_mistyped_address_can_be_corrected() {
    let policy = Policy::default();
    let mut vm = object(Stage::Bound);
    vm.spec.agent_address = "b:2".into();
    for (why, look, want) in [
        ("nobody is known there", silent(None, false), "bind:n2"),
        ("a known agent that is down may have made it", silent(None, true), "retry"),
        ("it answers that nothing was made", Look::Seen(None), "bind:n2"),
        ("it has made it: never redirected", machine(State::Running, None), "start"),
    ] {
        assert_eq!(verbs(&plan(&observed(&vm, look, &policy))), want, "{why}");
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
fn silence_is_said_after_a_while() {
    let policy = Policy::default();
    for (stage, what) in [(Stage::Live, "live"), (Stage::Bound, "bound"), (Stage::LiveDeleted, "deleted")] {
        let vm = object(stage);
        let mut memo = Memo::default();
        for n in 1..=6 {
            let plan = plan(&Observed { memo: memo.clone(), ..observed(&vm, silent(None, true), &policy) });
            let want = if n < policy.silent_max { "retry" } else { "say:Unreachable retry" };
            assert_eq!(verbs(&plan), want, "{what}, call {n}");
            memo = plan.memo;
        }
        let answered = plan(&Observed { memo, ..observed(&vm, machine(State::Running, None), &policy) });
        assert!(answered.memo.silent == 0 || answered.report.is_none());
    }
}

#[test]
fn abandoned_objects_are_let_go() {
    let policy = Policy::default();
    let mut vm = object(Stage::LiveDeleted);
    vm.annotations_mut().insert(keys::ABANDON.into(), "true".into());
    assert_eq!(verbs(&plan(&observed(&vm, silent(None, true), &policy))), "release!");
    let refused = Look::Refused(error(Code::PermissionDenied));
    assert_eq!(verbs(&plan(&observed(&vm, refused, &policy))), "release!");
    let seen = machine(State::Running, None);
    assert_eq!(
        verbs(&plan(&observed(&vm, seen, &policy))),
        "stop delete",
        "as long as it can be done it is done"
    );
}

#[test]
fn verdict_table() {
    let policy = Policy { internal_max: 3, ..Policy::default() };
    let said = |verdict: &Verdict| {
        verdict
            .report
            .as_ref()
            .map(|r| format!("{r:?}").split(['(', ' ']).next().unwrap_or_default().to_owned())
    };
    for (why, step, code, before, want, again) in [
        ("already there counts as created", Step::Create, Code::AlreadyExists, Memo::default(), None, true),
        ("a first INTERNAL passes", Step::Create, Code::Internal, Memo::default(), None, false),
        (
            "the third in a row is said",
            Step::Create,
            Code::Internal,
            Memo { internal: 2, ..Memo::default() },
            Some("Internal"),
            false,
        ),
        (
            "on start it only passes",
            Step::Start,
            Code::Internal,
            Memo { internal: 9, ..Memo::default() },
            None,
            false,
        ),
        ("unavailable passes", Step::Create, Code::Unavailable, Memo::default(), None, false),
        ("full passes", Step::Create, Code::ResourceExhausted, Memo::default(), None, false),
        (
            "vanished between create and start: again",
            Step::Start,
            Code::NotFound,
            Memo::default(),
            None,
            false,
        ),
        (
            "a bad argument is the user's",
            Step::Create,
            Code::InvalidArgument,
            Memo::default(),
            Some("Refused"),
            false,
        ),
        (
            "so is a missing image",
            Step::Create,
            Code::FailedPrecondition,
            Memo::default(),
            Some("Refused"),
            false,
        ),
        (
            "a refused delete is said",
            Step::Delete,
            Code::PermissionDenied,
            Memo::default(),
            Some("Refused"),
            false,
        ),
    ] {
        let verdict = judge(&step, &error(code), &before, &policy);
        assert_eq!((said(&verdict).as_deref(), verdict.again), (want, again), "{why}");
    }
}

#[test]
fn what_an_agent_explains_is_said_at_once_and_tried_again() {
    let policy = Policy::default();
    let said = |step: Step, code: Code, failure: &str| {
        let error = AgentError { failure: failure.into(), ..error(code) };
        let verdict = judge(&step, &error, &Memo::default(), &policy);
        assert!(!verdict.again);
        verdict.report
    };
    for (why, step, code, failure, want) in [
        ("the disk is full", Step::Create, Code::ResourceExhausted, "COR-IMG-010", true),
        ("no memory is left", Step::Create, Code::ResourceExhausted, "COR-VM-007", true),
        ("the registry is away", Step::Create, Code::Unavailable, "COR-IMG-011", true),
        ("the guest does not boot", Step::Start, Code::Internal, "COR-GST-002", true),
        ("the node is stopping", Step::Create, Code::Unavailable, "COR-VM-010", false),
        ("an old agent that is full", Step::Create, Code::ResourceExhausted, "", false),
    ] {
        let report = said(step, code, failure);
        assert_eq!(matches!(report, Some(Report::Waiting(_))), want, "{why}: {report:?}");
    }
}

#[test]
fn an_address_that_nobody_announces_is_said_to_be_silent_sooner() {
    let policy = Policy::default();
    let vm = object(Stage::Bound);
    let report = |announced, before| {
        let observed = Observed {
            memo: Memo { silent: before, ..Memo::default() },
            ..observed(&vm, silent(None, announced), &policy)
        };
        plan(&observed).report
    };
    assert_eq!(report(false, 0), None);
    assert!(matches!(report(false, 1), Some(Report::Unreachable(_))));
    assert_eq!(report(true, 1), None);
    assert!(matches!(report(true, 4), Some(Report::Unreachable(_))));
}

/// What the agent says, by state and power state.
fn powered(state: State, power: Option<PowerState>) -> Look {
    match machine(state, None) {
        Look::Seen(Some(machine)) => Look::Seen(Some(Machine { power, ..machine })),
        look => look,
    }
}

#[test]
fn power_state_table() {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = Policy::default();
    let up = |power| powered(State::Running, Some(power));
    let off = |power| powered(State::Stopped, Some(power));
    for (why, wanted, restart, look, want) in [
        ("absent means running", None, RestartPolicy::Always, up(Running), "say:Machine"),
        ("a VM that somebody paused goes on", None, RestartPolicy::Never, up(Paused), "power:Running"),
        ("one that sleeps is woken", Some(Running), RestartPolicy::Never, off(Hibernated), "power:Running"),
        (
            "one that ended is for restartPolicy",
            Some(Running),
            RestartPolicy::Never,
            off(Stopped),
            "say:Machine",
        ),
        (
            "one that ended is for restartPolicy",
            Some(Running),
            RestartPolicy::Always,
            off(Stopped),
            "say:Machine",
        ),
        ("paused as asked", Some(Paused), RestartPolicy::Always, up(Running), "power:Paused"),
        ("and stays so", Some(Paused), RestartPolicy::Always, up(Paused), "say:Machine"),
        (
            "it wakes before it is paused",
            Some(Paused),
            RestartPolicy::Always,
            off(Hibernated),
            "power:Running",
        ),
        ("hibernated as asked", Some(Hibernated), RestartPolicy::Always, up(Running), "power:Hibernated"),
        ("also a paused one", Some(Hibernated), RestartPolicy::Always, up(Paused), "power:Hibernated"),
        (
            "and restartPolicy leaves it",
            Some(Hibernated),
            RestartPolicy::Always,
            off(Hibernated),
            "say:Machine",
        ),
        ("powered off as asked", Some(Stopped), RestartPolicy::Always, up(Running), "power:Stopped"),
        ("also a paused one", Some(Stopped), RestartPolicy::Always, up(Paused), "power:Stopped"),
        ("and restartPolicy leaves it", Some(Stopped), RestartPolicy::Always, off(Stopped), "say:Machine"),
        (
            "a failed one is down",
            Some(Stopped),
            RestartPolicy::Always,
            powered(State::Error, Some(Stopped)),
            "say:Machine",
        ),
        (
            "on its way",
            Some(Paused),
            RestartPolicy::Always,
            powered(State::Creating, Some(Running)),
            "say:Machine",
        ),
        (
            "an old agent cannot",
            Some(Paused),
            RestartPolicy::Always,
            powered(State::Running, None),
            "say:PowerFailed",
        ),
        (
            "an old agent can power off",
            Some(Stopped),
            RestartPolicy::Always,
            powered(State::Running, None),
            "power:Stopped",
        ),
    ] {
        let mut vm = object(Stage::Live);
        (vm.spec.power_state, vm.spec.restart_policy) = (wanted, restart);
        let plan = plan(&observed(&vm, look, &policy));
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn a_vm_that_shall_begin_powered_off_does_not_boot() {
    let policy = Policy::default();
    let off = powered(State::Stopped, Some(PowerState::Stopped));
    let up = powered(State::Running, None);
    for (why, copy, created, look, want) in [
        ("laid out", "", false, Look::Seen(None), "lay"),
        ("and told of", "", true, off, "say:Machine"),
        ("an agent of old has booted it: power goes from here", "", true, up, "say:Machine"),
        ("one that shows none of what it has", "", true, Look::Seen(None), "start"),
        ("a copy goes on first", "yesterday", false, Look::Seen(None), "create start"),
    ] {
        let mut vm = object(Stage::Bound);
        (vm.spec.power_state, vm.spec.clone_from) = (Some(PowerState::Stopped), copy.into());
        let progress = Progress { created, ..Progress::default() };
        let plan = plan(&Observed { progress, ..observed(&vm, look, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn bedtime_table() {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = Policy::default();
    let up = |power| powered(State::Running, Some(power));
    let off = |power| powered(State::Stopped, Some(power));
    // It became Ready 60 s ago.
    for (why, after, wanted, look, want) in [
        ("never", "", None, up(Running), "say:Machine"),
        ("not yet", "1m1s", None, up(Running), "say:Machine"),
        ("now", "1m", None, up(Running), "power:Hibernated"),
        ("a paused one, too", "0h30s", None, up(Paused), "power:Hibernated"),
        ("it sleeps on", "1m", None, off(Hibernated), "say:Machine"),
        ("one that was hibernated by hand as well", "9h", None, off(Hibernated), "say:Machine"),
        ("until somebody wants it", "1m", Some(Running), off(Hibernated), "power:Running"),
        ("who then has it", "1m", Some(Running), up(Running), "say:Machine"),
        ("or does not want it", "1m", Some(Stopped), up(Running), "power:Stopped"),
        ("one that ended is for restartPolicy", "1h", None, off(Stopped), "say:Machine"),
        ("an old agent cannot", "1m", None, powered(State::Running, None), "say:PowerFailed"),
    ] {
        let mut vm = object(Stage::Live);
        (vm.spec.hibernate_after, vm.spec.power_state) = (after.into(), wanted);
        vm.spec.restart_policy = RestartPolicy::Never;
        let plan = plan(&observed(&vm, look, &policy));
        assert_eq!(verbs(&plan), want, "{why}");
    }
    let mut vm = object(Stage::Live);
    vm.spec.hibernate_after = "1m5s".into();
    assert_eq!(
        plan(&observed(&vm, up(Running), &policy)).requeue,
        Duration::from_secs(5),
        "it is looked at then"
    );
    vm.spec.hibernate_after = "9000000h".into();
    assert_eq!(plan(&observed(&vm, up(Running), &policy)).requeue, policy.resync);
}

#[test]
fn a_power_state_that_is_not_reached_is_told_and_the_vm_goes_on() {
    let refused = AgentError { failure: "COR-VM-011".into(), ..error(Code::ResourceExhausted) };
    let step = Step::Power(PowerState::Hibernated);
    let verdict = judge(&step, &refused, &Memo::default(), &Policy::default());
    assert!(matches!(verdict.report, Some(Report::PowerFailed(_))), "{verdict:?}");
    let silent = judge(&step, &error(Code::Unavailable), &Memo::default(), &Policy::default());
    assert_eq!(silent.report, None, "nobody answered: that is counted, as for other calls");
}
