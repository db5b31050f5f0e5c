//! The record of one VM: the only truth about it, written before the world changes.

mod container;
mod disk_image_vm;
mod snapshot_name;
mod template_key;
mod volume;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_hypervisor::{Accelerator, Compatibility, Forward, ProcessId};
use coracle_net::{Endpoint, GuestNic, Lease, Reach};
use coracle_oci::PullOrigin;
use coracle_types::{InstanceId, MacAddr, MemoryMib, SizeClass, UnixMillis, Vcpus, VmId, VmName, VmState};
use serde::{Deserialize, Serialize};

pub use self::container::{
    AttachedImage, ContainerId, ContainerMount, ContainerMountSource, ContainerRecord, ContainerRecords,
    ContainerSpec, ContainerState, GroupsPolicy, HostsFile, InvalidContainerId, PidNamespace, ProcessUser,
    Resources, Sandbox, Security, TERMINATION_MESSAGE_MAX,
};
pub use self::disk_image_vm::{BootFirmware, DiskImageVm, Resolver};
pub use self::snapshot_name::{InvalidSnapshotName, SnapshotName};
pub use self::template_key::TemplateKey;
pub use self::volume::{Filesystem, Submounts, Tmpfs, Volume, VolumeKind, VolumePhase};

/// Version of the format. A newer one is refused, an older one migrated on read.
pub const SCHEMA: u32 = 2;

/// Whole milliseconds, as records have them.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Everything that is known about a VM, `vms/<id>/record.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// [`SCHEMA`] of the writer.
    pub schema: u32,
    /// Internal id.
    pub id: VmId,
    /// What callers call it.
    pub name: VmName,
    /// The object that it belongs to, when a cluster owns it.
    #[serde(default)]
    pub owner: Owner,
    /// Where it is in its life.
    pub state: VmState,
    /// Why the state is what it is, one line; empty when there is nothing to say.
    #[serde(default)]
    pub message: String,
    /// Image reference as written by the caller.
    pub image: String,
    /// Manifest digest that the reference stood for at creation.
    pub image_digest: String,
    /// The read-only root file system.
    pub rootfs: PathBuf,
    /// What to run in it.
    pub workload: Workload,
    /// Number of CPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Kernel; `None` is the node's default.
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// Size of the writable disk.
    pub disk_mib: u64,
    /// Host name of the guest.
    pub hostname: String,
    /// Address of the NIC.
    pub mac: MacAddr,
    /// Address that the node gave; `None` where guests have none.
    #[serde(default)]
    pub address: Option<Ipv4Addr>,
    /// Its IPv6 address, on a network of the node that gives one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address6: Option<Ipv6Addr>,
    /// Has the guest acknowledged its address in the present run?
    #[serde(default)]
    pub address_acknowledged: bool,
    /// Host ports that lead in.
    #[serde(default)]
    pub ports: Vec<Forward>,
    /// What it may reach beside what is outside of the node.
    #[serde(default)]
    pub reach: Reach,
    /// Cgroup of its pod, below which its VMM is; empty: that of the node.
    #[serde(default)]
    pub cgroup_parent: String,
    /// Opaque labels of the caller, returned unchanged.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The accelerator of the present or last run.
    #[serde(default)]
    pub accelerator: Option<Accelerator>,
    /// The instance of its VMM, while there is one. Schema 1 had none: see [`Record::is_before_instances`].
    #[serde(default)]
    pub instance: Option<InstanceId>,
    /// The VMM, while there is one.
    #[serde(default)]
    pub process: Option<ProcessId>,
    /// How the workload ended in the last run.
    #[serde(default)]
    pub exit: Option<Exit>,
    /// It was killed, in a guest that was out of memory.
    #[serde(default)]
    pub oom_killed: bool,
    /// Digest of the image that the last run was pushed as.
    #[serde(default)]
    pub committed: Option<String>,
    /// When the record was made.
    pub created_at: UnixMillis,
    /// When the present or last run began to run.
    #[serde(default)]
    pub started_at: Option<UnixMillis>,
    /// When the last run ended.
    #[serde(default)]
    pub finished_at: Option<UnixMillis>,
    /// Starts so far.
    #[serde(default)]
    pub boots: u32,
    /// Bytes of output of this boot that were printed before the guest started anew by itself: its agent counts from there.
    #[serde(default)]
    pub output_before: u64,
    /// Milliseconds from the latest start until the workload had started.
    #[serde(default)]
    pub boot_ms: u64,
    /// Milliseconds of them that the guest took to take its identity.
    #[serde(default)]
    pub identity_ms: u64,
    /// Milliseconds of them after that, until its workload had started.
    #[serde(default)]
    pub workload_ms: u64,
    /// The template that the present or last run was cloned from; `None`: it booted.
    #[serde(default)]
    pub template: Option<TemplateKey>,
    /// Its own disk is in the slot [`coracle_hypervisor::Slots::premounted`] in the present or last run: the guest of the
    /// template had it mounted.
    #[serde(default, alias = "prepared")]
    pub premounted: bool,
    /// The clone of the present or last run was there before the VM was asked for.
    #[serde(default, alias = "standby")]
    pub pooled: bool,
    /// Never start it as a clone.
    #[serde(default)]
    pub cold: bool,
    /// Name of its driver; empty: the node's default.
    #[serde(default)]
    pub driver: String,
    /// Memory of a hibernated VM, until its guest is resumed.
    #[serde(default)]
    pub saved: Option<SavedMemory>,
    /// Disks and directories beside its own disk.
    #[serde(default)]
    pub volumes: Vec<Volume>,
    /// What is special about a VM whose disk image brings its own kernel; `None`: it runs a container image.
    #[serde(default, alias = "system")]
    pub disk_image_vm: Option<DiskImageVm>,
    /// On whose behalf registries are asked for it.
    #[serde(default)]
    pub origin: PullOrigin,
    /// Its containers come later, instead of an image and a workload of its own.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// What its VMM is launched with; `None`: its own size, as before there were classes.
    #[serde(default)]
    pub size_class: Option<SizeClass>,
    /// Images of containers that are in its slots.
    #[serde(default)]
    pub images: Vec<AttachedImage>,
    /// The VM whose address, MAC and ports it uses; `None`: it has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_of: Option<VmId>,
}

/// Memory and devices of a machine in a file, `vms/<id>/saved/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedMemory {
    /// What must be alike where it is loaded.
    pub machine: Compatibility,
    /// Length of the file.
    pub bytes: u64,
    /// When it was written.
    pub saved_at: UnixMillis,
    /// The snapshot that it was copied from: the guest gets another identity before it is resumed.
    #[serde(default)]
    pub of: Option<SnapshotName>,
    /// The guest keeps the identity that it has, though the memory was copied.
    #[serde(default)]
    pub same_identity: bool,
    /// Version of the guest agent in it; empty: it did not say.
    #[serde(default)]
    pub agent: String,
}

/// The cluster object that a VM belongs to; all empty for a local VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    /// Which cluster.
    #[serde(default)]
    pub cluster: String,
    /// Namespace of the object.
    #[serde(default)]
    pub namespace: String,
    /// Name of the object.
    #[serde(default)]
    pub name: String,
    /// Its uid; empty: not fenced.
    #[serde(default)]
    pub uid: String,
    /// The latest generation that asked for something.
    #[serde(default)]
    pub generation: i64,
}

/// For whom a caller speaks. Callers without one are old clients and not fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Uid of the object.
    pub uid: String,
    /// Generation that the caller has read.
    pub generation: i64,
}

/// What runs in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// `NAME=value`.
    #[serde(default)]
    pub env: Vec<String>,
    /// OCI user; empty is root.
    #[serde(default)]
    pub user: String,
    /// Working directory; empty is `/`.
    #[serde(default)]
    pub cwd: String,
}

/// How a workload ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Exit {
    /// 0 to 255; 128 + signal when a signal killed it.
    pub code: i32,
    /// 0 when it was none.
    pub signal: i32,
    /// Why it never ran; else empty.
    #[serde(default)]
    pub error: String,
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    /// When the file is missing, invalid, or was written by a newer version.
    pub fn load(path: &Path) -> io::Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let bytes = std::fs::read(path)?;
        let Version { schema } = serde_json::from_slice(&bytes)?;
        if schema > SCHEMA {
            let why = format!("written by a newer version (schema {schema}, this one knows {SCHEMA})");
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        serde_json::from_slice(&bytes).map_err(io::Error::from)
    }

    /// Was it written before VMMs had instances?
    pub fn is_before_instances(&self) -> bool {
        self.schema < 2
    }

    /// Writes the record so that a crash leaves the old or the new one. Blocking.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        coracle_files::write_atomic(path, &serde_json::to_vec_pretty(self)?)
    }

    /// What the packet filter must admit while the VM runs; `None` for a VM without a VMM or an address.
    pub fn running_guest(&self) -> Option<GuestNic> {
        let address = self.address.filter(|_| self.state.has_vmm())?;
        let (reach, ports) = (self.reach, self.ports.clone());
        Some(GuestNic { instance: self.instance.clone()?, mac: self.mac, address, reach, ports })
    }

    /// The VM as its network has it, with this lease.
    #[must_use]
    pub fn endpoint(&self, lease: Option<Lease>) -> Endpoint {
        Endpoint { mac: self.mac, lease, reach: self.reach, ports: self.ports.clone() }
    }

    /// CPUs and memory of its VMM.
    #[must_use]
    pub fn machine_size(&self) -> SizeClass {
        self.size_class.unwrap_or(SizeClass { vcpus: self.vcpus, memory: self.memory })
    }

    /// The address for callers: only what the guest has acknowledged.
    #[must_use]
    pub fn reachable_address(&self) -> Option<Ipv4Addr> {
        self.address.filter(|_| self.address_acknowledged)
    }

    /// As [`Record::reachable_address`], with the one of IPv6 behind it.
    #[must_use]
    pub fn reachable_addresses(&self) -> Vec<IpAddr> {
        if self.address_acknowledged { self.addresses() } else { Vec::new() }
    }

    /// The addresses that the node gave, the one of IPv6 last.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let addresses = [self.address.map(IpAddr::from), self.address6.map(IpAddr::from)];
        addresses.into_iter().flatten().collect()
    }
}

impl Exit {
    /// Did the workload run, and end by itself with 0?
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == 0 && self.signal == 0 && self.error.is_empty()
    }
}

impl Record {
    /// A VM of this shape that was never started; what is special about it is for the caller to add.
    pub fn new(
        id: VmId,
        name: VmName,
        (vcpus, memory): (Vcpus, MemoryMib),
        workload: Workload,
        created_at: UnixMillis,
    ) -> Self {
        Self {
            schema: SCHEMA,
            mac: MacAddr::of(&id),
            id,
            hostname: name.to_string(),
            name,
            owner: Owner::default(),
            state: VmState::Created,
            message: String::new(),
            image: String::new(),
            image_digest: String::new(),
            rootfs: PathBuf::new(),
            workload,
            vcpus,
            memory,
            kernel: None,
            disk_mib: 0,
            address: None,
            address6: None,
            address_acknowledged: false,
            ports: vec![],
            reach: Reach::default(),
            cgroup_parent: String::new(),
            metadata: BTreeMap::new(),
            accelerator: None,
            instance: None,
            process: None,
            exit: None,
            oom_killed: false,
            committed: None,
            created_at,
            started_at: None,
            finished_at: None,
            boots: 0,
            output_before: 0,
            boot_ms: 0,
            identity_ms: 0,
            workload_ms: 0,
            template: None,
            premounted: false,
            pooled: false,
            cold: false,
            driver: String::new(),
            saved: None,
            volumes: vec![],
            disk_image_vm: None,
            origin: PullOrigin::Local,
            sandbox: None,
            size_class: None,
            images: vec![],
            address_of: None,
        }
    }
}

/// A record for tests.
///
/// # Panics
/// When `name` is none for a VM.
#[cfg(any(test, feature = "testing"))]
#[must_use]
#[expect(clippy::unwrap_used, reason = "for tests alone")]
pub fn example(name: &str, state: VmState) -> Record {
    let name: VmName = name.parse().unwrap();
    let id = VmId::of_name(&name);
    let workload = Workload { argv: vec!["/bin/true".to_owned()], ..Workload::default() };
    let shape = (1.try_into().unwrap(), 128.try_into().unwrap());
    Record {
        state,
        image: "localhost/demo:1".to_owned(),
        rootfs: "/images/rootfs/x.erofs".into(),
        disk_mib: 64,
        address: Some("10.100.0.2".parse().unwrap()),
        ..Record::new(id, name, shape, workload, UnixMillis(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_a_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        let record = example("web", VmState::Running);
        record.save(&path).unwrap();
        assert_eq!(Record::load(&path).unwrap(), record);
    }

    #[test]
    fn a_newer_schema_is_refused_with_a_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        std::fs::write(&path, br#"{"schema": 99, "future": true}"#).unwrap();
        let error = Record::load(&path).unwrap_err();
        assert!(error.to_string().contains("newer version (schema 99"), "{error}");
    }

    #[test]
    fn an_address_is_told_only_after_the_guest_acknowledged_it() {
        let mut record = example("web", VmState::Running);
        assert_eq!(record.reachable_address(), None);
        record.address_acknowledged = true;
        assert_eq!(record.reachable_address(), record.address);
        record.address6 = "fd00::2".parse().ok();
        assert_eq!(
            record.reachable_addresses(),
            ["10.100.0.2", "fd00::2"].map(|ip| ip.parse::<IpAddr>().unwrap())
        );
    }
}
