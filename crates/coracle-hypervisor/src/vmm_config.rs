//! Complete description of one VMM process, which leaves a driver no choices.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use coracle_types::{InstanceId, MacAddr, MemoryMib, Vcpus};
use serde::{Deserialize, Serialize};

/// Parameters for the node's kernel of guests, under every VMM (kernel, Documentation/admin-guide/kernel-parameters.txt). The
/// self-tests of cryptography and the certificate list take most of a boot under TCG, and no program in the guest uses them.
/// Pressure is not accounted, because that takes time at each switch of tasks. Security modules that need a policy are left out:
/// a guest loads none, and they are asked at each opening of a file. The lockup detectors are off, because they wake up an idle
/// guest and report a lockup after a pause of the VM.
pub const KERNEL_PARAMETERS: &str =
    "cryptomgr.notests=1 initcall_blacklist=load_system_certificate_list psi=0 lsm=landlock,yama nowatchdog";

/// Name of the unpacked kernel, beside `vmlinuz`: Firecracker boots no other, and an emulated guest would unpack the other at
/// each boot.
pub const ELF_KERNEL: &str = "vmlinux";

/// Execution of guest instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Hardware virtualisation, proven to run a guest in long mode.
    Kvm,
    /// QEMU's dynamic translator; works everywhere.
    Tcg,
}

impl Accelerator {
    /// Returns the word used on command lines and in labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// File that the guest sees as a block device, in a device slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Device slot, from 0. Each slot has one disk; slots for images come first ([`Slots`]).
    pub slot: usize,
    /// File on the host: raw, or qcow2 over `backing`.
    pub path: PathBuf,
    /// Whether writes are refused. The file may then be shared by any number of VMs.
    pub read_only: bool,
    /// Raw backing file, read where the disk itself has no data. The backing file is never written, and a backing file named in
    /// the disk's own header is not trusted.
    pub backing: Option<PathBuf>,
    /// Whether a running guest sees the actual size when the disk is attached. The file system of an image knows its own size,
    /// so its guest need not wait for the resize.
    pub shows_size: bool,
}

impl Disk {
    /// Returns a raw disk.
    #[must_use]
    pub fn raw(slot: usize, path: impl Into<PathBuf>, read_only: bool) -> Self {
        Self { slot, path: path.into(), read_only, backing: None, shows_size: true }
    }

    /// Returns the raw disk of an image, which is never written.
    #[must_use]
    pub fn image(slot: usize, path: impl Into<PathBuf>) -> Self {
        Self { shows_size: false, ..Self::raw(slot, path, true) }
    }
}

/// Machine type of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MachineType {
    /// Minimal machine: no usable firmware, no PCI, disks in device slots; the kernel comes from the host.
    #[default]
    Microvm,
    /// PC with PCI Express (QEMU's q35), for images that bring their own kernel. Disks beyond those present at start are
    /// hot-plugged.
    Q35(Firmware),
}

/// Firmware of a PC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// Boots the kernel and initramfs of the VMM config.
    Kernel,
    /// BIOS, which boots from the first writable disk.
    Bios,
    /// UEFI, which boots from the first writable disk.
    Uefi {
        /// Firmware code; shared, never written.
        code: PathBuf,
        /// Firmware variables, owned by the VM.
        variables: PathBuf,
    },
}

/// Device slots, the same in all VMs of a shape, used or not: devices that cannot be hot-plugged exist from the start. The
/// guest identifies slot `n` by the serial number `slot<n>`. An empty slot appears 1 TiB large, and so may a slot with an image
/// ([`Disk::shows_size`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slots {
    /// Number of slots for images; they come first.
    pub read_only: u8,
    /// Number of slots for disks that the guest writes; they come after the others.
    pub writable: u8,
}

impl Default for Slots {
    /// Together with NIC, entropy device and guest channel, these fit the 24 devices of a microvm with ACPI.
    fn default() -> Self {
        Self { read_only: 12, writable: 4 }
    }
}

impl Slots {
    /// Returns the number of slots.
    #[must_use]
    pub fn total(self) -> usize {
        usize::from(self.read_only) + usize::from(self.writable)
    }

    /// Returns the slot after all others, for a disk whose file system is already mounted in the template. The slot exists only
    /// with drivers whose templates premount a disk ([`crate::Templates::premounts_disk`]).
    #[must_use]
    pub fn premounted(self) -> usize {
        self.total()
    }

    /// Returns whether the slot is one of those for images.
    #[must_use]
    pub fn is_read_only(self, slot: usize) -> bool {
        slot < usize::from(self.read_only)
    }
}

/// Transport protocol of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// Returns the name that QEMU, CNI plugins and the host service use.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Port of the host that is forwarded to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Forward {
    /// Transport protocol. Records of earlier versions have TCP only.
    #[serde(default)]
    pub protocol: Protocol,
    /// Host address to listen on.
    pub host_address: Ipv4Addr,
    /// Host port.
    pub host_port: u16,
    /// Guest port.
    pub guest_port: u16,
}

/// Backend of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicBackend {
    /// Existing tap device that the VMM may open.
    Tap {
        /// Interface name.
        name: String,
    },
    /// User-mode network inside the VMM: needs no privilege, and has no address that the host can reach.
    User {
        /// Forwarded ports.
        forwards: Vec<Forward>,
        /// Only the forwarded ports pass: the guest reaches neither the host's loopback nor a metadata address, nor any other
        /// network of the daemon's user.
        isolated: bool,
    },
}

/// Network interface of a VM, the only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// MAC address.
    pub mac: MacAddr,
    /// Backend on the host.
    pub backend: NicBackend,
}

/// Display of a VM, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Display {
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
}

impl Display {
    /// Display of a VM whose owner does not specify one.
    pub const DEFAULT: Self = Self { width: 1024, height: 768 };
    const MIN: Self = Self { width: 640, height: 480 };
    const MAX: Self = Self { width: 7680, height: 4320 };
}

impl FromStr for Display {
    type Err = String;

    /// Parses `1024x768`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = (Self::MIN, Self::MAX);
        let parsed = text.split_once('x').and_then(|(width, height)| {
            Some(Self { width: width.parse().ok()?, height: height.parse().ok()? })
        });
        let fits = |display: &Self| {
            (min.width..=max.width).contains(&display.width)
                && (min.height..=max.height).contains(&display.height)
        };
        parsed.filter(fits).ok_or_else(|| format!("\"{text}\" is not a size from {min} to {max}"))
    }
}

impl fmt::Display for Display {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

/// Everything that a driver needs to start one VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmmConfig {
    /// Id of the VMM instance.
    pub id: InstanceId,
    /// Number of vCPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Kernel image on the host; unused if firmware starts another.
    pub kernel: PathBuf,
    /// Initramfs with the guest agent.
    pub initrd: PathBuf,
    /// Disks, in any order.
    pub disks: Vec<Disk>,
    /// Device slots.
    pub slots: Slots,
    /// Machine type.
    pub machine_type: MachineType,
    /// Network interface; `None`: the guest has only a loopback interface.
    pub nic: Option<Nic>,
    /// Display; `None`: no display.
    pub display: Option<Display>,
    /// Existing directory of this instance, for the VMM's log.
    pub state_dir: PathBuf,
    /// Existing directory of this instance, short enough for socket paths. The process file in it serves to find the VMM again.
    pub run_dir: PathBuf,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// Name of the driver; empty: the node's default.
    pub driver: String,
    /// Uid and gid of the VMM, unique among the VMMs of the host; `None`: those of the daemon.
    pub uid: Option<u32>,
}

impl VmmConfig {
    /// Returns the disk in a slot.
    #[must_use]
    pub fn disk_in(&self, slot: usize) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.slot == slot)
    }

    /// Returns the kernel as an ELF file, if `cargo xtask guest-image` put [`ELF_KERNEL`] beside it. Otherwise
    /// returns the kernel itself. Blocking, for one directory lookup.
    #[must_use]
    pub fn elf_kernel(&self) -> PathBuf {
        let elf = self.kernel.with_file_name(ELF_KERNEL);
        match self.kernel.file_name() {
            Some(name) if name == "vmlinuz" && elf.is_file() => elf,
            _ => self.kernel.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacked_vmlinux_beside_vmlinuz_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let named = |name: &str| VmmConfig {
            id: InstanceId::new("web", 1),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: dir.path().join(name),
            initrd: PathBuf::new(),
            disks: vec![],
            slots: Slots::default(),
            machine_type: MachineType::default(),
            nic: None,
            display: None,
            state_dir: PathBuf::new(),
            run_dir: PathBuf::new(),
            accelerator: Accelerator::Tcg,
            driver: String::new(),
            uid: None,
        };
        assert_eq!(named("vmlinuz").elf_kernel(), dir.path().join("vmlinuz"));
        std::fs::write(dir.path().join("vmlinux"), "").unwrap();
        assert_eq!(named("vmlinuz").elf_kernel(), dir.path().join("vmlinux"));
        assert_eq!(named("mine").elf_kernel(), dir.path().join("mine"));
    }
}
