//! Everything that can go wrong with an image, and what a user can do about it.

use std::{io, path::PathBuf};

use crate::{Digest, Reference};

/// Boxed cause. Its text is never repeated in a message.
pub(crate) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why an operation on images did not happen. The codes are in the crate's documentation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The text is no image reference.
    #[error("parse image reference {text:?}: {reason}")]
    InvalidReference {
        /// What was given.
        text: String,
        /// Which rule it breaks.
        reason: String,
    },
    /// A local source (`oci:…`, `docker-archive:…`) does not hold what was asked for.
    #[error("read image source {source_text}: {reason}")]
    InvalidSource {
        /// What was given.
        source_text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The image is not in the store, and the policy forbids asking a registry.
    #[error("image {image} is not in the store")]
    NotPresent {
        /// Reference or digest that was asked for.
        image: String,
    },
    /// The registry has no such repository, tag or blob.
    #[error("registry {registry} has no {what} for image {image}")]
    NotFound {
        /// Host that answered.
        registry: String,
        /// The image asked for.
        image: Box<Reference>,
        /// `manifest` or a blob's digest.
        what: String,
    },
    /// The registry refused for want of (other) credentials.
    #[error("registry {registry} refuses access to {image}")]
    Unauthorized {
        /// Host that answered.
        registry: String,
        /// The image asked for.
        image: Box<Reference>,
        /// What the token server said, if it said something.
        source: Option<Cause>,
    },
    /// The image has nothing for this host's processor.
    #[error("image {image} is for {}, this host needs {need}", .have.join(", "))]
    WrongArchitecture {
        /// The image asked for.
        image: String,
        /// Platforms the image has, as `os/architecture`.
        have: Vec<String>,
        /// Platform this host needs.
        need: String,
    },
    /// Bytes do not hash to the digest that names them.
    #[error("verify {what}: expected {expected}, the bytes are {actual}")]
    DigestMismatch {
        /// Which bytes.
        what: String,
        /// The digest that was promised.
        expected: Digest,
        /// The digest of what came.
        actual: Digest,
    },
    /// The image breaks a rule that protects the host. Nothing of it was kept.
    #[error("refuse image content: {what}")]
    Hostile {
        /// The rule and the offending object.
        what: String,
    },
    /// A format, media type or entry kind this version does not read.
    #[error("read image: {what}")]
    Unsupported {
        /// The thing by its name.
        what: String,
    },
    /// The file system of the store is full.
    #[error("{operation}: no space left in the image store")]
    StorageFull {
        /// What needed the space.
        operation: String,
        /// What the kernel said; absent when the lack was seen beforehand.
        source: Option<io::Error>,
    },
    /// The registry could not be reached, or the connection broke. Transient.
    #[error("{operation} from registry {registry}")]
    Network {
        /// Host that was asked.
        registry: String,
        /// What was asked.
        operation: String,
        /// What the HTTP client said.
        source: Cause,
    },
    /// The registry answered with an error status.
    #[error("{operation}: registry {registry} answered HTTP status {status}")]
    Registry {
        /// Host that answered.
        registry: String,
        /// What was asked.
        operation: String,
        /// HTTP status.
        status: u16,
    },
    /// A local file operation.
    #[error("{operation} {}", .path.display())]
    Io {
        /// What was done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another process has this store open.
    #[error("open image store {}: another process owns it", .path.display())]
    StoreBusy {
        /// The store's directory.
        path: PathBuf,
    },
    /// A file of the store does not parse.
    #[error("read {} of the image store: {reason}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The docker configuration or a credential helper failed.
    #[error("find credentials for registry {registry}: {reason}")]
    Credentials {
        /// Host the credentials are for.
        registry: String,
        /// What is wrong.
        reason: String,
        /// The cause, if there is one.
        source: Option<Cause>,
    },
}

impl ImageError {
    /// Stable user code; the table is in the crate's documentation.
    pub fn code(&self) -> &'static str {
        match self {
            Self::InvalidReference { .. } => "COR-IMG-001",
            Self::InvalidSource { .. } => "COR-IMG-002",
            Self::NotPresent { .. } => "COR-IMG-003",
            Self::NotFound { .. } => "COR-IMG-004",
            Self::Unauthorized { .. } => "COR-IMG-005",
            Self::WrongArchitecture { .. } => "COR-IMG-006",
            Self::DigestMismatch { .. } => "COR-IMG-007",
            Self::Hostile { .. } => "COR-IMG-008",
            Self::Unsupported { .. } => "COR-IMG-009",
            Self::StorageFull { .. } => "COR-IMG-010",
            Self::Network { .. } => "COR-IMG-011",
            Self::Registry { .. } => "COR-IMG-012",
            Self::Io { .. } => "COR-IMG-013",
            Self::StoreBusy { .. } => "COR-IMG-014",
            Self::Corrupt { .. } => "COR-IMG-015",
            Self::Credentials { .. } => "COR-IMG-016",
        }
    }

    /// True when the same call may succeed later with nothing changed: broken connections, busy registries.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Network { .. } => true,
            Self::Registry { status, .. } => matches!(status, 408 | 425 | 429 | 500..=599),
            _ => false,
        }
    }

    /// One sentence that says what a user can do, where there is something to do.
    pub fn help(&self) -> Option<String> {
        Some(match self {
            Self::InvalidReference { .. } => {
                "write it like nginx:1.27, ghcr.io/org/app@sha256:…, oci:DIR[:TAG] or docker-archive:FILE"
                    .to_owned()
            }
            Self::NotPresent { .. } => "pull it first, or use the pull policy IfNotPresent".to_owned(),
            Self::NotFound { image, .. } => {
                format!("check the name and the tag of {image}; a private image may hide behind this answer")
            }
            Self::Unauthorized { registry, .. } => format!(
                "give credentials with `docker login {registry}` (they are read from $DOCKER_CONFIG/config.json or ~/.docker/config.json); \
                 some registries answer so for an image that does not exist"
            ),
            Self::WrongArchitecture { need, .. } => {
                format!("use a tag or digest of this image that is built for {need}")
            }
            Self::DigestMismatch { .. } => {
                "the registry, a mirror or a proxy delivers wrong bytes; nothing was kept".to_owned()
            }
            Self::Hostile { .. } => {
                "do not run this image; if you trust its maker, ask for a rebuild".to_owned()
            }
            Self::StorageFull { .. } => {
                "free space with an image prune, or move the state directory to a larger disk".to_owned()
            }
            Self::Network { registry, .. } => {
                format!("check that {registry} can be reached from this host, then try again")
            }
            Self::Registry { status: 429, .. } => {
                "the registry limits requests: log in, use a mirror, or wait".to_owned()
            }
            Self::StoreBusy { .. } => {
                "stop the other coracle process, or use another state directory".to_owned()
            }
            Self::Corrupt { path, .. } => {
                format!("remove {} and pull the images again; the blobs are kept and reused", path.display())
            }
            Self::InvalidSource { .. }
            | Self::Unsupported { .. }
            | Self::Registry { .. }
            | Self::Io { .. }
            | Self::Credentials { .. } => return None,
        })
    }

    /// Wraps a file error; a full disk becomes its own kind wherever it is met.
    pub(crate) fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if is_full(&source) {
            return Self::StorageFull {
                operation: format!("{operation} {}", path.display()),
                source: Some(source),
            };
        }
        Self::Io { operation, path, source }
    }

    pub(crate) fn hostile(what: impl Into<String>) -> Self {
        Self::Hostile { what: what.into() }
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into() }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_its_own_kind() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(ImageError::io("write", "/x", full()).code(), "COR-IMG-010");
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(ImageError::io("write", "/x", denied).code(), "COR-IMG-013");
    }

    #[test]
    fn transient_table() {
        let status = |status| ImageError::Registry { registry: "r".into(), operation: "get".into(), status };
        for (code, want) in [(400, false), (404, false), (429, true), (500, true), (503, true)] {
            assert_eq!(status(code).is_transient(), want, "{code}");
        }
    }
}
