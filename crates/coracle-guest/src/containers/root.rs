//! Roots of containers: an overlay of the image and a directory of the VM's own disk, with dev, sys and the mounts of
//! the container. What an image or a volume contains is hostile, so every place is resolved inside its root.

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
use crate::mounts::{Mounted, OF_CONTAINERS, OVERLAY, PLAIN, SANDBOX, handle};
use crate::rootfs::{self, Root};
use crate::user_namespace::{MakesFiles, UserNamespace};
use crate::{base_mounts, disks, mounts};

/// Where roots and images are mounted in the agent's own file system.
const ROOTS: &str = "/run/coracle/containers";
/// Where an image is mounted with mapped owners, until it is a layer of an overlay: one root is made at a time.
const MAPPED: &str = "/run/coracle/mapped";
const IMAGES: &str = "/run/coracle/images";
/// Files of the sandbox that every container has a copy of.
const COPIED: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Largest of them, bytes.
const COPIED_MAX: usize = 64 * 1024;
/// Most of a termination message, bytes (Kubernetes API reference, Container, terminationMessagePath).
const MESSAGE_MAX: u64 = 4096;
/// Size of /dev/shm, as the OCI runtimes have it.
const SHM: &std::ffi::CStr = c"mode=1777,size=64m";
const DIRECTORY: Mode = Mode::from_raw_mode(0o755);

/// Images that are mounted, with the number of containers that have them.
#[derive(Debug, Default)]
pub(super) struct Images(Mutex<BTreeMap<PathBuf, usize>>);

/// Use of a mounted image; given back by [`Images::release`].
#[derive(Debug)]
pub(super) struct ImageMount {
    device: PathBuf,
    place: PathBuf,
}

impl Images {
    /// Mounts an image, if no container has it yet; blocking.
    fn mount(&self, device: &Path, filesystem: &str) -> Result<ImageMount, Error> {
        let place = image_place(device);
        let mut images = self.lock();
        let users = images.entry(device.to_owned()).or_insert(0);
        if *users == 0 {
            make_dir(&place)?;
            let flags = MountFlags::RDONLY | MountFlags::NODEV;
            let data = if filesystem == "ext4" { c"noload" } else { c"" };
            let mounted = disks::unused(device).and_then(|node| {
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

    /// Unmounts an image that no other container has; blocking.
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

/// The mounted root of one container.
#[derive(Debug)]
pub(super) struct ContainerRoot {
    /// Where it is in the agent's file system; no part of the path comes from an image.
    pub(super) place: PathBuf,
    /// Upper and work directory of its overlay.
    writable: PathBuf,
    image: ImageMount,
    /// Images that are mounted in it.
    volumes: Vec<ImageMount>,
}

impl ContainerRoot {
    /// Puts the root together; blocking. What a failure had made is undone.
    ///
    /// # Errors
    /// When a disk, a volume or a place is missing, or the kernel refuses.
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
            None => self.lay(&self.image.place, None, &mut mounted)?,
            Some(namespace) => {
                let mut mapped = Mounted::default();
                self.map_image(namespace, &mut mapped)?;
                self.lay(Path::new(MAPPED), Some(namespace.ids.first()), &mut mounted)?;
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

    /// Mounts the overlay over an image. `owner` has its root; `None`: the guest's root.
    fn lay(&self, image: &Path, owner: Option<u32>, mounted: &mut Mounted) -> Result<(), Error> {
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

    /// Mounts the image once more, with owners of the user namespace. An overlay keeps a mount of its own of it.
    fn map_image(&self, namespace: &UserNamespace, mapped: &mut Mounted) -> Result<(), Error> {
        make_dir(Path::new(MAPPED))?;
        let image = fs::File::open(&self.image.place).map_err(Error::io("open the image"))?;
        let mount = namespace.mount(image).map_err(Error::io("map the owners of the image"))?;
        mapped.attach(&mount, Path::new(MAPPED))
    }

    /// The file of the termination message, empty, which every user can write.
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

    /// The end of what it left as its termination message; blocking, for one small read.
    pub(super) fn termination_message(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let Ok(mut file) = fs::File::open(self.message()) else { return text };
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let read = file.seek(SeekFrom::Start(length.saturating_sub(MESSAGE_MAX)));
        let _as_much_as_there_is = read.and_then(|_| file.take(MESSAGE_MAX).read_to_end(&mut text));
        text
    }

    /// Takes the root apart and removes what was written to it; blocking. Idempotent.
    pub(super) fn remove(&self, images: &Images) -> io::Result<()> {
        self.leave(images);
        for dir in [&self.place, &self.writable] {
            match fs::remove_dir_all(dir) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes the root apart; blocking. Everything below goes with it.
    pub(super) fn leave(&self, images: &Images) {
        let _not_mounted = rustix::mount::unmount(&self.place, UnmountFlags::DETACH);
        self.volumes.iter().for_each(|volume| images.release(volume));
        images.release(&self.image);
    }

    /// Bytes and inodes of what it has written; blocking.
    pub(super) fn usage(&self) -> (u64, u64) {
        disk_usage(&self.writable.join("upper"))
    }
}

/// Bytes and inodes below a directory. Best effort: what vanishes meanwhile does not count.
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

/// What every container finds beside its image. Its proc belongs to its PID namespace and is mounted when it starts.
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
    // The file system takes no numbers above 2147483647 (match_int of the kernel), where kubelets have the ids of pods. A terminal
    // has the group of who opens it then.
    let terminals = match security.ids {
        None => c"newinstance,mode=0620,gid=5,ptmxmode=0666",
        Some(_) => c"newinstance,mode=0620,ptmxmode=0666",
    };
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mounted.mount_on(root, "devpts", "/dev/pts", DIRECTORY, flags, terminals)?;
    mounted.mount_on(root, "tmpfs", "/dev/shm", Mode::from_raw_mode(0o1777), PLAIN, SHM)?;
    Ok(())
}

/// Names and resolver of the sandbox, but where the container has a mount of its own.
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

/// One mount of the container.
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

/// Puts a directory or a file at its place in the container.
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
        None => rustix::mount::mount_bind_recursive(handle(source), handle(&at)).map_err(io::Error::from),
        Some(namespace) => namespace.mount(source).and_then(|mount| mounts::attach(&mount, &at)),
    };
    made.map_err(Error::io(failed("mount")))?;
    mounted.push(root, target)?;
    if read_only {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        let top = root.resolve(target, OFlags::PATH).map_err(Error::io(failed("find")))?;
        rustix::mount::mount_remount(handle(&top), flags, c"")
            .map_err(Error::io(failed("make read-only")))?;
    }
    Ok(())
}

/// A volume, or a directory or file in it. A missing directory is made, with the mode of the volume as a kubelet has it.
fn source(name: &str, sub_path: &Path) -> Result<OwnedFd, Error> {
    let missing = || format!("find {} in volume {name}", sub_path.display());
    let place = Path::new(SANDBOX).join("volumes").join(name);
    let volume = Root::open(&place).map_err(Error::io(format!("find volume {name}")))?;
    match volume.resolve(sub_path_or_all(sub_path), OFlags::PATH) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let made = volume.ensure_dir(&Path::new("/").join(sub_path), DIRECTORY);
            let made = made.map_err(Error::io(missing()))?;
            // The umask does not apply.
            let of_volume = rustix::fs::stat(&place).map(|of| Mode::from_raw_mode(of.st_mode));
            of_volume
                .and_then(|mode| rustix::fs::chmod(handle(&made), mode))
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

/// A file to mount over, made empty where there is none.
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
