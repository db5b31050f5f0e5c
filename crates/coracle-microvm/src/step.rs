//! Effects of the MikromVM controller, as data.

use std::time::Duration;

use coracle_api::{Migration, PowerState};

use crate::{
    agent::{AgentAddress, Fence},
    vm_spec::VmSpec,
};

/// Node and agent that run a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeBinding {
    /// Name of the node; empty when only an address is known.
    pub node: String,
    /// The agent's `host:port`.
    pub address: String,
}

/// VM at an agent, and the object on whose behalf it is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmRef {
    /// Agent of the VM.
    pub agent: AgentAddress,
    /// The VM's id at the agent.
    pub id: String,
    /// UID, name and generation of the object.
    pub fence: Fence,
    /// Time that the guest has to power off; `None`: the node's default, and no grace period before a deletion.
    pub grace: Option<Duration>,
}

/// Snapshot of an object's VM, on any node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRef {
    /// Name of the snapshot.
    pub name: String,
    /// Object that owns the VM.
    pub fence: Fence,
    /// Cluster of the object; `None`: it could not be read.
    pub cluster: Option<String>,
}

/// Agents of the source and the target of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationEnds {
    /// Agent of the node that the VM leaves.
    pub source: AgentAddress,
    /// Agent of the node that the VM moves to.
    pub target: AgentAddress,
}

/// One effect with everything that it needs. Each step is safe to repeat.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Stores the finalizer.
    AddFinalizer,
    /// Stores the node, before anything exists there.
    Bind(NodeBinding),
    /// Creates the VM; coracle agents boot it, too.
    CreateVm(VmRef, VmSpec),
    /// Creates the VM powered off.
    CreateStopped(VmRef, VmSpec),
    /// Starts the VM.
    StartVm(VmRef),
    /// Pauses, hibernates, powers off or starts the VM.
    SetPowerState(VmRef, PowerState),
    /// Stops the VM before its deletion: by force, or after its grace period.
    StopVm(VmRef),
    /// Deletes the VM.
    DeleteVm(VmRef),
    /// Stores the phase of a move, and binds the VM to the target from `Restoring` on. `None`: the move is over.
    Migrate(Option<Migration>),
    /// Saves the VM as a snapshot on its node.
    SaveSnapshot(VmRef, String),
    /// Copies a snapshot from the source to the target.
    CopySnapshot(MigrationEnds, SnapshotRef),
    /// Creates the VM again from a snapshot, under its identity.
    RestoreVm(VmRef, SnapshotRef),
    /// Removes a snapshot that an earlier attempt left.
    DeleteSnapshot(AgentAddress, String),
    /// Removes the snapshots that a move left at both ends.
    DiscardSnapshots(MigrationEnds, String),
    /// Removes the finalizer.
    RemoveFinalizer {
        /// Reason why the agent did not confirm the deletion of the VM; an Event reports it. `None`: confirmed.
        unconfirmed: Option<String>,
    },
}

impl Step {
    /// True for a write to the object, which the API server refuses when the object has changed.
    #[must_use]
    pub fn checks_version(&self) -> bool {
        matches!(self, Self::AddFinalizer | Self::Bind(_) | Self::Migrate(_) | Self::RemoveFinalizer { .. })
    }

    /// Name in spans and tables.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::AddFinalizer => "add-finalizer",
            Self::Bind(_) => "bind",
            Self::CreateVm(..) => "create",
            Self::CreateStopped(..) => "create-stopped",
            Self::StartVm(_) => "start",
            Self::SetPowerState(..) => "set-power-state",
            Self::StopVm(_) => "stop",
            Self::DeleteVm(_) => "delete",
            Self::Migrate(_) => "migrate",
            Self::SaveSnapshot(..) => "save-snapshot",
            Self::CopySnapshot(..) => "copy-snapshot",
            Self::RestoreVm(..) => "restore",
            Self::DeleteSnapshot(..) => "delete-snapshot",
            Self::DiscardSnapshots(..) => "discard-snapshots",
            Self::RemoveFinalizer { .. } => "remove-finalizer",
        }
    }
}
