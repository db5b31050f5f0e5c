//! File systems of the agent at boot, and root of the container.

use std::collections::HashSet;
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_proto::guest::RootMount;
use coracle_types::RootfsLayout;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, UnmountFlags};

use crate::console::say;
use crate::error::Error;
use crate::rootfs::Root;
use crate::{base_mounts, disks};

/// Mount point of the VM's own disk.
pub(crate) const OVERLAY: &str = "/run/coracle/overlay";
/// Directory with names, resolver and volumes of a sandbox.
pub(crate) const SANDBOX: &str = "/run/coracle/sandbox";
/// Directories on the own disk: upper directory of the overlay, and the directory of containers.
const UPPER: &str = "upper";
pub(crate) const OF_CONTAINERS: &str = "containers";
/// Mount options of the own disk: no read-ahead, no background initialisation, no extra checks. A fresh disk needs none of
/// these, and a starting VM must not wait for them (ext4(5); kernel, Documentation/admin-guide/ext4.rst).
const DISK_OPTIONS: &std::ffi::CStr = c"noblock_validity,no_prefetch_block_bitmaps,noinit_itable";

/// Places of a root and of its layers, in the agent's own file system.
struct Places {
    root: &'static str,
    image: &'static str,
    /// Lower layer of a prepared root, above the image: files with the identity of the VM, in memory. Written there, they cost a
    /// clone less than in the upper layer, where a later change of them goes.
    identity: &'static str,
    /// Directory with the upper and work directories of the overlay.
    writable: &'static str,
}

/// Places of the VM's root, which are those of its container.
const OF_VM: Places = Places {
    root: "/sysroot",
    image: "/run/coracle/image",
    identity: "/run/coracle/identity",
    writable: OVERLAY,
};
/// Places of the root of a warm-up, which writes to memory.
const OF_WARM_UP: Places = Places {
    root: "/run/coracle/warm-up/root",
    image: "/run/coracle/warm-up/image",
    identity: "/run/coracle/warm-up/identity",
    writable: "/run/coracle/warm-up",
};

/// Mounts that were made when the template was taken, before the guest belonged to a VM.
static PREPARED: Mutex<Option<Prepared>> = Mutex::new(None);

struct Prepared {
    /// The VM's own disk.
    disk: PathBuf,
    /// Root of the VM; `None`: only the disk is mounted.
    of_vm: Option<PreparedRoot>,
    /// Root of a warm-up. It stays mounted afterwards, until its device is needed: to unmount it takes a clone more code than to
    /// use it.
    of_warm_up: Option<PreparedRoot>,
}

struct PreparedRoot {
    /// Device of the image.
    image: PathBuf,
    /// Whether no Configure has taken it.
    is_free: bool,
}

fn prepared() -> MutexGuard<'static, Option<Prepared>> {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Mounts the agent's own file systems. Called once, before everything else; a failure causes an error later.
pub(crate) fn mount_own() {
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

/// Validated [`RootMount`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    image: PathBuf,
    filesystem: &'static str,
    overlay: Option<PathBuf>,
    /// Whether the root directory of the image comes first.
    root_first: bool,
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
        let root_first = wire.root_first && filesystem == "erofs";
        Ok(Self { image: device(&wire.image_device)?, filesystem, overlay, root_first })
    }
}

/// Validates the path of a disk.
pub(crate) fn device(path: &str) -> Result<PathBuf, Error> {
    match path.strip_prefix(disks::BY_SERIAL).or_else(|| path.strip_prefix("/dev/")) {
        Some(name) if (1..=32).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric()) => {
            Ok(path.into())
        }
        _ => Err(Error::invalid(format!("invalid block device path {path:?}"))),
    }
}

/// Makes the directories for the mounts of a root. Idempotent.
///
/// # Errors
/// When the agent's own file system is full.
pub(crate) fn prepare() -> Result<(), Error> {
    for dir in [OF_VM.image, OF_VM.writable, OF_VM.root] {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {dir}")))?;
    }
    Ok(())
}

/// Mounts a fresh disk at the place of the overlay's upper layer, and the root of `image` on it, which the guest's VM finds
/// mounted: what a clone does for the first time is slow on an emulated CPU. Without an image, or if its root cannot be mounted,
/// an overlay is mounted once, so that at least the template has used it. Also mounts the root of `warm_up`, with which a clone
/// is warmed up without a trace in that of the VM. Blocking, idempotent.
///
/// # Errors
/// When `disk` is not a suitable disk, or the kernel refuses to mount it.
pub(crate) fn prepare_disk(disk: &Path, image: Option<&Path>, warm_up: Option<&Path>) -> Result<(), Error> {
    let mut prepared = prepared();
    if prepared.as_ref().is_some_and(|prepared| prepared.disk == disk) {
        return Ok(());
    }
    prepare()?;
    let mut mounted = Mounted::default();
    let device = disks::wait_for_disk(disk)?;
    disks::stop_scheduler(&device);
    mounted.mount(&device, Path::new(OVERLAY), "ext4", MountFlags::NODEV, DISK_OPTIONS)?;
    let root_of = |image: &Path, places| {
        let made =
            prepare_root(image, places).inspect_err(|e| say!("prepare a root: {e}; clones mount theirs"));
        made.ok().map(|()| PreparedRoot { image: image.to_owned(), is_free: true })
    };
    let of_vm = image.and_then(|image| root_of(image, &OF_VM));
    let of_warm_up = warm_up.and_then(|image| root_of(image, &OF_WARM_UP));
    if of_vm.is_none() {
        let mut warmup = Mounted::default();
        mount_overlay(&mut warmup, &OF_VM, &[OF_VM.image])?;
        drop(warmup);
        remove_work();
    }
    let settled = std::fs::File::open(OVERLAY).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
    settled.map_err(Error::io("write the disk"))?;
    mounted.keep();
    *prepared = Some(Prepared { disk: disk.to_owned(), of_vm, of_warm_up });
    Ok(())
}

/// Mounts the root of an image that only stands for a VM's, with the base mounts. The kernel keeps the superblock and the inode
/// of the root directory, which are the same in all images whose root directory comes first. Nothing else may be cached, so no
/// name is looked up in the image: directories of the overlay hide those in which it has the base mounts.
fn prepare_root(image: &Path, places: &Places) -> Result<(), Error> {
    let mut mounted = Mounted::default();
    let device = disks::wait_until_unused(image)?;
    disks::stop_scheduler(&device);
    make_dir(Path::new(places.image))?;
    mounted.mount(&device, Path::new(places.image), "erofs", MountFlags::RDONLY | MountFlags::NODEV, c"")?;
    let root = std::fs::metadata(places.image).map_err(Error::io("inspect the image's root directory"))?;
    let first = (RootfsLayout::FIRST_ROOT_INODE, RootfsLayout::FIRST_ROOT_LEN as u64);
    if (root.ino(), root.len()) != first {
        return Err(Error::invalid(format!("the root directory of {} does not come first", image.display())));
    }
    for tree in base_mounts::names() {
        hide(&Path::new(places.writable).join(UPPER).join(tree))?;
    }
    match std::fs::remove_dir_all(places.identity) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(Error::io(format!("empty {}", places.identity))(e));
        }
        _ => {}
    }
    make_dir(&Path::new(places.identity).join("etc"))?;
    // The overlay would note in it which directory of the image it is merged with.
    let _in_use_or_absent = std::fs::remove_dir(Path::new(places.writable).join(UPPER).join("etc"));
    mount_overlay(&mut mounted, places, &[places.identity, places.image])?;
    base_mounts::move_into(&open_root(places)?)?;
    disks::forget_blocks(&device)?;
    mounted.keep();
    Ok(())
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))
}

/// Makes a directory of the upper layer that hides what the image has in its place (kernel,
/// Documentation/filesystems/overlayfs.rst, "whiteouts and opaque directories"). Idempotent.
fn hide(dir: &Path) -> Result<(), Error> {
    let made = std::fs::create_dir_all(dir);
    let hidden = made.and_then(|()| {
        Ok(rustix::fs::setxattr(dir, "trusted.overlay.opaque", b"y", rustix::fs::XattrFlags::empty())?)
    });
    hidden.map_err(Error::io(format!("make {}", dir.display())))
}

fn open_root(places: &Places) -> Result<Root, Error> {
    Root::open(Path::new(places.root)).map_err(Error::io("open the container's root"))
}

/// Returns the prepared mounts of a root as this call's own, and its places, if the plan is for them. Unmounts those of the VM's
/// root if it is for others.
fn take_prepared_root(plan: &Plan) -> Option<(Mounted, &'static Places)> {
    let mut prepared = prepared();
    let Prepared { disk, of_vm, of_warm_up } = prepared.as_mut()?;
    let is_for = |root: &PreparedRoot| {
        plan.root_first && root.image == plan.image && plan.overlay.as_ref() == Some(&*disk)
    };
    let warm_up = of_warm_up.as_mut().filter(|root| root.is_free && is_for(root));
    let (root, places) = match (warm_up, of_vm) {
        (Some(warm_up), _) => (warm_up, &OF_WARM_UP),
        (None, Some(of_vm)) if of_vm.is_free => (of_vm, &OF_VM),
        _ => return None,
    };
    root.is_free = false;
    let mounted = places.mounted();
    is_for(root).then_some((mounted, places))
}

impl Places {
    /// Takes over the mounts that were made here.
    fn mounted(&self) -> Mounted {
        Mounted([self.image, self.root].map(PathBuf::from).to_vec())
    }
}

/// Makes a device free for another disk: unmounts the root of a warm-up that was mounted from it. Blocking, idempotent.
///
/// # Errors
/// When the device stays in use.
pub(crate) fn vacate(device: &Path) -> Result<(), Error> {
    let mut prepared = prepared();
    let Some(of_warm_up) = prepared.as_mut().map(|prepared| &mut prepared.of_warm_up) else { return Ok(()) };
    if of_warm_up.take_if(|root| root.image == device).is_none() {
        return Ok(());
    }
    drop(OF_WARM_UP.mounted());
    disks::wait_until_unused(device).map(drop)
}

/// Removes the overlay's internal work directory, which the next mount would otherwise have to remove.
fn remove_work() {
    let _may_not_be_there = std::fs::remove_dir(Path::new(OVERLAY).join("work/work"));
}

/// Upper directory of the overlay: everything that differs from the image.
pub(crate) fn upper() -> Result<Root, Error> {
    Root::open(&Path::new(OVERLAY).join(UPPER)).map_err(Error::io("open the overlay's upper directory"))
}

/// Whether a root is mounted, with base mounts, that no VM has yet.
pub(crate) fn has_prepared_root() -> bool {
    let is_free = |prepared: &Prepared| prepared.of_vm.as_ref().is_some_and(|root| root.is_free);
    prepared().as_ref().is_some_and(is_free)
}

/// Names at the top of the overlay's upper directory.
pub(crate) fn upper_entries() -> io::Result<HashSet<OsString>> {
    std::fs::read_dir(Path::new(OVERLAY).join(UPPER))?.map(|entry| Ok(entry?.file_name())).collect()
}

/// Undoes [`root`], except for the prepared disk, and removes everything that was written to the disk. Directories in `before`
/// stay, emptied. Prepares the VM's root again, if there was one. The root of a warm-up is left as it is: no other gets it.
pub(crate) fn undo_root(plan: &Plan, before: &HashSet<OsString>) -> io::Result<()> {
    let mut prepared = prepared();
    if prepared
        .as_ref()
        .and_then(|prepared| prepared.of_warm_up.as_ref())
        .is_some_and(|root| root.image == plan.image)
    {
        return Ok(());
    }
    for place in [OF_VM.root, OF_VM.image] {
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
    if let Some(of_vm) = prepared.as_mut().and_then(|prepared| prepared.of_vm.as_mut()) {
        prepare_root(&of_vm.image, &OF_VM).map_err(io::Error::other)?;
        of_vm.is_free = true;
    }
    Ok(())
}

/// Removes what a sandbox has left after its containers were removed, if it had any. The prepared disk stays.
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

/// Mounts the overlay of image and disk as the container's root. Its upper directory is self-contained, regardless of the
/// kernel's defaults: no directory or file in it refers to data of the image, and no hard link is stored elsewhere (kernel,
/// Documentation/filesystems/overlayfs.rst). `coracle commit` makes a layer of it.
fn mount_overlay(mounted: &mut Mounted, places: &Places, lower: &[&str]) -> Result<(), Error> {
    let Places { root, writable, .. } = places;
    for dir in [Path::new(root), &Path::new(writable).join(UPPER), &Path::new(writable).join("work")] {
        make_dir(dir)?;
    }
    let layers = format!(
        "lowerdir={},upperdir={writable}/{UPPER},workdir={writable}/work,redirect_dir=off,metacopy=off,index=off",
        lower.join(":")
    );
    let layers = CString::new(layers).map_err(|e| Error::invalid(e.to_string()))?;
    mounted.mount(Path::new("overlay"), Path::new(root), "overlay", MountFlags::empty(), &layers)
}

/// Mounts image, overlay and the base mounts of a container, unless the template has them mounted. A failure is undone, so the
/// call can be repeated. Also returns the directory for the files of the VM's identity, unless they belong into the root.
pub(crate) fn root(plan: &Plan) -> Result<(Root, Option<Root>), Error> {
    let Some((mut prepared, places)) = take_prepared_root(plan) else {
        let mut mounted = mount_root(plan)?;
        let root = open_root(&OF_VM)?;
        base_mounts::move_into(&root)?;
        mounted.keep();
        return Ok((root, None));
    };
    let has_identity = remove_shadowing_dirs(places);
    let identity = has_identity.then(|| Root::open(Path::new(places.identity))).transpose();
    let identity = identity.map_err(Error::io(format!("open {}", places.identity)))?;
    let root = open_root(places)?;
    prepared.keep();
    Ok((root, identity))
}

fn mount_root(plan: &Plan) -> Result<Mounted, Error> {
    let mut mounted = Mounted::default();
    let (image, overlay) = (Path::new(OF_VM.image), Path::new(OVERLAY));
    prepare()?;
    vacate(&plan.image)?;
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
    remove_shadowing_dirs(&OF_VM);
    mount_overlay(&mut mounted, &OF_VM, &[OF_VM.image])?;
    Ok(mounted)
}

/// Mounts the VM's own disk, unless it is already mounted by the template.
pub(crate) fn mount_own_disk(disk: &Path, mounted: &mut Mounted) -> Result<(), Error> {
    if prepared().as_ref().is_some_and(|prepared| prepared.disk == disk) {
        return Ok(());
    }
    mounted.mount(&disks::wait_for_disk(disk)?, Path::new(OVERLAY), "ext4", MountFlags::NODEV, DISK_OPTIONS)
}

/// Removes `/etc` of a fresh disk, and that of the identity, where they would hide that of the image: an overlay shows owner and
/// mode of the upper directory, and shows a directory instead of the image's symlink. The overlay must not have looked it up.
/// Returns whether both stay.
fn remove_shadowing_dirs(Places { image, identity, writable, .. }: &Places) -> bool {
    let above = [Path::new(writable).join(UPPER), PathBuf::from(identity)].map(|layer| layer.join("etc"));
    remove_unless_alike(&Path::new(image).join("etc"), &above)
}

/// Removes empty directories above that of the image, unless it has none in this place, or one with owner and mode of those on a
/// fresh disk. Returns whether they stay.
fn remove_unless_alike(lower: &Path, above: &[PathBuf]) -> bool {
    let stay = match std::fs::symlink_metadata(lower) {
        Ok(lower) => lower.is_dir() && (lower.mode() & 0o7777, lower.uid(), lower.gid()) == (0o755, 0, 0),
        Err(e) => e.kind() == std::io::ErrorKind::NotFound,
    };
    for above in above.iter().filter(|_| !stay) {
        let _in_use_or_absent = std::fs::remove_dir(above);
    }
    stay
}

/// Mounts made so far. Dropping it detaches those that were not kept.
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

    /// Attaches a detached mount to a path.
    pub(crate) fn attach(&mut self, mount: &OwnedFd, place: &Path) -> Result<(), Error> {
        let what = || format!("mount on {}", place.display());
        let at = std::fs::File::open(place).map_err(|e| Error::io(what())(e))?;
        attach(mount, &at).map_err(Error::io(what()))?;
        self.0.push(place.to_owned());
        Ok(())
    }

    /// Mounts a file system without a source inside a container's root, and opens its root directory.
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
        rustix::mount::mount(kind, fd_path(&place), kind, flags, data)
            .map_err(Error::io(format!("mount {kind} on {target} in the container")))?;
        self.push(root, path)
    }

    /// Records a mount inside a container's root, and opens its root directory.
    pub(crate) fn push(&mut self, root: &Root, target: &Path) -> Result<OwnedFd, Error> {
        let failed = || format!("find {} in the container", target.display());
        let top = root.resolve(target, OFlags::PATH).map_err(Error::io(failed()))?;
        self.0.push(std::fs::read_link(fd_path(&top)).map_err(Error::io(failed()))?);
        Ok(top)
    }

    /// Keeps the mounts when this is dropped.
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

/// Attaches a detached mount to an open directory or file.
pub(crate) fn attach(mount: impl AsFd, at: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount.as_fd(), c"", at.as_fd(), c"", flags)?)
}

/// Path of an open directory, for calls that take no descriptors.
pub(crate) fn fd_path(dir: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

/// Unmounts the container's root, so that its disk is clean. Best effort: a busy disk becomes read-only.
pub(crate) fn unmount_all() {
    let _ = rustix::mount::unmount(OF_VM.root, UnmountFlags::DETACH);
    prepared().take();
    if rustix::mount::unmount(OVERLAY, UnmountFlags::empty()).is_err() {
        let _ = rustix::mount::mount_remount(OVERLAY, MountFlags::RDONLY, c"");
    }
    let _ = rustix::mount::unmount(OF_VM.image, UnmountFlags::DETACH);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_upper_directory_that_differs_from_lower_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (lower, upper) = (dir.path().join("lower"), dir.path().join("upper"));
        let stays = || {
            std::fs::create_dir_all(&upper).unwrap();
            remove_unless_alike(&lower, std::slice::from_ref(&upper));
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
    fn root_mount_devices_are_validated() {
        let plan = |image: &str, fs: &str, overlay: &str| {
            Plan::parse(&RootMount {
                image_device: image.into(),
                image_fs: fs.into(),
                overlay_device: overlay.into(),
                root_first: false,
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
