//! Plans for power states.

use super::*;

#[test]
fn power_state_table() {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = Policy::default();
    let up = |power| powered(State::Running, Some(power));
    let off = |power| powered(State::Stopped, Some(power));
    for (why, wanted, restart, view, want) in [
        ("absent means running", None, RestartPolicy::Always, up(Running), "report:Vm"),
        ("paused by hand: resumed", None, RestartPolicy::Never, up(Paused), "power:Running"),
        ("hibernated by hand: woken", Some(Running), RestartPolicy::Never, off(Hibernated), "power:Running"),
        ("ended: for restartPolicy", Some(Running), RestartPolicy::Never, off(Stopped), "report:Vm"),
        ("ended: for restartPolicy", Some(Running), RestartPolicy::Always, off(Stopped), "report:Vm"),
        ("paused as asked", Some(Paused), RestartPolicy::Always, up(Running), "power:Paused"),
        ("paused already", Some(Paused), RestartPolicy::Always, up(Paused), "report:Vm"),
        ("woken before it is paused", Some(Paused), RestartPolicy::Always, off(Hibernated), "power:Running"),
        ("hibernated as asked", Some(Hibernated), RestartPolicy::Always, up(Running), "power:Hibernated"),
        ("from paused", Some(Hibernated), RestartPolicy::Always, up(Paused), "power:Hibernated"),
        (
            "restartPolicy does not apply",
            Some(Hibernated),
            RestartPolicy::Always,
            off(Hibernated),
            "report:Vm",
        ),
        ("powered off as asked", Some(Stopped), RestartPolicy::Always, up(Running), "power:Stopped"),
        ("from paused", Some(Stopped), RestartPolicy::Always, up(Paused), "power:Stopped"),
        ("restartPolicy does not apply", Some(Stopped), RestartPolicy::Always, off(Stopped), "report:Vm"),
        (
            "failed: down already",
            Some(Stopped),
            RestartPolicy::Always,
            powered(State::Error, Some(Stopped)),
            "report:Vm",
        ),
        (
            "state in between",
            Some(Paused),
            RestartPolicy::Always,
            powered(State::Creating, Some(Running)),
            "report:Vm",
        ),
        (
            "not supported by an old agent",
            Some(Paused),
            RestartPolicy::Always,
            powered(State::Running, None),
            "report:PowerFailed",
        ),
        (
            "an old agent powers off",
            Some(Stopped),
            RestartPolicy::Always,
            powered(State::Running, None),
            "power:Stopped",
        ),
    ] {
        let mut vm = object(Stage::Live);
        (vm.spec.power_state, vm.spec.restart_policy) = (wanted, restart);
        let plan = plan(&observed(&vm, view, &policy));
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn powered_off_vm_follows_power_state_not_restart_policy() {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = Policy::default();
    let off = || powered(State::Stopped, Some(Stopped));
    let started = AppliedSteps { powered: Some(Running), ..AppliedSteps::default() };
    for (why, wanted, progress, want) in [
        ("runs again", Some(Running), AppliedSteps::default(), "power:Running"),
        ("absent means running", None, AppliedSteps::default(), "power:Running"),
        ("runs before it is paused", Some(Paused), AppliedSteps::default(), "power:Running"),
        ("runs before it hibernates", Some(Hibernated), AppliedSteps::default(), "power:Running"),
        ("still off, as asked", Some(Stopped), AppliedSteps::default(), "report:Vm"),
        ("started, and ended at once: for restartPolicy", Some(Running), started, "report:Vm"),
    ] {
        for restart in [RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never] {
            let mut vm = object(Stage::Live);
            (vm.spec.power_state, vm.spec.restart_policy) = (wanted, restart);
            vm.status.as_mut().unwrap().powered_off = true;
            let plan = plan(&Observed { progress, ..observed(&vm, off(), &policy) });
            assert_eq!(verbs(&plan), want, "{why}, {restart:?}");
            assert_eq!(plan.memo.streak, 0, "{why}, {restart:?}: not a restart");
        }
    }
}

#[test]
fn powered_off_vm_of_old_agent_is_recreated() {
    let policy = Policy::default();
    let refusal = AgentError { message: "VM x must be recreated".into(), ..error(Code::FailedPrecondition) };
    let verdict =
        judge(&Step::SetPowerState(target(), PowerState::Running), &refusal, &Memo::default(), &policy);
    assert!(verdict.again && verdict.memo.recreate, "{verdict:?}");
    let mut vm = object(Stage::Live);
    vm.status.as_mut().unwrap().powered_off = true;
    let memo = verdict.memo;
    let plan = plan(&Observed { memo, ..observed(&vm, vm_in(State::Stopped, OWN), &policy) });
    assert_eq!(verbs(&plan), "delete create start");
}

#[test]
fn vm_created_powered_off_does_not_boot() {
    let policy = Policy::default();
    let off = powered(State::Stopped, Some(PowerState::Stopped));
    let up = powered(State::Running, None);
    for (why, copy, created, view, want) in [
        ("absent", "", false, AgentView::Answered(None), "create-stopped"),
        ("created", "", true, off, "report:Vm"),
        ("booted by an old agent: reported, powered off next", "", true, up, "report:Vm"),
        ("the agent shows no VM", "", true, AgentView::Answered(None), "start"),
        ("a clone runs first", "yesterday", false, AgentView::Answered(None), "create start"),
    ] {
        let mut vm = object(Stage::Bound);
        (vm.spec.power_state, vm.spec.clone_from) = (Some(PowerState::Stopped), copy.into());
        let progress = AppliedSteps { created, ..AppliedSteps::default() };
        let plan = plan(&Observed { progress, ..observed(&vm, view, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn hibernate_after_table() {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = Policy::default();
    let up = |power| powered(State::Running, Some(power));
    let off = |power| powered(State::Stopped, Some(power));
    // The VM became Ready 60 s ago.
    for (why, after, wanted, view, want) in [
        ("never", "", None, up(Running), "report:Vm"),
        ("not yet", "1m1s", None, up(Running), "report:Vm"),
        ("now", "1m", None, up(Running), "power:Hibernated"),
        ("from paused", "0h30s", None, up(Paused), "power:Hibernated"),
        ("stays hibernated", "1m", None, off(Hibernated), "report:Vm"),
        ("hibernated by hand", "9h", None, off(Hibernated), "report:Vm"),
        ("woken by the spec", "1m", Some(Running), off(Hibernated), "power:Running"),
        ("runs by the spec", "1m", Some(Running), up(Running), "report:Vm"),
        ("powered off by the spec", "1m", Some(Stopped), up(Running), "power:Stopped"),
        ("ended: for restartPolicy", "1h", None, off(Stopped), "report:Vm"),
        ("not supported by an old agent", "1m", None, powered(State::Running, None), "report:PowerFailed"),
    ] {
        let mut vm = object(Stage::Live);
        (vm.spec.hibernate_after, vm.spec.power_state) = (after.into(), wanted);
        vm.spec.restart_policy = RestartPolicy::Never;
        let plan = plan(&observed(&vm, view, &policy));
        assert_eq!(verbs(&plan), want, "{why}");
    }
    let mut vm = object(Stage::Live);
    vm.spec.hibernate_after = "1m5s".into();
    assert_eq!(
        plan(&observed(&vm, up(Running), &policy)).requeue,
        Duration::from_secs(5),
        "reconciled at that time"
    );
    vm.spec.hibernate_after = "9000000h".into();
    assert_eq!(plan(&observed(&vm, up(Running), &policy)).requeue, policy.resync);
}

#[test]
fn power_state_not_reached_is_reported() {
    let refused = AgentError { failure: "COR-VM-011".into(), ..error(Code::ResourceExhausted) };
    let step = Step::SetPowerState(target(), PowerState::Hibernated);
    let verdict = judge(&step, &refused, &Memo::default(), &Policy::default());
    assert!(matches!(verdict.finding, Some(Finding::PowerFailed(_))), "{verdict:?}");
    let silent = judge(&step, &error(Code::Unavailable), &Memo::default(), &Policy::default());
    assert_eq!(silent.finding, None, "no answer: counted as for other calls");
}
