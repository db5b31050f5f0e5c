//! Disk image VMs: the disk image has its own kernel and init.
//!
//! Such a VM is a PC. Its disk is an overlay on the image; beside it is a cloud-init seed ([`crate::cloud_init`]) with the
//! guest agent and the settings of a first boot. The firmware is detected from the image unless the caller chooses it.

use std::io;
use std::path::Path;

use coracle_disk::empty_overlay;
use coracle_proto::guest as pb;

use crate::cloud_init::CloudInitSeed;
use crate::firmware::uefi;
use crate::vmm_config::VmPaths;
use crate::{BootFirmware, DiskImageVm, Record};

/// Maximum size of the user data, bytes: the limit of clouds, and more than fits a screen.
pub const USER_DATA_MAX: usize = 256 * 1024;

/// Creates the missing disks of a disk image VM, and writes the cloud-init seed anew. For a guest that continues from saved
/// memory, the seed is written only if it is missing. Blocking, idempotent.
///
/// # Errors
/// When a file cannot be written, or the agent or the firmware does not exist.
pub fn prepare(
    settings: &DiskImageVm,
    paths: &VmPaths,
    record: &Record,
    network: Option<&pb::Network>,
    agent: &Path,
) -> io::Result<()> {
    let own = paths.own_disk(record);
    if !own.exists() {
        let part = own.with_extension("part");
        empty_overlay(&part, record.disk_mib << 20).map_err(io::Error::other)?;
        std::fs::rename(&part, &own)?;
    }
    if settings.firmware == BootFirmware::Uefi && !paths.variables().exists() {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "firmware for UEFI; install Debian's ovmf");
        let (_, variables) = uefi().ok_or_else(gone)?;
        let part = paths.variables().with_extension("part");
        std::fs::copy(variables, &part)?;
        std::fs::rename(&part, paths.variables())?;
    }
    if record.saved.is_some() && paths.cloud_init_disk().exists() {
        return Ok(());
    }
    let instance = record.id.as_str();
    let cloud_init = CloudInitSeed {
        instance,
        hostname: &record.hostname,
        network,
        user_data: &settings.user_data,
        ssh_keys: &settings.ssh_keys,
    };
    cloud_init.write(&paths.cloud_init_disk(), agent)
}
