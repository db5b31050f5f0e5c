//! Errors of the API server as clients see them.

use http::StatusCode;
use serde_json::{Value, json};

use super::kinds::Kind;

/// A `Status` of kind Failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) code: StatusCode,
    reason: &'static str,
    message: String,
}

impl Failure {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    pub(super) fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", format!("{} {name:?} not found", kind.qualified_name()))
    }

    pub(super) fn unknown_path() -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource")
    }

    pub(super) fn already_exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", kind.qualified_name());
        Self::new(StatusCode::CONFLICT, "AlreadyExists", message)
    }

    pub(super) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", kind.qualified_name());
        Self::new(StatusCode::CONFLICT, "Conflict", message)
    }

    pub(super) fn stale(kind: &Kind, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    pub(super) fn apply_conflict(owners: &[String]) -> Self {
        let message = format!("Apply failed with {} conflicts: {}", owners.len(), owners.join("; "));
        Self::new(StatusCode::CONFLICT, "Conflict", message)
    }

    pub(super) fn invalid(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("{}.{} {name:?} is invalid: {why}", kind.kind, kind.group);
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(super) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    pub(super) fn expired() -> Self {
        Self::new(StatusCode::GONE, "Expired", "too old resource version")
    }

    pub(super) fn body(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code.as_u16(),
        })
    }
}
