//! Power states: the desired one of a VM, and the transition to it. Pure.

use coracle_api::PowerState;
use jiff::{SignedDuration, Timestamp};

use crate::{
    agent::{State, VmInfo},
    observed::Observed,
    status,
};

/// Transition to the desired power state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    /// No transition: the VM has the desired power state.
    AsWanted,
    /// Next power state; a VM passes through Running when it must.
    To(PowerState),
    /// The agent has no call for the transition.
    Unsupported,
    /// The VM should be running: restartPolicy decides when it is down.
    ByPolicy,
}

/// Returns the time when the VM hibernates by `spec.hibernateAfter`: that long after it became Ready, unless the spec sets a
/// power state.
pub(super) fn hibernation_due(o: &Observed<'_>) -> Option<Timestamp> {
    let after: SignedDuration = o.vm.spec.hibernate_after.parse().ok()?; // empty: never
    let ready = status::ready_since(o.vm).filter(|_| o.vm.spec.power_state.is_none())?;
    Some(ready.saturating_add(after).unwrap_or(Timestamp::MAX))
}

/// Returns the power state that the VM should have now.
pub(super) fn wanted_power_state(o: &Observed<'_>, vm: &VmInfo, due: Option<Timestamp>) -> PowerState {
    // A VM that a drain hibernated was not hibernated by hibernateAfter.
    let hibernated = vm.power == Some(PowerState::Hibernated)
        && !o.vm.spec.hibernate_after.is_empty()
        && !status::is_drained(o.vm);
    let default = match hibernated || due.is_some_and(|at| at <= o.now) {
        true => PowerState::Hibernated,
        false => PowerState::Running,
    };
    o.vm.spec.power_state.unwrap_or(default)
}

/// Returns the transition to `wanted`. `powered_off`: the VM is down because its power state was Stopped, and not because it
/// ended.
pub(super) fn transition(wanted: PowerState, vm: &VmInfo, powered_off: bool) -> Transition {
    use PowerState::{Hibernated, Paused, Running, Stopped};
    let now = match (vm.power, vm.state) {
        (Some(power), State::Running | State::Stopped | State::Error) => power,
        (None, State::Running) => Running,
        (None, State::Stopped | State::Error) => Stopped,
        (_, State::Creating | State::Stopping | State::Deleting | State::Unspecified) => {
            return Transition::ByPolicy;
        }
    };
    match (wanted, now) {
        (Running, Paused | Hibernated) | (Paused, Hibernated) => Transition::To(Running),
        (Running, Running) => Transition::ByPolicy,
        (Running | Paused | Hibernated, Stopped) if powered_off => Transition::To(Running),
        (Running | Paused | Hibernated, Stopped) => Transition::ByPolicy,
        (Stopped, Running | Paused) => Transition::To(Stopped),
        (Paused, Running) | (Hibernated, Running | Paused) if vm.power.is_some() => Transition::To(wanted),
        (Paused, Running) | (Hibernated, Running | Paused) => Transition::Unsupported,
        (Paused, Paused) | (Hibernated, Hibernated) | (Stopped, Stopped | Hibernated) => Transition::AsWanted,
    }
}
