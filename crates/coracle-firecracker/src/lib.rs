//! Driver for Firecracker, with one process for each VM, controlled over its API socket.
//!
//! `calls.rs` turns a VMM config into the API calls that create a VM (pure), `run_dir.rs` lays out the working directory of the
//! process, `driver.rs` starts, finds and ends the process, `snapshots.rs` and `templates.rs` save VMs and load them,
//! `console.rs` relays the serial console.
//!
//! Every path that Firecracker records in a snapshot is relative: `slot3`, `guest.sock`. A loaded VM opens the disks and the
//! socket that it finds under these names in the working directory of its own process, so that two clones of one state never
//! share one (docs/snapshotting: drives are reopened at the recorded path, and no override exists).

mod calls;
mod console;
mod driver;
mod run_dir;
mod snapshots;
mod templates;

pub use calls::{Call, boot_calls, load_calls};
pub use driver::{FirecrackerConfig, FirecrackerDriver};
