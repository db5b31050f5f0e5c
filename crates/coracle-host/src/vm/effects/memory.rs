//! Saves the memory of a VM to files, and copies its disk.

use std::fs::File;
use std::io::{self, Seek};
use std::path::{Path, PathBuf};

use coracle_hypervisor::Driver as _;
use coracle_record::SavedMemory;
use coracle_snapshot::{DISK_FILE, MEMORY_FILE};

use super::Context;
use crate::HostError;
use crate::files::{self, blocking};
use coracle_lifecycle::{JobOutcome, SaveTo};

/// Space for device state in addition to the RAM, bytes.
const DEVICES_BYTES: u64 = 64 << 20;

impl Context {
    /// Directory of the saved memory, and the file that it is written to.
    fn part(&self, to: &SaveTo) -> (PathBuf, PathBuf) {
        match to {
            SaveTo::Own => (self.paths.saved(), self.paths.saved().join("memory.part")),
            SaveTo::Copy(dir) => (dir.clone(), dir.join(MEMORY_FILE)),
        }
    }

    /// Makes a file with reserved space for the memory, and for a copy of the disk if one is needed.
    pub(super) async fn reserve_memory(&self, to: SaveTo) -> Result<(), HostError> {
        let disk = match to {
            SaveTo::Own => None,
            SaveTo::Copy(_) => Some(self.paths.own_disk(&self.record)),
        };
        let room = self.record.machine_size().memory.bytes() + DEVICES_BYTES;
        let (dir, part) = self.part(&to);
        let reserved = blocking(move || {
            let more = disk.map_or(0, |disk| files::allocated_bytes(&disk));
            reserve(&dir, &part, room + more)
        });
        reserved.await.map_err(self.files_error("reserve space for the memory"))
    }

    /// Writes the memory of a paused guest. `Own` memory is synced when this returns; for a copy the disk is copied as well.
    pub(super) async fn save_memory(&self, to: SaveTo) -> Result<JobOutcome, HostError> {
        let vmm_config = self.vmm_config();
        let driver = self.shared.node.driver.clone();
        let unsupported = || HostError::Unsupported {
            name: self.name(),
            driver: self.shared.node.driver_name(&self.record.driver),
            what: "save the memory of a VM",
        };
        let snapshots = driver.snapshots(&vmm_config).ok_or_else(unsupported)?;
        let (_, part) = self.part(&to);
        let open = part.clone();
        let opened = blocking(move || File::options().read(true).write(true).open(open)).await;
        let file = opened.map_err(self.files_error("open the file of the memory"))?;
        let failed = |source| HostError::Driver { name: self.name(), source };
        snapshots.save(&vmm_config, &file).await.map_err(failed)?;
        let machine = snapshots.compatibility(&vmm_config).await;
        let bytes = match to {
            SaveTo::Own => self.seal(file, part).await?,
            SaveTo::Copy(dir) => self.copy_disk(file, dir.join(DISK_FILE)).await?,
        };
        let saved_at = self.shared.node.clock.now();
        let agent = String::new();
        Ok(JobOutcome::Saved(Box::new(SavedMemory {
            machine,
            bytes,
            saved_at,
            of: None,
            same_identity: false,
            agent,
        })))
    }

    async fn seal(&self, file: File, part: PathBuf) -> Result<u64, HostError> {
        let place = self.paths.saved_memory();
        let sealed = blocking(move || {
            let bytes = trim(&file)?;
            file.sync_all()?;
            std::fs::rename(&part, &place)?;
            files::sync_parent(&place)?;
            Ok(bytes)
        });
        sealed.await.map_err(self.files_error("keep the memory"))
    }

    async fn copy_disk(&self, memory: File, disk: PathBuf) -> Result<u64, HostError> {
        let overlay = self.paths.own_disk(&self.record);
        let copied = blocking(move || {
            let bytes = trim(&memory)?;
            files::copy_sparse(&overlay, &disk)?;
            Ok(bytes)
        });
        copied.await.map_err(self.files_error("copy the disk"))
    }

    pub(super) async fn sync_copy(&self, dir: PathBuf) -> Result<(), HostError> {
        let synced = blocking(move || {
            [MEMORY_FILE, DISK_FILE].iter().try_for_each(|name| File::open(dir.join(name))?.sync_all())
        });
        synced.await.map_err(self.files_error("write the snapshot to disk"))
    }

    /// Copies a hibernated VM. Its memory file is never written again, so a hard link suffices.
    pub(super) async fn copy_saved(&self, dir: PathBuf) -> Result<(), HostError> {
        let (memory, overlay) = (self.paths.saved_memory(), self.paths.own_disk(&self.record));
        let copied = blocking(move || {
            std::fs::create_dir_all(&dir)?;
            std::fs::hard_link(&memory, dir.join(MEMORY_FILE))?;
            files::copy_sparse(&overlay, &dir.join(DISK_FILE))?;
            File::open(dir.join(DISK_FILE))?.sync_all()
        });
        copied.await.map_err(self.files_error("copy the saved VM"))
    }
}

/// Makes a file with reserved space.
fn reserve(dir: &Path, part: &Path, bytes: u64) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::create_dir_all(dir)?;
    let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(part)?;
    match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, bytes) {
        // If space cannot be reserved, a full disk is noticed while writing.
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => {
            let _nothing_is_kept = std::fs::remove_file(part);
            Err(error.into())
        }
    }
}

/// Releases the reserved space that was not used, and returns the length.
fn trim(mut file: &File) -> io::Result<u64> {
    let bytes = file.stream_position()?;
    file.set_len(bytes)?;
    Ok(bytes)
}
