//! Events for watchers.

use std::sync::Arc;

use coracle_types::{UnixMillis, VmState};

use crate::Record;

/// One change of one VM.
#[derive(Clone, Debug)]
pub struct HostEvent {
    /// What happened.
    pub kind: EventKind,
    /// The VM after it.
    pub record: Arc<Record>,
    /// When.
    pub time: UnixMillis,
}

/// What happened to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// It exists.
    Created,
    /// Its guest runs.
    Started,
    /// Its guest is off, as wanted.
    Stopped,
    /// It is gone.
    Deleted,
    /// It ended as it should not.
    Failed,
    /// Anything else.
    Updated,
}

impl EventKind {
    /// The event that a change of state means.
    pub fn of_change(from: VmState, to: VmState) -> Self {
        match to {
            _ if from == to => Self::Updated,
            VmState::Created => Self::Created,
            // Its guest never went off.
            VmState::Running if matches!(from, VmState::Paused | VmState::Hibernating) => Self::Updated,
            VmState::Running => Self::Started,
            VmState::Stopped | VmState::Hibernated => Self::Stopped,
            VmState::Failed => Self::Failed,
            VmState::Creating
            | VmState::Starting
            | VmState::Paused
            | VmState::Hibernating
            | VmState::Stopping
            | VmState::Deleting => Self::Updated,
        }
    }
}
