//! Errors of calls and of the store.

use coracle_auction::Rejection;

/// Refusal of a request, for gRPC and HTTP.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct RequestError {
    /// Error constant such as `OWNER_VERSION`.
    pub code: &'static str,
    /// HTTP status.
    pub status: u16,
    /// Message.
    pub detail: String,
    /// Present version of the owner, if the request named another one.
    pub owner_version: Option<u64>,
    /// Invalid field of the request, if the refusal is about one.
    pub field: Option<&'static str>,
}

impl RequestError {
    pub(crate) fn new(status: u16, code: &'static str, detail: impl Into<String>) -> Self {
        Self { code, status, detail: detail.into(), owner_version: None, field: None }
    }

    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(400, "INVALID_ARGUMENT", detail)
    }

    /// Error of one invalid field.
    pub(crate) fn invalid_field(field: &'static str, detail: impl Into<String>) -> Self {
        Self { field: Some(field), ..Self::invalid(detail) }
    }

    /// Error of an unknown object. Also used for objects of other tenants, so that their existence is not disclosed.
    pub(crate) fn not_found() -> Self {
        Self::new(404, "NOT_FOUND", "not found")
    }

    pub(crate) fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(503, "UNAVAILABLE", detail)
    }
}

impl From<Rejection> for RequestError {
    fn from(refusal: Rejection) -> Self {
        let (status, code) = match refusal {
            Rejection::NotFound => (404, "NOT_FOUND"),
            Rejection::Terminal => (409, "TERMINAL"),
            Rejection::OwnerVersion { .. } => (409, "OWNER_VERSION"),
            Rejection::IdempotencyConflict => (409, "IDEMPOTENCY_CONFLICT"),
            Rejection::Invalid { .. } => (400, "INVALID_ARGUMENT"),
            Rejection::Halted => (503, "HALTED"),
            Rejection::Quota => (429, "QUOTA"),
            Rejection::Budget => (409, "BUDGET"),
            Rejection::TooLate => (409, "TOO_LATE"),
            _ => (500, "REFUSED"),
        };
        let mut problem = Self::new(status, code, refusal.to_string());
        match refusal {
            Rejection::OwnerVersion { current } => problem.owner_version = Some(current),
            Rejection::Invalid { field, .. } => problem.field = Some(field),
            _ => {}
        }
        problem
    }
}

/// Error of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A database operation failed.
    #[error("{operation} in the market's store")]
    Sql {
        /// Name of the operation.
        operation: &'static str,
        /// Cause.
        source: sqlx::Error,
    },
    /// The bytes do not decode as a journal entry or snapshot.
    #[error("read {what} of market {market}")]
    Malformed {
        /// What was decoded: journal or snapshot.
        what: &'static str,
        /// Number of the market.
        market: u32,
        /// Decoding error.
        source: coracle_auction::codec::Malformed,
    },
    /// A group of the journal differs from what was written.
    #[error("journal of market {market}: the chain breaks at command {seq}")]
    Chain {
        /// Number of the market.
        market: u32,
        /// First command of the group.
        seq: i64,
    },
    /// Another process writes to this store.
    #[error("another process holds the store until {until_ms}")]
    Held {
        /// End of its lease, in milliseconds since 1970.
        until_ms: i64,
    },
    /// The address of the store is invalid.
    #[error("invalid store \"{0}\": write sqlite:FILE or postgres://…")]
    Address(String),
}
