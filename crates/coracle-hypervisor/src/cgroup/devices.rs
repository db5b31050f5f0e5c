//! Block devices below the disks of VMs.

use std::fmt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Number of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNumber {
    /// Major number, of the driver.
    pub major: u32,
    /// Minor number, of the device.
    pub minor: u32,
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// Returns the whole block devices below these files, each once, because limits do not apply to partitions. Files on a file
/// system without a block device, such as tmpfs, are skipped.
pub(super) fn of_disks<'a>(disks: impl Iterator<Item = &'a Path>) -> Vec<DeviceNumber> {
    let mut found: Vec<_> = disks.filter_map(|disk| whole_device(number_under(disk)?)).collect();
    found.sort();
    found.dedup();
    found
}

fn number_under(disk: &Path) -> Option<DeviceNumber> {
    let file = std::fs::metadata(disk).ok()?;
    let number = if file.file_type().is_block_device() { file.rdev() } else { file.dev() };
    Some(DeviceNumber { major: rustix::fs::major(number), minor: rustix::fs::minor(number) })
}

/// Returns the device itself, or the device of which it is a partition (Linux, Documentation/ABI/stable/sysfs-block).
fn whole_device(number: DeviceNumber) -> Option<DeviceNumber> {
    let dir = Path::new("/sys/dev/block").join(number.to_string()).canonicalize().ok()?;
    if !dir.join("partition").exists() {
        return Some(number);
    }
    let text = std::fs::read_to_string(dir.parent()?.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_device_count_once() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| dir.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, "").unwrap());
        assert!(of_disks(files.iter().map(AsRef::as_ref)).len() <= 1);
        let none = [Path::new("/proc/self/status"), Path::new("/absent")];
        assert_eq!(of_disks(none.into_iter()), []);
    }
}
