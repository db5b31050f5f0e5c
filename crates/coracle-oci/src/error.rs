//! Errors of names, registries and transfers, with stable codes and advice for users.

use std::{io, path::PathBuf};

use crate::{Digest, Reference};

/// Boxed cause. Its text is not repeated in the message of the error.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Failure of an operation on images or registries. The codes are in the documentation of the crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OciError {
    /// The text is not an image reference.
    #[error("invalid image reference {text:?}: {reason}")]
    InvalidReference {
        /// Rejected text.
        text: String,
        /// Broken rule.
        reason: String,
    },
    /// The registry has no such repository, tag or blob.
    #[error("image {image} not found: registry {registry} has no such {what}")]
    NotFound {
        /// Host that answered.
        registry: String,
        /// Requested image.
        image: Box<Reference>,
        /// `manifest`, `repository`, `upload`, or a blob by its digest.
        what: String,
    },
    /// The registry requires other credentials.
    #[error("access to image {image} denied by registry {registry}")]
    Unauthorized {
        /// Host that answered.
        registry: String,
        /// Requested image.
        image: Box<Reference>,
        /// Reason, if the client knows it.
        source: Option<Cause>,
    },
    /// The image has no manifest for the processor of this host.
    #[error("image {image} is for {}, this host needs {need}", .have.join(", "))]
    WrongArchitecture {
        /// Requested image.
        image: String,
        /// Platforms the image has, as `os/architecture`.
        have: Vec<String>,
        /// Platform this host needs.
        need: String,
    },
    /// Content does not match its digest.
    #[error("cannot verify {what}: expected {expected}, got {actual}")]
    DigestMismatch {
        /// Content that was verified.
        what: String,
        /// Announced digest.
        expected: Box<Digest>,
        /// Digest of the received bytes.
        actual: Box<Digest>,
    },
    /// The image breaks a rule that protects the host. None of its content was kept.
    #[error("invalid image content: {what}")]
    Hostile {
        /// Broken rule and the object that breaks it.
        what: String,
    },
    /// Format, media type or entry kind that this version does not read.
    #[error("unsupported image: {what}")]
    Unsupported {
        /// Unsupported property.
        what: String,
    },
    /// The file system is full.
    #[error("cannot {operation}: no space left on the file system")]
    StorageFull {
        /// Operation that needed the space.
        operation: String,
        /// Error of the kernel; absent when free space was checked beforehand.
        source: Option<io::Error>,
    },
    /// The registry could not be reached, or the connection broke. Transient.
    #[error("cannot {operation}: request to registry {registry} failed")]
    Network {
        /// Host of the request.
        registry: String,
        /// Requested operation.
        operation: String,
        /// Error of the HTTP client.
        source: Cause,
    },
    /// The registry answered with an error status.
    #[error("cannot {operation}: registry {registry} answered HTTP status {status}")]
    Registry {
        /// Host that answered.
        registry: String,
        /// Requested operation.
        operation: String,
        /// HTTP status.
        status: u16,
    },
    /// A local file operation failed.
    #[error("cannot {operation} {}", .path.display())]
    Io {
        /// Operation.
        operation: &'static str,
        /// File.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The docker configuration or a credential helper failed.
    #[error("cannot find credentials for registry {registry}: {reason}")]
    Credentials {
        /// Host of the registry.
        registry: String,
        /// Reason.
        reason: String,
        /// Cause, if there is one.
        source: Option<Cause>,
    },
    /// The registry, its token server or a redirect leads to an address that requests of a cluster may not reach.
    #[error("cannot reach {host} for registry {registry}: it is {kind}")]
    AddressNotAllowed {
        /// Registry of the request.
        registry: String,
        /// Refused host.
        host: String,
        /// Kind of its address.
        kind: &'static str,
    },
    /// The registry configuration cannot be read.
    #[error("cannot read {}{}: {reason}", .path.display(), .line.map(|line| format!(" line {line}")).unwrap_or_default())]
    RegistryConfig {
        /// File or directory.
        path: PathBuf,
        /// Line, counted from 1, if known.
        line: Option<usize>,
        /// Reason.
        reason: String,
    },
}

impl OciError {
    /// Stable code for users; the table is in the documentation of the crate.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::InvalidReference { .. } => "COR-IMG-001",
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
            Self::Credentials { .. } => "COR-IMG-016",
            Self::AddressNotAllowed { .. } => "COR-IMG-017",
            Self::RegistryConfig { .. } => "COR-IMG-018",
        }
    }

    /// True when the same call may succeed later without any change: broken connections, busy registries.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Network { .. } => true,
            Self::Registry { status, .. } => matches!(status, 408 | 425 | 429 | 500..=599),
            _ => false,
        }
    }

    /// Advice for users: one sentence.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        Some(match self {
            Self::InvalidReference { .. } => {
                "write it like nginx:1.27, ghcr.io/org/app@sha256:…, oci:DIR[:TAG] or docker-archive:FILE"
                    .to_owned()
            }
            Self::NotFound { image, .. } => {
                format!(
                    "check the name and the tag of {image}; registries answer the same for a private image"
                )
            }
            Self::Unauthorized { registry, .. } => format!(
                "give credentials with `docker login {registry}` (they are read from $DOCKER_CONFIG/config.json or ~/.docker/config.json); \
                 some registries answer the same for an image that does not exist"
            ),
            Self::WrongArchitecture { need, .. } => {
                format!("use a tag or digest of this image that is built for {need}")
            }
            Self::DigestMismatch { .. } => {
                "the registry, a mirror or a proxy delivers wrong bytes; none of them were kept".to_owned()
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
            Self::AddressNotAllowed { host, .. } => {
                format!(
                    "to allow {host}, create a directory for it in the node's --registry-config directory"
                )
            }
            Self::RegistryConfig { .. } => {
                "the file has the format of containerd's hosts.toml: see docs/guides/images.md".to_owned()
            }
            Self::Unsupported { .. } | Self::Registry { .. } | Self::Io { .. } | Self::Credentials { .. } => {
                return None;
            }
        })
    }

    /// File error; a full file system becomes [`OciError::StorageFull`]. A message inside of an error of that kind becomes
    /// part of the text.
    pub fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if is_full(&source) {
            return match source.get_ref() {
                Some(reason) => Self::StorageFull {
                    operation: format!("{operation} {}, where {reason}", path.display()),
                    source: None,
                },
                None => Self::StorageFull {
                    operation: format!("{operation} {}", path.display()),
                    source: Some(source),
                },
            };
        }
        Self::Io { operation, path, source }
    }

    /// [`OciError::DigestMismatch`]
    pub fn digest_mismatch(what: impl Into<String>, expected: Digest, actual: Digest) -> Self {
        Self::DigestMismatch { what: what.into(), expected: expected.into(), actual: actual.into() }
    }

    /// [`OciError::Hostile`]
    pub fn hostile(what: impl Into<String>) -> Self {
        Self::Hostile { what: what.into() }
    }

    /// [`OciError::Unsupported`]
    pub fn unsupported(what: impl Into<String>) -> Self {
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
    fn full_file_system_has_its_own_code() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(OciError::io("write", "/x", full()).code(), "COR-IMG-010");
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(OciError::io("write", "/x", denied).code(), "COR-IMG-013");
    }

    #[test]
    fn transient_table() {
        let status = |status| OciError::Registry { registry: "r".into(), operation: "get".into(), status };
        for (code, want) in [(400, false), (404, false), (429, true), (500, true), (503, true)] {
            assert_eq!(status(code).is_transient(), want, "{code}");
        }
    }
}
