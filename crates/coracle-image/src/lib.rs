//! OCI images on one host: references, pull, a content-addressed store, and read-only root file systems.
//!
//! A VM never gets layers. It gets one EROFS file per image, made once from all layers and shared by every VM
//! that runs it.
//!
//! ```text
//! Reference ─resolve─▶ manifest ─▶ config + layers ─verify─▶ blobs/sha256/… ─flatten─▶ rootfs/<chain-id>.erofs ─▶ VMs (read-only)
//!     oci:DIR, docker-archive:FILE ──────────────────────────────▲
//! ```
//!
//! What this crate never does: unpack an archive onto the host's file system (a hostile layer has no path to
//! escape to), hold a layer in memory, show a blob before its digest was verified, or change a file once it
//! is visible in the store.
//!
//! # Error codes
//!
//! The codes are stable; [`ImageError::code`] gives them.
//!
//! | code | kind | meaning |
//! |---|---|---|
//! | `COR-IMG-001` | [`ImageError::InvalidReference`] | the text is no image reference |
//! | `COR-IMG-002` | [`ImageError::InvalidSource`] | the local source cannot be imported |
//! | `COR-IMG-003` | [`ImageError::NotPresent`] | not in the store, and the policy forbids pulling |
//! | `COR-IMG-004` | [`ImageError::NotFound`] | the registry has no such image |
//! | `COR-IMG-005` | [`ImageError::Unauthorized`] | the registry wants (other) credentials |
//! | `COR-IMG-006` | [`ImageError::WrongArchitecture`] | the image is for other machines |
//! | `COR-IMG-007` | [`ImageError::DigestMismatch`] | the bytes are not what the digest says |
//! | `COR-IMG-008` | [`ImageError::Hostile`] | the image breaks a rule that protects the host |
//! | `COR-IMG-009` | [`ImageError::Unsupported`] | a format or media type this version does not read |
//! | `COR-IMG-010` | [`ImageError::StorageFull`] | no space left for the image |
//! | `COR-IMG-011` | [`ImageError::Network`] | the registry could not be reached or hung up |
//! | `COR-IMG-012` | [`ImageError::Registry`] | the registry answered with an error status |
//! | `COR-IMG-013` | [`ImageError::Io`] | a local file operation |
//! | `COR-IMG-014` | [`ImageError::StoreBusy`] | another process owns the store |
//! | `COR-IMG-015` | [`ImageError::Corrupt`] | a file of the store does not parse |
//! | `COR-IMG-016` | [`ImageError::Credentials`] | the docker configuration or a credential helper |

mod auth;
mod commit;
mod digest;
mod disk;
mod erofs;
mod error;
mod export;
#[doc(hidden)]
pub mod fuzz;
mod image;
mod import;
mod limits;
mod manifest;
mod platform;
mod progress;
mod pull;
mod push;
mod reference;
mod registry;
mod rootfs;
mod source;
mod space;
mod sparse;
mod store;
mod tarball;

pub use auth::{Credentials, Secret};
pub use commit::MachineRoot;
pub use digest::{Digest, InvalidDigest};
pub use disk::{
    CocoonVersion, DiskFormat, DiskOptions, DiskProgress, DiskReport, RemoteSnapshot, SnapshotBase,
    SnapshotFile, cocoon_head, empty_overlay, find_snapshot, pull_cocoon, pull_disk, push_cocoon, push_disk,
    push_snapshot, raw_copy,
};
pub use error::ImageError;
pub use image::{Descriptor, ExposedPort, Image, ImageConfig, Layer, Protocol};
pub use limits::Limits;
pub use platform::Platform;
pub use progress::{NoProgress, Progress, ProgressEvent, Step};
pub use pull::{PullOptions, PullPolicy};
pub use push::{PushOptions, PushReport};
pub use reference::Reference;
pub use registry::{RegistryConfig, Timeouts};
pub use rootfs::{Rootfs, stand_in};
pub use source::Source;
pub use store::{PruneReport, Removed, Store, StoreOptions};
