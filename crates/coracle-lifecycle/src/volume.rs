//! Volumes: disks and directories of the node that a VM has beside its own disk.
//!
//! The source that a caller requests is inspected once ([`inspect_source`]); then [`plan_volume`] decides its place from the
//! record alone. A disk that is written belongs to one VM ([`Claims`]).

use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_hypervisor::Slots;
use coracle_types::{IdMapping, VmId};

use coracle_instance::vmm_config::{IMAGE_SLOT, overlay_slot};
use coracle_record::{AttachedImage, Submounts, Tmpfs};

use crate::{Filesystem, HostConfig, Record, Volume, VolumeKind, VolumePhase, disks};
use coracle_files::granted;

/// Maximum length of a volume's name, and of a path in a guest (PATH_MAX).
const NAME_MAX: usize = 63;
const TARGET_MAX: usize = 4096;
/// Maximum number of shared directories of a VM: the agent mounts 64 volumes.
const SHARED_DIRS_MAX: usize = 48;

/// Volume that a caller requests for a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeRequest {
    /// Name in the VM; empty: derived from the source.
    pub name: String,
    /// Absolute path on the node, or the name of a disk that the node keeps.
    pub source: String,
    /// Absolute path in the guest; empty: derived from the name.
    pub target: String,
    /// Whether the guest may only read the volume.
    pub read_only: bool,
    /// Treatment of file systems that are mounted below the directory.
    pub submounts: Submounts,
    /// User namespace in the guest to which the owners in the directory belong.
    pub ids: Option<IdMapping>,
    /// File system in the guest's memory, without a source.
    pub tmpfs: Option<Tmpfs>,
    /// Size of a named disk that does not exist yet, MiB.
    pub size_mib: Option<u64>,
    /// Uid of a caller on the node's own socket, who may name paths that belong to this user.
    pub local_user: Option<u32>,
}

/// Inspected source of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSource {
    path: PathBuf,
    /// Device and inode number, which identify a file under any name.
    inode: (u64, u64),
    kind: SourceKind,
    /// The file system was not unmounted cleanly, so its journal must be replayed before it can be read.
    dirty: bool,
}

impl VolumeSource {
    /// Inspects a path of the node's own. Blocking.
    ///
    /// # Errors
    /// A sentence with the reason.
    pub fn at(path: PathBuf) -> Result<Self, String> {
        inspect(path)
    }

    /// Returns the source of a file system in memory.
    pub fn in_memory(tmpfs: Tmpfs) -> Self {
        Self { path: PathBuf::new(), inode: (0, 0), kind: SourceKind::Tmpfs(tmpfs), dirty: false }
    }

    /// Inspects the source of a VM's volume.
    ///
    /// # Errors
    /// When the source does not exist any more.
    pub fn of(volume: &Volume) -> io::Result<Self> {
        if let VolumeKind::Tmpfs(tmpfs) = volume.kind {
            return Ok(Self::in_memory(tmpfs));
        }
        let metadata = volume.source.metadata()?;
        let kind = match volume.kind {
            VolumeKind::Tmpfs(tmpfs) => SourceKind::Tmpfs(tmpfs),
            VolumeKind::SharedDir => SourceKind::Directory,
            VolumeKind::Disk { filesystem, .. } => SourceKind::Disk(filesystem),
            VolumeKind::Block { .. } => SourceKind::Raw,
        };
        let inode = (metadata.dev(), metadata.ino());
        Ok(Self { path: volume.source.clone(), inode, kind, dirty: false })
    }

    /// Returns the path with links resolved; empty for a file system in memory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks whether a restored VM can have the volume with this source, which must match the volume in the snapshot.
    ///
    /// # Errors
    /// A sentence with the reason.
    pub fn check_restored(&self, volume: &Volume) -> Result<(), String> {
        check_target(&volume.target)?;
        let fits = match (self.kind, volume.kind) {
            (SourceKind::Directory, VolumeKind::SharedDir) | (SourceKind::Tmpfs(_), VolumeKind::Tmpfs(_)) => {
                true
            }
            (SourceKind::Disk(found), VolumeKind::Disk { filesystem, .. }) => {
                found == filesystem && volume.read_only
            }
            (SourceKind::Raw, VolumeKind::Block { .. }) => volume.read_only,
            _ => false,
        };
        if fits && is_name(&volume.name) {
            return Ok(());
        }
        Err(format!("{} is not what the snapshot has as volume {}", self.path.display(), volume.name))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceKind {
    Directory,
    Disk(Filesystem),
    Raw,
    Tmpfs(Tmpfs),
}

/// Inspects the source of a request; creates a named disk that does not exist yet if its size is given. Blocking.
///
/// # Errors
/// A sentence with reason and remedy.
pub fn inspect_source(config: &HostConfig, request: &VolumeRequest) -> Result<VolumeSource, String> {
    if let Some(tmpfs) = request.tmpfs {
        return Ok(VolumeSource::in_memory(tmpfs));
    }
    let source = Path::new(&request.source);
    if is_name(&request.source) {
        return named_disk(config, request);
    }
    if request.size_mib.is_some() {
        return Err(
            "only a disk by name can be made: leave the size out, or give a name as the source".to_owned()
        );
    }
    if !source.is_absolute() {
        return Err(format!("{:?} is neither a path nor a name (a-z, 0-9, -)", request.source));
    }
    let allowed: Vec<_> = config.volume_dirs.iter().cloned().chain([named_disks_dir(config)]).collect();
    let path = granted(source, &allowed, request.local_user).map_err(|e| match e.kind() {
        io::ErrorKind::PermissionDenied => e.to_string(),
        _ => format!("{}: {e}", source.display()),
    })?;
    inspect(path)
}

/// Inspects or creates a disk that the node keeps by name.
fn named_disk(config: &HostConfig, request: &VolumeRequest) -> Result<VolumeSource, String> {
    let dir = named_disks_dir(config);
    let path = dir.join(format!("{}.ext4", request.source));
    let make = |size| {
        std::fs::create_dir_all(&dir)?;
        disks::ensure_overlay(&config.state_dir.join("cache"), &path, size)
    };
    if !path.exists() {
        let Some(size) = request.size_mib else {
            return Err(format!("this node keeps no disk {}: give a size to make one", request.source));
        };
        make(size).map_err(|e| format!("make {}: {e}", path.display()))?;
    }
    inspect(path.canonicalize().map_err(|e| format!("{}: {e}", path.display()))?)
}

fn named_disks_dir(config: &HostConfig) -> PathBuf {
    config.state_dir.join("volumes")
}

fn inspect(path: PathBuf) -> Result<VolumeSource, String> {
    let failed = |e: io::Error| format!("{}: {e}", path.display());
    let metadata = path.metadata().map_err(failed)?;
    let (kind, dirty) = if metadata.is_dir() {
        (SourceKind::Directory, false)
    } else if metadata.is_file() {
        if metadata.len() == 0 || metadata.len() % 512 != 0 {
            return Err(format!("{} cannot be a disk: its size is not a multiple of 512", path.display()));
        }
        let file = std::fs::File::open(&path).map_err(failed)?;
        let (filesystem, dirty) = filesystem(&file).map_err(failed)?;
        (filesystem.map_or(SourceKind::Raw, SourceKind::Disk), dirty)
    } else {
        return Err(format!("{} is neither a file nor a directory", path.display()));
    };
    let inode = (metadata.dev(), metadata.ino());
    Ok(VolumeSource { path, inode, kind, dirty })
}

/// Detects the file system, and whether its journal needs a replay, from the superblock at 1024. ext4 has 0xEF53 at 0x38 in it
/// and, at 0x60, the bit 4 while it is mounted for writing; EROFS begins with 0xE0F5E1E2 (Linux, Documentation/filesystems/ext4
/// and erofs).
fn filesystem(file: &std::fs::File) -> io::Result<(Option<Filesystem>, bool)> {
    let mut block = [0; 128];
    match file.read_exact_at(&mut block, 1024) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok((None, false)),
        Err(e) => return Err(e),
    }
    Ok(if block.starts_with(&0xE0F5_E1E2_u32.to_le_bytes()) {
        (Some(Filesystem::Erofs), false)
    } else if block.get(0x38..0x3A) == Some(&0xEF53_u16.to_le_bytes()) {
        (Some(Filesystem::Ext4), block.get(0x60).is_some_and(|flags| flags & 4 != 0))
    } else {
        (None, false)
    })
}

/// Plans the volume of a VM that has the volumes `others`. Pure.
///
/// # Errors
/// A sentence with reason and remedy.
pub fn plan_volume(
    others: &[Volume],
    images: &[AttachedImage],
    request: &VolumeRequest,
    found: &VolumeSource,
) -> Result<Volume, String> {
    let name = if request.name.is_empty() { name_of(&found.path) } else { request.name.clone() };
    if !is_name(&name) {
        return Err(format!("invalid volume name {name:?}: a-z, 0-9 and -, at most {NAME_MAX}"));
    }
    let target = match request.target.as_str() {
        "" if found.kind == SourceKind::Raw => format!("/dev/{name}"),
        "" => format!("/mnt/{name}"),
        given => given.to_owned(),
    };
    check_target(&target)?;
    for other in others {
        if other.name == name {
            return Err(format!("the VM has a volume {name} already: choose another name"));
        }
        if Path::new(&other.target) == Path::new(&target) {
            return Err(format!("volume {} is at {target} already: choose another place", other.name));
        }
        // To mount there, the guest would access the shared directory before the node serves it.
        let within = other.kind == VolumeKind::SharedDir && Path::new(&target).starts_with(&other.target);
        let around = found.kind == SourceKind::Directory && Path::new(&other.target).starts_with(&target);
        if within || around {
            return Err(format!(
                "{target} and {} of volume {} overlap: choose another place",
                other.target, other.name
            ));
        }
    }
    let read_only = request.read_only || found.kind == SourceKind::Disk(Filesystem::Erofs);
    if read_only && found.dirty {
        let path = found.path.display();
        return Err(format!(
            "{path} was not unmounted by the guest that wrote it last: attach it once to be written, and detach it"
        ));
    }
    let kind = match found.kind {
        SourceKind::Directory => {
            let shared_dirs = others.iter().filter(|other| other.kind == VolumeKind::SharedDir).count();
            if shared_dirs >= SHARED_DIRS_MAX {
                return Err(format!(
                    "the VM has {SHARED_DIRS_MAX} shared directories, the most it can have: detach one"
                ));
            }
            VolumeKind::SharedDir
        }
        SourceKind::Disk(filesystem) => {
            VolumeKind::Disk { slot: free_slot(others, images, read_only)?, filesystem }
        }
        SourceKind::Raw => VolumeKind::Block { slot: free_slot(others, images, read_only)? },
        SourceKind::Tmpfs(tmpfs) => VolumeKind::Tmpfs(tmpfs),
    };
    let source = found.path.clone();
    let VolumeRequest { submounts, ids, .. } = *request;
    Ok(Volume { name, source, kind, target, read_only, submounts, ids, phase: VolumePhase::Attached })
}

/// Returns the first free slot of the kind. The first slot of each kind is reserved for the root's image and the VM's own disk.
pub fn free_slot(others: &[Volume], images: &[AttachedImage], read_only: bool) -> Result<usize, String> {
    let slots = Slots::default();
    let taken = |slot: &usize| {
        *slot == IMAGE_SLOT
            || *slot == overlay_slot()
            || others.iter().any(|v| v.slot() == Some(*slot))
            || images.iter().any(|image| image.slot == *slot)
    };
    let mut fitting = (0..slots.total()).filter(|slot| slots.is_read_only(*slot) == read_only);
    let kind = if read_only { "read-only" } else { "writable" };
    fitting
        .find(|slot| !taken(slot))
        .ok_or_else(|| format!("the machine has no free slot for a {kind} disk: detach another volume first"))
}

/// Returns the path where the guest of a sandbox mounts a volume, for its containers.
pub fn sandbox_target(name: &str) -> String {
    format!("/volumes/{name}")
}

fn check_target(target: &str) -> Result<(), String> {
    let path = Path::new(target);
    let whole = path.is_absolute()
        && path.file_name().is_some()
        && target.len() <= TARGET_MAX
        && !target.contains('\0')
        && !path.components().any(|part| part == Component::ParentDir);
    if !whole {
        return Err(format!("invalid target {target:?}: not an absolute path"));
    }
    let system = ["/proc", "/sys"].into_iter().find(|dir| path.starts_with(dir));
    let system = system.or_else(|| (path == Path::new("/dev")).then_some("/dev"));
    system.map_or(Ok(()), |dir| Err(format!("{target} is the guest's own: nothing can be put into {dir}")))
}

/// Returns whether the text is a valid volume name.
#[must_use]
pub fn is_name(text: &str) -> bool {
    (1..=NAME_MAX).contains(&text.len())
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Derives a volume name from the last part of a path; other characters become dashes.
fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
    let clean = stem.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' });
    clean.take(NAME_MAX).collect::<String>().trim_matches('-').to_owned()
}

/// Files in use as disks, with their VMs.
#[derive(Debug, Default)]
pub struct Claims(Mutex<Vec<Claim>>);

#[derive(Debug)]
struct Claim {
    vm: VmId,
    volume: String,
    inode: (u64, u64),
    read_only: bool,
}

impl Claims {
    /// Returns the claims of all records. A volume whose file no longer exists is not claimed.
    pub fn of(records: &[Record]) -> Self {
        let claims = Self::default();
        for record in records {
            for volume in &record.volumes {
                if let Ok(found) = VolumeSource::of(volume) {
                    let _two_records_may_have_it_by_now = claims.claim(&record.id, volume, &found);
                }
            }
        }
        claims
    }

    /// Claims the file of a volume for a VM: either many readers, or one writer.
    ///
    /// # Errors
    /// A sentence that names the VM with the conflicting claim.
    pub fn claim(&self, vm: &VmId, volume: &Volume, found: &VolumeSource) -> Result<(), String> {
        if matches!(volume.kind, VolumeKind::SharedDir | VolumeKind::Tmpfs(_)) {
            return Ok(());
        }
        let mut claims = self.lock();
        let against = |claim: &&Claim| {
            claim.inode == found.inode && (claim.vm == *vm || !claim.read_only || !volume.read_only)
        };
        if let Some(other) = claims.iter().find(against) {
            let path = found.path.display();
            return Err(format!(
                "{path} is volume {} of VM {}: detach it there first, or attach it read-only to all",
                other.volume, other.vm
            ));
        }
        claims.push(Claim {
            vm: vm.clone(),
            volume: volume.name.clone(),
            inode: found.inode,
            read_only: volume.read_only,
        });
        Ok(())
    }

    /// Releases the claim of a volume. Idempotent.
    pub fn release(&self, vm: &VmId, volume: &str) {
        self.lock().retain(|claim| claim.vm != *vm || claim.volume != volume);
    }

    /// Releases all claims of a VM. Idempotent.
    pub fn release_all(&self, vm: &VmId) {
        self.lock().retain(|claim| claim.vm != *vm);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Claim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
