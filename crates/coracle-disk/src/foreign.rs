//! Disks in formats of other tools: detected on pull, written on request.
//!
//! | format | content |
//! |---|---|
//! | cloud image | layers with the parts of the disk, by title; each whole or in compressed chunks |
//! | tart | parts of 512 MiB in order, each in Apple's framing of LZ4; a label states that they are raw |
//! | lume | numbered parts, each gzip, uncompressed, or in Apple's framing of LZ4 |
//! | macOS-vz | the whole disk, gzip |
//! | containerDisk | a container image with one file below `/disk/` |

mod lz4;
mod plan;
mod read;
mod tart;
mod write;

pub(super) use lz4::unpack as unpack_lz4;
pub(super) use plan::{ForeignDisk, detect};
pub(super) use read::pull;
pub(super) use tart::push_tart;
pub(super) use write::{push_cloud_image, push_container_disk};
