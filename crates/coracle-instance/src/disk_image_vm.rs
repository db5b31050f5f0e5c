//! Disk image VMs: their disk image has its own kernel and first process.
//!
//! Such a VM is a PC. Its disk lies over the image's; beside it is a cloud-init seed ([`crate::cloud_init`]) with the guest
//! agent and the settings of a first boot. Which firmware starts it is read from the image, unless the caller says.

use std::io;
use std::path::Path;

use coracle_disk::empty_overlay;
use coracle_proto::guest as pb;

use crate::cloud_init::CloudInitSeed;
use crate::firmware::uefi;
use crate::vmm_config::VmPaths;
use crate::{BootFirmware, DiskImageVm, Record};

/// Largest user data, bytes: what clouds allow, and more than fits a screen.
pub const USER_DATA_MAX: usize = 256 * 1024;

/// Makes the own disks of a disk image VM where they are missing, and the cloud-init seed anew: for a guest that continues from
/// saved memory only where it has none. Blocking, idempotent.
///
/// # Errors
/// A file cannot be written, or the agent or the firmware is not there.
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
