//! Container images on one host: pull, a content-addressed store, and read-only root file systems.
//!
//! A VM never mounts layers. It gets one EROFS file per image, made from all layers and shared by all VMs of the image.
//!
//! ```text
//! Reference ─resolve─▶ manifest ─▶ config + layers ─verify─▶ blobs/sha256/… ─flatten─▶ rootfs/<chain-id>.erofs ─▶ VMs
//!     oci:DIR, docker-archive:FILE ──────────────────────────────▲
//! ```
//!
//! The modules, from the bottom up: `tarball` and `decompress` read layers, `rootfs` and `erofs` turn them into a file system,
//! `content` keeps the files of the store, `pull`, `push`, `import`, `export` and `commit` are the operations, and [`Store`] is
//! the public API.
//!
//! Registries are reached through `coracle-oci`. `coracle-disk` depends on this crate for its archive readers. This crate never
//! unpacks an archive onto the file system of the host (so a hostile layer cannot escape), never holds a layer in memory, shows
//! no blob before its digest is verified, and never changes a file that is visible in the store.
//!
//! # Error codes
//!
//! The codes are stable; [`ImageError::code`] returns them. Codes of names, registries and transfers are in
//! [`coracle_oci`].
//!
//! | code | kind | meaning |
//! |---|---|---|
//! | `COR-IMG-002` | [`ImageError::InvalidSource`] | the local source cannot be imported |
//! | `COR-IMG-003` | [`ImageError::NotPresent`] | not in the store, and the policy forbids a pull |
//! | `COR-IMG-014` | [`ImageError::StoreBusy`] | another process uses the store |
//! | `COR-IMG-015` | [`ImageError::Corrupt`] | a file of the store is damaged |

mod commit;
mod compression;
mod content;
mod decompress;
mod erofs;
mod error;
mod export;
#[doc(hidden)]
pub mod fuzz;
mod image;
mod import;
mod limits;
mod manifest;
mod pull;
mod push;
mod rootfs;
mod signature;
mod source;
pub mod space;
pub mod sparse;
mod store;
pub mod tarball;

pub use commit::{RootKind, VmRoot};
pub use compression::Compression;
pub use content::{
    StoreOptions,
    prune::{PruneReport, Removed},
};
pub use decompress::{Budget, DecompressReader};
pub use error::ImageError;
pub use image::{ExposedPort, Image, ImageConfig, ImageName, Layer, Protocol};
pub use limits::Limits;
pub use pull::{PullOptions, PullPolicy};
pub use push::{PushOptions, PushReport};
pub use rootfs::{Rootfs, warmup_rootfs};
pub use signature::{InvalidPublicKey, PublicKeys, SignatureError};
pub use source::Source;
pub use store::Store;
