//! QEMU's `microvm` machine as a driver: one process a VM, spoken to over QMP.
//!
//! `argv.rs` turns a VMM config into arguments (pure), `files.rs` opens what a VMM inherits, `qmp.rs` speaks the
//! monitor's protocol, `templates.rs` saves a machine and starts clones of it, `snapshots.rs` saves
//! a VMM with its memory and resumes it, `slots.rs` swaps the disks of one that runs.
//! No state is kept here: a driver made after a restart is as good as the first.

mod argv;
mod driver;
mod files;
mod monitor;
mod qmp;
mod slots;
mod snapshots;
mod templates;
mod tsc;

pub use argv::{Birth, Descriptors, argv, argv_for_this_host};
pub use driver::{QemuConfig, QemuDriver};
pub use qmp::{Qmp, QmpError};
