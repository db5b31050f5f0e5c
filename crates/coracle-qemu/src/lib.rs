//! QEMU's `microvm` machine as a driver: one process a VM, found again by the
//! folder that its arguments name, spoken to over QMP.
//!
//! `argv.rs` turns a recipe into arguments (pure), `qmp.rs` speaks the
//! monitor's protocol, `accel.rs` proves an accelerator before it is used,
//! `templates.rs` saves a machine and starts clones of it, `snapshots.rs` saves
//! one whole and lets it go on.
//! No state is kept here: a driver made after a restart is as good as the first.

mod accel;
mod argv;
mod driver;
mod kvm;
mod monitor;
mod qmp;
mod snapshots;
mod templates;
mod tsc;

pub use accel::{KvmProbe, Verdict};
pub use argv::{Birth, argv, argv_for_this_host};
pub use driver::{QemuConfig, QemuDriver};
pub use kvm::run_payload as run_kvm_payload;
pub use qmp::{Qmp, QmpError};
