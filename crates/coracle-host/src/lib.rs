//! Host core: the only owner of every VM on a node.
//!
//! Frontends (`coracle-frontends`) translate APIs to the host core. The record of a VM says what the VM is; only the VM's task
//! changes the record.
//!
//! ```text
//! frontend ─▶ Host ─▶ vm::task (one per VM) ─▶ coracle-lifecycle decides ─▶ record.json, then the world
//!                    │ jobs: boot · follow the guest · console · watch the VMM
//!                    └─ Driver (VMM) · Network (tap) · Store (image) · guest session
//! ```
//! A VMM outlives the daemon. After a restart `coracle-lifecycle` decides what each VM needs, from the record and the process
//! table alone.

mod addresses;
mod host;
mod own_volumes;
mod private_images;
mod signed_images;
mod temporary;
mod vm;

use coracle_disk::blank as disks;
pub use coracle_disk::{DiskImage, DiskImages};
use coracle_files as files;
pub use coracle_files::LocalUser;
pub use coracle_guest_client::GuestClient;
pub use coracle_image::PullPolicy;
pub use coracle_instance::directories::{ensure_run_dir, ensure_state_dir};
pub use coracle_instance::firmware::uefi;
pub use coracle_instance::templates::TemplateInfo;
pub use coracle_instance::{Fault, HostConfig, HostError, TemplatePolicy, WarmPoolPolicy, run_dir_of};
use coracle_instance::{disk_image_vm, instances, memory_images, node, templates, vmm_config, warm_pool};
use coracle_lifecycle::{commit_annotation, events, guest_requests as containers, volume as volumes};
pub use coracle_logs::{ConsoleHandle, LogEntry, LogStream};
pub use coracle_oci::PullOrigin;
pub use coracle_record::{
    BootFirmware, ContainerId, ContainerMount, ContainerMountSource, ContainerRecord, ContainerRecords,
    ContainerSpec, ContainerState, DiskImageVm, Exit, Fence, Filesystem, GroupsPolicy, InvalidSnapshotName,
    Owner, PidNamespace, ProcessUser, Record, Resolver, Resources, Sandbox, Security, SnapshotName,
    Submounts, TemplateKey, Tmpfs, Volume, VolumeKind, VolumePhase, Workload,
};
pub use coracle_snapshot::SnapshotInfo;

pub use coracle_lifecycle::commit_annotation::{COMMIT_ANNOTATION, commit_request};
pub use coracle_lifecycle::events::{EventKind, HostEvent};

pub use coracle_lifecycle::volume::VolumeRequest;
pub use host::{
    Access, Capacity, CommittedImage, Host, LogFollower, NodeImage, RestoreSpec, RestoredIdentity, VmSpec,
    chunk_progress,
};
pub use own_volumes::{OwnContent, OwnFile, OwnVolume};
pub use temporary::{Hold, REMOVE_ANNOTATION, RemoveWhen};
pub use vm::View;
