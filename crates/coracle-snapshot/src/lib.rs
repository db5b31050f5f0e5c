//! Snapshots: memory and disk of a VM at one instant, kept until they are removed.
//!
//! ```text
//! <state>/snapshots/<name>/{manifest.json, memory, disk.ext4}   renamed into place when it is whole; grants alone change
//! save ─▶ .part-<name> ─▶ <name>            restore: memory is linked, the disk copied, and a VM starts from them
//! import of an archive ─▶ .part-<name> ─▶ <name>
//! pull ─▶ .pull-<name> ─▶ <name>           an interrupted pull stays for a week; the next one under that name continues it
//! ```

mod access;
pub mod archive;
#[doc(hidden)]
pub mod fuzz;
mod part;
pub mod remote;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use coracle_hypervisor::Compatibility;
use coracle_types::{IdMapping, MemoryMib, RootfsLayout, SizeClass, UnixMillis, Vcpus, VmName};
use serde::{Deserialize, Serialize};

pub use self::part::Part;

use coracle_files as files;
use coracle_record::{
    AttachedImage, ContainerRecord, ContainerRecords, DiskImageVm, Owner, Record, Sandbox, SavedMemory,
    SnapshotName, Submounts, Volume, VolumeKind, VolumePhase, Workload,
};

/// Version of the manifest. A newer version is refused.
const SCHEMA: u32 = 1;
/// Name of the memory file in the directory of a snapshot.
pub const MEMORY_FILE: &str = "memory";
/// Name of the disk file in the directory of a snapshot.
pub const DISK_FILE: &str = "disk.ext4";
const MANIFEST_FILE: &str = "manifest.json";
/// Maximum length of a manifest, bytes.
const MANIFEST_MAX: u64 = 1 << 20;

/// Manifest of a snapshot, `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotInfo {
    schema: u32,
    /// Name, unique on the host.
    pub name: SnapshotName,
    /// Name of the VM that the snapshot was taken of.
    pub vm: VmName,
    /// Image reference of that VM.
    pub image: String,
    /// Manifest digest of the image, which a restore needs.
    pub image_digest: String,
    /// Layout of its root file system, which the guest in the memory has mounted.
    #[serde(default)]
    pub rootfs_layout: RootfsLayout,
    /// Process that runs in the guest.
    pub workload: Workload,
    /// Number of vCPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Size class that the VMM was launched with; `None`: the VM's own size.
    #[serde(default)]
    pub size_class: Option<SizeClass>,
    /// Kernel that the VM named; the saved memory already contains it.
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// Size of the writable disk, MiB.
    pub disk_mib: u64,
    /// Whether that disk is in the slot [`coracle_hypervisor::Slots::premounted`].
    #[serde(default, alias = "prepared")]
    pub premounted: bool,
    /// Address that the VM had.
    #[serde(default)]
    pub address: Option<Ipv4Addr>,
    /// Metadata of the VM's owner.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Time of the state in memory and disk.
    pub taken_at: UnixMillis,
    /// Properties that a host must share to restore the snapshot.
    pub machine: Compatibility,
    /// Version of the guest agent in the memory; empty: not reported.
    #[serde(default)]
    pub agent: String,
    /// Length of the memory file, bytes.
    pub memory_bytes: u64,
    /// Disk space that the disk takes, bytes.
    pub disk_bytes: u64,
    /// Settings of a disk image VM; `None`: the VM ran a container image.
    #[serde(default, alias = "system")]
    pub disk_image_vm: Option<DiskImageVm>,
    /// Host name of the guest; empty: derived from the name of the VM.
    #[serde(default)]
    pub hostname: String,
    /// Shared directories and read-only disks, for which a restore names new sources.
    #[serde(default)]
    pub volumes: Vec<SnapshotVolume>,
    /// Pod sandbox settings, if the VM had containers.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Images of the containers, and their slots.
    #[serde(default)]
    pub images: Vec<SnapshotImage>,
    /// Containers of the VM.
    #[serde(default)]
    pub containers: Vec<ContainerRecord>,
    /// Cluster object that the VM belonged to; all fields are empty for a local VM.
    #[serde(default)]
    pub owner: Owner,
    /// Namespaces of the cluster that may use the snapshot, beside the owner's.
    #[serde(default)]
    pub shared_with: BTreeSet<String>,
}

/// Volume of the VM without its source, which depends on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotVolume {
    /// Name of the volume within the VM.
    pub name: String,
    /// Kind of volume, with the slot of a disk.
    pub kind: VolumeKind,
    /// Absolute path in the guest.
    pub target: String,
    /// Whether the guest may only read the volume.
    pub read_only: bool,
    /// Visibility of file systems below a shared directory.
    #[serde(default)]
    pub submounts: Submounts,
    /// User namespace in the guest to which the owners in a shared directory belong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdMapping>,
}

impl SnapshotVolume {
    fn of(volume: &Volume) -> Self {
        let Volume { name, source: _, kind, target, read_only, submounts, ids, phase: _ } = volume.clone();
        Self { name, kind, target, read_only, submounts, ids }
    }

    /// Returns the volume of a restored VM, with this source.
    #[must_use]
    pub fn restored(&self, source: PathBuf) -> Volume {
        let Self { name, kind, target, read_only, submounts, ids } = self.clone();
        Volume { name, source, kind, target, read_only, submounts, ids, phase: VolumePhase::Attached }
    }
}

/// Container image in a slot of the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotImage {
    /// Reference by which a container named the image.
    pub reference: String,
    /// Manifest digest of the image.
    pub digest: String,
    /// Layout of its root file system.
    #[serde(default)]
    pub layout: RootfsLayout,
    /// Device slot.
    pub slot: usize,
}

/// Removes the path of the log, which is valid only on the node that chose it.
fn without_place(mut container: ContainerRecord) -> ContainerRecord {
    container.spec.log_path = None;
    container
}

impl SnapshotInfo {
    /// Returns the manifest of a snapshot of the VM of `record`, whose disk takes `disk_bytes`.
    #[must_use]
    pub fn of(
        name: SnapshotName,
        record: &Record,
        containers: &ContainerRecords,
        saved: SavedMemory,
        disk_bytes: u64,
    ) -> Self {
        let image = |image: &AttachedImage| {
            let user = containers.values().find(|container| container.image_digest == image.digest);
            let reference = user.map(|container| container.spec.image.clone()).unwrap_or_default();
            let (digest, layout) = (image.digest.clone(), RootfsLayout::of(&image.rootfs));
            SnapshotImage { reference, digest, layout, slot: image.slot }
        };
        Self {
            schema: SCHEMA,
            name,
            vm: record.name.clone(),
            image: record.image.clone(),
            image_digest: record.image_digest.clone(),
            rootfs_layout: RootfsLayout::of(&record.rootfs),
            workload: record.workload.clone(),
            vcpus: record.vcpus,
            memory: record.memory,
            size_class: record.size_class,
            kernel: record.kernel.clone(),
            disk_mib: record.disk_mib,
            premounted: record.premounted,
            address: record.address,
            metadata: record.metadata.clone(),
            taken_at: saved.saved_at,
            machine: saved.machine,
            agent: saved.agent,
            memory_bytes: saved.bytes,
            disk_bytes,
            disk_image_vm: record.disk_image_vm.clone(),
            hostname: record.hostname.clone(),
            volumes: record.volumes.iter().map(SnapshotVolume::of).collect(),
            sandbox: record.sandbox.clone(),
            images: record.images.iter().map(image).collect(),
            containers: containers.values().map(|record| without_place(record.as_ref().clone())).collect(),
            owner: record.owner.clone(),
            shared_with: BTreeSet::new(),
        }
    }
}

/// Snapshots of a host.
#[derive(Clone, Debug)]
pub struct SnapshotStore {
    dir: PathBuf,
    /// Names of the snapshots that are being written.
    taken: Arc<Mutex<HashSet<SnapshotName>>>,
}

impl SnapshotStore {
    /// Opens `<state>/snapshots` and removes incomplete snapshots; interrupted pulls stay for a week. Blocking.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn open(state_dir: &Path, now: UnixMillis) -> io::Result<Self> {
        let dir = state_dir.join("snapshots");
        std::fs::create_dir_all(&dir)?;
        for entry in std::fs::read_dir(&dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.') && !part::is_resumable_pull(&name, &entry.path(), now)? {
                files::remove_tree(&entry.path())?;
            }
        }
        Ok(Self { dir, taken: Arc::default() })
    }

    /// Returns all complete snapshots, by name. Blocking.
    ///
    /// # Errors
    /// When the directory cannot be read. A snapshot that cannot be read stays and is logged.
    pub fn list(&self) -> io::Result<Vec<SnapshotInfo>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
            if hidden {
                continue;
            }
            match read(&path) {
                Ok(info) => all.push(info),
                Err(error) => tracing::warn!(dir = %path.display(), %error, "snapshot cannot be read"),
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Returns a snapshot; `None` when it does not exist. Blocking.
    ///
    /// # Errors
    /// When the snapshot cannot be read.
    pub fn get(&self, name: &SnapshotName) -> io::Result<Option<SnapshotInfo>> {
        match read(&self.place(name)) {
            Ok(info) => Ok(Some(info)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Removes a snapshot, and the remains of a pull under its name. Returns false when neither exists. Blocking.
    ///
    /// # Errors
    /// When the snapshot cannot be removed.
    pub fn remove(&self, name: &SnapshotName) -> io::Result<bool> {
        // Renamed first, so that a partly removed directory is never taken for a snapshot.
        let doomed = self.dir.join(format!(".removed-{name}"));
        files::remove_tree(&doomed)?;
        let was_there = match std::fs::rename(self.place(name), &doomed) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            renamed => renamed.map(|()| true)?,
        };
        if was_there {
            files::sync_parent(&doomed)?;
            files::remove_tree(&doomed)?;
        }
        Ok(self.forget_pull(name)? || was_there)
    }

    /// Returns the path of a snapshot's memory.
    #[must_use]
    pub fn memory_of(&self, name: &SnapshotName) -> PathBuf {
        self.place(name).join(MEMORY_FILE)
    }

    /// Returns the path of a snapshot's disk.
    #[must_use]
    pub fn disk_of(&self, name: &SnapshotName) -> PathBuf {
        self.place(name).join(DISK_FILE)
    }

    fn place(&self, name: &SnapshotName) -> PathBuf {
        self.dir.join(name.as_str())
    }
}

fn read(dir: &Path) -> io::Result<SnapshotInfo> {
    let path = dir.join(MANIFEST_FILE);
    let wrong =
        |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()));
    if std::fs::metadata(&path)?.len() > MANIFEST_MAX {
        return Err(wrong("it is too long for a manifest".to_owned()));
    }
    let info = parse(&std::fs::read(&path)?).map_err(wrong)?;
    if dir.file_name().and_then(|n| n.to_str()) == Some(info.name.as_str()) {
        return Ok(info);
    }
    Err(wrong(format!("it is of snapshot {}", info.name)))
}

fn parse(manifest: &[u8]) -> Result<SnapshotInfo, String> {
    #[derive(Deserialize)]
    struct Version {
        schema: u32,
    }
    let Version { schema } = serde_json::from_slice(manifest).map_err(|e| format!("no manifest: {e}"))?;
    if schema > SCHEMA {
        return Err(format!("written by a newer version (schema {schema}, this one knows {SCHEMA})"));
    }
    serde_json::from_slice(manifest).map_err(|e| format!("no manifest: {e}"))
}

#[cfg(test)]
mod tests {
    use coracle_types::VmState;

    use super::*;

    pub(crate) fn info(name: &str) -> SnapshotInfo {
        let record = coracle_record::example("web", VmState::Running);
        let text = |s: &str| s.to_owned();
        let machine = Compatibility {
            driver: text("qemu"),
            vmm: text("7.2"),
            accelerator: text("tcg"),
            cpu: text("cpu"),
            devices: text("devices"),
            tsc_khz: 0,
        };
        let saved = SavedMemory {
            machine,
            bytes: 6,
            saved_at: UnixMillis(5),
            of: None,
            same_identity: false,
            agent: "1.2.3".to_owned(),
        };
        SnapshotInfo::of(name.parse().unwrap(), &record, &BTreeMap::new(), saved, 4)
    }

    pub(crate) fn fill(store: &SnapshotStore, name: &str) -> SnapshotInfo {
        let part = store.begin(name.parse().unwrap()).unwrap();
        std::fs::create_dir_all(part.dir()).unwrap();
        std::fs::write(part.dir().join(MEMORY_FILE), "memory").unwrap();
        std::fs::write(part.dir().join(DISK_FILE), "disk").unwrap();
        let info = info(name);
        part.seal(&info).unwrap();
        info
    }

    #[test]
    fn snapshot_exists_from_seal_to_removal() {
        let state = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        let name: SnapshotName = "first".parse().unwrap();
        let part = store.begin(name.clone()).unwrap();
        assert!(store.begin(name.clone()).is_none(), "two at once never fill the same");
        std::fs::create_dir_all(part.dir()).unwrap();
        assert_eq!(store.list().unwrap(), []);
        drop(part);
        let info = fill(&store, "first");
        assert!(store.begin(name.clone()).is_none(), "the name is taken");
        assert_eq!(SnapshotStore::open(state.path(), UnixMillis(0)).unwrap().list().unwrap(), [info]);
        assert!(store.remove(&name).unwrap());
        assert!(!store.remove(&name).unwrap());
        assert_eq!(std::fs::read_dir(state.path().join("snapshots")).unwrap().count(), 0);
    }

    #[test]
    fn open_removes_incomplete_snapshots_and_skips_foreign_files() {
        let state = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        fill(&store, "good");
        let dir = state.path().join("snapshots");
        for left in [".part-a", ".removed-b"] {
            std::fs::create_dir_all(dir.join(left)).unwrap();
        }
        std::fs::rename(dir.join("good"), dir.join("other")).unwrap();
        let store = SnapshotStore::open(state.path(), UnixMillis(0)).unwrap();
        assert_eq!(store.list().unwrap(), [], "a manifest under another's name");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "left alone, and the parts are gone");
        let newer = br#"{"schema": 99}"#;
        assert!(parse(newer).unwrap_err().contains("newer version (schema 99"));
    }
}
