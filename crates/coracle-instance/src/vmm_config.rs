//! Conversion of a record to a VMM config and a guest configuration. Pure but for the values passed in.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use coracle_hypervisor::launch::LOG_FILE;
use coracle_hypervisor::{
    Accelerator, Disk, Firmware, Forward, Jail, MachineType, Nic, NicBackend, Slots, VmmConfig,
};
use coracle_net::{Attachment, Subnet};
use coracle_proto::guest as pb;
use coracle_types::{InstanceId, MacAddr, MemoryMib, RootfsLayout, UnixMillis, Vcpus, VmId};

use crate::firmware::uefi;
use crate::{
    AttachedImage, BootFirmware, DiskImageVm, Filesystem, HostConfig, Record, Sandbox, Volume, VolumeKind,
};

/// Returns the backend of a NIC.
pub fn backend(config: &HostConfig, attachment: &Attachment, forwards: &[Forward]) -> NicBackend {
    match attachment {
        Attachment::Tap(name) => NicBackend::Tap { name: name.clone() },
        Attachment::User => {
            NicBackend::User { forwards: forwards.to_vec(), isolated: !config.user_network_open }
        }
    }
}

/// Slot of the root file system's image.
pub const IMAGE_SLOT: usize = 0;

/// Returns the default slot of a VM's own disk: the first writable one. A disk premounted by the template has another slot.
pub fn overlay_slot() -> usize {
    usize::from(Slots::default().read_only)
}

/// Returns the slot of the image that a clone is warmed up with: the last of those for images, the least used one.
pub fn warm_up_slot() -> usize {
    overlay_slot().saturating_sub(1)
}

/// Returns the slot of a VM's own disk in the present run.
fn own_slot(record: &Record) -> usize {
    if record.premounted { Slots::default().premounted() } else { overlay_slot() }
}

/// Directories of a VMM instance.
#[derive(Clone, Debug)]
pub struct InstancePaths {
    /// State directory, on disk.
    pub state: PathBuf,
    /// Directory of the sockets.
    pub run: PathBuf,
}

impl InstancePaths {
    /// Returns the directories of the instance `id`.
    pub fn of(config: &HostConfig, id: &InstanceId) -> Self {
        let state = config.state_dir.join("instances").join(id.as_str());
        Self { state, run: config.run_dir.join(id.short()) }
    }
}

/// Paths of a VM's files.
#[derive(Clone, Debug)]
pub struct VmPaths {
    /// State directory of the VM.
    pub state: PathBuf,
}

impl VmPaths {
    /// Returns the paths of the VM `id`.
    pub fn of(config: &HostConfig, id: &VmId) -> Self {
        Self { state: config.state_dir.join("vms").join(id.as_str()) }
    }

    /// Returns the path of the record.
    pub fn record(&self) -> PathBuf {
        self.state.join("record.json")
    }

    /// Returns the path of the VM's own disk.
    pub fn own_disk(&self, record: &Record) -> PathBuf {
        self.state.join("disks").join(if record.disk_image_vm.is_some() {
            "root.qcow2"
        } else {
            "overlay.ext4"
        })
    }

    /// Returns the path of the cloud-init seed of a disk image VM.
    pub fn cloud_init_disk(&self) -> PathBuf {
        self.state.join("disks").join("init.iso")
    }

    /// Returns the path of the UEFI variables of a disk image VM.
    pub fn variables(&self) -> PathBuf {
        self.state.join("disks").join("uefi.variables")
    }

    /// Returns the directory for the memory of a hibernated VM.
    pub fn saved(&self) -> PathBuf {
        self.state.join("saved")
    }

    /// Returns the path of the saved memory.
    pub fn saved_memory(&self) -> PathBuf {
        self.saved().join("memory")
    }

    /// Returns the path of the table of node ids that the guest knows of a shared directory. The next daemon reads it.
    pub fn folder_table(&self, volume: &str) -> PathBuf {
        self.state.join("folders").join(volume)
    }

    /// Returns the path of the last VMM's log.
    pub fn vmm_log(&self) -> PathBuf {
        self.state.join(LOG_FILE)
    }

    /// Returns the directory of the container records, and of container logs without another path.
    pub fn containers(&self) -> PathBuf {
        self.state.join("containers")
    }

    /// Returns the path of the latest output of the serial console.
    pub fn console(&self) -> PathBuf {
        self.state.join("console.ring")
    }
}

/// Returns the machine type of a disk image VM.
pub fn machine_type(settings: &DiskImageVm, paths: &VmPaths) -> MachineType {
    MachineType::Q35(match settings.firmware {
        BootFirmware::Bios => Firmware::Bios,
        BootFirmware::Uefi => {
            let (code, _) = uefi().unwrap_or_default();
            Firmware::Uefi { code, variables: paths.variables() }
        }
    })
}

/// Returns a volume as a disk of the VMM; `None` for a shared directory.
pub fn volume_disk(volume: &Volume) -> Option<Disk> {
    let slot = volume.slot()?;
    // A slot for images is read-only by itself; in the other slots the guest's mount enforces it.
    let read_only = Slots::default().is_read_only(slot);
    Some(Disk::raw(slot, volume.source.clone(), read_only))
}

/// Returns a container image as a disk of the VMM.
pub fn image_disk(image: &AttachedImage) -> Disk {
    Disk::image(image.slot, image.rootfs.clone())
}

/// Returns the request to the guest to mount a volume.
pub fn mount_request(volume: &Volume) -> pb::MountRequest {
    let disk = |slot, fs: &str| {
        pb::mount_request::Source::Disk(pb::DiskSource { device: device(slot), fs: fs.to_owned() })
    };
    let source = match volume.kind {
        VolumeKind::Disk { slot, filesystem: Filesystem::Ext4 } => disk(slot, "ext4"),
        VolumeKind::Disk { slot, filesystem: Filesystem::Erofs } => disk(slot, "erofs"),
        VolumeKind::Block { slot } => disk(slot, ""),
        VolumeKind::SharedDir => pb::mount_request::Source::SharedDir(pb::SharedDirSource {}),
        VolumeKind::Tmpfs(coracle_record::Tmpfs { size_bytes, mode, uid, gid }) => {
            pb::mount_request::Source::Tmpfs(pb::TmpfsSource { size_bytes, mode, uid, gid })
        }
    };
    pb::MountRequest {
        name: volume.name.clone(),
        target: volume.target.clone(),
        // The node refuses writes to the read-only parts; the guest cannot distinguish the file systems of a directory.
        read_only: volume.read_only && !volume.submounts.writable,
        source: Some(source),
    }
}

/// Returns the VMM config of a record, in the directories of its instance. Without an instance it describes a shape. Without
/// `attachment` it serves to find a VMM, not to start one.
pub fn vmm_config(
    config: &HostConfig,
    record: &Record,
    accelerator: Accelerator,
    attachment: Option<&Attachment>,
) -> VmmConfig {
    let paths = VmPaths::of(config, &record.id);
    let instance = record.instance.clone().unwrap_or_else(|| record.id.clone().into());
    let InstancePaths { state: state_dir, run: run_dir } = InstancePaths::of(config, &instance);
    let backend = attachment.map(|attachment| backend(config, attachment, &record.ports));
    let own = paths.own_disk(record);
    let mut disks = match record.disk_image_vm {
        None if record.sandbox.is_some() => vec![Disk::raw(own_slot(record), own, false)],
        None => {
            let image = Disk::image(IMAGE_SLOT, record.rootfs.clone());
            vec![image, Disk::raw(own_slot(record), own, false)]
        }
        Some(_) => vec![
            Disk::raw(IMAGE_SLOT, paths.cloud_init_disk(), true),
            Disk { backing: Some(record.rootfs.clone()), ..Disk::raw(overlay_slot(), own, false) },
        ],
    };
    disks.extend(record.volumes.iter().filter_map(volume_disk));
    disks.extend(record.images.iter().map(image_disk));
    VmmConfig {
        vcpus: record.machine_size().vcpus,
        memory: record.machine_size().memory,
        kernel: record.kernel.clone().unwrap_or_else(|| config.kernel.clone()),
        initrd: config.initrd.clone(),
        disks,
        slots: Slots::default(),
        machine_type: record
            .disk_image_vm
            .as_ref()
            .map(|settings| machine_type(settings, &paths))
            .unwrap_or_default(),
        nic: backend.map(|backend| Nic { mac: record.mac, backend }),
        display: record.disk_image_vm.as_ref().and_then(|settings| settings.display),
        state_dir,
        run_dir,
        accelerator,
        driver: record.driver.clone(),
        uid: config.jail.then(|| Jail::uid_of(&instance)),
        id: instance,
    }
}

/// Returns a VMM config of the smallest shape, for looking up processes and for taking templates by hand.
pub fn of_shape(config: &HostConfig, accelerator: Accelerator) -> VmmConfig {
    let id = InstanceId::new("shape", 0);
    VmmConfig {
        vcpus: Vcpus::MIN,
        memory: MemoryMib::MIN,
        kernel: config.kernel.clone(),
        initrd: config.initrd.clone(),
        disks: vec![],
        slots: Slots::default(),
        machine_type: Default::default(),
        nic: Some(Nic { mac: MacAddr::of(&id), backend: backend(config, &Attachment::User, &[]) }),
        display: None,
        state_dir: config.state_dir.clone(),
        run_dir: config.run_dir.clone(),
        accelerator,
        driver: String::new(),
        uid: None,
        id,
    }
}

/// Address, gateway and name server of QEMU's user-mode network (QEMU manual, "Using the user mode network stack").
const USER_NETWORK: (&str, &str, &str) = ("10.0.2.15/24", "10.0.2.2", "10.0.2.3");

/// Returns the configuration that the guest gets at its start.
pub fn configuration(
    config: &HostConfig,
    record: &Record,
    subnet: Option<Subnet>,
    entropy: Vec<u8>,
    now: UnixMillis,
) -> pb::ConfigureRequest {
    let network = match (record.address, subnet) {
        (Some(address), Some(subnet)) => pb::Network {
            mac: record.mac.to_string(),
            address: format!("{address}/{}", subnet.prefix()),
            gateway: subnet.gateway().to_string(),
            nameservers: config.nameservers.clone(),
            ..pb::Network::default()
        },
        _ => {
            let (address, gateway, nameserver) = USER_NETWORK;
            pb::Network {
                mac: record.mac.to_string(),
                address: address.to_owned(),
                gateway: gateway.to_owned(),
                nameservers: vec![nameserver.to_owned()],
                ..pb::Network::default()
            }
        }
    };
    let resolver = record.disk_image_vm.as_ref().and_then(|settings| settings.resolver.as_ref());
    let network = match resolver {
        None => network,
        Some(resolver) => pb::Network {
            nameservers: match resolver.nameservers.is_empty() {
                true => network.nameservers,
                false => resolver.nameservers.clone(),
            },
            search_domains: resolver.search_domains.clone(),
            resolver_options: resolver.options.clone(),
            ..network
        },
    };
    pb::ConfigureRequest {
        hostname: record.hostname.clone(),
        entropy,
        clock_unix_ns: now.0.saturating_mul(1_000_000),
        machine_id: machine_id(&record.id),
        takes_over: false,
        network: Some(network),
        root: (record.disk_image_vm.is_none() && record.sandbox.is_none()).then(|| pb::RootMount {
            image_device: device(IMAGE_SLOT),
            image_fs: "erofs".to_owned(),
            overlay_device: device(own_slot(record)),
            root_first: RootfsLayout::of(&record.rootfs) == RootfsLayout::RootFirst,
        }),
        mounts: record.volumes.iter().map(mount_request).collect(),
        limits: limits(record),
    }
}

/// Period of a CPU quota, microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// Returns the cgroup limits that keep a guest to the size of its VM, if its VMM is larger.
fn limits(record: &Record) -> Option<pb::CgroupLimits> {
    let class = record.machine_size();
    let limits = pb::CgroupLimits {
        cpu_quota_us: (class.vcpus != record.vcpus).then(|| u64::from(record.vcpus.get()) * CPU_PERIOD_US),
        memory_max_bytes: (class.memory != record.memory).then(|| record.memory.bytes()),
        ..pb::CgroupLimits::default()
    };
    (limits != pb::CgroupLimits::default()).then_some(limits)
}

/// Returns the same configuration for a guest whose containers are created later.
pub fn sandbox_configuration(
    sandbox: &Sandbox,
    record: &Record,
    configuration: pb::ConfigureRequest,
) -> pb::ConfigureSandboxRequest {
    let request = for_containers(configuration, own_slot(record));
    let network = request.network.map(|network| pb::Network {
        nameservers: match sandbox.nameservers.is_empty() {
            true => network.nameservers,
            false => sandbox.nameservers.clone(),
        },
        search_domains: sandbox.search_domains.clone(),
        resolver_options: sandbox.resolver_options.clone(),
        ..network
    });
    let of_vm = network.as_ref().map(addresses).unwrap_or_default();
    let hosts = sandbox.hosts.as_ref().map(|hosts| hosts.text(&of_vm)).unwrap_or_default();
    pb::ConfigureSandboxRequest { network, sysctls: sandbox.sysctls.clone(), hosts, ..request }
}

/// Returns the part of the configuration that is independent of a root file system, for containers on the disk in slot `own`.
pub(crate) fn for_containers(configuration: pb::ConfigureRequest, own: usize) -> pb::ConfigureSandboxRequest {
    let pb::ConfigureRequest {
        hostname, entropy, clock_unix_ns, machine_id, network, mounts, limits, ..
    } = configuration;
    pb::ConfigureSandboxRequest {
        hostname,
        entropy,
        clock_unix_ns,
        machine_id,
        network,
        overlay_device: device(own),
        mounts,
        limits,
        ..pb::ConfigureSandboxRequest::default()
    }
}

/// Returns the addresses of the guest.
fn addresses(network: &pb::Network) -> Vec<IpAddr> {
    let with_prefix = [Some(&network.address), network.ipv6.as_ref().map(|ipv6| &ipv6.address)];
    with_prefix.into_iter().flatten().filter_map(|text| text.split('/').next()?.parse().ok()).collect()
}

/// Returns the device path in the guest of the disk in a slot.
pub fn device(slot: usize) -> String {
    format!("/dev/disk/by-id/virtio-slot{slot}")
}

/// Returns the machine id, 32 hex digits that never change for a VM.
fn machine_id(id: &VmId) -> String {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(format!("machine-id {id}"));
    hash.iter().take(16).map(|b| format!("{b:02x}")).collect()
}

/// Returns the process that the guest starts.
pub fn process(record: &Record) -> pb::Process {
    pb::Process {
        argv: record.workload.argv.clone(),
        env: record.workload.env.clone(),
        user: record.workload.user.clone(),
        cwd: record.workload.cwd.clone(),
        ..Default::default()
    }
}

/// Checks a kernel that a caller named: it must be inside an allowed directory, and a kernel.
pub fn check_kernel(allowed: &[PathBuf], path: &str) -> Result<PathBuf, String> {
    let real = Path::new(path).canonicalize().map_err(|e| e.to_string())?;
    if !allowed.iter().filter_map(|dir| dir.canonicalize().ok()).any(|dir| real.starts_with(dir)) {
        return Err("not under an allowed kernel directory (--kernel-dir)".to_owned());
    }
    let mut head = vec![0; 0x206];
    let file = std::fs::File::open(&real).map_err(|e| e.to_string())?;
    let read = std::os::unix::fs::FileExt::read_at(&file, &mut head, 0).map_err(|e| e.to_string())?;
    head.truncate(read);
    if is_kernel(&head) { Ok(real) } else { Err("not a kernel image: neither bzImage nor ELF".to_owned()) }
}

/// Returns whether the file begins like a kernel: `HdrS` at 0x202 (Linux Documentation/arch/x86/boot.rst), or an ELF header.
fn is_kernel(head: &[u8]) -> bool {
    head.get(0x202..0x206) == Some(b"HdrS") || head.starts_with(b"\x7fELF")
}

#[cfg(test)]
mod tests {
    use coracle_types::{SizeClass, VmState};

    use super::*;
    use coracle_record::example;

    fn config() -> HostConfig {
        HostConfig::new("/state".into(), "/boot/vmlinuz".into(), "/boot/initrd".into())
    }

    #[test]
    fn guest_network_depends_on_the_network_mode() {
        let mut record = example("web", VmState::Starting);
        let subnet = "10.100.0.0/24".parse().unwrap();
        let bridge = configuration(&config(), &record, Some(subnet), vec![], UnixMillis(5));
        assert_eq!(bridge.network.unwrap().address, "10.100.0.2/24");
        assert_eq!(bridge.clock_unix_ns, 5_000_000);
        record.address = None;
        let user = configuration(&config(), &record, None, vec![], UnixMillis(5));
        assert_eq!(user.network.unwrap().address, "10.0.2.15/24");
    }

    #[test]
    fn guest_keeps_the_size_of_its_vm() {
        let mut record = example("web", VmState::Starting);
        assert_eq!(limits(&record), None);
        (record.vcpus, record.memory) = (3.try_into().unwrap(), 200.try_into().unwrap());
        assert_eq!(limits(&record), None, "a VM of an earlier version has its own size");
        record.size_class = Some(SizeClass::of(record.vcpus, record.memory));
        let kept = limits(&record).unwrap();
        assert_eq!((kept.cpu_quota_us, kept.memory_max_bytes), (Some(300_000), Some(200 << 20)));
        let launched = vmm_config(&config(), &record, Accelerator::Kvm, None);
        assert_eq!((launched.vcpus.get(), launched.memory.get()), (4, 256));
    }

    #[test]
    fn kernel_path_and_format_are_validated() {
        let dir = tempfile::tempdir().unwrap();
        let allowed = dir.path().join("kernels");
        std::fs::create_dir(&allowed).unwrap();
        let good = allowed.join("good");
        let mut image = vec![0; 0x300];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        std::fs::write(&good, &image).unwrap();
        std::fs::write(allowed.join("text"), b"hello").unwrap();
        std::fs::write(dir.path().join("outside"), &image).unwrap();
        let escape = allowed.join("../outside");
        let check = |path: &Path| check_kernel(std::slice::from_ref(&allowed), path.to_str().unwrap());
        assert_eq!(check(&good), Ok(good.canonicalize().unwrap()));
        assert!(check(&allowed.join("text")).unwrap_err().contains("not a kernel image"));
        assert!(check(&escape).unwrap_err().contains("allowed kernel directory"));
        assert!(check(&allowed.join("absent")).is_err());
    }
}
