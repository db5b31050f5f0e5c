//! Power states: which one a VM shall have, and what brings it there. Pure.

use coracle_api::PowerState;
use jiff::{SignedDuration, Timestamp};

use crate::{
    agent::{State, VmInfo},
    observed::Observed,
    status,
};

/// What the wanted power state requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    /// None: the VM has it.
    AsWanted,
    /// This power state next; a VM passes through Running where it must.
    To(PowerState),
    /// The agent has no call for it.
    Unsupported,
    /// The VM shall be up: restartPolicy decides about one that is down.
    ByPolicy,
}

/// When the VM hibernates by `spec.hibernateAfter`: that long after it became Ready, unless the spec sets a
/// power state.
pub(super) fn hibernation_due(o: &Observed<'_>) -> Option<Timestamp> {
    let after: SignedDuration = o.vm.spec.hibernate_after.parse().ok()?; // empty: never
    let ready = status::ready_since(o.vm).filter(|_| o.vm.spec.power_state.is_none())?;
    Some(ready.saturating_add(after).unwrap_or(Timestamp::MAX))
}

/// The power state that the VM shall have now.
pub(super) fn wanted(o: &Observed<'_>, vm: &VmInfo, due: Option<Timestamp>) -> PowerState {
    // A drain is not what hibernateAfter asked for.
    let hibernated = vm.power == Some(PowerState::Hibernated)
        && !o.vm.spec.hibernate_after.is_empty()
        && !status::is_drained(o.vm);
    let default = match hibernated || due.is_some_and(|at| at <= o.now) {
        true => PowerState::Hibernated,
        false => PowerState::Running,
    };
    o.vm.spec.power_state.unwrap_or(default)
}

/// `powered_off`: the VM is down because its power state was Stopped, and not because it ended.
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
