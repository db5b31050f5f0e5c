//! Volumes in the record of a VM.

use std::path::PathBuf;

use coracle_types::IdMapping;
use serde::{Deserialize, Serialize};

/// Volume of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Name of the volume within the VM.
    pub name: String,
    /// Path of the file or directory on the node, with symbolic links resolved.
    pub source: PathBuf,
    /// Kind of volume.
    pub kind: VolumeKind,
    /// Absolute path in the guest.
    pub target: String,
    /// Whether the guest may only read the volume.
    #[serde(default)]
    pub read_only: bool,
    /// Treatment of file systems that are mounted below a shared directory.
    #[serde(default)]
    pub submounts: Submounts,
    /// User namespace of the owners in a shared directory; `None`: owners are ids of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdMapping>,
    /// Progress of attaching or detaching.
    #[serde(default)]
    pub phase: VolumePhase,
}

/// Visibility of the file systems that the node has mounted below a shared directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Submounts {
    /// Shows only the file systems that are mounted when the node begins to serve the directory.
    #[serde(default)]
    pub private: bool,
    /// Lets the guest write these file systems although the directory is read-only.
    #[serde(default)]
    pub writable: bool,
}

/// Kind of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum VolumeKind {
    /// Raw file with a file system, which the guest mounts.
    Disk {
        /// Device slot.
        slot: usize,
        /// File system on the disk.
        filesystem: Filesystem,
    },
    /// Raw file that the guest sees as a block device.
    Block {
        /// Device slot.
        slot: usize,
    },
    /// Directory of the node, served to the guest by FUSE over the guest channel.
    #[serde(rename = "folder")]
    SharedDir,
    /// File system in guest memory, whose content ends with the guest.
    Tmpfs(Tmpfs),
}

/// File system in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tmpfs {
    /// Maximum size, bytes; 0: half of the guest's memory.
    pub size_bytes: u64,
    /// Permissions of the root directory.
    pub mode: u32,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
}

/// File system that the guest's kernel supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filesystem {
    /// Read and written.
    Ext4,
    /// Read-only.
    Erofs,
}

/// Progress of a volume. A change that is cut off ends with the volume detached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumePhase {
    /// Attached to the VM.
    #[default]
    #[serde(rename = "there")]
    Attached,
    /// Being attached; not acknowledged yet.
    #[serde(rename = "coming")]
    Attaching,
    /// Being detached; may still be attached to the VM.
    #[serde(rename = "going")]
    Detaching,
}

impl Volume {
    /// Returns the slot of a disk; `None` for other volumes.
    #[must_use]
    pub fn slot(&self) -> Option<usize> {
        match self.kind {
            VolumeKind::Disk { slot, .. } | VolumeKind::Block { slot } => Some(slot),
            VolumeKind::SharedDir | VolumeKind::Tmpfs(_) => None,
        }
    }
}
