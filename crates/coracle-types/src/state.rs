//! States of a VM, and which operations each state accepts.

use std::fmt;

use serde::{Deserialize, Serialize};

/// State of a VM. Stored in its record.
///
/// ```text
/// Creating ─▶ Created ─▶ Starting ─▶ Running ─▶ Stopping ─▶ Stopped ─▶ Starting …
///                            └────────▶ Failed ◀──┘   (any) ─▶ Deleting ─▶ gone
/// Running ◀─▶ Paused;  Running, Paused ─▶ Hibernating ─▶ Hibernated ─▶ Starting …
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum VmState {
    /// Resources are being created; the request is not acknowledged yet.
    Creating,
    /// Created, never started.
    Created,
    /// A VMM is starting or runs; the guest has not acknowledged its configuration.
    Starting,
    /// The guest acknowledged its configuration and started the workload.
    Running,
    /// The VMM runs with paused vCPUs.
    Paused,
    /// The vCPUs are paused and the memory is being saved. After an interruption the guest runs again.
    Hibernating,
    /// No VMM; disk, address and the saved memory are kept.
    Hibernated,
    /// The guest was asked to power off.
    Stopping,
    /// No VMM; disk and address are kept.
    Stopped,
    /// No VMM; it ended with an error.
    Failed,
    /// Being deleted; no other operation is accepted.
    Deleting,
}

/// Operations on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Run the VM: boot it, resume its vCPUs, or load its saved memory.
    Start,
    /// Pause the vCPUs.
    Pause,
    /// Like [`Op::Start`], but never boots.
    Resume,
    /// Save the memory and end the VMM.
    Hibernate,
    /// Copy memory and disk as of one instant.
    Snapshot,
    /// Power off.
    Stop,
    /// Delete the VM.
    Delete {
        /// Delete a running VM, too.
        force: bool,
    },
    /// Call the guest agent (exec, copy, port-forward).
    Guest,
    /// Attach or detach a volume. The guest confirms a detachment.
    Volume,
    /// Copy the disk while no VMM writes it.
    CopyDisk,
}

/// Error for an operation that the state of a VM does not allow.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("VM is {state}: {why}")]
pub struct Refused {
    /// State of the VM.
    pub state: VmState,
    /// Remedy.
    pub why: &'static str,
    /// Whether the operation will soon be possible without any action.
    pub transient: bool,
}

impl VmState {
    /// Returns whether `op` is allowed in this state. Pure; no other code decides it.
    ///
    /// # Errors
    /// [`Refused`] with a remedy.
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
            // Allowed, because a VMM that does not answer would keep the VM in this state.
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
            (Op::Pause, Hibernated) => refuse("it is hibernated already", false),
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
            (Op::CopyDisk, Created | Stopped | Failed) => Ok(()),
            (Op::CopyDisk, Stopping) => refuse("wait until it has stopped", true),
            (Op::CopyDisk, Starting | Running | Paused) => refuse("stop it first", false),
            (Op::CopyDisk, Hibernated) => refuse("resume it and stop it then", false),
            (Op::Guest, Running) => Ok(()),
            (Op::Guest, Paused | Hibernated) => refuse("resume it first", false),
            (Op::Guest, Created | Stopping | Stopped | Failed) => refuse("start it first", false),
        }
    }

    /// Returns whether a VMM runs, or may run, in this state.
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
            (Op::CopyDisk, vec![Created, Stopped, Failed]),
        ] {
            let got: Vec<_> = states.into_iter().filter(|s| s.admit(op).is_ok()).collect();
            assert_eq!(got, allowed, "{op:?}");
        }
    }
}
