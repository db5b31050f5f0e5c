//! From layers to one read-only root file system.
//!
//! Layers are read from the topmost down, so that what an upper layer hides is known before its bytes arrive
//! and is never written. Only metadata is held in memory; nothing is extracted anywhere. Semantics: OCI image
//! specification, "Image Layer Filesystem Changeset". Where a path leads through something that is no
//! directory, the upper layer wins; within one layer it is refused. Links are never followed.

mod build;
mod flatten;
mod layer;
pub(crate) mod path;
mod stand_in;
mod tree;
mod unpack;

use std::path::PathBuf;

pub(crate) use build::{Job, LayerFile, build, uuid};
pub use stand_in::stand_in;
pub(crate) use unpack::{Budget, Unpacked};

/// A root file system in the store. Open `path` read-only and share it: it never changes, and it stays
/// readable while open even when the image is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rootfs {
    /// An EROFS file.
    pub path: PathBuf,
    /// Its apparent size; blocks of zeros take no space on disk.
    pub bytes: u64,
}
