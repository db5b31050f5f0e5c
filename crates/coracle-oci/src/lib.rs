//! The client side of OCI registries: names, digests, manifests, credentials, requests and blob transfers.
//!
//! ```text
//! Reference ─▶ Registries (hosts.toml: mirrors, TLS) ─▶ Client ─login─▶ Session ─▶ manifests
//!                                                                          └─transfer─▶ blobs ⇄ memory, files
//! ```
//!
//! This is the lowest of the image crates: `coracle-registry` uses its vocabulary, `coracle-image` and `coracle-disk` also its
//! client. This crate keeps no store, unpacks no layers, and knows nothing of file systems or VMs.
//!
//! # Error codes
//!
//! The codes are stable; [`OciError::code`] returns them. `coracle-image` has the codes of the store.
//!
//! | code | kind | meaning |
//! |---|---|---|
//! | `COR-IMG-001` | [`OciError::InvalidReference`] | the text is not an image reference |
//! | `COR-IMG-004` | [`OciError::NotFound`] | the registry has no such image |
//! | `COR-IMG-005` | [`OciError::Unauthorized`] | the registry requires (other) credentials |
//! | `COR-IMG-006` | [`OciError::WrongArchitecture`] | the image is for another processor |
//! | `COR-IMG-007` | [`OciError::DigestMismatch`] | content does not match its digest |
//! | `COR-IMG-008` | [`OciError::Hostile`] | the image breaks a rule that protects the host |
//! | `COR-IMG-009` | [`OciError::Unsupported`] | format or media type that this version does not read |
//! | `COR-IMG-010` | [`OciError::StorageFull`] | no space left on the file system |
//! | `COR-IMG-011` | [`OciError::Network`] | the registry could not be reached, or the connection broke |
//! | `COR-IMG-012` | [`OciError::Registry`] | the registry answered with an error status |
//! | `COR-IMG-013` | [`OciError::Io`] | a local file operation failed |
//! | `COR-IMG-016` | [`OciError::Credentials`] | the docker configuration or a credential helper failed |
//! | `COR-IMG-017` | [`OciError::AddressNotAllowed`] | a request of a cluster leads to an address of this host |
//! | `COR-IMG-018` | [`OciError::RegistryConfig`] | the registry configuration cannot be read |

mod auth;
mod client;
pub mod cocoon;
mod digest;
mod error;
mod manifest;
pub mod media_types;
mod names;
mod platform;
mod progress;
mod reference;
mod transfer;

pub use auth::{Credentials, InvalidPullSecret, PullSecret, Secret};
pub use client::{
    Capabilities, Client, Endpoint, InvalidHosts, ManifestBytes, Operation, PullOrigin, Registries,
    RegistryHost, RegistryHosts, RetryPolicy, Session, Timeouts,
};
pub use digest::{Algorithm, Digest, Hasher, HashingWriter, InvalidDigest};
pub use error::{Cause, OciError};
pub use manifest::{Descriptor, IndexEntry, InvalidDescriptor, Manifest, RawDescriptor, select};
pub use names::{InvalidName, RepositoryName, Tag, TagOrDigest};
pub use platform::Platform;
pub use progress::{Meter, NoProgress, Progress, ProgressEvent, Step};
pub use reference::Reference;
pub use transfer::{BlobFile, Offered, Payload, SentBytes, fetch_bytes, fetch_file, fetch_unverified};
