//! What the record of a VM says of the system that its disk image brings.

use serde::{Deserialize, Serialize};

/// Settings of a disk image VM, in `vms/<id>/record.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskImageVm {
    /// What starts it.
    pub firmware: BootFirmware,
    /// User data for cloud-init or another reader of NoCloud seeds; may be empty.
    #[serde(default)]
    pub user_data: String,
}

/// What a PC runs first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BootFirmware {
    /// The first sector of the disk.
    #[default]
    Bios,
    /// A program on the disk's system partition.
    Uefi,
}
