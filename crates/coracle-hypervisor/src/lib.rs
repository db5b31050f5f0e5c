//! Port between the host core and the hypervisor drivers. Test doubles and the conformance suite of drivers are in
//! `coracle-hypervisor-testing`.
//!
//! A driver starts, finds and kills VMM processes and opens their channels. A driver has no state of its own: each call passes
//! the description of a VM as a [`VmmConfig`], and the process table tells which VMMs exist. Lifecycle, records and guest
//! sessions belong to `coracle-host`.

mod accel;
mod api;
pub mod bundle;
mod cgroup;
mod driver;
mod drivers;
mod error;
mod jail;
mod kvm;
pub mod launch;
mod memory;
mod process;
mod snapshots;
mod templates;
mod vmm_config;
mod vmm_files;
pub mod vsock;

pub use accel::{AcceleratorChoice, KvmProbe};
pub use api::{ApiError, ApiSocket, memory_call_limit};
pub use cgroup::{DeviceNumber, Limits, create_in_background, move_to_cgroup, remove_cgroup, to_foreground};
pub use driver::{Driver, Probe, end_vmms};
pub use drivers::Drivers;
pub use error::DriverError;
pub use jail::{
    JAIL_BOOT_FILES, JAIL_RUN_DIR, JAIL_SAVED_DIR, Jail, JailPart, OwnedFile, PreparedJail, allow_file_bytes,
    attach_to_jail, can_bound_files, detach_from_jail, jail_parts, share_with_jail, slot_in_jail,
};
pub use kvm::run_payload as run_kvm_payload;
pub use memory::{MemoryFile, SealedFile};
pub use process::{ProcessId, find_by_argument};
pub use snapshots::{Compatibility, Saved, Snapshots, cpu_model};
pub use templates::{Cloned, Template, Templates};
pub use vmm_config::{
    Accelerator, Disk, Display, ELF_KERNEL, Firmware, Forward, KERNEL_PARAMETERS, MachineType, Nic,
    NicBackend, Protocol, Slots, VmmConfig,
};
pub use vmm_files::{SavedDir, VmmFiles};
