//! What the record of a VM says of its volumes.

use std::path::PathBuf;

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
    /// How far it has come.
    #[serde(default)]
    pub phase: VolumePhase,
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
            VolumeKind::SharedDir => None,
        }
    }
}
