//! Action for a VM when its node is drained, and progress of a migration.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Action for a VM when its node is cordoned: value of the annotation [`crate::keys::vm::ON_DRAIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDrain {
    /// The VM's memory is saved on the node's disk; the VM continues when the node is uncordoned.
    Hibernate,
    /// The VM continues on another node, with its memory and disk.
    Move,
    /// The VM is powered off, and boots when the node is uncordoned.
    Stop,
}

impl OnDrain {
    /// Parses the value of the annotation.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "hibernate" => Some(Self::Hibernate),
            "move" => Some(Self::Move),
            "stop" => Some(Self::Stop),
            _ => None,
        }
    }
}

/// Move of a VM to another node, in `status.migration` until it is complete and cleaned up.
///
/// ```text
/// Saving     hibernated at the source, saved as a snapshot, copied to the target
/// Leaving    deleted at the source
/// Restoring  bound to the target; made again from the snapshot
/// Cleaning   the snapshots are removed
/// ```
/// When the target cannot run the VM, source and target change places and the VM moves back.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    /// Phase of the move.
    pub phase: MigrationPhase,
    /// Node that the VM leaves.
    pub source: MigrationNode,
    /// Node that the VM moves to.
    pub target: MigrationNode,
    /// Name of the snapshot that carries the VM, on both nodes.
    pub snapshot: String,
}

/// One end of a move.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct MigrationNode {
    /// Name of the node.
    pub node_name: String,
    /// Address of the node's agent, as `host:port`.
    pub agent_address: String,
}

/// Phase of a move; see [`Migration`].
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigrationPhase {
    /// The VM is being hibernated, saved and copied. When the move is aborted in this phase, the VM stays at the source.
    #[default]
    Saving,
    /// Both nodes have the snapshot; the VM is deleted at the source.
    Leaving,
    /// The VM is being created again at the target.
    Restoring,
    /// The VM has reached its final node; the snapshots are being removed.
    Cleaning,
}
