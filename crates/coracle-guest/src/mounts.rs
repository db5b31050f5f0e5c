//! File systems: the agent's own at boot, and the container's root.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_proto::guest::RootMount;
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::console::say;
use crate::error::Error;
use crate::root::Root;

/// Where the container's root is put together.
pub(crate) const SYSROOT: &str = "/sysroot";
const IMAGE: &str = "/run/coracle/image";
pub(crate) const OVERLAY: &str = "/run/coracle/overlay";

/// What udev calls a virtio disk by its serial number; there is no udev here, so the name is looked up.
const BY_SERIAL: &str = "/dev/disk/by-id/virtio-";
/// Size of a slot that no disk is in, in sectors of 512 bytes: 1 TiB.
const EMPTY_SLOT: u64 = 1 << 31;

/// Limit for a disk to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(2);
const DEVICE_POLL: Duration = Duration::from_millis(2);

const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// The agent's own file systems. Called once, first of all; what is missing shows later.
pub(crate) fn at_boot() {
    for (kind, target, flags, data) in [
        ("devtmpfs", "/dev", MountFlags::NOSUID, c"mode=0755"),
        ("proc", "/proc", PLAIN, c""),
        ("sysfs", "/sys", PLAIN, c""),
        (
            "devpts",
            "/dev/pts",
            MountFlags::NOSUID.union(MountFlags::NOEXEC),
            c"mode=0620,gid=5,ptmxmode=0666",
        ),
        ("tmpfs", "/dev/shm", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=1777"),
        ("tmpfs", "/run", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=0755"),
        ("tmpfs", "/tmp", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=1777"),
        ("cgroup2", "/sys/fs/cgroup", PLAIN, c""),
    ] {
        let _ = std::fs::create_dir_all(target);
        match rustix::mount::mount(kind, target, kind, flags, data) {
            Ok(()) | Err(Errno::BUSY) => {}
            Err(e) => say!("mount {target}: {e}"),
        }
    }
}

/// A checked [`RootMount`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    image: PathBuf,
    filesystem: &'static str,
    overlay: Option<PathBuf>,
}

impl Plan {
    pub(crate) fn parse(wire: &RootMount) -> Result<Self, Error> {
        let filesystem = match wire.image_fs.as_str() {
            "erofs" => "erofs",
            "ext4" => "ext4",
            other => {
                return Err(Error::invalid(format!("image file system {other:?} is neither erofs nor ext4")));
            }
        };
        let overlay = if wire.overlay_device.is_empty() { None } else { Some(device(&wire.overlay_device)?) };
        Ok(Self { image: device(&wire.image_device)?, filesystem, overlay })
    }
}

fn device(path: &str) -> Result<PathBuf, Error> {
    match path.strip_prefix(BY_SERIAL).or_else(|| path.strip_prefix("/dev/")) {
        Some(name) if (1..=32).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric()) => {
            Ok(path.into())
        }
        _ => Err(Error::invalid(format!("{path:?} is no block device path"))),
    }
}

/// Mounts image and overlay and what a container expects below. Undoes itself when it fails, so it can be repeated.
pub(crate) fn root(plan: &Plan) -> Result<Root, Error> {
    let mut mounted = Undo(Vec::new());
    let (image, overlay) = (Path::new(IMAGE), Path::new(OVERLAY));
    for dir in [image, overlay, Path::new(SYSROOT)] {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
    }
    let data = if plan.filesystem == "ext4" { c"noload" } else { c"" };
    mounted.mount(
        &ready(&plan.image)?,
        image,
        plan.filesystem,
        MountFlags::RDONLY | MountFlags::NODEV,
        data,
    )?;
    match &plan.overlay {
        Some(disk) => {
            mounted.mount(&ready(disk)?, overlay, "ext4", MountFlags::NODEV, c"")?;
        }
        None => mounted.mount(Path::new("tmpfs"), overlay, "tmpfs", MountFlags::NODEV, c"mode=0755")?,
    }
    for dir in ["upper", "work"] {
        let dir = overlay.join(dir);
        std::fs::create_dir_all(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
    }
    let layers =
        c"lowerdir=/run/coracle/image,upperdir=/run/coracle/overlay/upper,workdir=/run/coracle/overlay/work";
    mounted.mount(Path::new("overlay"), Path::new(SYSROOT), "overlay", MountFlags::empty(), layers)?;
    let root = Root::open(Path::new(SYSROOT)).map_err(Error::io("open the container's root"))?;
    furnish(&root)?;
    mounted.0.clear();
    Ok(root)
}

/// Mounts made so far; those still listed when it is dropped are detached.
struct Undo(Vec<PathBuf>);

impl Undo {
    fn mount(
        &mut self,
        source: &Path,
        target: &Path,
        kind: &str,
        flags: MountFlags,
        data: &std::ffi::CStr,
    ) -> Result<(), Error> {
        let what = || format!("mount {} ({kind}) on {}", source.display(), target.display());
        rustix::mount::mount(source, target, kind, flags, data).map_err(|e| Error::io(what())(e))?;
        self.0.push(target.to_owned());
        Ok(())
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for target in self.0.iter().rev() {
            let _ = rustix::mount::unmount(target, UnmountFlags::DETACH);
        }
    }
}

/// Waits for the disk and drops what the kernel cached of it: a slot's disk may have been swapped since. Returns the
/// device's node.
fn ready(device: &Path) -> Result<PathBuf, Error> {
    let since = Instant::now();
    let (node, file) = loop {
        match locate(device).and_then(|node| Ok((File::open(&node)?, node))) {
            Ok((file, node)) => break (node, file),
            Err(e) if e.kind() == io::ErrorKind::NotFound && since.elapsed() < DEVICE_WAIT => {
                std::thread::sleep(DEVICE_POLL)
            }
            Err(e) => return Err(Error::io(format!("open {}", device.display()))(e)),
        }
    };
    let kind = file.metadata().map_err(Error::io(format!("inspect {}", device.display())))?.file_type();
    if !kind.is_block_device() {
        return Err(Error::invalid(format!("{} is no block device", device.display())));
    }
    crate::sys::flush_block_cache(file.as_fd()).map_err(Error::io(format!("flush {}", device.display())))?;
    Ok(node)
}

/// The node of a disk that is named by its serial number. `NotFound` also while its slot is empty.
fn locate(device: &Path) -> io::Result<PathBuf> {
    let Some(serial) = device.to_str().and_then(|path| path.strip_prefix(BY_SERIAL)) else {
        return Ok(device.to_owned());
    };
    let absent = || io::Error::from(io::ErrorKind::NotFound);
    for disk in std::fs::read_dir("/sys/block")?.flatten() {
        let told = |file: &str| std::fs::read_to_string(disk.path().join(file)).unwrap_or_default();
        if told("serial").trim_end() == serial {
            let filled = told("size").trim_end().parse().is_ok_and(|sectors: u64| sectors != EMPTY_SLOT);
            return if filled { Ok(Path::new("/dev").join(disk.file_name())) } else { Err(absent()) };
        }
    }
    Err(absent())
}

/// proc, sys, dev and the rest, each on a folder resolved inside the root: the image is not trusted.
/// Detaching the root takes along what lies on it, so there is nothing further to undo.
fn furnish(root: &Root) -> Result<(), Error> {
    let device_flags = MountFlags::NOSUID.union(MountFlags::NOEXEC);
    for (kind, target, flags, data, mode) in [
        ("proc", "/proc", PLAIN, c"", 0o555),
        ("sysfs", "/sys", PLAIN, c"", 0o555),
        ("cgroup2", "/sys/fs/cgroup", PLAIN, c"", 0o555),
        ("tmpfs", "/dev", device_flags, c"mode=0755,size=64k", 0o755),
        ("devpts", "/dev/pts", device_flags, c"newinstance,mode=0620,gid=5,ptmxmode=0666", 0o755),
        ("tmpfs", "/dev/shm", PLAIN, c"mode=1777", 0o1777),
        ("mqueue", "/dev/mqueue", PLAIN, c"", 0o755),
    ] {
        let dir = root
            .ensure_dir(Path::new(target), Mode::from_raw_mode(mode))
            .map_err(Error::io(format!("make {target} in the image")))?;
        let by_handle = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
        match rustix::mount::mount(kind, &by_handle, kind, flags, data) {
            Ok(()) if kind == "tmpfs" && target == "/dev" => {
                nodes(root).map_err(Error::io("make device nodes"))?
            }
            Ok(()) => {}
            Err(Errno::NODEV) if kind == "mqueue" => {} // not in every kernel
            Err(e) => return Err(Error::io(format!("mount {target} in the image"))(e)),
        }
    }
    Ok(())
}

/// The device nodes that every container has.
fn nodes(root: &Root) -> io::Result<()> {
    let dev = root.dir(Path::new("/dev"))?;
    for (name, major, minor) in [
        ("null", 1, 3),
        ("zero", 1, 5),
        ("full", 1, 7),
        ("random", 1, 8),
        ("urandom", 1, 9),
        ("tty", 5, 0),
        ("fuse", 10, 229),
    ] {
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(&dev, name, FileType::CharacterDevice, mode, rustix::fs::makedev(major, minor))?;
        rustix::fs::chmodat(&dev, name, mode, rustix::fs::AtFlags::empty())?; // the umask does not apply
    }
    for (name, to) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        rustix::fs::symlinkat(to, &dev, name)?;
    }
    Ok(())
}

/// Lays the file `with` over `target` inside the container's root.
pub(crate) fn cover(root: &Root, target: &Path, with: &Path) -> io::Result<()> {
    let target = root.resolve(target, rustix::fs::OFlags::PATH)?;
    let by_handle = CString::new(format!("/proc/self/fd/{}", target.as_raw_fd()))?;
    Ok(rustix::mount::mount_bind(with, by_handle.as_c_str())?)
}

/// Takes the container's root apart, so that its disk is clean. Best effort: what is busy becomes read-only.
pub(crate) fn leave() {
    let _ = rustix::mount::unmount(SYSROOT, UnmountFlags::DETACH);
    if rustix::mount::unmount(OVERLAY, UnmountFlags::empty()).is_err() {
        let _ = rustix::mount::mount_remount(OVERLAY, MountFlags::RDONLY, c"");
    }
    let _ = rustix::mount::unmount(IMAGE, UnmountFlags::DETACH);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_devices() {
        let plan = |image: &str, fs: &str, overlay: &str| {
            Plan::parse(&RootMount {
                image_device: image.into(),
                image_fs: fs.into(),
                overlay_device: overlay.into(),
            })
            .is_ok()
        };
        assert!(plan("/dev/vda", "erofs", "/dev/vdb") && plan("/dev/vda", "ext4", ""));
        assert!(
            !plan("", "erofs", "")
                && !plan("/dev/vda", "btrfs", "")
                && !plan("/dev/../etc/passwd", "erofs", "")
        );
        assert!(!plan("/dev/vda", "erofs", "/tmp/x") && !plan("/dev/a,b", "erofs", ""));
    }

    #[test]
    fn a_file_is_refused_as_a_disk() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(ready(file.path()), Err(Error::Invalid(_))));
    }
}
