//! The host core: the one owner of every VM on a node.
//!
//! Doors (the CLI's socket, FirecrackerAgent, later CRI and the virtual node)
//! translate; what a VM is stands in its record, and one task per VM changes it.
//!
//! ```text
//! door ─▶ Host ─▶ vm::Actor (queue, one per VM) ─▶ record.json, then the world
//!                    │ jobs: boot · follow the guest · console · watch the VMM
//!                    └─ Driver (VMM) · Network (tap) · Store (image) · guest session
//! ```
//! A VMM outlives this process. After a restart `adopt.rs` decides, from the
//! record and the process table alone, what each VM needs.

mod adopt;
mod config;
mod console;
mod disk_images;
mod disks;
mod error;
mod events;
mod files;
mod folders;
#[doc(hidden)]
pub mod fuzz;
mod guest;
mod host;
mod logs;
mod recipe;
mod record;
mod ring;
mod seed;
mod service;
mod snapshots;
mod standby;
mod system;
mod templates;
mod vm;
mod volumes;

pub use config::{HostConfig, run_dir_of};
pub use console::ConsoleHandle;
pub use disk_images::DiskImage;
pub use error::{Fault, HostError};
pub use events::{EventKind, HostEvent};
pub use folders::{FolderServer, FolderSpec};
pub use guest::GuestClient;
pub use host::{Capacity, CreateSpec, Fence, Host, PullMode, RestoreSpec};
pub use logs::{LogEntry, LogStream};
pub use record::{Exit, Owner, Record, Workload};
pub use service::{COMMIT_ANNOTATION, HostService, commit_wish};
pub use snapshots::{InvalidSnapshotName, SnapshotInfo, SnapshotName};
pub use standby::StandbyPolicy;
pub use system::{BootFirmware, System, uefi};
pub use templates::{TemplateInfo, TemplateKey, TemplatePolicy};
pub use vm::View;
pub use volumes::{Filesystem, Volume, VolumeKind, VolumePhase, VolumeWish};
