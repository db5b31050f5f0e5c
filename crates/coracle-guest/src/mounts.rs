//! File systems: the agent's own at boot, and the container's root.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_proto::guest::RootMount;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, UnmountFlags};

use crate::console::say;
use crate::error::Error;
use crate::rootfs::Root;
use crate::{base_mounts, disks};

/// Where the container's root is put together.
pub(crate) const SYSROOT: &str = "/sysroot";
const IMAGE: &str = "/run/coracle/image";
pub(crate) const OVERLAY: &str = "/run/coracle/overlay";
/// Names, resolver and volumes of a guest whose containers come later.
pub(crate) const SANDBOX: &str = "/run/coracle/sandbox";
/// The directory of the overlay that holds what a machine writes, and the one of its containers.
const UPPER: &str = "upper";
pub(crate) const OF_CONTAINERS: &str = "containers";
/// Nothing is read ahead, made ready in the background or checked twice: a fresh disk needs none of it, and a machine that
/// shall run at once is not to wait (ext4(5); kernel, Documentation/admin-guide/ext4.rst).
const DISK_OPTIONS: &std::ffi::CStr = c"noblock_validity,no_prefetch_block_bitmaps,noinit_itable";

/// The disk that was mounted before the machine was anybody's.
static PREPARED: Mutex<Option<PathBuf>> = Mutex::new(None);

fn prepared() -> MutexGuard<'static, Option<PathBuf>> {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

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

/// A checked path of a disk.
pub(crate) fn device(path: &str) -> Result<PathBuf, Error> {
    match path.strip_prefix(disks::BY_SERIAL).or_else(|| path.strip_prefix("/dev/")) {
        Some(name) if (1..=32).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric()) => {
            Ok(path.into())
        }
        _ => Err(Error::invalid(format!("invalid block device path {path:?}"))),
    }
}

/// Makes the directories that a root is put together in. Idempotent.
///
/// # Errors
/// When the agent's own file system is full.
pub(crate) fn prepare() -> Result<(), Error> {
    for dir in [IMAGE, OVERLAY, SYSROOT] {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {dir}")))?;
    }
    Ok(())
}

/// Mounts a fresh disk where an overlay will have it, and lays one on it for once: a clone's first use of anything is slow
/// where the processor is emulated, and this has been used in its template. Blocking, idempotent.
///
/// # Errors
/// When the disk is none, or the kernel refuses.
pub(crate) fn prepare_disk(disk: &Path) -> Result<(), Error> {
    let mut prepared = prepared();
    if prepared.as_deref() == Some(disk) {
        return Ok(());
    }
    prepare()?;
    let mut mounted = Mounted::default();
    mounted.mount(&disks::ready(disk)?, Path::new(OVERLAY), "ext4", MountFlags::NODEV, DISK_OPTIONS)?;
    let mut warmup = Mounted::default();
    lay(&mut warmup)?;
    drop(warmup);
    remove_work();
    let settled = std::fs::File::open(OVERLAY).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
    settled.map_err(Error::io("write the disk"))?;
    mounted.keep();
    *prepared = Some(disk.to_owned());
    Ok(())
}

/// The overlay's own, which the next one would remove first.
fn remove_work() {
    let _may_not_be_there = std::fs::remove_dir(Path::new(OVERLAY).join("work/work"));
}

/// The overlay's upper directory: everything that differs from the image.
pub(crate) fn upper() -> Result<Root, Error> {
    Root::open(&Path::new(OVERLAY).join(UPPER)).map_err(Error::io("open the overlay's upper directory"))
}

/// What lies at the top of the disk's part of a root.
pub(crate) fn in_upper() -> io::Result<HashSet<OsString>> {
    std::fs::read_dir(Path::new(OVERLAY).join(UPPER))?.map(|entry| Ok(entry?.file_name())).collect()
}

/// Takes apart what [`root`] has put together, but not the prepared disk, and removes what was written there: of what had
/// been there before, empty directories are left.
pub(crate) fn undo_root(before: &HashSet<OsString>) -> io::Result<()> {
    for place in [SYSROOT, IMAGE] {
        rustix::mount::unmount(place, UnmountFlags::DETACH)?;
    }
    remove_work();
    for entry in std::fs::read_dir(Path::new(OVERLAY).join(UPPER))? {
        let entry = entry?;
        if !before.contains(&entry.file_name()) {
            remove(&entry)?;
        } else if entry.file_type()?.is_dir() {
            std::fs::read_dir(entry.path())?.try_for_each(|inner| remove(&inner?))?;
        }
    }
    Ok(())
}

/// Removes what a sandbox without containers has left, which may never have had one. The prepared disk stays.
pub(crate) fn undo_sandbox() -> io::Result<()> {
    std::fs::remove_dir_all(SANDBOX)?;
    match std::fs::remove_dir(Path::new(OVERLAY).join(OF_CONTAINERS)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn remove(entry: &std::fs::DirEntry) -> io::Result<()> {
    if entry.file_type()?.is_dir() {
        std::fs::remove_dir_all(entry.path())
    } else {
        std::fs::remove_file(entry.path())
    }
}

/// The overlay over image and disk, as the container's root. Its upper directory is complete by itself, regardless of the
/// kernel's defaults are: no directory or file in it points at data of the image, and no hard link is kept elsewhere
/// (kernel, Documentation/filesystems/overlayfs.rst). `coracle commit` makes a layer of it.
fn lay(mounted: &mut Mounted) -> Result<(), Error> {
    for dir in [UPPER, "work"] {
        let dir = Path::new(OVERLAY).join(dir);
        std::fs::create_dir_all(&dir).map_err(Error::io(format!("make {}", dir.display())))?;
    }
    let layers =
        c"lowerdir=/run/coracle/image,upperdir=/run/coracle/overlay/upper,workdir=/run/coracle/overlay/work,\
        redirect_dir=off,metacopy=off,index=off";
    mounted.mount(Path::new("overlay"), Path::new(SYSROOT), "overlay", MountFlags::empty(), layers)
}

/// Mounts image and overlay and what a container expects below. Undoes itself when it fails, so it can be repeated.
pub(crate) fn root(plan: &Plan) -> Result<Root, Error> {
    let mut mounted = Mounted::default();
    let (image, overlay) = (Path::new(IMAGE), Path::new(OVERLAY));
    prepare()?;
    let data = if plan.filesystem == "ext4" { c"noload" } else { c"" };
    mounted.mount(
        &disks::image(&plan.image)?,
        image,
        plan.filesystem,
        MountFlags::RDONLY | MountFlags::NODEV,
        data,
    )?;
    match &plan.overlay {
        Some(disk) => mount_own_disk(disk, &mut mounted)?,
        None => mounted.mount(Path::new("tmpfs"), overlay, "tmpfs", MountFlags::NODEV, c"mode=0755")?,
    }
    yield_to(&image.join("etc"), &overlay.join("upper/etc"));
    lay(&mut mounted)?;
    let root = Root::open(Path::new(SYSROOT)).map_err(Error::io("open the container's root"))?;
    base_mounts::move_into(&root)?;
    mounted.keep();
    Ok(root)
}

/// Mounts the VM's own disk, unless the template has it mounted.
pub(crate) fn mount_own_disk(disk: &Path, mounted: &mut Mounted) -> Result<(), Error> {
    if prepared().as_deref() == Some(disk) {
        return Ok(());
    }
    mounted.mount(&disks::ready(disk)?, Path::new(OVERLAY), "ext4", MountFlags::NODEV, DISK_OPTIONS)
}

/// Removes an empty directory that a fresh disk has in the place of the image's, unless that is a directory like it, or is
/// missing: an overlay shows the owner and the mode of the upper one, and a directory instead of a symlink below it.
fn yield_to(lower: &Path, upper: &Path) {
    let alike = match std::fs::symlink_metadata(lower) {
        Ok(lower) => lower.is_dir() && (lower.mode() & 0o7777, lower.uid(), lower.gid()) == (0o755, 0, 0),
        Err(e) => e.kind() == std::io::ErrorKind::NotFound,
    };
    if !alike {
        let _in_use = std::fs::remove_dir(upper);
    }
}

/// Mounts made so far; those still listed when it is dropped are detached.
#[derive(Debug, Default)]
pub(crate) struct Mounted(Vec<PathBuf>);

impl Mounted {
    pub(crate) fn mount(
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

    /// Gives a mount that is at no place yet its place.
    pub(crate) fn attach(&mut self, mount: &OwnedFd, place: &Path) -> Result<(), Error> {
        let what = || format!("mount on {}", place.display());
        let at = std::fs::File::open(place).map_err(|e| Error::io(what())(e))?;
        attach(mount, &at).map_err(Error::io(what()))?;
        self.0.push(place.to_owned());
        Ok(())
    }

    /// Mounts a file system without a source inside a container's root, and opens it.
    pub(crate) fn mount_on(
        &mut self,
        root: &Root,
        kind: &str,
        target: &str,
        mode: Mode,
        flags: MountFlags,
        data: &std::ffi::CStr,
    ) -> Result<OwnedFd, Error> {
        let path = Path::new(target);
        let place =
            root.ensure_dir(path, mode).map_err(Error::io(format!("make {target} in the container")))?;
        rustix::mount::mount(kind, handle(&place), kind, flags, data)
            .map_err(Error::io(format!("mount {kind} on {target} in the container")))?;
        self.push(root, path)
    }

    /// Notes a mount inside a container's root, and opens it.
    pub(crate) fn push(&mut self, root: &Root, target: &Path) -> Result<OwnedFd, Error> {
        let failed = || format!("find {} in the container", target.display());
        let top = root.resolve(target, OFlags::PATH).map_err(Error::io(failed()))?;
        self.0.push(std::fs::read_link(handle(&top)).map_err(Error::io(failed()))?);
        Ok(top)
    }

    /// They stay.
    pub(crate) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for target in self.0.iter().rev() {
            let _ = rustix::mount::unmount(target, UnmountFlags::DETACH);
        }
    }
}

/// Gives a mount that is at no place yet the place that is open.
pub(crate) fn attach(mount: impl AsFd, at: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount.as_fd(), c"", at.as_fd(), c"", flags)?)
}

/// The path of an open directory, for calls that take no handles.
pub(crate) fn handle(dir: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

/// Takes the container's root apart, so that its disk is clean. Best effort: what is busy becomes read-only.
pub(crate) fn leave() {
    let _ = rustix::mount::unmount(SYSROOT, UnmountFlags::DETACH);
    prepared().take();
    if rustix::mount::unmount(OVERLAY, UnmountFlags::empty()).is_err() {
        let _ = rustix::mount::mount_remount(OVERLAY, MountFlags::RDONLY, c"");
    }
    let _ = rustix::mount::unmount(IMAGE, UnmountFlags::DETACH);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_of_a_fresh_disk_replaces_only_an_equal_one() {
        let dir = tempfile::tempdir().unwrap();
        let (lower, upper) = (dir.path().join("lower"), dir.path().join("upper"));
        let stays = || {
            std::fs::create_dir_all(&upper).unwrap();
            yield_to(&lower, &upper);
            upper.exists()
        };
        assert!(stays(), "the image has none");
        std::os::unix::fs::symlink("usr/etc", &lower).unwrap();
        assert!(!stays(), "the image has a symlink there");
        std::fs::remove_file(&lower).unwrap();
        std::fs::create_dir(&lower).unwrap();
        std::fs::set_permissions(&lower, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        assert!(!stays(), "the image's is for its owner alone");
        std::fs::create_dir_all(upper.join("used")).unwrap();
        assert!(stays(), "what the machine wrote is its own");
    }

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
}
