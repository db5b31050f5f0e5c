//! What a hypervisor driver must do, a fake that does it in memory, and the
//! conformance suite that both the fake and every real driver pass.
//!
//! A driver starts, finds and kills VMM processes and opens their channels.
//! It keeps no state of its own: what a VM is comes in with each call as a
//! [`VmRecipe`], what exists is read from the process table. Lifecycle,
//! records and guest sessions belong to `coracle-host`.

pub mod conformance;
mod driver;
pub mod fake;
mod memory;
mod process;
mod recipe;
mod snapshots;
mod templates;

pub use driver::{Driver, DriverError, Probe};
pub use memory::{MemoryFile, SealedFile};
pub use process::{ProcessId, find_by_argument};
pub use recipe::{Accelerator, Disk, Forward, Nic, NicBackend, Slots, VmRecipe};
pub use snapshots::{Compatibility, Snapshots};
pub use templates::{Cloned, Template, Templates};
