//! Driver for QEMU, with one process for each VM, controlled over QMP.
//!
//! `argv.rs` turns a VMM config into arguments (pure), `files.rs` opens the files that a VMM inherits, `qmp.rs` speaks the
//! monitor's protocol, `templates.rs` takes templates and starts clones of them, `snapshots.rs` saves a VM with its memory and
//! restores it, `slots.rs` replaces disks of a running VM. The crate has no state: a driver that is created after a restart is
//! as good as the first.

mod argv;
mod driver;
mod files;
mod monitor;
mod qmp;
mod slots;
mod snapshots;
mod templates;
mod tsc;

pub use argv::{Descriptors, StartMode, argv, argv_for_this_host};
pub use driver::{QemuConfig, QemuDriver};
pub use qmp::{Qmp, QmpError};
