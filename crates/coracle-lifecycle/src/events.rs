//! Events for watchers.

use std::sync::Arc;

use coracle_types::{UnixMillis, VmState};

use crate::Record;

/// Change of one VM.
#[derive(Clone, Debug)]
pub struct HostEvent {
    /// Kind of the change.
    pub kind: EventKind,
    /// Record after the change.
    pub record: Arc<Record>,
    /// Time of the change.
    pub time: UnixMillis,
}

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The VM was created.
    Created,
    /// The guest runs.
    Started,
    /// The guest is powered off, as expected.
    Stopped,
    /// The VM was deleted.
    Deleted,
    /// The VM ended unexpectedly.
    Failed,
    /// Any other change.
    Updated,
}

impl EventKind {
    /// Returns the event for a change of state.
    pub fn of_change(from: VmState, to: VmState) -> Self {
        match to {
            _ if from == to => Self::Updated,
            VmState::Created => Self::Created,
            // The guest did not stop in between.
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
