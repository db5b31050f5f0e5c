//! Firecracker as a driver: one process a VM, spoken to over its API socket.
//!
//! `calls.rs` turns a VMM config into the calls that make a machine (pure), `folder.rs` lays out the directory that the process
//! runs in, `driver.rs` starts, finds and ends it, `snapshots.rs` and `templates.rs` save machines and load them,
//! `console.rs` carries the serial line.
//!
//! Every path that Firecracker records in a snapshot is relative: `slot3`, `guest.sock`. A loaded machine opens the disks
//! and the socket that it finds under these names in the directory where its own process runs, so that two clones of one
//! state never share one (docs/snapshotting: drives are reopened at the recorded path, and no override exists).

mod calls;
mod console;
mod driver;
mod folder;
mod snapshots;
mod templates;

pub use calls::{Call, boot_calls, load_calls};
pub use driver::{FirecrackerConfig, FirecrackerDriver};
