//! Plans for cordoned nodes.

use coracle_api::{Migration, MigrationNode, MigrationPhase, OnDrain};
use coracle_microvm::{
    observed::Drain,
    step::{MigrationEnds, SnapshotRef},
};

use super::*;

fn drained(policy: OnDrain) -> Option<Drain> {
    let target = NodeBinding { node: "n2".into(), address: "b:2".into() };
    Some(Drain { policy, target: Ok(target) })
}

#[test]
fn drain_table() {
    use OnDrain::{Hibernate, Move, Stop};
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = Policy::default();
    let up = |power| powered(State::Running, Some(power));
    let off = |power| powered(State::Stopped, Some(power));
    for (why, drain, wanted, view, want) in [
        ("not cordoned", None, None, up(Running), "report:Vm"),
        ("hibernates", Some(Hibernate), None, up(Running), "power:Hibernated"),
        ("from paused", Some(Hibernate), Some(Paused), up(Paused), "power:Hibernated"),
        ("stays so", Some(Hibernate), None, off(Hibernated), "report:Drained"),
        ("not woken by its power state", Some(Hibernate), Some(Running), off(Hibernated), "report:Drained"),
        ("off, and shall be", Some(Hibernate), Some(Stopped), off(Stopped), "report:Drained"),
        ("powers off", Some(Stop), None, up(Running), "power:Stopped"),
        ("is not restarted", Some(Stop), Some(Running), off(Stopped), "report:Drained"),
        ("hibernated by its power state", Some(Stop), Some(Hibernated), off(Hibernated), "report:Drained"),
        ("begins to move", Some(Move), None, up(Running), "migrate"),
        ("a hibernated one, too", Some(Move), Some(Hibernated), off(Hibernated), "migrate"),
        ("has no memory to move", Some(Move), Some(Stopped), off(Stopped), "report:Vm"),
        ("an old agent has no snapshots", Some(Move), None, powered(State::Running, None), "report:Vm"),
        ("in between", Some(Move), None, powered(State::Creating, Some(Running)), "report:Vm"),
    ] {
        let mut vm = object(Stage::Live);
        vm.spec.power_state = wanted;
        let drain = drain.and_then(drained);
        let plan = plan(&Observed { drain, ..observed(&vm, view, &policy) });
        assert_eq!(verbs(&plan), want, "{why}");
    }
}

#[test]
fn vm_that_was_drained_runs_again_when_its_node_is_uncordoned() {
    use PowerState::{Hibernated, Stopped};
    let policy = Policy::default();
    for (why, power, powered_off, hibernate_after) in [
        ("hibernated", Hibernated, false, ""),
        ("powered off", Stopped, true, ""),
        ("hibernated, and not by hibernateAfter", Hibernated, false, "1h"),
    ] {
        let mut vm = object(Stage::Live);
        vm.spec.hibernate_after = hibernate_after.into();
        let status = vm.status.as_mut().unwrap();
        status.powered_off = powered_off;
        status.conditions[0].status = "False".into();
        status.conditions[0].reason = reason::DRAINED.into();
        let plan = plan(&observed(&vm, powered(State::Stopped, Some(power)), &policy));
        assert_eq!(verbs(&plan), "power:Running", "{why}");
    }
}

#[test]
fn vm_that_cannot_move_keeps_running() {
    let policy = Policy::default();
    let vm = object(Stage::Live);
    let view = || powered(State::Running, Some(PowerState::Running));
    let nowhere = Some(Drain { policy: OnDrain::Move, target: Err("node n2 is full".into()) });
    let blocked = plan(&Observed { drain: nowhere, ..observed(&vm, view(), &policy) });
    assert_eq!(verbs(&blocked), "report:DrainBlocked");
    let memo = Memo { unmovable_until: Some(at(NOW + 1)), ..Memo::default() };
    let o = Observed { drain: drained(OnDrain::Move), memo: memo.clone(), ..observed(&vm, view(), &policy) };
    let waiting = plan(&o);
    assert_eq!(
        (verbs(&waiting).as_str(), &waiting.memo),
        ("report:Vm", &memo),
        "it is not begun again at once"
    );
}

fn end(node: &str, agent: &str) -> MigrationNode {
    MigrationNode { node_name: node.into(), agent_address: agent.into() }
}

fn ends() -> MigrationEnds {
    let agent = |address: &str| AgentAddress { address: address.into(), ..AgentAddress::default() };
    MigrationEnds { source: agent("a:1"), target: agent("b:2") }
}

fn moving(stage: Stage, phase: MigrationPhase) -> MikromVM {
    let mut vm = object(stage);
    let (source, target) = (end("n1", "a:1"), end("n2", "b:2"));
    vm.status.as_mut().unwrap().migration =
        Some(Migration { phase, source, target, snapshot: "move-1".into() });
    vm
}

#[test]
fn move_table() {
    use MigrationPhase::{Cleaning, Leaving, Restoring, Saving};
    use PowerState::{Hibernated, Running, Stopped};
    let policy = Policy::default();
    let up = || powered(State::Running, Some(Running));
    let asleep = || powered(State::Stopped, Some(Hibernated));
    let absent = || AgentView::Answered(None);
    let refused = Memo { refusals: policy.refusals_max, ..Memo::default() };
    let fresh = Memo::default();
    for (why, phase, cordoned, memo, view, want) in [
        (
            "what an earlier try saved is older than the VM",
            Saving,
            true,
            &fresh,
            up(),
            "delete-snapshot delete-snapshot power:Hibernated save-snapshot copy-snapshot migrate",
        ),
        (
            "hibernated before a crash",
            Saving,
            true,
            &fresh,
            asleep(),
            "delete-snapshot delete-snapshot save-snapshot copy-snapshot migrate",
        ),
        ("it has ended meanwhile", Saving, true, &fresh, powered(State::Stopped, Some(Stopped)), "migrate"),
        ("uncordoned: given up", Saving, false, &fresh, asleep(), "migrate"),
        ("refused too often: given up", Saving, true, &refused, asleep(), "migrate"),
        ("vanished: nothing to move", Saving, true, &fresh, absent(), "migrate"),
        ("no answer", Saving, true, &fresh, silent(None, true), "retry"),
        ("its node is lost before it was saved", Saving, true, &fresh, silent(Some(300), false), "bind:n2"),
        ("saved and copied", Leaving, true, &fresh, asleep(), "delete"),
        ("also when it was uncordoned", Leaving, false, &fresh, asleep(), "delete"),
        ("deleted at the source", Leaving, true, &fresh, absent(), "migrate"),
        (
            "its source is lost: it may still be there",
            Leaving,
            true,
            &fresh,
            silent(Some(300), false),
            "retry",
        ),
        ("made again", Restoring, false, &fresh, absent(), "restore"),
        ("the target refuses: back to the source", Restoring, false, &refused, absent(), "migrate"),
        ("runs at the target", Restoring, false, &fresh, up(), "migrate"),
        ("snapshots are removed", Cleaning, false, &fresh, up(), "discard-snapshots migrate"),
    ] {
        let vm = moving(Stage::Live, phase);
        let drain = cordoned.then(|| drained(OnDrain::Move)).flatten();
        let o = Observed {
            drain,
            memo: memo.clone(),
            migration_ends: Some(ends()),
            ..observed(&vm, view, &policy)
        };
        assert_eq!(verbs(&plan(&o)), want, "{why}");
    }
}

#[test]
fn refusing_migration_target_returns_the_vm_to_its_source() {
    let policy = Policy::default();
    let vm = moving(Stage::Live, MigrationPhase::Restoring);
    let memo = Memo { refusals: policy.refusals_max, ..Memo::default() };
    let view = AgentView::Answered(None);
    let plan = plan(&Observed { memo, migration_ends: Some(ends()), ..observed(&vm, view, &policy) });
    let Some(Step::Migrate(Some(back))) = plan.steps.first() else { panic!("{plan:?}") };
    assert_eq!((&back.source, &back.target), (&end("n2", "b:2"), &end("n1", "a:1")));
    assert_eq!((back.phase, plan.memo.refusals), (MigrationPhase::Restoring, 0));
    assert!(plan.memo.unmovable_until > Some(at(NOW)), "and is not moved again at once");
}

#[test]
fn unreachable_migration_peer_does_not_delay_the_vm() {
    let policy = Policy::default();
    let view = || powered(State::Running, Some(PowerState::Running));
    let vm = moving(Stage::Live, MigrationPhase::Cleaning);
    let progress = AppliedSteps { discarded: true, ..AppliedSteps::default() };
    let o = Observed { progress, migration_ends: Some(ends()), ..observed(&vm, view(), &policy) };
    assert_eq!(verbs(&plan(&o)), "report:Vm");
    let verdict = judge(
        &Step::DiscardSnapshots(ends(), "s".into()),
        &error(Code::Unavailable),
        &Memo::default(),
        &policy,
    );
    assert!(verdict.again, "the next round follows the VM");
}

#[test]
fn object_deleted_while_it_moves_leaves_nothing() {
    use MigrationPhase::{Cleaning, Leaving, Restoring, Saving};
    let policy = Policy::default();
    for (phase, want) in [
        (Saving, "delete delete delete-snapshot delete-snapshot migrate"),
        (Leaving, "delete delete delete-snapshot delete-snapshot migrate"),
        (Restoring, "delete delete delete-snapshot delete-snapshot migrate"),
        (Cleaning, "discard-snapshots migrate"),
    ] {
        let mut vm = moving(Stage::LiveDeleted, phase);
        let view = || powered(State::Running, Some(PowerState::Running));
        let steps = |vm: &MikromVM| {
            verbs(&plan(&Observed { migration_ends: Some(ends()), ..observed(vm, view(), &policy) }))
        };
        assert_eq!(steps(&vm), want, "{phase:?}");
        vm.annotations_mut().insert(keys::ABANDON.into(), "true".into());
        assert_eq!(steps(&vm), "stop delete", "{phase:?}: abandoned");
    }
}

#[test]
fn refusals_of_a_move_are_counted_and_reported() {
    let policy = Policy::default();
    let snapshot = SnapshotRef { name: "s".into(), fence: target().fence, cluster: None };
    for step in [
        Step::SaveSnapshot(target(), "s".into()),
        Step::CopySnapshot(ends(), snapshot.clone()),
        Step::RestoreVm(target(), snapshot),
    ] {
        let verdict = judge(&step, &error(Code::FailedPrecondition), &Memo::default(), &policy);
        assert!(matches!(verdict.finding, Some(Finding::MoveFailed(_))), "{step:?}");
        assert_eq!(verdict.memo.refusals, 1, "{step:?}");
    }
}
