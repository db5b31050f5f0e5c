//! Volumes in the container's root: disks and directories of the host in addition to the own disk, mounted and unmounted while
//! the workload runs. Names and mount points come from the host. The image controls the path of a mount point, so it is
//! resolved inside the root.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_proto::guest::mount_request::Source;
use coracle_proto::guest::{MountRequest, TmpfsSource};
use rustix::fs::{AtFlags, FileType, Mode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::error::Error;
use crate::mounts::{device, fd_path, vacate};
use crate::rootfs::{PATH_MAX, Root};
use crate::shared_dir::SharedDir;
use crate::{disks, rootfs};

/// Maximum number of volumes of a guest: more than it has slots.
const VOLUMES_MAX: usize = 64;

/// Validated request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    name: String,
    target: PathBuf,
    read_only: bool,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Disk {
        device: PathBuf,
        filesystem: &'static str,
    },
    /// Raw block device.
    Block {
        device: PathBuf,
    },
    SharedDir,
    /// Tmpfs in the memory of the guest, with these mount options.
    Tmpfs {
        options: CString,
    },
}

impl Plan {
    pub(crate) fn parse(wire: &MountRequest) -> Result<Self, Error> {
        let is_name = (1..=63).contains(&wire.name.len())
            && wire.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !is_name {
            return Err(Error::invalid(format!("volume name {:?}", wire.name)));
        }
        let target = Path::new(&wire.target);
        let plain = target.is_absolute()
            && target.file_name().is_some()
            && wire.target.len() <= PATH_MAX
            && !wire.target.contains('\0')
            && !target.components().any(|part| part == std::path::Component::ParentDir);
        if !plain {
            return Err(Error::invalid(format!("invalid target {:?} of a volume", wire.target)));
        }
        let kind = match &wire.source {
            Some(Source::Disk(disk)) => {
                let device = device(&disk.device)?;
                match disk.fs.as_str() {
                    "" => Kind::Block { device },
                    "ext4" => Kind::Disk { device, filesystem: "ext4" },
                    "erofs" => Kind::Disk { device, filesystem: "erofs" },
                    other => return Err(Error::invalid(format!("file system {other:?} of a volume"))),
                }
            }
            Some(Source::SharedDir(_)) => Kind::SharedDir,
            Some(Source::Tmpfs(tmpfs)) => Kind::Tmpfs { options: tmpfs_options(tmpfs) },
            None => return Err(Error::invalid("a volume without a source")),
        };
        Ok(Self { name: wire.name.clone(), target: target.to_owned(), read_only: wire.read_only, kind })
    }
}

/// Mounted volume.
#[derive(Debug)]
struct Mounted {
    plan: Plan,
    /// Resolved path of the mount point, without links.
    place: PathBuf,
    shared_dir: Option<Arc<SharedDir>>,
}

/// Volumes of this guest, by name.
#[derive(Debug, Default)]
pub(crate) struct Volumes(Mutex<BTreeMap<String, Mounted>>);

impl Volumes {
    /// Mounts a volume; blocking. `Ok` if it is mounted already.
    pub(crate) fn mount(&self, root: &Root, plan: Plan) -> Result<(), Error> {
        let mut volumes = self.lock();
        if let Some(there) = volumes.get(&plan.name) {
            let why = format!("volume {} is mounted otherwise", plan.name);
            return if there.plan == plan { Ok(()) } else { Err(Error::State(why)) };
        }
        if volumes.len() >= VOLUMES_MAX {
            return Err(Error::State(format!("{VOLUMES_MAX} volumes are mounted already")));
        }
        let (place, shared_dir) = match &plan.kind {
            Kind::Disk { device, filesystem } => (mount_disk(root, &plan, device, filesystem)?, None),
            Kind::Block { device } => (give_device(root, &plan, device)?, None),
            Kind::SharedDir => mount_shared_dir(root, &plan)
                .map(|(place, shared_dir)| (place, Some(Arc::new(shared_dir))))?,
            Kind::Tmpfs { options } => {
                (mount_at(root, &plan, Path::new("tmpfs"), "tmpfs", options.clone())?, None)
            }
        };
        volumes.insert(plan.name.clone(), Mounted { plan, place, shared_dir });
        Ok(())
    }

    /// Unmounts a volume; blocking. When this returns, all writes are on its disk. `Ok` if it is not mounted.
    pub(crate) fn unmount(&self, root: &Root, name: &str) -> Result<(), Error> {
        let mut volumes = self.lock();
        let Some(there) = volumes.get(name) else { return Ok(()) };
        let target = there.plan.target.display();
        if let Kind::Block { device } = &there.plan.kind {
            let (dir, leaf) = root.parent(&there.plan.target).map_err(Error::io(format!("find {target}")))?;
            rootfs::remove(dir.as_fd(), &leaf).map_err(Error::io(format!("remove {target}")))?;
            disks::wait_for_disk(device)?;
        } else {
            match rustix::mount::unmount(&there.place, UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                Err(Errno::BUSY) => {
                    return Err(Error::State(format!("{target} is in use: end what has files open in it")));
                }
                // The workload may have unmounted the volume itself.
                Err(Errno::INVAL | Errno::NOENT) => {}
                Err(e) => return Err(Error::io(format!("unmount {target}"))(e)),
            }
        }
        volumes.remove(name);
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Shared directory of that name, to be served.
    pub(crate) fn shared_dir(&self, name: &str) -> Result<Arc<SharedDir>, Error> {
        let volumes = self.lock();
        let shared_dir = volumes.get(name).and_then(|volume| volume.shared_dir.clone());
        shared_dir.ok_or_else(|| Error::State(format!("shared directory {name:?} not found")))
    }

    /// Unmounts all idle volumes; blocking.
    pub(crate) fn unmount_idle(&self) {
        self.lock().retain(|_, volume| {
            matches!(volume.plan.kind, Kind::Block { .. })
                || rustix::mount::unmount(&volume.place, UnmountFlags::NOFOLLOW).is_err()
        });
    }

    /// Unmounts all volumes, so that their disks are clean. Best effort: a busy disk becomes read-only. A shared directory that
    /// is not served any more is aborted, because the kernel would wait for a reply.
    pub(crate) fn unmount_all(&self) {
        for Mounted { plan, place, shared_dir } in std::mem::take(&mut *self.lock()).into_values() {
            drop(shared_dir);
            let busy = rustix::mount::unmount(&place, UnmountFlags::NOFOLLOW).is_err();
            if busy && matches!(plan.kind, Kind::Disk { .. }) {
                let _ = rustix::mount::mount_remount(&place, MountFlags::RDONLY, c"");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Mounted>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Mount options of a tmpfs (tmpfs(5)).
pub(crate) fn tmpfs_options(tmpfs: &TmpfsSource) -> CString {
    let mode = if tmpfs.mode == 0 { 0o1777 } else { tmpfs.mode & 0o7777 };
    let owner = match (tmpfs.uid, tmpfs.gid) {
        (0, 0) => String::new(),
        (uid, gid) => format!(",uid={uid},gid={gid}"),
    };
    let size = if tmpfs.size_bytes == 0 { String::new() } else { format!(",size={}", tmpfs.size_bytes) };
    CString::new(format!("mode={mode:04o}{owner}{size}")).unwrap_or_default()
}

fn mount_disk(root: &Root, plan: &Plan, device: &Path, filesystem: &str) -> Result<PathBuf, Error> {
    vacate(device)?;
    let node = disks::wait_for_disk(device)?;
    mount_at(root, plan, &node, filesystem, c"".to_owned())
}

fn mount_shared_dir(root: &Root, plan: &Plan) -> Result<(PathBuf, SharedDir), Error> {
    let (shared_dir, device) = SharedDir::open().map_err(Error::io("open /dev/fuse"))?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=131072",
        device.as_raw_fd()
    );
    let options = CString::new(options).map_err(|_| Error::invalid("mount options"))?;
    let place = mount_at(root, plan, Path::new("coracle"), "fuse", options)?;
    Ok((place, shared_dir))
}

/// Mounts over the directory that the target resolves to inside the root, and returns its resolved path.
fn mount_at(root: &Root, plan: &Plan, source: &Path, kind: &str, data: CString) -> Result<PathBuf, Error> {
    let target = plan.target.display();
    let dir = root
        .ensure_dir(&plan.target, Mode::from_raw_mode(0o755))
        .map_err(Error::io(format!("make {target} in the container")))?;
    let place = std::fs::read_link(fd_path(&dir)).map_err(Error::io(format!("find {target}")))?;
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, plan.read_only || kind == "erofs");
    rustix::mount::mount(source, fd_path(&dir), kind, flags, data.as_c_str())
        .map_err(|e| Error::io(format!("mount volume {} ({kind}) on {target}", plan.name))(e))?;
    Ok(place)
}

/// Makes a device node of the disk at the target.
fn give_device(root: &Root, plan: &Plan, device: &Path) -> Result<PathBuf, Error> {
    let target = plan.target.display();
    let failed = |what: &str| Error::io(format!("{what} {target} in the container"));
    vacate(device)?;
    let node = disks::wait_for_disk(device)?;
    let number = std::fs::metadata(&node).map_err(Error::io(format!("inspect {}", node.display())))?.rdev();
    let parent = plan.target.parent().unwrap_or(Path::new("/"));
    root.ensure_dir(parent, Mode::from_raw_mode(0o755)).map_err(failed("make the parent directory of"))?;
    let (dir, leaf) = root.parent(&plan.target).map_err(failed("find"))?;
    let mode = Mode::from_raw_mode(0o660);
    match rustix::fs::mknodat(&dir, leaf.as_os_str(), FileType::BlockDevice, mode, number) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Err(Error::State(format!("there is something at {target} already"))),
        Err(e) => return Err(failed("make")(e.into())),
    }
    // Sets the mode again, because the umask must not apply.
    rustix::fs::chmodat(&dir, leaf.as_os_str(), mode, AtFlags::empty())
        .map_err(|e| failed("open")(e.into()))?;
    Ok(plan.target.clone())
}

#[cfg(test)]
mod tests {
    use coracle_proto::guest::{DiskSource, SharedDirSource};

    use super::*;

    fn request() -> MountRequest {
        let disk = DiskSource { device: "/dev/disk/by-id/virtio-slot13".into(), fs: "ext4".into() };
        MountRequest {
            name: "data".into(),
            target: "/var/lib/data".into(),
            read_only: false,
            source: Some(Source::Disk(disk)),
        }
    }

    #[test]
    fn invalid_mount_requests_are_refused() {
        assert!(Plan::parse(&request()).is_ok());
        let shared_dir = MountRequest { source: Some(Source::SharedDir(SharedDirSource {})), ..request() };
        assert_eq!(Plan::parse(&shared_dir).unwrap().kind, Kind::SharedDir);
        let disk =
            |device: &str, fs: &str| Some(Source::Disk(DiskSource { device: device.into(), fs: fs.into() }));
        for (why, bad) in [
            ("no name", MountRequest { name: String::new(), ..request() }),
            ("a path as a name", MountRequest { name: "a/b".into(), ..request() }),
            ("relative", MountRequest { target: "data".into(), ..request() }),
            ("the root itself", MountRequest { target: "/".into(), ..request() }),
            ("upwards", MountRequest { target: "/a/../b".into(), ..request() }),
            ("no source", MountRequest { source: None, ..request() }),
            ("no device", MountRequest { source: disk("/etc/passwd", "ext4"), ..request() }),
            ("unknown file system", MountRequest { source: disk("/dev/vda", "ntfs"), ..request() }),
        ] {
            assert!(matches!(Plan::parse(&bad), Err(Error::Invalid(_))), "{why}");
        }
    }
}
