//! Base mounts of every container's root: proc, sys and dev.
//!
//! They are mounted before the guest is configured, and three mount moves bring them into the container's root. Everything that
//! a clone uses for the first time is slow on an emulated CPU; these mounts were already used in its template.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, UnmountFlags};

use crate::error::Error;
use crate::mounts::PLAIN;
use crate::rootfs::Root;

const STORE: &str = "/run/coracle/base";
/// Trees that are moved, and the modes of directories that an image lacks.
const TREES: [(&str, u32); 3] = [("proc", 0o555), ("sys", 0o555), ("dev", 0o755)];
/// File with the guest's own boot id, bind-mounted over that of the kernel, which is the template's.
pub(crate) const BOOT_ID: &str = "/run/coracle/boot_id";
pub(crate) const KERNEL_BOOT_ID: &str = "proc/sys/kernel/random/boot_id";

/// Names of the directories of a root that have base mounts.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    TREES.into_iter().map(|(tree, _)| tree)
}

/// Makes the base mounts, if they do not exist yet. Idempotent.
///
/// # Errors
/// When the kernel refuses a mount.
pub(crate) fn prepare() -> Result<(), Error> {
    if is_mounted(&stored_path("dev")) {
        return Ok(());
    }
    for (tree, _) in TREES {
        let _what_a_failure_left = rustix::mount::unmount(stored_path(tree), UnmountFlags::DETACH);
    }
    let device_flags = MountFlags::NOSUID.union(MountFlags::NOEXEC);
    for (kind, target, flags, data) in [
        ("proc", "proc", PLAIN, c""),
        ("sysfs", "sys", PLAIN, c""),
        ("cgroup2", "sys/fs/cgroup", PLAIN, c""),
        ("tmpfs", "dev", device_flags, c"mode=0755,size=64k"),
        ("devpts", "dev/pts", device_flags, c"newinstance,mode=0620,gid=5,ptmxmode=0666"),
        ("tmpfs", "dev/shm", PLAIN, c"mode=1777"),
        ("mqueue", "dev/mqueue", PLAIN, c""),
    ] {
        let place = stored_path(target);
        std::fs::create_dir_all(&place).map_err(Error::io(format!("make {}", place.display())))?;
        match rustix::mount::mount(kind, &place, kind, flags, data) {
            Ok(()) if target == "dev" => {
                let dev = std::fs::File::open(stored_path("dev"));
                dev.and_then(|dev| nodes(&dev)).map_err(Error::io("make device nodes"))?;
            }
            Ok(()) => {}
            Err(Errno::NODEV) if kind == "mqueue" => {} // not in every kernel
            Err(e) => return Err(Error::io(format!("mount {}", place.display()))(e)),
        }
    }
    cover_boot_id(&stored_path(""))
}

/// Mounts a boot id file of the agent, empty at first, over that of the kernel below `root`. Idempotent.
pub(crate) fn cover_boot_id(root: &Path) -> Result<(), Error> {
    let kernels = root.join(KERNEL_BOOT_ID);
    let is_ours = |a: rustix::fs::Stat, b: rustix::fs::Stat| (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino);
    if let (Ok(ours), Ok(there)) = (rustix::fs::stat(BOOT_ID), rustix::fs::stat(&kernels))
        && is_ours(ours, there)
    {
        return Ok(());
    }
    let made = std::fs::create_dir_all("/run/coracle").and_then(|()| boot_id(""));
    made.map_err(Error::io("make room for a boot id"))?;
    rustix::mount::mount_bind(BOOT_ID, &kernels).map_err(Error::io("cover the kernel's boot id"))
}

/// Moves the base mounts into the container's root. Each target directory is resolved inside the root, because the image is not
/// trusted. Detaching the root detaches them as well, so a failure needs no further undo.
///
/// # Errors
/// When the image has something else in the place of a directory.
pub(crate) fn move_into(root: &Root) -> Result<(), Error> {
    prepare()?;
    for (tree, mode) in TREES {
        let target = Path::new("/").join(tree);
        let dir = root
            .ensure_dir(&target, Mode::from_raw_mode(mode))
            .map_err(Error::io(format!("make {} in the image", target.display())))?;
        rustix::mount::move_mount(CWD, stored_path(tree), &dir, "", MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH)
            .map_err(Error::io(format!("mount {} in the image", target.display())))?;
    }
    Ok(())
}

/// Sets the boot id of the guest.
///
/// # Errors
/// When the agent's own file system is full.
pub(crate) fn boot_id(id: &str) -> std::io::Result<()> {
    std::fs::write(BOOT_ID, id)
}

fn stored_path(path: &str) -> PathBuf {
    Path::new(STORE).join(path)
}

fn is_mounted(path: &Path) -> bool {
    let device = |path: &Path| rustix::fs::stat(path).map(|stat| stat.st_dev);
    matches!((device(path), device(Path::new("/run"))), (Ok(a), Ok(b)) if a != b)
}

/// Makes the device nodes that every container has.
pub(crate) fn nodes(dev: impl AsFd) -> std::io::Result<()> {
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
        rustix::fs::mknodat(
            dev.as_fd(),
            name,
            FileType::CharacterDevice,
            mode,
            rustix::fs::makedev(major, minor),
        )?;
        rustix::fs::chmodat(dev.as_fd(), name, mode, rustix::fs::AtFlags::empty())?; // the umask does not apply
    }
    for (name, to) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        rustix::fs::symlinkat(to, dev.as_fd(), name)?;
    }
    Ok(())
}
