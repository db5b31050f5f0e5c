//! Why CNI plugins made no network.

use std::path::PathBuf;
use std::time::Duration;

use crate::NetError;

/// Why a VM has no network of a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CniError {
    /// No file of the directory has this network.
    #[error("CNI network {name} not found in {}", .dir.display())]
    NotFound {
        /// What was asked for.
        name: String,
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// A file of the directory cannot be used.
    #[error("invalid CNI configuration {}: {reason}", .path.display())]
    Configuration {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The network cannot do what the VM wishes.
    #[error("CNI network {network} has no plugin with the capability {capability}")]
    Capability {
        /// The network.
        network: String,
        /// What was wished.
        capability: &'static str,
    },
    /// A plugin refused.
    #[error("CNI plugin {plugin} refused {command}: {message} (code {code})")]
    Refused {
        /// The plugin.
        plugin: String,
        /// What was asked.
        command: &'static str,
        /// What it answered.
        message: String,
        /// Its error code.
        code: i64,
    },
    /// A plugin did not answer as the specification says.
    #[error("invalid answer of CNI plugin {plugin} to {command}: {reason}")]
    Answer {
        /// The plugin.
        plugin: String,
        /// What was asked.
        command: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A plugin did not end in time, and was killed.
    #[error("CNI plugin {plugin} did not end {command} within {} s", .limit.as_secs())]
    Hangs {
        /// The plugin.
        plugin: String,
        /// What was asked.
        command: &'static str,
        /// What it had.
        limit: Duration,
    },
    /// A plugin cannot be run.
    #[error("cannot run CNI plugin {plugin} of {}", .dir.display())]
    Run {
        /// The plugin.
        plugin: String,
        /// Where plugins are.
        dir: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file or a namespace of this node cannot be changed.
    #[error("cannot {operation}")]
    Node {
        /// What was tried.
        operation: String,
        /// Why not.
        source: std::io::Error,
    },
    /// An interface cannot be joined to the network.
    #[error(transparent)]
    Link(#[from] NetError),
}
