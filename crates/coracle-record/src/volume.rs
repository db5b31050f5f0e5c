//! What the record of a VM says of its volumes.

use std::path::PathBuf;

use coracle_types::IdMapping;
use serde::{Deserialize, Serialize};

/// A volume of a VM, as its record keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// What it is called in its VM.
    pub name: String,
    /// Its file or directory, without links.
    pub source: PathBuf,
    /// What it is.
    pub kind: VolumeKind,
    /// Absolute path in the guest.
    pub target: String,
    /// The guest may not write it.
    #[serde(default)]
    pub read_only: bool,
    /// What is mounted below a shared directory.
    #[serde(default)]
    pub submounts: Submounts,
    /// Owners in a shared directory are ids of this user namespace; `None`: they are those of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdMapping>,
    /// How far it has come.
    #[serde(default)]
    pub phase: VolumePhase,
}

/// What the guest sees of the file systems that the node has mounted below a shared directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Submounts {
    /// Only those that are there when the node begins to serve the directory.
    #[serde(default)]
    pub private: bool,
    /// The guest may write them although the directory is read-only.
    #[serde(default)]
    pub writable: bool,
}

/// What a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum VolumeKind {
    /// A raw file with a file system, which is mounted.
    Disk {
        /// The slot that it is in.
        slot: usize,
        /// What is on it.
        filesystem: Filesystem,
    },
    /// A raw file that the guest gets as a block device.
    Block {
        /// The slot that it is in.
        slot: usize,
    },
    /// A directory of the node, served to the guest by FUSE over the guest channel.
    #[serde(rename = "folder")]
    SharedDir,
    /// A file system in the memory of the guest, whose content ends with it.
    Tmpfs(Tmpfs),
}

/// A file system in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tmpfs {
    /// Most bytes that it holds; 0: half of the guest's memory.
    pub size_bytes: u64,
    /// Permissions of its root.
    pub mode: u32,
    /// Owner of its root.
    pub uid: u32,
    /// Group of its root.
    pub gid: u32,
}

/// A file system that the guest's kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filesystem {
    /// Read and written.
    Ext4,
    /// Only read.
    Erofs,
}

/// A volume comes and goes in steps; cut off in between, it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumePhase {
    /// It belongs to the VM.
    #[default]
    There,
    /// It was not acknowledged yet.
    Coming,
    /// It may still be in the machine.
    Going,
}

impl Volume {
    /// The slot of a disk.
    #[must_use]
    pub fn slot(&self) -> Option<usize> {
        match self.kind {
            VolumeKind::Disk { slot, .. } | VolumeKind::Block { slot } => Some(slot),
            VolumeKind::SharedDir | VolumeKind::Tmpfs(_) => None,
        }
    }
}
