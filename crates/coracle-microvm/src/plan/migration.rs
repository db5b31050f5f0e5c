//! Moves a VM to another node: hibernate, save, copy, delete, restore. Pure.
//!
//! Each phase is stored before its steps, and each step may be repeated, so the move continues after a crash at any point.
//! Until `Leaving` the VM belongs to the source; from then on both nodes have the snapshot, and the VM is created from it.

use coracle_api::{Migration, MigrationPhase, PowerState};

use super::{Plan, add, execute, is_abandoned, retry, vm_ref, vm_ref_at};
use crate::{
    agent::{Fence, State, VmInfo},
    observed::{AgentView, Memo, Observed},
    step::{MigrationEnds, SnapshotRef, Step},
};

/// Continues the move. `None`: the VM is first treated like any other.
pub(super) fn plan(o: &Observed<'_>, migration: &Migration) -> Option<Plan> {
    let ends = o.migration_ends.as_ref()?;
    let phase = |phase| Step::Migrate(Some(Migration { phase, ..migration.clone() }));
    Some(match (migration.phase, &o.view) {
        // After one attempt the VM is followed again, also when a node does not respond.
        (MigrationPhase::Cleaning, _) if o.progress.discarded => return None,
        (MigrationPhase::Cleaning, _) => {
            let discard = Step::DiscardSnapshots(ends.clone(), migration.snapshot.clone());
            execute(o, vec![discard, Step::Migrate(None)])
        }
        (MigrationPhase::Saving, AgentView::Answered(Some(vm))) => save(o, migration, ends, vm),
        (MigrationPhase::Saving, AgentView::Answered(None)) => {
            execute(o, vec![phase(MigrationPhase::Cleaning)])
        }
        (MigrationPhase::Saving, _) => return None,
        (MigrationPhase::Leaving, AgentView::Answered(Some(_))) => {
            execute(o, vec![Step::DeleteVm(vm_ref(o))])
        }
        (MigrationPhase::Leaving, AgentView::Answered(None)) => {
            execute(o, vec![phase(MigrationPhase::Restoring)])
        }
        (MigrationPhase::Restoring, AgentView::Answered(Some(_))) => {
            execute(o, vec![phase(MigrationPhase::Cleaning)])
        }
        (MigrationPhase::Restoring, AgentView::Answered(None)) => restore(o, migration),
        (
            MigrationPhase::Leaving | MigrationPhase::Restoring,
            AgentView::Unreachable { error, .. } | AgentView::Refused(error),
        ) => retry(o, error.clone()),
        (MigrationPhase::Leaving | MigrationPhase::Restoring, AgentView::Unbound) => return None,
    })
}

/// Saves and copies the VM. An earlier attempt may have left a snapshot after which the VM continued to run, so it is deleted
/// first.
fn save(o: &Observed<'_>, migration: &Migration, ends: &MigrationEnds, vm: &VmInfo) -> Plan {
    if o.drain.is_none() || o.memo.refusals >= o.policy.refusals_max {
        return give_up(o, migration);
    }
    let name = migration.snapshot.clone();
    let hibernated = vm.power == Some(PowerState::Hibernated);
    let mut steps = vec![
        Step::DeleteSnapshot(ends.target.clone(), name.clone()),
        Step::DeleteSnapshot(ends.source.clone(), name.clone()),
    ];
    if !hibernated {
        if vm.state != State::Running {
            return give_up(o, migration); // the VM has ended, and has no memory
        }
        steps.push(Step::SetPowerState(vm_ref(o), PowerState::Hibernated));
    }
    steps.extend([
        Step::SaveSnapshot(vm_ref(o), name),
        Step::CopySnapshot(ends.clone(), snapshot(o, migration)),
        Step::Migrate(Some(Migration { phase: MigrationPhase::Leaving, ..migration.clone() })),
    ]);
    execute(o, steps)
}

fn snapshot(o: &Observed<'_>, migration: &Migration) -> SnapshotRef {
    SnapshotRef { name: migration.snapshot.clone(), fence: Fence::of(o.vm), cluster: o.cluster.clone() }
}

/// Aborts the move. The VM stays where it is bound, and is not moved again for a while.
fn give_up(o: &Observed<'_>, migration: &Migration) -> Plan {
    let memo = Memo { refusals: 0, unmovable_until: Some(add(o.now, o.policy.avoid_for)), ..o.memo.clone() };
    let step = Step::Migrate(Some(Migration { phase: MigrationPhase::Cleaning, ..migration.clone() }));
    Plan { memo, ..execute(o, vec![step]) }
}

/// Creates the VM again. When the target has refused it often enough, the VM moves back.
fn restore(o: &Observed<'_>, migration: &Migration) -> Plan {
    if o.memo.refusals < o.policy.refusals_max {
        return execute(o, vec![Step::RestoreVm(vm_ref(o), snapshot(o, migration))]);
    }
    let back = Migration {
        phase: MigrationPhase::Restoring,
        source: migration.target.clone(),
        target: migration.source.clone(),
        snapshot: migration.snapshot.clone(),
    };
    let memo = Memo { refusals: 0, unmovable_until: Some(add(o.now, o.policy.avoid_for)), ..o.memo.clone() };
    Plan { memo, ..execute(o, vec![Step::Migrate(Some(back))]) }
}

/// Removes the VM and its snapshots at both nodes, before the object is removed. `None`: the VM is removed like any other.
pub(super) fn remove(o: &Observed<'_>, migration: &Migration) -> Option<Plan> {
    let ends = o.migration_ends.as_ref().filter(|_| !is_abandoned(o.vm))?;
    if migration.phase == MigrationPhase::Cleaning {
        return plan(o, migration);
    }
    let both = [&ends.source, &ends.target];
    let mut steps: Vec<_> = both.map(|agent| Step::DeleteVm(vm_ref_at(o, agent))).into();
    steps.extend(both.map(|agent| Step::DeleteSnapshot(agent.clone(), migration.snapshot.clone())));
    steps.push(Step::Migrate(None));
    Some(execute(o, steps))
}
