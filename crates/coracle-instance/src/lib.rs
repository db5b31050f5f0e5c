//! VMM instances of a node, for VMs, templates, the warm pool and copies of snapshots: launched, found, assigned and ended
//! here.
//!
//! ```text
//! Node ─▶ Instances ─▶ Driver (VMM) · Network (tap)
//!   └──▶ Templates ─▶ WarmPool: clones that wait for a VM
//! ```

pub mod cloud_init;
pub mod config;
pub mod directories;
pub mod disk_image_vm;
pub mod error;
pub mod firmware;
pub mod instances;
pub mod memory;
pub mod memory_images;
pub mod node;
pub mod templates;
pub mod vmm_config;
pub mod warm_pool;

use coracle_disk::blank as disks;
use coracle_files as files;
use coracle_record::{
    AttachedImage, BootFirmware, DiskImageVm, Filesystem, Record, Sandbox, SnapshotName, TemplateKey, Volume,
    VolumeKind,
};

pub use config::{HostConfig, TemplatePolicy, WarmPoolPolicy, run_dir_of};
pub use error::{Fault, HostError};
