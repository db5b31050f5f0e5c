//! Maximum file size of a VMM: that of the disks and the memory of its VM (getrlimit(2), `RLIMIT_FSIZE`). Disks are attached to
//! running VMMs, and only a process with `CAP_SYS_RESOURCE` can raise the limit then. Without that capability there is no
//! limit.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::process::{Pid, Resource, Rlimit};
use rustix::thread::CapabilitySet;

use crate::{Disk, VmmConfig, launch};

/// Size of a saved VM beside its memory: device state and padding between them.
const STATE_BYTES: u64 = 1 << 30;
/// Divisor for the tables of a qcow2 image, with some reserve: a table of 64 KiB describes 512 MiB of clusters, another one
/// holds their reference counts.
const TABLES_SHARE: u64 = 64;

/// Returns whether this process can raise the limit of a VMM.
#[must_use]
pub fn can_bound_files() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_RESOURCE))
}

/// Returns the length of the longest file that a VMM writes when it starts. Reads the sizes of its disks; a disk that does not
/// exist counts as 0. Blocking.
pub(super) fn file_bytes_max(vmm_config: &VmmConfig) -> Option<u64> {
    if !can_bound_files() {
        return None;
    }
    let memory = (u64::from(vmm_config.memory.get()) << 20) + STATE_BYTES;
    let disks = vmm_config.disks.iter().filter(|disk| !disk.read_only);
    disks
        .map(|disk| disk_bytes_max(disk).ok())
        .try_fold(memory, |max, bytes| bytes.map(|bytes| max.max(bytes)))
}

/// Returns the maximum length that the file of a disk can reach.
fn disk_bytes_max(disk: &Disk) -> io::Result<u64> {
    let file = match File::open(&disk.path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        opened => opened?,
    };
    let length = file.metadata()?.len();
    if disk.backing.is_none() {
        return Ok(length);
    }
    // Virtual size of the disk (QEMU, docs/interop/qcow2.txt, "Header").
    let mut size = [0; 8];
    file.read_exact_at(&mut size, 24)?;
    let size = u64::from_be_bytes(size);
    Ok(length.max(size.saturating_add(size / TABLES_SHARE).saturating_add(STATE_BYTES)))
}

/// Raises the limit of the living VMM of this VMM config so that it can write a disk of `bytes` bytes. Does nothing without a
/// jail, without a VMM, or if the limit suffices. Idempotent.
///
/// # Errors
/// When the kernel refuses.
pub fn allow_file_bytes(vmm_config: &VmmConfig, bytes: u64) -> io::Result<()> {
    let Some(vmm) = vmm_config.uid.and(launch::find_in(&vmm_config.run_dir)?) else { return Ok(()) };
    let pid = i32::try_from(vmm.pid).ok().and_then(Pid::from_raw);
    let now = file_size_limit(vmm.pid)?;
    if now.is_none_or(|limit| limit >= bytes) {
        return Ok(());
    }
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    rustix::process::prlimit(pid, Resource::Fsize, limit)?;
    Ok(())
}

/// Returns the present limit of a process; `None`: unlimited (proc_pid_limits(5)).
fn file_size_limit(pid: u32) -> io::Result<Option<u64>> {
    let limits = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("limits"))?;
    Ok(file_size_in(&limits))
}

fn file_size_in(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file size"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_bound_table() {
        let dir = tempfile::tempdir().unwrap();
        let raw = Disk::raw(0, dir.path().join("raw"), false);
        File::create(&raw.path).unwrap().set_len(5 << 30).unwrap();
        let overlay =
            Disk { backing: Some("/base".into()), ..Disk::raw(1, dir.path().join("overlay"), false) };
        let mut header = vec![0; 64];
        header[24..32].copy_from_slice(&(64_u64 << 30).to_be_bytes());
        std::fs::write(&overlay.path, header).unwrap();
        let absent = Disk::raw(2, dir.path().join("absent"), false);
        for (disk, want) in [(&raw, 5 << 30), (&overlay, 66 << 30), (&absent, 0)] {
            assert_eq!(disk_bytes_max(disk).unwrap(), want, "{}", disk.path.display());
        }
    }

    #[test]
    fn file_size_limit_is_read() {
        let text = |limit: &str| {
            format!(
                "Limit  Soft Limit  Hard Limit  Units\nMax cpu time  unlimited  unlimited  seconds\nMax file size  {limit}  {limit}  bytes\n"
            )
        };
        assert_eq!(file_size_in(&text("4096")), Some(4096));
        assert_eq!(file_size_in(&text("unlimited")), None);
    }
}
