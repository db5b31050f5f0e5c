//! The life of a VM, and which requests each state accepts.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a VM is in its life. Stored in its record.
///
/// ```text
/// Creating ─▶ Created ─▶ Starting ─▶ Running ─▶ Stopping ─▶ Stopped ─▶ Starting …
///                            └────────▶ Failed ◀──┘   (any) ─▶ Deleting ─▶ gone
/// Running ◀─▶ Paused;  Running, Paused ─▶ Hibernating ─▶ Hibernated ─▶ Starting …
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum VmState {
    /// Resources are being laid out; the request is not acknowledged yet.
    Creating,
    /// Laid out, never started.
    Created,
    /// A VMM is wanted or runs; the guest has not acknowledged its configuration.
    Starting,
    /// The guest acknowledged its configuration and started the workload.
    Running,
    /// The VMM is there and the guest's CPUs stand still.
    Paused,
    /// The guest stands still and its memory is being saved; cut off, it runs again.
    Hibernating,
    /// No VMM; disk, address and the saved memory are kept.
    Hibernated,
    /// The guest was asked to power off.
    Stopping,
    /// No VMM; disk and address are kept.
    Stopped,
    /// No VMM, and it did not end as it should.
    Failed,
    /// On its way out; only this can finish.
    Deleting,
}

/// What a caller may ask of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Make it run: boot it, let its CPUs go on, or load its saved memory.
    Start,
    /// Hold its CPUs.
    Pause,
    /// As [`Op::Start`], but never boot.
    Resume,
    /// Save its memory and end its VMM.
    Hibernate,
    /// Copy its memory and its disk as of one instant.
    Snapshot,
    /// Power it off.
    Stop,
    /// Remove it.
    Delete {
        /// Also when it runs.
        force: bool,
    },
    /// Talk to its guest (exec, copy, port-forward).
    Guest,
    /// Give it a volume, or take one away: its guest says that it has let go.
    Volume,
}

/// A request that the state of a VM does not allow.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("VM is {state}: {why}")]
pub struct Refused {
    /// The state it was in.
    pub state: VmState,
    /// What to do instead.
    pub why: &'static str,
    /// True when waiting a moment is all it needs.
    pub transient: bool,
}

impl VmState {
    /// May `op` be carried out now? Pure; the one place that knows.
    ///
    /// # Errors
    /// [`Refused`] with what to do instead.
    pub fn admit(self, op: Op) -> Result<(), Refused> {
        use VmState::{
            Created, Creating, Deleting, Failed, Hibernated, Hibernating, Paused, Running, Starting, Stopped,
            Stopping,
        };
        let refuse = |why, transient| Err(Refused { state: self, why, transient });
        match (op, self) {
            (Op::Delete { .. }, Deleting) => Ok(()),
            (_, Deleting) => refuse("it is being deleted", false),
            (_, Creating) => refuse("wait until it is created", true),
            // Asked for while a VMM that does not answer holds it in this state.
            (Op::Stop | Op::Delete { force: true }, Hibernating) => Ok(()),
            (_, Hibernating) => refuse("wait until its memory is saved", true),
            (Op::Start, Stopping) => refuse("wait until it has stopped", true),
            (Op::Start, _) => Ok(()),
            (Op::Pause, Running | Paused) => Ok(()),
            (Op::Resume, Running | Paused | Hibernated) => Ok(()),
            (Op::Hibernate | Op::Snapshot, Running | Paused | Hibernated) => Ok(()),
            (Op::Volume, Created | Running | Stopped | Failed) => Ok(()),
            (Op::Volume, Paused | Hibernated) => refuse("resume it first", false),
            (Op::Volume, Stopping) => refuse("wait until it has stopped", true),
            (Op::Pause | Op::Resume | Op::Hibernate | Op::Snapshot | Op::Guest | Op::Volume, Starting) => {
                refuse("wait until it runs", true)
            }
            (Op::Pause, Hibernated) => refuse("it is at rest already", false),
            (
                Op::Pause | Op::Resume | Op::Hibernate | Op::Snapshot,
                Created | Stopping | Stopped | Failed,
            ) => refuse("start it first", false),
            (Op::Stop, Hibernated) => refuse("resume it and stop it then, or delete it", false),
            (Op::Stop, _) => Ok(()),
            (Op::Delete { force: false }, Starting | Running | Paused | Stopping) => {
                refuse("stop it first, or force", false)
            }
            (Op::Delete { .. }, _) => Ok(()),
            (Op::Guest, Running) => Ok(()),
            (Op::Guest, Paused | Hibernated) => refuse("resume it first", false),
            (Op::Guest, Created | Stopping | Stopped | Failed) => refuse("start it first", false),
        }
    }

    /// Is there, or may there be, a VMM in this state?
    #[must_use]
    pub fn has_vmm(self) -> bool {
        matches!(self, Self::Starting | Self::Running | Self::Paused | Self::Hibernating | Self::Stopping)
    }
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Creating => "Creating",
            Self::Created => "Created",
            Self::Starting => "Starting",
            Self::Running => "Running",
            Self::Paused => "Paused",
            Self::Hibernating => "Hibernating",
            Self::Hibernated => "Hibernated",
            Self::Stopping => "Stopping",
            Self::Stopped => "Stopped",
            Self::Failed => "Failed",
            Self::Deleting => "Deleting",
        })
    }
}

#[cfg(test)]
mod tests {
    use VmState::{
        Created, Creating, Deleting, Failed, Hibernated, Hibernating, Paused, Running, Starting, Stopped,
        Stopping,
    };

    use super::*;

    #[test]
    fn admission_table() {
        let states = [
            Creating,
            Created,
            Starting,
            Running,
            Paused,
            Hibernating,
            Hibernated,
            Stopping,
            Stopped,
            Failed,
            Deleting,
        ];
        for (op, allowed) in [
            (Op::Start, vec![Created, Starting, Running, Paused, Hibernated, Stopped, Failed]),
            (Op::Pause, vec![Running, Paused]),
            (Op::Resume, vec![Running, Paused, Hibernated]),
            (Op::Hibernate, vec![Running, Paused, Hibernated]),
            (Op::Snapshot, vec![Running, Paused, Hibernated]),
            (Op::Volume, vec![Created, Running, Stopped, Failed]),
            (Op::Stop, vec![Created, Starting, Running, Paused, Hibernating, Stopping, Stopped, Failed]),
            (Op::Delete { force: false }, vec![Created, Hibernated, Stopped, Failed, Deleting]),
            (
                Op::Delete { force: true },
                vec![
                    Created,
                    Starting,
                    Running,
                    Paused,
                    Hibernating,
                    Hibernated,
                    Stopping,
                    Stopped,
                    Failed,
                    Deleting,
                ],
            ),
            (Op::Guest, vec![Running]),
        ] {
            let got: Vec<_> = states.into_iter().filter(|s| s.admit(op).is_ok()).collect();
            assert_eq!(got, allowed, "{op:?}");
        }
    }
}
