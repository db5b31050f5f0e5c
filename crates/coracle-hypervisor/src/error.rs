//! Errors of drivers.

use std::io;
use std::path::PathBuf;

use coracle_types::InstanceId;

/// Failure between the host core and a VMM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver cannot be used on this host.
    #[error("driver {driver} is not available: {reason}")]
    Unavailable {
        /// Name of the driver.
        driver: &'static str,
        /// Reason, and what to install.
        reason: String,
    },
    /// The node has no driver of this name.
    #[error("no driver {name} on this node")]
    Unknown {
        /// Driver name that the VM asks for.
        name: String,
    },
    /// The program could not be run.
    #[error("start VMM {id}: run {}", .program.display())]
    Spawn {
        /// Id of the VMM instance.
        id: InstanceId,
        /// Path of the program.
        program: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The VMM ended before it was ready.
    #[error("start VMM {id}: the VMM exited: {last_words}")]
    Exited {
        /// Id of the VMM instance.
        id: InstanceId,
        /// End of the VMM's log.
        last_words: String,
    },
    /// The VMM did not become ready in time.
    #[error("start VMM {id}: no answer on the control socket within {seconds} s")]
    NotReady {
        /// Id of the VMM instance.
        id: InstanceId,
        /// Time limit.
        seconds: u64,
    },
    /// A socket of the VMM could not be opened.
    #[error("open the {channel} channel of VMM {id}")]
    Channel {
        /// Id of the VMM instance.
        id: InstanceId,
        /// `guest`, `console` or `display`.
        channel: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The VMM refused a command, or did not answer.
    #[error("{operation} VMM {id}")]
    Control {
        /// Id of the VMM instance.
        id: InstanceId,
        /// Command, in the words of the VMM.
        operation: &'static str,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Any other failure of the operating system.
    #[error("{operation}")]
    Io {
        /// Operation that failed.
        operation: String,
        /// Cause.
        source: io::Error,
    },
}

impl DriverError {
    /// Returns true when the same call may succeed later without any change.
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
