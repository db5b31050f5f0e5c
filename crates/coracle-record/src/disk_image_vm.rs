//! Settings of a disk image VM in its record.

use coracle_hypervisor::Display;
use serde::{Deserialize, Serialize};

/// Settings of a disk image VM, in `vms/<id>/record.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskImageVm {
    /// Firmware that starts the VM.
    pub firmware: BootFirmware,
    /// User data for cloud-init or another reader of the NoCloud seed; may be empty.
    #[serde(default)]
    pub user_data: String,
    /// SSH public keys of the image's default user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
    /// Resolver of the guest; `None`: that of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolver: Option<Resolver>,
    /// Display of the VM; `None`: no display.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<Display>,
    /// The guest has no guest agent, or none yet: a start does not wait for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_agent: bool,
}

/// Name resolution of a guest, as in resolv.conf(5).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Resolver {
    /// Addresses of name servers.
    pub nameservers: Vec<String>,
    /// Domains in which short names are looked up.
    #[serde(default)]
    pub search_domains: Vec<String>,
    /// Options of the resolver.
    #[serde(default)]
    pub options: Vec<String>,
}

/// Firmware of a PC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BootFirmware {
    /// Legacy BIOS: runs the program in the first sector of the disk.
    #[default]
    Bios,
    /// UEFI: runs a program on the EFI system partition.
    Uefi,
}
