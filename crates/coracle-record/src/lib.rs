//! Record of one VM: the only authoritative state, written before the VM is changed.

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

/// Version of the record format. A newer version is refused; an older one is migrated when it is read.
pub const SCHEMA: u32 = 2;

/// Returns whole milliseconds, the unit of durations in records.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Persistent state of a VM, `vms/<id>/record.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// [`SCHEMA`] version of the writer.
    pub schema: u32,
    /// Internal id.
    pub id: VmId,
    /// Name of the VM.
    pub name: VmName,
    /// Cluster object that owns the VM, if any.
    #[serde(default)]
    pub owner: Owner,
    /// Lifecycle state.
    pub state: VmState,
    /// Reason for the state, one line; empty without a reason.
    #[serde(default)]
    pub message: String,
    /// Image reference as written by the caller.
    pub image: String,
    /// Manifest digest that the reference resolved to at creation.
    pub image_digest: String,
    /// Read-only root file system.
    pub rootfs: PathBuf,
    /// Process that runs in the guest.
    pub workload: Workload,
    /// Number of vCPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Guest kernel; `None`: the node's default.
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// Size of the writable disk, MiB.
    pub disk_mib: u64,
    /// Host name of the guest.
    pub hostname: String,
    /// MAC address of the NIC.
    pub mac: MacAddr,
    /// IPv4 address that the node assigned; `None` where guests have none.
    #[serde(default)]
    pub address: Option<Ipv4Addr>,
    /// IPv6 address; `None` on a network without IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address6: Option<Ipv6Addr>,
    /// Whether the guest has acknowledged its address in the present run.
    #[serde(default)]
    pub address_acknowledged: bool,
    /// Host ports that are forwarded to the guest.
    #[serde(default)]
    pub ports: Vec<Forward>,
    /// Networks and services that the guest may reach, beside what is outside of the node.
    #[serde(default)]
    pub reach: Reach,
    /// Cgroup of the VM's pod, parent of the VMM's cgroup; empty: the node's cgroup.
    #[serde(default)]
    pub cgroup_parent: String,
    /// Opaque labels of the caller, returned unchanged.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Accelerator of the present or last run.
    #[serde(default)]
    pub accelerator: Option<Accelerator>,
    /// VMM instance of the VM, while there is one. Schema 1 had no instances: see [`Record::is_before_instances`].
    #[serde(default)]
    pub instance: Option<InstanceId>,
    /// VMM process, while there is one.
    #[serde(default)]
    pub process: Option<ProcessId>,
    /// Exit status of the workload in the last run.
    #[serde(default)]
    pub exit: Option<Exit>,
    /// Whether the workload was killed in a guest that was out of memory.
    #[serde(default)]
    pub oom_killed: bool,
    /// Digest of the image that was pushed from the last run.
    #[serde(default)]
    pub committed: Option<String>,
    /// Creation time of the record.
    pub created_at: UnixMillis,
    /// Start time of the present or last run.
    #[serde(default)]
    pub started_at: Option<UnixMillis>,
    /// End time of the last run.
    #[serde(default)]
    pub finished_at: Option<UnixMillis>,
    /// Number of starts so far.
    #[serde(default)]
    pub boots: u32,
    /// Bytes of output of this boot that were printed before the guest rebooted by itself. The guest agent counts from there.
    #[serde(default)]
    pub output_before: u64,
    /// Milliseconds from the latest start until the workload had started.
    #[serde(default)]
    pub boot_ms: u64,
    /// Part of `boot_ms` in which the guest took its identity.
    #[serde(default)]
    pub identity_ms: u64,
    /// Part of `boot_ms` from then until the workload had started.
    #[serde(default)]
    pub workload_ms: u64,
    /// Template that the present or last run was cloned from; `None`: cold boot.
    #[serde(default)]
    pub template: Option<TemplateKey>,
    /// In the present or last run, the VM's own disk is in the slot [`coracle_hypervisor::Slots::premounted`]: the guest of the
    /// template had it mounted.
    #[serde(default, alias = "prepared")]
    pub premounted: bool,
    /// Whether the present or last run used a clone from the warm pool.
    #[serde(default, alias = "standby")]
    pub pooled: bool,
    /// Whether the VM is always cold booted, never cloned.
    #[serde(default)]
    pub cold: bool,
    /// Name of the driver; empty: the node's default.
    #[serde(default)]
    pub driver: String,
    /// Memory of a hibernated VM, until its guest is resumed.
    #[serde(default)]
    pub saved: Option<SavedMemory>,
    /// Volumes, beside the VM's own disk.
    #[serde(default)]
    pub volumes: Vec<Volume>,
    /// Settings of a disk image VM; `None`: the VM runs a container image.
    #[serde(default, alias = "system")]
    pub disk_image_vm: Option<DiskImageVm>,
    /// Origin of the requests to registries that are made for the VM.
    #[serde(default)]
    pub origin: PullOrigin,
    /// Pod sandbox settings: containers are created later, in place of an image and a workload of the VM.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Size class that the VMM is launched with; `None`: the VM's own size, as in records from before size classes.
    #[serde(default)]
    pub size_class: Option<SizeClass>,
    /// Container images that are attached to device slots.
    #[serde(default)]
    pub images: Vec<AttachedImage>,
    /// VM whose address, MAC and ports are used; `None`: the VM has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_of: Option<VmId>,
}

/// Saved memory and device state of a VM, in the file `vms/<id>/saved/memory`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedMemory {
    /// Properties that a host must share with the one that saved the memory.
    pub machine: Compatibility,
    /// Length of the file, bytes.
    pub bytes: u64,
    /// Time when the file was written.
    pub saved_at: UnixMillis,
    /// Snapshot that the file was copied from. The guest then gets a new identity before it is resumed.
    #[serde(default)]
    pub of: Option<SnapshotName>,
    /// The guest keeps its identity although the memory was copied.
    #[serde(default)]
    pub same_identity: bool,
    /// Version of the guest agent in the saved guest; empty: not reported.
    #[serde(default)]
    pub agent: String,
}

/// Cluster object that owns a VM; all fields are empty for a local VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    /// Name of the cluster.
    #[serde(default)]
    pub cluster: String,
    /// Namespace of the object.
    #[serde(default)]
    pub namespace: String,
    /// Name of the object.
    #[serde(default)]
    pub name: String,
    /// Uid of the object; empty: not fenced.
    #[serde(default)]
    pub uid: String,
    /// Latest generation of the object that requested an operation.
    #[serde(default)]
    pub generation: i64,
}

/// Object that a caller acts for. Callers without a fence are old clients and are not fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Uid of the object.
    pub uid: String,
    /// Generation that the caller has read.
    pub generation: i64,
}

/// Process that runs in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment, `NAME=value`.
    #[serde(default)]
    pub env: Vec<String>,
    /// OCI user; empty is root.
    #[serde(default)]
    pub user: String,
    /// Working directory; empty is `/`.
    #[serde(default)]
    pub cwd: String,
}

/// Exit status of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Exit {
    /// Exit code, 0 to 255; 128 + signal number if a signal killed the process.
    pub code: i32,
    /// Signal that killed the process; 0: none.
    pub signal: i32,
    /// Reason why the process never ran; otherwise empty.
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

    /// Returns whether the record was written before VMMs had instances.
    pub fn is_before_instances(&self) -> bool {
        self.schema < 2
    }

    /// Writes the record atomically: a crash leaves the old or the new one. Blocking.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        coracle_files::write_atomic(path, &serde_json::to_vec_pretty(self)?)
    }

    /// Returns what the packet filter must admit while the VM runs; `None` for a VM without a VMM or an address.
    pub fn running_guest(&self) -> Option<GuestNic> {
        let address = self.address.filter(|_| self.state.has_vmm())?;
        let (reach, ports) = (self.reach, self.ports.clone());
        Some(GuestNic { instance: self.instance.clone()?, mac: self.mac, address, reach, ports })
    }

    /// Returns the network endpoint of the VM with this lease.
    #[must_use]
    pub fn endpoint(&self, lease: Option<Lease>) -> Endpoint {
        Endpoint { mac: self.mac, lease, reach: self.reach, ports: self.ports.clone() }
    }

    /// Returns CPUs and memory of the VMM.
    #[must_use]
    pub fn machine_size(&self) -> SizeClass {
        self.size_class.unwrap_or(SizeClass { vcpus: self.vcpus, memory: self.memory })
    }

    /// Returns the address for callers, once the guest has acknowledged it.
    #[must_use]
    pub fn reachable_address(&self) -> Option<Ipv4Addr> {
        self.address.filter(|_| self.address_acknowledged)
    }

    /// Like [`Record::reachable_address`], followed by the IPv6 address.
    #[must_use]
    pub fn reachable_addresses(&self) -> Vec<IpAddr> {
        if self.address_acknowledged { self.addresses() } else { Vec::new() }
    }

    /// Returns the addresses that the node assigned, the IPv6 address last.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let addresses = [self.address.map(IpAddr::from), self.address6.map(IpAddr::from)];
        addresses.into_iter().flatten().collect()
    }
}

impl Exit {
    /// Returns whether the workload ran and exited by itself with 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == 0 && self.signal == 0 && self.error.is_empty()
    }
}

impl Record {
    /// Returns the record of a VM of this shape that was never started. The caller sets further fields.
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

/// Returns a record for tests.
///
/// # Panics
/// When `name` is not a valid VM name.
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
    fn record_survives_a_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        let record = example("web", VmState::Running);
        record.save(&path).unwrap();
        assert_eq!(Record::load(&path).unwrap(), record);
    }

    #[test]
    fn newer_schema_is_refused_with_a_message() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        std::fs::write(&path, br#"{"schema": 99, "future": true}"#).unwrap();
        let error = Record::load(&path).unwrap_err();
        assert!(error.to_string().contains("newer version (schema 99"), "{error}");
    }

    #[test]
    fn address_is_hidden_until_acknowledged() {
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
