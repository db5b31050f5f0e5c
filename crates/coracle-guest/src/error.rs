//! Errors of the agent, and their gRPC codes.

use std::fmt::Display;
use std::io;

use tonic::{Code, Status};

/// Error of one request. No error ends the agent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is invalid; repeating it is useless.
    #[error("{0}")]
    Invalid(String),
    /// The request is valid, but not in the current state.
    #[error("{0}")]
    State(String),
    /// The object of the request does not exist.
    #[error("{0}")]
    NotFound(String),
    /// A server inside the guest does not answer (yet).
    #[error("{0}")]
    Unavailable(String),
    /// The operation took longer than its limit.
    #[error("{0} took too long")]
    TimedOut(&'static str),
    /// An operation of another request is still under way.
    #[error("{0}")]
    UnderWay(String),
    /// The kernel refused an operation on an object.
    #[error("{what}")]
    Io {
        /// Operation and object.
        what: String,
        /// Error from the kernel.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: adds the operation and the object.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Display) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what: what.to_string(), source: source.into() }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let message = match &error {
            Error::Io { what, source } => format!("{what}: {source}"),
            other => other.to_string(),
        };
        let code = match &error {
            Error::Invalid(_) => Code::InvalidArgument,
            Error::State(_) => Code::FailedPrecondition,
            Error::NotFound(_) => Code::NotFound,
            Error::Unavailable(_) => Code::Unavailable,
            Error::TimedOut(_) | Error::UnderWay(_) => Code::DeadlineExceeded,
            Error::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => Code::NotFound,
                io::ErrorKind::PermissionDenied => Code::PermissionDenied,
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::NotADirectory => {
                    Code::InvalidArgument
                }
                io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory => Code::ResourceExhausted,
                _ => Code::Internal,
            },
        };
        Self::new(code, message)
    }
}
