//! Error responses.

use axum::response::{IntoResponse, Response};
use coracle_host::{Fault, HostError};
use http::StatusCode;

/// Status and reason, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HttpFailure {
    pub(super) status: StatusCode,
    pub(super) message: String,
}

impl HttpFailure {
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into() }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, message: message.into() }
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self { status: StatusCode::NOT_FOUND, message: message.into() }
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, message: message.into() }
    }

    pub(super) fn unauthorized() -> Self {
        Self { status: StatusCode::UNAUTHORIZED, message: "Unauthorized".to_owned() }
    }

    /// Converts an error of the host core.
    pub(super) fn of_host(error: &HostError) -> Self {
        let status = match error.fault() {
            Fault::NotFound => StatusCode::NOT_FOUND,
            Fault::Invalid | Fault::Precondition => StatusCode::BAD_REQUEST,
            Fault::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, message: error.chain() }
    }
}

impl IntoResponse for HttpFailure {
    fn into_response(self) -> Response {
        (self.status, format!("{}\n", self.message)).into_response()
    }
}
