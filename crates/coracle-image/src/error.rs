//! Errors of the image store, with stable codes and advice for users.

use std::{io, path::PathBuf};

use coracle_oci::OciError;

/// Failure of an operation on the image store. The codes are in the documentation of the crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Error of a name, a registry, a transfer or the content of an image.
    #[error(transparent)]
    Oci(#[from] OciError),
    /// A local source (`oci:…`, `docker-archive:…`) cannot be imported.
    #[error("invalid image source {source_text:?}: {reason}")]
    InvalidSource {
        /// Rejected source.
        source_text: String,
        /// Reason.
        reason: String,
    },
    /// The image is not in the store, and the policy forbids a pull.
    #[error("image {image} not found in the store")]
    NotPresent {
        /// Requested reference or digest.
        image: String,
    },
    /// Another process has this store open.
    #[error("cannot open image store {}: another process uses it", .path.display())]
    StoreBusy {
        /// Directory of the store.
        path: PathBuf,
    },
    /// A file of the store is damaged.
    #[error("cannot read {} of the image store: {reason}", .path.display())]
    Corrupt {
        /// File.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
}

impl ImageError {
    /// Stable code for users; the tables are in the documentation of this crate and of `coracle-oci`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Oci(error) => error.code(),
            Self::InvalidSource { .. } => "COR-IMG-002",
            Self::NotPresent { .. } => "COR-IMG-003",
            Self::StoreBusy { .. } => "COR-IMG-014",
            Self::Corrupt { .. } => "COR-IMG-015",
        }
    }

    /// True when the same call may succeed later without any change: broken connections, busy registries.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Oci(error) if error.is_transient())
    }

    /// Advice for users: one sentence.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        Some(match self {
            Self::Oci(error) => return error.help(),
            Self::InvalidSource { .. } => return None,
            Self::NotPresent { .. } => "pull it first, or use the pull policy IfNotPresent".to_owned(),
            Self::StoreBusy { .. } => {
                "stop the other coracle process, or use another state directory".to_owned()
            }
            Self::Corrupt { path, .. } => {
                format!("remove {} and pull the images again; the blobs are kept and reused", path.display())
            }
        })
    }

    /// File error, see [`OciError::io`].
    pub fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        OciError::io(operation, path, source).into()
    }

    /// [`OciError::Hostile`]
    pub fn hostile(what: impl Into<String>) -> Self {
        OciError::hostile(what).into()
    }

    /// [`OciError::Unsupported`]
    pub fn unsupported(what: impl Into<String>) -> Self {
        OciError::unsupported(what).into()
    }
}
