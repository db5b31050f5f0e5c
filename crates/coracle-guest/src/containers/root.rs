//! Roots of containers: an overlay of the image and a directory of the VM's own disk, with dev, sys and the mounts of the
//! container. Images and volumes are hostile, so every path is resolved inside its root.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::plan::{Mount, MountSource, Plan, SecurityPlan};
use crate::error::Error;
use crate::mounts::{Mounted, OF_CONTAINERS, OVERLAY, PLAIN, SANDBOX, fd_path};
use crate::rootfs::{self, Root};
use crate::{base_mounts, disks, mounts};
use coracle_spawn::{MakesFiles, UserNamespace};

/// Mount points of roots and images in the agent's own file system.
const ROOTS: &str = "/run/coracle/containers";
/// Mount point of an image with mapped owners, until it is a layer of an overlay. One root is made at a time.
const MAPPED: &str = "/run/coracle/mapped";
const IMAGES: &str = "/run/coracle/images";
/// Files of the sandbox that are copied into every container.
const COPIED: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Maximum size of a copied file, bytes.
const COPIED_MAX: usize = 64 * 1024;
/// Maximum length of a termination message, bytes (Kubernetes API reference, Container, terminationMessagePath).
const MESSAGE_MAX: u64 = 4096;
/// Mount options of /dev/shm, with the size that the OCI runtimes use.
const SHM: &std::ffi::CStr = c"mode=1777,size=64m";
const DIRECTORY: Mode = Mode::from_raw_mode(0o755);

/// Mounted images, with the number of their users.
#[derive(Debug, Default)]
pub(super) struct Images(Mutex<BTreeMap<PathBuf, usize>>);

/// Use of a mounted image, released by [`Images::release`].
#[derive(Debug)]
pub(super) struct ImageMount {
    device: PathBuf,
    place: PathBuf,
}

impl Images {
    /// Mounts an image, unless it is mounted; blocking.
    fn mount(&self, device: &Path, filesystem: &str) -> Result<ImageMount, Error> {
        let place = image_place(device);
        let mut images = self.lock();
        let users = images.entry(device.to_owned()).or_insert(0);
        if *users == 0 {
            make_dir(&place)?;
            let flags = MountFlags::RDONLY | MountFlags::NODEV;
            let data = if filesystem == "ext4" { c"noload" } else { c"" };
            let free = mounts::vacate(device).and_then(|()| disks::wait_until_unused(device));
            let mounted = free.and_then(|node| {
                let what = format!("mount {} ({filesystem})", node.display());
                rustix::mount::mount(&node, &place, filesystem, flags, data).map_err(Error::io(what))
            });
            if let Err(error) = mounted {
                images.remove(device);
                return Err(error);
            }
        }
        images.entry(device.to_owned()).and_modify(|users| *users += 1);
        Ok(ImageMount { device: device.to_owned(), place })
    }

    /// Releases an image and unmounts it after its last use; blocking.
    fn release(&self, image: &ImageMount) {
        let mut images = self.lock();
        let left = images.get_mut(&image.device).map(|users| {
            *users = users.saturating_sub(1);
            *users
        });
        if left == Some(0) {
            images.remove(&image.device);
            let _ = rustix::mount::unmount(&image.place, UnmountFlags::DETACH);
            let _ = fs::remove_dir(&image.place);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn image_place(device: &Path) -> PathBuf {
    Path::new(IMAGES).join(device.file_name().unwrap_or_default())
}

/// Mounted root of one container.
#[derive(Debug)]
pub(super) struct ContainerRoot {
    /// Mount point in the agent's file system; no part of the path comes from an image.
    pub(super) place: PathBuf,
    /// Directory with the upper and work directories of the overlay.
    writable: PathBuf,
    image: ImageMount,
    /// Images that are mounted in the container.
    volumes: Vec<ImageMount>,
}

impl ContainerRoot {
    /// Mounts the root; blocking. A failure is undone.
    ///
    /// # Errors
    /// When a disk, a volume or a mount point is missing, or the kernel refuses a mount.
    pub(super) fn mount(
        plan: &Plan,
        user_namespace: Option<&UserNamespace>,
        images: &Images,
    ) -> Result<(Self, Root), Error> {
        let image = images.mount(&plan.image, plan.filesystem)?;
        let mut container = Self {
            place: Path::new(ROOTS).join(&plan.id),
            writable: Path::new(OVERLAY).join(OF_CONTAINERS).join(&plan.id),
            image,
            volumes: vec![],
        };
        let mounted = container.mount_images(plan, images);
        match mounted.and_then(|()| container.assemble(plan, user_namespace)) {
            Ok(root) => Ok((container, root)),
            Err(error) => {
                if let Err(left) = container.remove(images) {
                    crate::console::say!("remove root of {}: {left}", plan.id);
                }
                Err(error)
            }
        }
    }

    fn mount_images(&mut self, plan: &Plan, images: &Images) -> Result<(), Error> {
        for mount in &plan.mounts {
            if let MountSource::Image { device, filesystem, .. } = &mount.source {
                self.volumes.push(images.mount(device, filesystem)?);
            }
        }
        Ok(())
    }

    fn assemble(&self, plan: &Plan, user_namespace: Option<&UserNamespace>) -> Result<Root, Error> {
        let mut mounted = Mounted::default();
        match user_namespace {
            None => self.mount_overlay(&self.image.place, None, &mut mounted)?,
            Some(namespace) => {
                let mut mapped = Mounted::default();
                self.map_image(namespace, &mut mapped)?;
                self.mount_overlay(Path::new(MAPPED), Some(namespace.ids.first()), &mut mounted)?;
            }
        }
        let message = match &plan.termination_message {
            Some(target) => Some((target, self.make_message()?)),
            None => None,
        };
        let makes_files = user_namespace.map(|namespace| MakesFiles::as_root_of(namespace.ids)).transpose();
        let _as_root = makes_files.map_err(Error::io("become the container's root"))?;
        let root = Root::open(&self.place).map_err(Error::io("open the container's root"))?;
        system_mounts(&root, &mut mounted, &plan.security)?;
        copy_files(&root, &plan.mounts)?;
        for mount in &plan.mounts {
            add(&root, &mut mounted, mount, user_namespace)?;
        }
        if let Some((target, file)) = message {
            bind((&root, &mut mounted), target, &file, false, None)?;
        }
        mounted.keep();
        Ok(root)
    }

    /// Mounts the overlay over an image. `owner` becomes the owner of the root directory; `None`: the guest's root.
    fn mount_overlay(&self, image: &Path, owner: Option<u32>, mounted: &mut Mounted) -> Result<(), Error> {
        let (upper, work) = (self.writable.join("upper"), self.writable.join("work"));
        [&self.place, &upper, &work].into_iter().try_for_each(|dir| make_dir(dir))?;
        if owner.is_some() {
            std::os::unix::fs::chown(&upper, owner, owner).map_err(Error::io("give the root its owner"))?;
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=off,metacopy=off,index=off",
            image.display(),
            upper.display(),
            work.display()
        );
        let options = CString::new(options).map_err(|_| Error::invalid("overlay options"))?;
        mounted.mount(Path::new("overlay"), &self.place, "overlay", MountFlags::empty(), &options)
    }

    /// Mounts the image again, with owners mapped to the user namespace. The overlay then holds a mount of its own.
    fn map_image(&self, namespace: &UserNamespace, mapped: &mut Mounted) -> Result<(), Error> {
        make_dir(Path::new(MAPPED))?;
        let image = fs::File::open(&self.image.place).map_err(Error::io("open the image"))?;
        let mount = namespace.mount(image).map_err(Error::io("map the owners of the image"))?;
        mapped.attach(&mount, Path::new(MAPPED))
    }

    /// Makes an empty termination message file that every user can write.
    fn make_message(&self) -> Result<OwnedFd, Error> {
        let (path, mode) = (self.message(), Mode::from_raw_mode(0o666));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, mode).and_then(|file| {
            rustix::fs::fchmod(&file, mode)?; // the umask does not apply
            Ok(file)
        });
        file.map_err(|e| Error::io(format!("make {}", path.display()))(e))
    }

    fn message(&self) -> PathBuf {
        self.writable.join("termination-message")
    }

    /// Reads the end of the termination message; blocking, one small read.
    pub(super) fn termination_message(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let Ok(mut file) = fs::File::open(self.message()) else { return text };
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let read = file.seek(SeekFrom::Start(length.saturating_sub(MESSAGE_MAX)));
        let _as_much_as_there_is = read.and_then(|_| file.take(MESSAGE_MAX).read_to_end(&mut text));
        text
    }

    /// Unmounts the root and removes everything that was written to it; blocking. Idempotent.
    pub(super) fn remove(&self, images: &Images) -> io::Result<()> {
        self.unmount_all(images);
        for dir in [&self.place, &self.writable] {
            match fs::remove_dir_all(dir) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Unmounts the root with everything below; blocking.
    pub(super) fn unmount_all(&self, images: &Images) {
        let _not_mounted = rustix::mount::unmount(&self.place, UnmountFlags::DETACH);
        self.volumes.iter().for_each(|volume| images.release(volume));
        images.release(&self.image);
    }

    /// Bytes and inodes that the container has written; blocking.
    pub(super) fn usage(&self) -> (u64, u64) {
        disk_usage(&self.writable.join("upper"))
    }
}

/// Bytes and inodes below a directory. Best effort: files that vanish meanwhile are not counted.
fn disk_usage(dir: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let mut open = vec![dir.to_owned()];
    let (mut bytes, mut inodes) = (0_u64, 0_u64);
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512));
            inodes = inodes.saturating_add(1);
            if metadata.is_dir() {
                open.push(entry.path());
            }
        }
    }
    (bytes, inodes)
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))
}

/// Mounts sys and dev of a container. Its proc belongs to its PID namespace and is mounted when it starts.
fn system_mounts(root: &Root, mounted: &mut Mounted, security: &SecurityPlan) -> Result<(), Error> {
    let privileged = security.privileged;
    place(root, "/proc", Mode::from_raw_mode(0o555))?;
    let mut sys_flags = PLAIN;
    sys_flags.set(MountFlags::RDONLY, !privileged);
    mounted.mount_on(root, "sysfs", "/sys", Mode::from_raw_mode(0o555), sys_flags, c"")?;
    if privileged {
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        mounted.mount_on(root, "devtmpfs", "/dev", DIRECTORY, flags, c"mode=0755")?;
    } else {
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        let dev = mounted.mount_on(root, "tmpfs", "/dev", DIRECTORY, flags, c"mode=0755,size=64k")?;
        base_mounts::nodes(&dev).map_err(Error::io("make device nodes"))?;
    }
    // With a user namespace `gid` is omitted: the file system accepts no numbers above 2147483647 (match_int of the kernel),
    // and kubelets use larger ids for pods. A terminal then has the group of the process that opens it.
    let terminals = match security.ids {
        None => c"newinstance,mode=0620,gid=5,ptmxmode=0666",
        Some(_) => c"newinstance,mode=0620,ptmxmode=0666",
    };
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mounted.mount_on(root, "devpts", "/dev/pts", DIRECTORY, flags, terminals)?;
    mounted.mount_on(root, "tmpfs", "/dev/shm", Mode::from_raw_mode(0o1777), PLAIN, SHM)?;
    Ok(())
}

/// Copies names and resolver of the sandbox, unless the container has a mount in their place.
fn copy_files(root: &Root, mounts: &[Mount]) -> Result<(), Error> {
    let sandbox = Root::open(Path::new(SANDBOX)).map_err(Error::io("open the sandbox's files"))?;
    for path in COPIED.map(Path::new) {
        if mounts.iter().any(|mount| mount.target == path) {
            continue;
        }
        let Ok(text) = sandbox.read(path, COPIED_MAX) else { continue };
        root.replace(path, &text, Mode::from_raw_mode(0o644))
            .map_err(Error::io(format!("write {} in the container", path.display())))?;
    }
    Ok(())
}

/// Adds one mount of the container.
fn add(
    root: &Root,
    mounted: &mut Mounted,
    mount: &Mount,
    user_namespace: Option<&UserNamespace>,
) -> Result<(), Error> {
    let target = &mount.target;
    match &mount.source {
        MountSource::Tmpfs { options } => {
            let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
            flags.set(MountFlags::RDONLY, mount.read_only);
            let path = target.to_string_lossy();
            mounted.mount_on(root, "tmpfs", &path, DIRECTORY, flags, options).map(drop)
        }
        MountSource::Volume { name, sub_path } => {
            // Owners in volumes are those of the guest.
            bind((root, mounted), target, &source(name, sub_path)?, mount.read_only, None)
        }
        MountSource::Image { device, sub_path, .. } => {
            let image = Root::open(&image_place(device)).map_err(Error::io("open the image of a mount"))?;
            let source = image
                .resolve(sub_path_or_all(sub_path), OFlags::PATH)
                .map_err(Error::io(format!("find {} in an image", sub_path.display())))?;
            bind((root, mounted), target, &source, true, user_namespace)
        }
    }
}

/// Binds a directory or a file to a path in the container.
fn bind(
    (root, mounted): (&Root, &mut Mounted),
    target: &Path,
    source: &OwnedFd,
    read_only: bool,
    owners: Option<&UserNamespace>,
) -> Result<(), Error> {
    let is_dir = rootfs::is(source, FileType::Directory).map_err(Error::io("inspect a volume"))?;
    let at = if is_dir { dir_place(root, target) } else { file_place(root, target) };
    let at = at.map_err(Error::io(format!("make {} in the container", target.display())))?;
    let failed = |what: &str| format!("{what} {}", target.display());
    let made = match owners {
        None => rustix::mount::mount_bind_recursive(fd_path(source), fd_path(&at)).map_err(io::Error::from),
        Some(namespace) => namespace.mount(source).and_then(|mount| mounts::attach(&mount, &at)),
    };
    made.map_err(Error::io(failed("mount")))?;
    mounted.push(root, target)?;
    if read_only {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        let top = root.resolve(target, OFlags::PATH).map_err(Error::io(failed("find")))?;
        rustix::mount::mount_remount(fd_path(&top), flags, c"")
            .map_err(Error::io(failed("make read-only")))?;
    }
    Ok(())
}

/// Opens a volume, or a directory or file in it. A missing directory is made with the mode of the volume, as kubelets do.
fn source(name: &str, sub_path: &Path) -> Result<OwnedFd, Error> {
    let missing = || format!("find {} in volume {name}", sub_path.display());
    let place = Path::new(SANDBOX).join("volumes").join(name);
    let volume = Root::open(&place).map_err(Error::io(format!("find volume {name}")))?;
    match volume.resolve(sub_path_or_all(sub_path), OFlags::PATH) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let made = volume.ensure_dir(&Path::new("/").join(sub_path), DIRECTORY);
            let made = made.map_err(Error::io(missing()))?;
            // Sets the mode again, because the umask must not apply.
            let of_volume = rustix::fs::stat(&place).map(|of| Mode::from_raw_mode(of.st_mode));
            of_volume
                .and_then(|mode| rustix::fs::chmod(fd_path(&made), mode))
                .map_err(|e| Error::io(missing())(e))?;
            Ok(made)
        }
        found => found.map_err(Error::io(missing())),
    }
}

fn sub_path_or_all(sub_path: &Path) -> &Path {
    if sub_path.as_os_str().is_empty() { Path::new(".") } else { sub_path }
}

fn place(root: &Root, path: &str, mode: Mode) -> Result<OwnedFd, Error> {
    root.ensure_dir(Path::new(path), mode).map_err(Error::io(format!("make {path} in the container")))
}

fn dir_place(root: &Root, target: &Path) -> io::Result<OwnedFd> {
    root.ensure_dir(target, DIRECTORY)
}

/// Opens a file to mount over, and makes an empty one if it is missing.
fn file_place(root: &Root, target: &Path) -> io::Result<OwnedFd> {
    root.ensure_dir(target.parent().unwrap_or(Path::new("/")), DIRECTORY)?;
    match root.resolve(target, OFlags::PATH) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let (dir, leaf) = root.parent(target)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(&dir, leaf.as_os_str(), flags, Mode::from_raw_mode(0o644)) {
        Ok(_) | Err(Errno::EXIST) => root.resolve(target, OFlags::PATH),
        Err(e) => Err(e.into()),
    }
}
