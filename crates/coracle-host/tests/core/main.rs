//! Host core and its service, with VMMs in memory and files on a real disk.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod accelerator;
mod adopted;
mod boots;
mod burst;
mod containers;
mod full_disk;
mod hostile;
mod names;
mod network;
mod own_volumes;
mod shared_dirs;
mod signatures;
mod support;
mod temporary;
