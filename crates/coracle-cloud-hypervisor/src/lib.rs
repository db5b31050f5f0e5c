//! Cloud Hypervisor as a driver: one process a VM, spoken to over its API socket.
//!
//! `config.rs` turns a VMM config into the configuration of a machine, and a saved configuration into that of the machine it
//! shall be here (pure); `driver.rs` starts, finds and ends it and plugs disks; `events.rs` reads what it tells of itself;
//! `snapshots.rs` saves machines and loads them.
//!
//! There is nothing to override when a machine is loaded: the saved configuration is rewritten in a private copy. It may
//! come out of an archive, so of it only what a machine of ours has is taken, and no path.

mod config;
mod driver;
mod events;
mod snapshots;

pub use config::{TapBy, rewritten, vm_config};
pub use driver::{CloudHypervisorConfig, CloudHypervisorDriver};
pub use events::{Event, events};
