//! The host core: the one owner of every VM on a node.
//!
//! Frontends (`coracle-frontends`) translate APIs to it. The record of a VM says what the VM is; one task per VM changes
//! it.
//!
//! ```text
//! frontend ─▶ Host ─▶ vm::Actor (queue, one per VM) ─▶ record.json, then the world
//!                    │ jobs: boot · follow the guest · console · watch the VMM
//!                    └─ Driver (VMM) · Network (tap) · Store (image) · guest session
//! ```
//! A VMM outlives this process. After a restart `adopt.rs` decides, from the
//! record and the process table alone, what each VM needs.

mod adopt;
mod cloud_init;
mod config;
mod console;
mod directories;
mod disk_image_vm;
mod disk_images;
mod disks;
mod error;
mod events;
#[doc(hidden)]
pub mod fuzz;
mod granted;
mod host;
mod instances;
mod logs;
mod memory;
mod node;
mod record;
mod ring;
mod snapshots;
mod templates;
mod vm;
mod vmm_config;
mod volumes;
mod warm_pool;

use coracle_files as files;
pub use coracle_guest_client::GuestClient;
pub use coracle_image::PullPolicy;
pub use coracle_oci::PullOrigin;

pub use config::{HostConfig, TemplatePolicy, WarmPoolPolicy, run_dir_of};
pub use console::ConsoleHandle;
pub use directories::{ensure_run_dir, ensure_state_dir};
pub use disk_image_vm::uefi;
pub use disk_images::{DiskImage, DiskImages};
pub use error::{Fault, HostError};
pub use events::{EventKind, HostEvent};
pub use granted::LocalUser;
pub use host::{
    Access, COMMIT_ANNOTATION, Capacity, Host, LogFollower, NodeImage, RestoreSpec, VmSpec, chunk_progress,
    commit_request,
};
pub use logs::{LogEntry, LogStream};
pub use record::{
    BootFirmware, DiskImageVm, Exit, Fence, Filesystem, InvalidSnapshotName, Owner, Record, SnapshotName,
    Volume, VolumeKind, VolumePhase, Workload,
};
pub use snapshots::SnapshotInfo;
pub use templates::{TemplateInfo, TemplateKey};
pub use vm::View;
pub use volumes::VolumeRequest;
