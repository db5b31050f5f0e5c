//! Errors of the controller.

use coracle_reconcile::{ApplyError, ElectionError};
use coracle_vm_inputs::ReadError;

use crate::agent::AgentError;

/// Reason why a reconcile, or the controller, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call to the agent failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// A write to the API server failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A read from the API server failed.
    #[error("read MikromVM {namespace}/{name}")]
    Read {
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
        /// Error of the API server.
        source: Box<kube::Error>,
    },
    /// An object that the VM refers to could not be read.
    #[error(transparent)]
    Inputs(#[from] ReadError),
    /// The object changed in every round of the reconcile.
    #[error("reconcile MikromVM {namespace}/{name}: still changing after the last round")]
    Unsettled {
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
    },
    /// The leader election failed.
    #[error(transparent)]
    Election(#[from] ElectionError),
}
