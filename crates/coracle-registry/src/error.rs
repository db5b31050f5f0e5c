//! What goes wrong inside, and what a client is told of it.

use std::io;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The store of blobs or of names does not do what it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file.
    #[error("{operation} {path}")]
    File {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: String,
        /// Why it did not work.
        source: io::Error,
    },
    /// The database.
    #[error("{operation} in the registry's database")]
    Sql {
        /// What was tried.
        operation: &'static str,
        /// Why it did not work.
        source: sqlx::Error,
    },
    /// A worker thread.
    #[error("{operation}: the worker ended")]
    Worker {
        /// What was tried.
        operation: &'static str,
    },
    /// An address of a store that is none.
    #[error("{text:?} is no address of a database: sqlite:FILE or postgres://…")]
    Address {
        /// As it was given.
        text: String,
    },
    /// The original's database, which is not one of ours.
    #[error("MySQL is not supported: give a postgres:// address, or none for SQLite")]
    MySql,
    /// Another process has the folder.
    #[error("{path} belongs to another registry that runs")]
    Busy {
        /// The folder.
        path: String,
    },
    /// A request to the object store.
    #[error("{operation} {key} in the object store")]
    S3 {
        /// What was tried.
        operation: &'static str,
        /// On which object.
        key: String,
        /// Why it did not work.
        source: reqwest::Error,
    },
    /// An answer of the object store.
    #[error("{operation} {key} in the object store: it answered with status {status}")]
    S3Status {
        /// What was tried.
        operation: &'static str,
        /// On which object.
        key: String,
        /// What it said.
        status: u16,
    },
    /// An address of an object store that is none.
    #[error("{text:?} is no object store: {why}")]
    S3Address {
        /// As it was given.
        text: String,
        /// What is wrong.
        why: String,
    },
    /// A blob that is being removed at this moment stays in the way.
    #[error("blob {digest} is being removed")]
    Dying {
        /// Which.
        digest: String,
    },
}

impl StoreError {
    pub(crate) fn file(operation: &'static str, path: &std::path::Path, source: io::Error) -> Self {
        Self::File { operation, path: path.display().to_string(), source }
    }

    pub(crate) fn s3(operation: &'static str, key: &str, source: reqwest::Error) -> Self {
        // The address may hold what nobody should read.
        Self::S3 { operation, key: key.to_owned(), source: source.without_url() }
    }

    /// Nothing is free on the disk.
    pub(crate) fn is_full(&self) -> bool {
        match self {
            Self::File { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            // SQLITE_FULL, and PostgreSQL's disk_full.
            Self::Sql { source, .. } => source
                .as_database_error()
                .and_then(|e| e.code())
                .is_some_and(|code| matches!(code.as_ref(), "13" | "53100")),
            _ => false,
        }
    }
}

/// Makes a [`StoreError::Sql`].
pub(crate) fn sql(operation: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
    move |source| StoreError::Sql { operation, source }
}

/// Codes of the distribution specification, and ours where it has none.
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

    /// The status that goes with a code, unless the request says more.
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

/// A request that did not happen, in the form that the specification gives to errors.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    code: Code,
    message: String,
    details: Vec<Value>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Problem {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status: code.status(), code, message, details: Vec::new(), headers: Vec::new() }
    }

    pub(crate) fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// One error more in the answer, about this.
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

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = &error as &dyn std::error::Error, "request not served");
        if error.is_full() {
            return Self::new(Code::StorageFull, "no space is left in the registry");
        }
        if matches!(error, StoreError::Dying { .. }) {
            return Self::new(Code::Unavailable, "the blob is being removed; try again")
                .header(header::RETRY_AFTER, "1");
        }
        Self::new(Code::Unknown, "the registry could not do it; its log says why")
    }
}

impl IntoResponse for Problem {
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
