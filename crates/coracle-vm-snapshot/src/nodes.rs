//! What the controllers ask of nodes.

use std::fmt;

use async_trait::async_trait;
use coracle_api::MikromVM;
use coracle_microvm::agent::{AgentError, NodeSnapshots, SavedSnapshot};

/// A call that a node did not carry out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NodeError {
    /// What the node said.
    pub message: String,
    /// There was no answer.
    pub is_silence: bool,
    /// No node of that name is announced.
    pub is_unknown: bool,
}

/// Snapshots of nodes. Every call may be repeated.
#[async_trait]
pub trait SnapshotNodes: fmt::Debug + Send + Sync {
    /// Copies memory and disk of the VM on its node. `Ok` when the node has a snapshot of that name.
    async fn save(&self, vm: &MikromVM, name: &str) -> Result<(), NodeError>;
    /// The snapshot of that name on a node; `None`: not found.
    async fn get(&self, node: &str, name: &str) -> Result<Option<SavedSnapshot>, NodeError>;
    /// Copies a snapshot under another name, for VMs of `namespace`. `Ok` when the node has a snapshot of the copy's name.
    async fn copy(&self, node: &str, copied: (&str, &str), namespace: &str) -> Result<(), NodeError>;
    /// Removes a snapshot. An unknown one is `Ok`.
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

/// Translates errors of the client of nodes.
trait Translate {
    fn error(&self, node: &str, error: &AgentError) -> NodeError;
}

impl Translate for NodeSnapshots {
    fn error(&self, node: &str, error: &AgentError) -> NodeError {
        let is_silence = error.is_silence();
        // The error of the transport would show the operator's network to the user.
        let message = if is_silence { format!("node {node} does not answer") } else { error.to_string() };
        NodeError { message, is_silence, is_unknown: !self.is_announced(node) }
    }
}
