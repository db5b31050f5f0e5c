//! Disks and directories that are added to and removed from a jail while its VMM runs, for VMMs that open them by name.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::running::{mount_in_jail, unmount_in_jail};
use super::{JAIL_SAVED_DIR, allow_file_bytes, slot_in_jail};
use crate::{Disk, VmmConfig, VmmFiles};

/// Time limit of a change: the storage below a disk may hang.
const LIMIT: Duration = Duration::from_secs(10);

/// Mounts a disk in the jail of a living VMM. Returns false if the VMM has no jail. Idempotent.
///
/// # Errors
/// Without the VMM or the disk, where owners cannot be mapped, and `TimedOut`.
pub async fn attach_to_jail(vmm_config: &VmmConfig, disk: &Disk) -> io::Result<bool> {
    let disk = disk.clone();
    change(vmm_config, move |vmm_config, vmm, uid| {
        allow_file_bytes(vmm_config, std::fs::metadata(&disk.path)?.len())?;
        mount_in_jail(vmm, uid, &disk.path, &slot_in_jail(disk.slot), !disk.read_only)
    })
    .await
}

/// Unmounts the disk of a slot in the jail of a living VMM. Returns false if the VMM has no jail. Idempotent.
///
/// # Errors
/// Without the VMM, and `TimedOut`.
pub async fn detach_from_jail(vmm_config: &VmmConfig, slot: usize) -> io::Result<bool> {
    change(vmm_config, move |_, vmm, _| unmount_in_jail(vmm, &slot_in_jail(slot))).await
}

/// Mounts a host directory at [`JAIL_SAVED_DIR`] in the jail of a living VMM, so that the VMM saves its state there; `None`
/// unmounts it. Returns false if the VMM has no jail. Idempotent.
///
/// # Errors
/// Same as [`attach_to_jail`].
pub async fn share_with_jail(vmm_config: &VmmConfig, dir: Option<&Path>) -> io::Result<bool> {
    let dir = dir.map(Path::to_owned);
    change(vmm_config, move |_, vmm, uid| match dir {
        Some(dir) => mount_in_jail(vmm, uid, &dir, Path::new(JAIL_SAVED_DIR), true),
        None => unmount_in_jail(vmm, Path::new(JAIL_SAVED_DIR)),
    })
    .await
}

async fn change(
    vmm_config: &VmmConfig,
    make: impl FnOnce(&VmmConfig, crate::ProcessId, u32) -> io::Result<()> + Send + 'static,
) -> io::Result<bool> {
    let vmm_config = vmm_config.clone();
    let changed = spawn_blocking(move || {
        let (Some(uid), Some(vmm)) = (vmm_config.uid, VmmFiles::of(&vmm_config.run_dir)?.jailed()) else {
            return Ok(false);
        };
        make(&vmm_config, vmm, uid).map(|()| true)
    });
    let changed = timeout(LIMIT, changed).await.map_err(|_| io::ErrorKind::TimedOut)?;
    changed.map_err(io::Error::other)?
}
