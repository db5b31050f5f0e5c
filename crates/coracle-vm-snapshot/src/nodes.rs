//! Calls of the controllers to nodes.

use std::fmt;

use async_trait::async_trait;
use coracle_api::MikromVM;
use coracle_microvm::agent::{AgentError, NodeSnapshots, SavedSnapshot};

/// A call that a node did not carry out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NodeError {
    /// Message of the node.
    pub message: String,
    /// True when there was no response.
    pub is_silence: bool,
    /// True when no node with that name is announced.
    pub is_unknown: bool,
}

/// Snapshots on nodes. Every call may be repeated.
#[async_trait]
pub trait SnapshotNodes: fmt::Debug + Send + Sync {
    /// Copies memory and disk of the VM on its node. Returns `Ok` when the node already has a snapshot with that name.
    async fn save(&self, vm: &MikromVM, name: &str) -> Result<(), NodeError>;
    /// Returns the snapshot with that name on a node; `None`: not found.
    async fn get(&self, node: &str, name: &str) -> Result<Option<SavedSnapshot>, NodeError>;
    /// Copies a snapshot under another name, for VMs of `namespace`. Returns `Ok` when the node already has a snapshot with the
    /// name of the copy.
    async fn copy(&self, node: &str, copied: (&str, &str), namespace: &str) -> Result<(), NodeError>;
    /// Removes a snapshot. Returns `Ok` for an unknown snapshot.
    async fn delete(&self, node: &str, name: &str) -> Result<(), NodeError>;
}

#[async_trait]
impl SnapshotNodes for NodeSnapshots {
    async fn save(&self, vm: &MikromVM, name: &str) -> Result<(), NodeError> {
        let node = vm.status.as_ref().map(|status| status.node_name.as_str()).unwrap_or_default();
        self.save(vm, name).await.map_err(|error| self.error(node, &error))
    }

    async fn get(&self, node: &str, name: &str) -> Result<Option<SavedSnapshot>, NodeError> {
        self.get(node, name).await.map_err(|error| self.error(node, &error))
    }

    async fn copy(&self, node: &str, copied: (&str, &str), namespace: &str) -> Result<(), NodeError> {
        self.copy(node, copied, namespace).await.map_err(|error| self.error(node, &error))
    }

    async fn delete(&self, node: &str, name: &str) -> Result<(), NodeError> {
        self.delete(node, name).await.map_err(|error| self.error(node, &error))
    }
}

/// Translates errors of the node client.
trait Translate {
    fn error(&self, node: &str, error: &AgentError) -> NodeError;
}

impl Translate for NodeSnapshots {
    fn error(&self, node: &str, error: &AgentError) -> NodeError {
        let is_silence = error.is_silence();
        // The error of the transport would expose the operator's network to the user.
        let message = if is_silence { format!("node {node} does not answer") } else { error.to_string() };
        NodeError { message, is_silence, is_unknown: !self.is_announced(node) }
    }
}
