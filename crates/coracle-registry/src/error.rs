//! Internal errors and error responses.

use std::io;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Failure of the storage or of the database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file operation failed.
    #[error("cannot {operation} {path}")]
    File {
        /// Operation.
        operation: &'static str,
        /// File.
        path: String,
        /// Cause.
        source: io::Error,
    },
    /// A database operation failed.
    #[error("cannot {operation} in the database of the registry")]
    Sql {
        /// Operation.
        operation: &'static str,
        /// Cause.
        source: sqlx::Error,
    },
    /// A worker thread panicked.
    #[error("cannot {operation}: the worker thread ended")]
    Worker {
        /// Operation.
        operation: &'static str,
    },
    /// The address of a database is invalid.
    #[error("invalid database address {text:?}: give sqlite:FILE or postgres://…")]
    Address {
        /// Rejected text.
        text: String,
    },
    /// The address is of MySQL, which epoch supports and this registry does not.
    #[error("MySQL is not supported: give a postgres:// address, or none for SQLite")]
    MySql,
    /// Another process uses the directory.
    #[error("{path} belongs to another registry, which is running")]
    Busy {
        /// Directory.
        path: String,
    },
    /// A request to the object store failed.
    #[error("cannot {operation} {key} in the object store")]
    S3 {
        /// Operation.
        operation: &'static str,
        /// Key of the object.
        key: String,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The size of an object is wrong.
    #[error("{key} in the object store has {size} bytes instead of {want}")]
    S3Size {
        /// Key of the object.
        key: String,
        /// Size of the object, bytes.
        size: u64,
        /// Expected size or limit, bytes.
        want: u64,
    },
    /// The object store answered with an error status.
    #[error("cannot {operation} {key} in the object store: HTTP status {status}")]
    S3Status {
        /// Operation.
        operation: &'static str,
        /// Key of the object.
        key: String,
        /// HTTP status.
        status: u16,
    },
    /// The address of an object store is invalid.
    #[error("invalid object store address {text:?}: {why}")]
    S3Address {
        /// Rejected text.
        text: String,
        /// Reason.
        why: String,
    },
    /// A sweep is removing the blob.
    #[error("blob {digest} is being removed")]
    Dying {
        /// Digest of the blob.
        digest: String,
    },
}

impl StoreError {
    pub(crate) fn file(operation: &'static str, path: &std::path::Path, source: io::Error) -> Self {
        Self::File { operation, path: path.display().to_string(), source }
    }

    /// True when the file system or the database is full.
    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::File { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            // SQLITE_FULL in SQLite, disk_full in PostgreSQL.
            Self::Sql { source, .. } => source
                .as_database_error()
                .and_then(|e| e.code())
                .is_some_and(|code| matches!(code.as_ref(), "13" | "53100")),
            _ => false,
        }
    }
}

/// Creates a [`StoreError::Sql`].
pub(crate) fn sql(operation: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
    move |source| StoreError::Sql { operation, source }
}

/// Error codes of the distribution specification, and codes of this registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    BlobUnknown,
    BlobUploadInvalid,
    BlobUploadUnknown,
    DigestInvalid,
    ManifestBlobUnknown,
    ManifestInvalid,
    ManifestUnknown,
    NameInvalid,
    NameUnknown,
    SizeInvalid,
    TagInvalid,
    Unauthorized,
    Denied,
    Unsupported,
    PaginationNumberInvalid,
    StorageFull,
    Unavailable,
    Unknown,
}

impl Code {
    fn word(self) -> &'static str {
        match self {
            Self::BlobUnknown => "BLOB_UNKNOWN",
            Self::BlobUploadInvalid => "BLOB_UPLOAD_INVALID",
            Self::BlobUploadUnknown => "BLOB_UPLOAD_UNKNOWN",
            Self::DigestInvalid => "DIGEST_INVALID",
            Self::ManifestBlobUnknown => "MANIFEST_BLOB_UNKNOWN",
            Self::ManifestInvalid => "MANIFEST_INVALID",
            Self::ManifestUnknown => "MANIFEST_UNKNOWN",
            Self::NameInvalid => "NAME_INVALID",
            Self::NameUnknown => "NAME_UNKNOWN",
            Self::SizeInvalid => "SIZE_INVALID",
            Self::TagInvalid => "TAG_INVALID",
            Self::Unauthorized => "UNAUTHORIZED",
            Self::Denied => "DENIED",
            Self::Unsupported => "UNSUPPORTED",
            Self::PaginationNumberInvalid => "PAGINATION_NUMBER_INVALID",
            Self::StorageFull => "STORAGE_FULL",
            Self::Unavailable => "UNAVAILABLE",
            Self::Unknown => "UNKNOWN",
        }
    }

    /// Default HTTP status of a code.
    fn status(self) -> StatusCode {
        match self {
            Self::BlobUnknown | Self::BlobUploadUnknown | Self::ManifestUnknown | Self::NameUnknown => {
                StatusCode::NOT_FOUND
            }
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Denied => StatusCode::FORBIDDEN,
            Self::Unsupported => StatusCode::METHOD_NOT_ALLOWED,
            Self::StorageFull => StatusCode::INSUFFICIENT_STORAGE,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
            Self::BlobUploadInvalid
            | Self::DigestInvalid
            | Self::ManifestBlobUnknown
            | Self::ManifestInvalid
            | Self::NameInvalid
            | Self::SizeInvalid
            | Self::TagInvalid
            | Self::PaginationNumberInvalid => StatusCode::BAD_REQUEST,
        }
    }
}

/// Error response, with a body in the form of the specification.
#[derive(Debug)]
pub(crate) struct ErrorResponse {
    pub(crate) status: StatusCode,
    code: Code,
    message: String,
    details: Vec<Value>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl ErrorResponse {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status: code.status(), code, message, details: Vec::new(), headers: Vec::new() }
    }

    pub(crate) fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Adds an error with this detail to the body of the response.
    pub(crate) fn detail(mut self, detail: Value) -> Self {
        self.details.push(detail);
        self
    }

    pub(crate) fn header(mut self, name: HeaderName, value: &str) -> Self {
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.push((name, value));
        }
        self
    }
}

impl From<StoreError> for ErrorResponse {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "serve request failed");
        if error.is_full() {
            return Self::new(Code::StorageFull, "no space left in the registry");
        }
        if matches!(error, StoreError::Dying { .. }) {
            return Self::new(Code::Unavailable, "the blob is being removed; try again")
                .header(header::RETRY_AFTER, "1");
        }
        Self::new(Code::Unknown, "internal error of the registry; see its log")
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let one = |detail: Option<&Value>| {
            let mut error = json!({"code": self.code.word(), "message": self.message});
            if let Some(detail) = detail {
                error["detail"] = detail.clone();
            }
            error
        };
        let errors: Vec<_> = match self.details.is_empty() {
            true => vec![one(None)],
            false => self.details.iter().map(|d| one(Some(d))).collect(),
        };
        let mut response = (self.status, Json(json!({"errors": errors}))).into_response();
        response.headers_mut().extend(self.headers);
        response
    }
}
