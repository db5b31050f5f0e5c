//! Disks of the guest, found by serial number as udev would name them, with invalidated caches.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::console::say;
use crate::error::Error;

/// Prefix of udev's name of a virtio disk with a serial number. The agent resolves it, because the guest has no udev.
pub(crate) const BY_SERIAL: &str = "/dev/disk/by-id/virtio-";
/// Prefix of the serial number of a device slot; the slot's number follows.
const SLOT: &str = "slot";
/// Size of an empty device slot, bytes.
const EMPTY_SLOT: u64 = 1 << 40;

/// Flag to open a block device, which fails while a file system uses the device (open(2)).
const EXCLUSIVE: i32 = 0o200;

/// Time limit for a disk to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(2);
const DEVICE_POLL: Duration = Duration::from_millis(2);

/// Device nodes of the disks at boot, by serial number. A device keeps its node for as long as it exists.
static AT_BOOT: OnceLock<HashMap<String, PathBuf>> = OnceLock::new();

/// Reads the serial numbers of the disks before a template is saved, because each is a request to the disk.
pub(crate) fn prepare() {
    AT_BOOT.get_or_init(|| disks().collect());
}

/// Waits for the disk and drops the kernel's cache of it, because the disk in a slot may have been swapped. Returns the device
/// node.
pub(crate) fn wait_for_disk(device: &Path) -> Result<PathBuf, Error> {
    wait_for_device(device, |node| {
        let bytes = io::Seek::seek(&mut File::open(node)?, io::SeekFrom::End(0))?;
        if bytes == EMPTY_SLOT { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
    })
}

/// Like [`wait_for_disk`], for an image, which the host puts into its slot before it sends the request. The size of the device
/// is not checked.
pub(crate) fn image(device: &Path) -> Result<PathBuf, Error> {
    wait_for_device(device, |_| Ok(()))
}

/// Waits for a disk; `is_there` fails with `NotFound` while it is absent.
fn wait_for_device(device: &Path, is_there: impl Fn(&Path) -> io::Result<()>) -> Result<PathBuf, Error> {
    let since = Instant::now();
    let (node, file) = loop {
        let found = locate(device).and_then(|node| {
            is_there(&node)?;
            Ok((File::open(&node)?, node))
        });
        match found {
            Ok((file, node)) => break (node, file),
            Err(e) if e.kind() == io::ErrorKind::NotFound && since.elapsed() < DEVICE_WAIT => {
                std::thread::sleep(DEVICE_POLL)
            }
            Err(e) => return Err(Error::io(format!("open {}", device.display()))(e)),
        }
    };
    let kind = file.metadata().map_err(Error::io(format!("inspect {}", device.display())))?.file_type();
    if !kind.is_block_device() {
        return Err(Error::invalid(format!("{} is not a block device", device.display())));
    }
    crate::sys::flush_block_cache(file.as_fd()).map_err(Error::io(format!("flush {}", device.display())))?;
    Ok(node)
}

/// Drops the kernel's cache of a device, also while a file system is mounted from it.
pub(crate) fn forget_blocks(node: &Path) -> Result<(), Error> {
    let flushed = File::open(node).and_then(|file| crate::sys::flush_block_cache(file.as_fd()));
    flushed.map_err(Error::io(format!("flush {}", node.display())))
}

/// Like [`image`], but waits until no file system is mounted from the device. Another mount would show the disk that the slot
/// had before, because the kernel has one superblock per device. An unmounted file system disappears after a moment.
pub(crate) fn wait_until_unused(device: &Path) -> Result<PathBuf, Error> {
    let since = Instant::now();
    loop {
        let node = image(device)?;
        match File::options().read(true).custom_flags(EXCLUSIVE).open(&node) {
            Ok(_) => return Ok(node),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && since.elapsed() < DEVICE_WAIT => {
                std::thread::sleep(DEVICE_POLL);
            }
            Err(e) => return Err(Error::io(format!("{} is in use", device.display()))(e)),
        }
    }
}

/// Passes requests to a disk without an I/O scheduler and without throttling of writes: the host schedules the real disk, and a
/// clone has less code to run for the first time (kernel, Documentation/block/switching-sched.rst,
/// Documentation/ABI/stable/sysfs-block).
pub(crate) fn stop_scheduler(node: &Path) {
    let queue = Path::new("/sys/block").join(node.file_name().unwrap_or_default()).join("queue");
    for (setting, value) in [("scheduler", "none"), ("wbt_lat_usec", "0")] {
        let path = queue.join(setting);
        if let Err(e) = std::fs::write(&path, value) {
            say!("write {value} to {}: {e}", path.display()); // the kernel may be built without it
        }
    }
}

/// Device node of a disk that is named by its serial number.
fn locate(device: &Path) -> io::Result<PathBuf> {
    let Some(serial) = device.to_str().and_then(|path| path.strip_prefix(BY_SERIAL)) else {
        return Ok(device.to_owned());
    };
    let known = AT_BOOT.get().and_then(|disks| disks.get(serial)).cloned();
    let node = known.or_else(|| disks().find(|(number, _)| number == serial).map(|(_, node)| node));
    node.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Serial number and device node of every disk with a number.
fn disks() -> impl Iterator<Item = (String, PathBuf)> {
    let blocks = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let found = blocks.filter_map(|block| {
        let serial = std::fs::read_to_string(block.path().join("serial")).ok()?;
        Some((serial.trim_end().to_owned(), block.file_name().to_str()?.to_owned()))
    });
    let numbered = numbered(found.collect());
    numbered.into_iter().map(|(serial, name)| (serial, Path::new("/dev").join(name)))
}

/// Numbers the disks of Firecracker, whose serial numbers are fixed. All its slots exist from the start and in order: if no
/// disk has the serial number of a slot, the virtio disks are numbered in order.
fn numbered(mut disks: Vec<(String, String)>) -> Vec<(String, String)> {
    if disks.iter().any(|(serial, _)| serial.starts_with(SLOT)) {
        return disks;
    }
    disks.retain(|(_, name)| name.starts_with("vd"));
    // Sorts vdb before vdaa.
    disks.sort_by(|(_, a), (_, b)| (a.len(), a).cmp(&(b.len(), b)));
    disks.into_iter().enumerate().map(|(slot, (_, name))| (format!("{SLOT}{slot}"), name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_slots_follow_serial_numbers_or_device_order() {
        let text = |disks: &[(&str, &str)]| {
            let disks = disks.iter().map(|(s, n)| ((*s).to_owned(), (*n).to_owned())).collect();
            let all = numbered(disks).into_iter().map(|(s, n)| format!("{s}={n}"));
            all.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text(&[("slot1", "vda"), ("slot0", "vdb")]), "slot1=vda slot0=vdb");
        assert_eq!(
            text(&[("7", "vdaa"), ("3", "vdb"), ("9", "vda"), ("x", "nvme0n1")]),
            "slot0=vda slot1=vdb slot2=vdaa"
        );
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn regular_file_is_refused_as_a_disk() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(wait_for_disk(file.path()), Err(Error::Invalid(_))));
    }
}
