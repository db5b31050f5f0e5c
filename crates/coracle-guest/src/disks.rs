//! The machine's disks: found by serial number, as udev would name them, and fresh.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::error::Error;

/// Prefix of udev's name of a virtio disk with a serial number; resolved here, because the guest has no udev.
pub(crate) const BY_SERIAL: &str = "/dev/disk/by-id/virtio-";
/// What the serial number of a slot begins with; its number follows.
const SLOT: &str = "slot";
/// Size of a slot that no disk is in, bytes.
const EMPTY_SLOT: u64 = 1 << 40;

/// On a block device: fails while a file system has it (open(2)).
const EXCLUSIVE: i32 = 0o200;

/// Limit for a disk to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(2);
const DEVICE_POLL: Duration = Duration::from_millis(2);

/// Nodes of the disks that were there at boot, by serial number. A device keeps its own for as long as it is there.
static AT_BOOT: OnceLock<HashMap<String, PathBuf>> = OnceLock::new();

/// Reads the serial numbers of the disks. Each is a request to the disk, so this happens before the template is saved.
pub(crate) fn prepare() {
    AT_BOOT.get_or_init(|| disks().collect());
}

/// Waits for the disk and drops what the kernel cached of it: a slot's disk may have been swapped since. Returns the
/// device's node.
pub(crate) fn ready(device: &Path) -> Result<PathBuf, Error> {
    settled(device, |node| {
        let bytes = io::Seek::seek(&mut File::open(node)?, io::SeekFrom::End(0))?;
        if bytes == EMPTY_SLOT { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
    })
}

/// As [`ready`], of an image, which is in its slot before the host speaks of it. Its size may not be shown.
pub(crate) fn image(device: &Path) -> Result<PathBuf, Error> {
    settled(device, |_| Ok(()))
}

/// `is_there` says `NotFound` while it is not.
fn settled(device: &Path, is_there: impl Fn(&Path) -> io::Result<()>) -> Result<PathBuf, Error> {
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

/// As [`image`], once no file system is mounted from the disk any more. A mount of one that still is would show the disk
/// that the slot had before: the kernel has one superblock a device. What was unmounted goes a moment later.
pub(crate) fn unused(device: &Path) -> Result<PathBuf, Error> {
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

/// The node of a disk that is named by its serial number.
fn locate(device: &Path) -> io::Result<PathBuf> {
    let Some(serial) = device.to_str().and_then(|path| path.strip_prefix(BY_SERIAL)) else {
        return Ok(device.to_owned());
    };
    let known = AT_BOOT.get().and_then(|disks| disks.get(serial)).cloned();
    let node = known.or_else(|| disks().find(|(number, _)| number == serial).map(|(_, node)| node));
    node.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Serial number and node of every disk that has a number.
fn disks() -> impl Iterator<Item = (String, PathBuf)> {
    let blocks = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let found = blocks.filter_map(|block| {
        let serial = std::fs::read_to_string(block.path().join("serial")).ok()?;
        Some((serial.trim_end().to_owned(), block.file_name().to_str()?.to_owned()))
    });
    let numbered = numbered(found.collect());
    numbered.into_iter().map(|(serial, name)| (serial, Path::new("/dev").join(name)))
}

/// Firecracker has fixed serial numbers, but all slots exist from the start and in order: where no disk has the number of
/// a slot, the virtio disks are numbered in order.
fn numbered(mut disks: Vec<(String, String)>) -> Vec<(String, String)> {
    if disks.iter().any(|(serial, _)| serial.starts_with(SLOT)) {
        return disks;
    }
    disks.retain(|(_, name)| name.starts_with("vd"));
    // vdb comes before vdaa.
    disks.sort_by(|(_, a), (_, b)| (a.len(), a).cmp(&(b.len(), b)));
    disks.into_iter().enumerate().map(|(slot, (_, name))| (format!("{SLOT}{slot}"), name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_go_by_their_numbers_or_else_by_their_order() {
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
    fn a_file_is_refused_as_a_disk() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(ready(file.path()), Err(Error::Invalid(_))));
    }
}
