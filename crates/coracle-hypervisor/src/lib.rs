//! What a hypervisor driver must do, a fake that does it in memory, and the
//! conformance suite that both the fake and every real driver pass.
//!
//! A driver starts, finds and kills VMM processes and opens their channels.
//! It keeps no state of its own: what a VM is comes in with each call as a
//! [`VmRecipe`], what exists is read from the process table. Lifecycle,
//! records and guest sessions belong to `coracle-host`.

mod accel;
mod api;
pub mod bundle;
pub mod conformance;
mod driver;
mod drivers;
pub mod fake;
mod kvm;
pub mod launch;
mod memory;
mod process;
mod recipe;
mod snapshots;
mod templates;
pub mod vsock;

pub use accel::{KvmProbe, Verdict};
pub use api::{ApiError, ApiSocket};
pub use driver::{Driver, DriverError, Probe};
pub use drivers::Drivers;
pub use kvm::run_payload as run_kvm_payload;
pub use memory::{MemoryFile, SealedFile};
pub use process::{ProcessId, find_by_argument};
pub use recipe::{Accelerator, Disk, Firmware, Forward, Machine, Nic, NicBackend, Slots, VmRecipe};
pub use snapshots::{Compatibility, Saved, Snapshots, cpu_model};
pub use templates::{Cloned, Template, Templates};
