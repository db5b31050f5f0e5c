//! What the record of a VM says of the system that its disk image brings.

use coracle_hypervisor::Display;
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
    /// Public keys of its default user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
    /// Its resolver; `None`: that of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolver: Option<Resolver>,
    /// Its screen; `None`: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<Display>,
    /// Its system has no guest agent, or not yet: a start does not wait for one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_agent: bool,
}

/// Name resolution of a guest, as in `resolv.conf`.
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
