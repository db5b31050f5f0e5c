//! Cordoned nodes: VMs hibernate, stop or move, as their annotation requires. Pure.

use coracle_api::{Migration, MigrationNode, MigrationPhase, OnDrain, PowerState};
use kube::ResourceExt as _;

use super::{Plan, execute, report};
use crate::{
    agent::{State, VmInfo},
    observed::{Drain, Observed},
    status::Finding,
    step::{NodeBinding, Step},
};

/// Returns the power state that the VM should have now, instead of `wanted`. A VM without a VMM needs no drain.
pub(super) fn power_state(o: &Observed<'_>, wanted: PowerState) -> PowerState {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let policy = o.drain.as_ref().map(|drain| drain.policy);
    match (policy, wanted) {
        (Some(OnDrain::Hibernate), Running | Paused) => Hibernated,
        (Some(OnDrain::Stop), Running | Paused) => Stopped,
        (Some(_) | None, wanted) => wanted,
    }
}

/// Returns the finding for a VM that has the power state of [`power_state`]. Its earlier state is restored when the node is
/// uncordoned.
pub(super) fn vm_finding(o: &Observed<'_>, vm: &VmInfo) -> Finding {
    match &o.drain {
        Some(Drain { policy: OnDrain::Hibernate | OnDrain::Stop, .. }) if vm.state == State::Stopped => {
            Finding::Drained(vm.clone())
        }
        _ => Finding::Vm(vm.clone()),
    }
}

/// Begins the move of a VM that has memory to move. `None`: the VM has no memory, or must not move now.
pub(super) fn begin_move(o: &Observed<'_>, vm: &VmInfo) -> Option<Plan> {
    let drain = o.drain.as_ref().filter(|drain| drain.policy == OnDrain::Move)?;
    if o.memo.unmovable_until.is_some_and(|until| o.now < until) || !has_memory(vm) {
        return None;
    }
    let target = match &drain.target {
        Ok(target) => end(target),
        Err(why) => {
            let finding = Finding::DrainBlocked(vm.clone(), why.clone());
            return Some(report(o, finding));
        }
    };
    let uid = o.vm.uid().unwrap_or_default();
    let migration = Migration {
        phase: MigrationPhase::Saving,
        source: end(&o.bound_to),
        target,
        snapshot: format!("move-{uid}-{}", o.now.as_millisecond()),
    };
    Some(execute(o, vec![Step::Migrate(Some(migration))]))
}

/// True when a snapshot of the VM contains its memory. Old agents report no power state, and have no snapshots.
fn has_memory(vm: &VmInfo) -> bool {
    match (vm.state, vm.power) {
        (State::Running, Some(PowerState::Running | PowerState::Paused)) => true,
        (State::Stopped, power) => power == Some(PowerState::Hibernated),
        _ => false,
    }
}

fn end(binding: &NodeBinding) -> MigrationNode {
    MigrationNode { node_name: binding.node.clone(), agent_address: binding.address.clone() }
}
