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
mod commit_annotation;
mod config;
mod directories;
mod disk_image_vm;
mod error;
mod events;
mod firmware;
mod host;
mod instances;
mod memory;
mod memory_images;
mod node;
mod templates;
mod vm;
mod vmm_config;
mod volumes;
mod warm_pool;

use coracle_disk::blank as disks;
pub use coracle_disk::{DiskImage, DiskImages};
use coracle_files as files;
pub use coracle_files::LocalUser;
pub use coracle_guest_client::GuestClient;
pub use coracle_image::PullPolicy;
pub use coracle_logs::{ConsoleHandle, LogEntry, LogStream};
pub use coracle_oci::PullOrigin;
pub use coracle_record::{
    BootFirmware, DiskImageVm, Exit, Fence, Filesystem, InvalidSnapshotName, Owner, Record, SnapshotName,
    TemplateKey, Volume, VolumeKind, VolumePhase, Workload,
};
pub use coracle_snapshot::SnapshotInfo;

pub use commit_annotation::{COMMIT_ANNOTATION, commit_request};
pub use config::{HostConfig, TemplatePolicy, WarmPoolPolicy, run_dir_of};
pub use directories::{ensure_run_dir, ensure_state_dir};
pub use error::{Fault, HostError};
pub use events::{EventKind, HostEvent};
pub use firmware::uefi;

pub use host::{Access, Capacity, Host, LogFollower, NodeImage, RestoreSpec, VmSpec, chunk_progress};
pub use templates::TemplateInfo;
pub use vm::View;
pub use volumes::VolumeRequest;
