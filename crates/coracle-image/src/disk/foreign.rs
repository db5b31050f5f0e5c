//! Disks of other formats: read as they are found, written on request.
//!
//! | format | what it is |
//! |---|---|
//! | cloud image | layers that are the disk in pieces, by title; whole, or in compressed chunks |
//! | tart | pieces of 512 MiB in order, each in Apple's framing of LZ4 |
//! | lume | pieces by number, each gzip, plain, or in that framing |
//! | macOS-vz | the whole disk, gzip |
//! | containerDisk | a container image with one file below `/disk/` |

mod lz4;
mod plan;
mod read;
mod write;

pub(super) use lz4::unpack as unpack_lz4;
pub(super) use plan::{Found, found};
pub(super) use read::pull;
pub(super) use write::{push_cloud_image, push_container_disk};
