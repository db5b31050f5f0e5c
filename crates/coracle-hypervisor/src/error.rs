//! Failures of drivers.

use std::io;
use std::path::PathBuf;

use coracle_types::InstanceId;

/// What can go wrong between the host core and a VMM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver cannot be used on this host.
    #[error("driver {driver} is not available: {reason}")]
    Unavailable {
        /// Which one.
        driver: &'static str,
        /// Why, and what to install.
        reason: String,
    },
    /// No driver of that name is on this node.
    #[error("no driver {name} on this node")]
    Unknown {
        /// As the machine names it.
        name: String,
    },
    /// The program could not be run.
    #[error("start VMM {id}: run {}", .program.display())]
    Spawn {
        /// Which VM.
        id: InstanceId,
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VMM ended before it was ready.
    #[error("start VMM {id}: the VMM exited: {last_words}")]
    Exited {
        /// Which VM.
        id: InstanceId,
        /// The end of its log.
        last_words: String,
    },
    /// The VMM did not become ready in time.
    #[error("start VMM {id}: no answer on the control socket within {seconds} s")]
    NotReady {
        /// Which VM.
        id: InstanceId,
        /// The limit.
        seconds: u64,
    },
    /// A socket of the VMM could not be opened.
    #[error("open the {channel} channel of VMM {id}")]
    Channel {
        /// Which VM.
        id: InstanceId,
        /// guest or console.
        channel: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The VMM refused a command, or did not answer.
    #[error("{operation} VMM {id}")]
    Control {
        /// Which VM.
        id: InstanceId,
        /// The VMM's word for it.
        operation: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Anything else that the operating system refused.
    #[error("{operation}")]
    Io {
        /// What was tried.
        operation: String,
        /// Why not.
        source: io::Error,
    },
}

impl DriverError {
    /// True when the same call may succeed later with nothing changed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Channel { .. } | Self::NotReady { .. } => true,
            Self::Spawn { source, .. } | Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ),
            Self::Unavailable { .. } | Self::Unknown { .. } | Self::Exited { .. } | Self::Control { .. } => {
                false
            }
        }
    }
}
