//! Failures in the format of the API server, so that kubectl and client libraries show them.

use axum::Json;
use axum::response::{IntoResponse, Response};
use coracle_microvm::agent::NoHostService;
use http::StatusCode;
use serde_json::json;

/// Failed request (`meta/v1` Status).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

impl Failure {
    fn new(status: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { status, reason, message: message.into() }
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", "requests come through the API server")
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "Conflict", message)
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message)
    }
}

impl From<NoHostService> for Failure {
    fn from(error: NoHostService) -> Self {
        let message = error.to_string();
        match error {
            NoHostService::Unplaced { .. } => Self::conflict(message),
            NoHostService::Unannounced { .. } | NoHostService::Unreachable(_) => Self::unavailable(message),
            NoHostService::Absent { .. } => {
                Self::new(StatusCode::NOT_IMPLEMENTED, "MethodNotAllowed", message)
            }
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.status.as_u16(),
        });
        (self.status, Json(body)).into_response()
    }
}
