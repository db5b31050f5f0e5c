//! Mapping from errors of the host core to gRPC.

use coracle_host::{Fault, HostError};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

/// Status with the code and causes of `error`, and as metadata its stable code (`coracle-code`) and help text
/// (`coracle-help-bin`).
#[must_use]
pub fn to_status(error: &HostError) -> Status {
    let mut metadata = MetadataMap::new();
    metadata.insert("coracle-code", MetadataValue::from_static(error.code()));
    if let Some(help) = error.help() {
        metadata.insert_bin("coracle-help-bin", MetadataValue::from_bytes(help.as_bytes()));
    }
    Status::with_metadata(code(error.fault()), error.chain(), metadata)
}

fn code(fault: Fault) -> Code {
    match fault {
        Fault::NotFound => Code::NotFound,
        Fault::AlreadyExists => Code::AlreadyExists,
        Fault::Invalid => Code::InvalidArgument,
        Fault::Exhausted => Code::ResourceExhausted,
        Fault::Precondition => Code::FailedPrecondition,
        Fault::Unavailable => Code::Unavailable,
        Fault::TimedOut => Code::DeadlineExceeded,
        Fault::Denied => Code::PermissionDenied,
        Fault::Internal => Code::Internal,
    }
}

/// Status of an invalid request, with the reason.
pub(crate) fn invalid(why: impl ToString) -> Status {
    to_status(&HostError::Invalid { message: why.to_string() })
}

/// Converts results of the host core for `?` in a gRPC handler.
pub(crate) trait OrStatus<T> {
    /// Returns the value, or [`to_status`] of the error.
    fn or_status(self) -> Result<T, Status>;
}

impl<T> OrStatus<T> for Result<T, HostError> {
    fn or_status(self) -> Result<T, Status> {
        self.map_err(|error| to_status(&error))
    }
}
