//! Failures of calls to a guest agent.

use std::time::Duration;

use tonic::{Code, Status};

/// Error of a call that the guest agent refused or did not answer. The text comes from the agent: untrusted, and one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct GuestError {
    kind: GuestErrorKind,
    message: String,
}

/// Kind of a [`GuestError`], by which a caller decides what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestErrorKind {
    /// The guest does not have the object.
    NotFound,
    /// The request is invalid.
    Invalid,
    /// The guest did not answer in time.
    TimedOut,
    /// The session ended, or there is none.
    Unavailable,
    /// The state of the guest does not permit the call.
    Precondition,
    /// A limit of the guest is reached.
    Exhausted,
    /// The requested offset does not exist yet: the guest has restarted its output.
    OutOfRange,
    /// Any other error.
    Internal,
}

impl GuestError {
    /// Error for a missing session, with the reason.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { kind: GuestErrorKind::Unavailable, message: message.into() }
    }

    /// Error for a call without an answer within `limit`.
    #[must_use]
    pub fn timed_out(limit: Duration) -> Self {
        let message = format!("no answer within {} ms", limit.as_millis());
        Self { kind: GuestErrorKind::TimedOut, message }
    }

    /// Kind of the error.
    #[must_use]
    pub fn kind(&self) -> GuestErrorKind {
        self.kind
    }
}

impl From<Status> for GuestError {
    fn from(status: Status) -> Self {
        let kind = match status.code() {
            Code::NotFound => GuestErrorKind::NotFound,
            Code::InvalidArgument => GuestErrorKind::Invalid,
            Code::DeadlineExceeded => GuestErrorKind::TimedOut,
            Code::Unavailable | Code::Cancelled => GuestErrorKind::Unavailable,
            Code::FailedPrecondition => GuestErrorKind::Precondition,
            Code::ResourceExhausted => GuestErrorKind::Exhausted,
            Code::OutOfRange => GuestErrorKind::OutOfRange,
            _ => GuestErrorKind::Internal,
        };
        Self { kind, message: status.message().to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_codes_map_to_kinds() {
        for (code, kind) in [
            (Code::NotFound, GuestErrorKind::NotFound),
            (Code::Cancelled, GuestErrorKind::Unavailable),
            (Code::FailedPrecondition, GuestErrorKind::Precondition),
            (Code::OutOfRange, GuestErrorKind::OutOfRange),
            (Code::DataLoss, GuestErrorKind::Internal),
        ] {
            let error = GuestError::from(Status::new(code, "/data is in use"));
            assert_eq!((error.kind(), error.to_string()), (kind, "/data is in use".to_owned()));
        }
    }
}
