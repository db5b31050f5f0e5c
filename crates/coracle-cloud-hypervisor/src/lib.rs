//! Driver for Cloud Hypervisor, with one process for each VM, controlled over its API socket.
//!
//! `config.rs` turns a VMM config into the configuration of a VM, and a saved configuration into that of the VM on this host
//! (pure); `driver.rs` starts, finds and ends processes and hot-plugs disks; `events.rs` reads their events; `snapshots.rs`
//! saves VMs and loads them.
//!
//! Cloud Hypervisor has no overrides for loading a VM, so the saved configuration is rewritten in a private copy. It may come
//! from an archive: only properties that a VM of this driver has are taken from it, and no path.

mod config;
mod driver;
mod events;
mod snapshots;

pub use config::{TapBy, rewritten, vm_config};
pub use driver::{CloudHypervisorConfig, CloudHypervisorDriver};
pub use events::{Event, events};
