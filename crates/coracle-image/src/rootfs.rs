//! Flattens layers into one read-only root file system.
//!
//! Layers are read from the topmost to the lowest: content that an upper layer hides is known before its bytes arrive, and is
//! never written. Only metadata is held in memory, and no file is extracted. Semantics: OCI image specification, "Image Layer
//! Filesystem Changeset". Where a path leads through a file, the upper layer wins; within one layer this is an error. A
//! directory that an upper layer has no entry for follows a symbolic link of a lower layer, within the tree of names
//! (`links.rs`); no other link is followed.

mod build;
mod flatten;
mod layer;
mod links;
mod tree;
mod warmup;

use std::path::PathBuf;

pub(crate) use build::{Job, LayerFile, build, uuid};
pub(crate) use layer::kept_bytes;
pub use warmup::warmup_rootfs;

/// Root file system in the store. Open `path` read-only and share it: the file never changes, and an open file stays readable
/// when the image is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rootfs {
    /// EROFS file.
    pub path: PathBuf,
    /// Apparent size in bytes. Blocks of zeros are holes.
    pub bytes: u64,
}
