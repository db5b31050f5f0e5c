//! Host core with real VMs: one test program, because each links the whole host.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

mod clone;
mod cni;
mod containers;
mod disk_image_vm;
mod hostile;
mod lifecycle;
mod registry;
mod snapshot;
mod snapshot_volumes;
mod support;
mod suspend;
mod volumes;
mod warm_pool;
