//! Errors of CNI networks.

use std::path::PathBuf;
use std::time::Duration;

use crate::NetError;

/// Reason why a VM has no CNI network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CniError {
    /// No file of the directory describes this network.
    #[error("CNI network {name} not found in {}", .dir.display())]
    NotFound {
        /// Name of the network.
        name: String,
        /// Directory that was searched.
        dir: PathBuf,
    },
    /// A file of the directory cannot be used.
    #[error("invalid CNI configuration {}: {reason}", .path.display())]
    Configuration {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
    /// No plugin of the network has a capability that the VM needs.
    #[error("CNI network {network} has no plugin with the capability {capability}")]
    Capability {
        /// Name of the network.
        network: String,
        /// Capability that is missing.
        capability: &'static str,
    },
    /// A plugin reported an error.
    #[error("CNI plugin {plugin} refused {command}: {message} (code {code})")]
    Refused {
        /// Name of the plugin.
        plugin: String,
        /// CNI command.
        command: &'static str,
        /// Error message of the plugin.
        message: String,
        /// Error code of the plugin.
        code: i64,
    },
    /// The answer of a plugin violates the specification.
    #[error("invalid answer of CNI plugin {plugin} to {command}: {reason}")]
    Answer {
        /// Name of the plugin.
        plugin: String,
        /// CNI command.
        command: &'static str,
        /// What is wrong with the answer.
        reason: String,
    },
    /// A plugin exceeded its time limit and was killed.
    #[error("CNI plugin {plugin} did not end {command} within {} s", .limit.as_secs())]
    TimedOut {
        /// Name of the plugin.
        plugin: String,
        /// CNI command.
        command: &'static str,
        /// Time limit.
        limit: Duration,
    },
    /// A plugin cannot be executed.
    #[error("cannot run CNI plugin {plugin} of {}", .dir.display())]
    Run {
        /// Name of the plugin.
        plugin: String,
        /// Directory of the plugins.
        dir: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file or a namespace of this node cannot be changed.
    #[error("cannot {operation}")]
    Node {
        /// Operation that failed.
        operation: String,
        /// Cause.
        source: std::io::Error,
    },
    /// An interface cannot be joined to the network.
    #[error(transparent)]
    Link(#[from] NetError),
}
