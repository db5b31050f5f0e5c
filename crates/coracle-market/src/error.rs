//! Errors of calls and of the store.

use coracle_auction::Rejection;

/// Why a request was refused, for gRPC and HTTP.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {detail}")]
pub struct RequestError {
    /// A constant such as `OWNER_VERSION`.
    pub code: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// Message.
    pub detail: String,
    /// The owner's version, when that is what is wrong.
    pub owner_version: Option<u64>,
    /// The field of the request that is wrong, when it is one.
    pub field: Option<&'static str>,
}

impl RequestError {
    pub(crate) fn new(status: u16, code: &'static str, detail: impl Into<String>) -> Self {
        Self { code, status, detail: detail.into(), owner_version: None, field: None }
    }

    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(400, "INVALID_ARGUMENT", detail)
    }

    /// Something is wrong with one field.
    pub(crate) fn invalid_field(field: &'static str, detail: impl Into<String>) -> Self {
        Self { field: Some(field), ..Self::invalid(detail) }
    }

    /// Also for objects of other tenants, so that their existence is not disclosed.
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

/// The store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The database said no.
    #[error("{operation} in the market's store")]
    Sql {
        /// Operation.
        operation: &'static str,
        /// Why not.
        source: sqlx::Error,
    },
    /// Bytes that do not decode as a journal entry or snapshot.
    #[error("read {what} of market {market}")]
    Malformed {
        /// Journal or snapshot.
        what: &'static str,
        /// The market.
        market: u32,
        /// Reason.
        source: coracle_auction::codec::Malformed,
    },
    /// A group of the journal is not what was written.
    #[error("journal of market {market}: the chain breaks at command {seq}")]
    Chain {
        /// The market.
        market: u32,
        /// First command of the group.
        seq: i64,
    },
    /// Another process writes to this store.
    #[error("another process holds the store until {until_ms}")]
    Held {
        /// Engine time.
        until_ms: i64,
    },
    /// Invalid address of a store.
    #[error("invalid store \"{0}\": write sqlite:FILE or postgres://…")]
    Address(String),
}
