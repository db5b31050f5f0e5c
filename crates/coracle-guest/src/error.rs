//! What can go wrong in the agent, and the gRPC code it becomes.

use std::fmt::Display;
use std::io;

use tonic::{Code, Status};

/// An error of one request. None of them ends the agent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request itself is wrong; repeating it is of no use.
    #[error("{0}")]
    Invalid(String),
    /// The request is fine, but not in this state.
    #[error("{0}")]
    State(String),
    /// The object of the request does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The peer inside the guest does not answer (yet).
    #[error("{0}")]
    Unavailable(String),
    /// The operation took longer than its limit.
    #[error("{0} took too long")]
    TimedOut(&'static str),
    /// An operation that another request began is still under way, with what it waits for.
    #[error("{0}")]
    UnderWay(String),
    /// The kernel refused an operation on an object.
    #[error("{what}")]
    Io {
        /// Operation and object.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: names the operation and the object.
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
