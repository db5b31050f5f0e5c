//! What a VM does when its node is drained, and how far a move is.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What happens to a VM when its node is cordoned: the value of the annotation [`crate::keys::vm::ON_DRAIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDrain {
    /// Its memory is saved on the node's disk; it continues when the node is uncordoned.
    Hibernate,
    /// It continues on another node, with its memory and disk.
    Move,
    /// It is powered off; it boots when the node is uncordoned.
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

/// A move of a VM to another node, in `status.migration` until nothing is left of it.
///
/// ```text
/// Saving     hibernated at the source, saved as a snapshot, copied to the target
/// Leaving    deleted at the source
/// Restoring  bound to the target; made again from the snapshot
/// Cleaning   the snapshots are removed
/// ```
/// A target that cannot run the VM gives it back: source and target change places.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    /// How far it is.
    pub phase: MigrationPhase,
    /// The node that the VM leaves.
    pub source: MigrationNode,
    /// The node that the VM goes to.
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
    /// The agent on it, as `host:port`.
    pub agent_address: String,
}

/// How far a move is; see [`Migration`].
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigrationPhase {
    /// Hibernated, saved and copied. Given up, it leaves the VM where it was.
    #[default]
    Saving,
    /// Both nodes have the snapshot; the VM is deleted at the source.
    Leaving,
    /// The VM is made again at the target.
    Restoring,
    /// The VM is where it belongs; the snapshots are removed.
    Cleaning,
}
