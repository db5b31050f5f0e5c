//! The complete description of one VMM process. A driver has no choices left.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use coracle_types::{InstanceId, MacAddr, MemoryMib, Vcpus};
use serde::{Deserialize, Serialize};

/// How guest instructions are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Hardware virtualisation, proven to run a guest in long mode.
    Kvm,
    /// QEMU's translator; works everywhere.
    Tcg,
}

impl Accelerator {
    /// The word used on command lines and in labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// A file that the guest sees as a block device, in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its slot, from 0. One disk a slot; those for images come first ([`Slots`]).
    pub slot: usize,
    /// File on the host: raw, or qcow2 over `backing`.
    pub path: PathBuf,
    /// Refuse writes; the file may be shared by any number of VMs.
    pub read_only: bool,
    /// The raw file that shows where the disk itself has nothing. It is never written, and what the disk's own header
    /// names is not believed.
    pub backing: Option<PathBuf>,
    /// A guest that runs sees its size when it is attached. The file system of an image knows its own, and its guest is not
    /// kept waiting for that.
    pub shows_size: bool,
}

impl Disk {
    /// A raw file.
    #[must_use]
    pub fn raw(slot: usize, path: impl Into<PathBuf>, read_only: bool) -> Self {
        Self { slot, path: path.into(), read_only, backing: None, shows_size: true }
    }

    /// The raw file of an image, which no one writes.
    #[must_use]
    pub fn image(slot: usize, path: impl Into<PathBuf>) -> Self {
        Self { shows_size: false, ..Self::raw(slot, path, true) }
    }
}

/// What kind of computer the guest finds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MachineType {
    /// The least: no firmware worth the name, no PCI, disks in slots; its kernel comes from the host.
    #[default]
    Microvm,
    /// A PC with PCI Express (QEMU's q35), for images that bring their own kernel. Disks beside those that it starts
    /// with are plugged in and out.
    Q35(Firmware),
}

/// What a PC runs first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// The kernel and initramfs of the VMM config.
    Kernel,
    /// A BIOS, and what it finds on the first disk that can be written.
    Bios,
    /// UEFI, likewise.
    Uefi {
        /// The firmware itself; shared, never written.
        code: PathBuf,
        /// Its variables; the VM's own.
        variables: PathBuf,
    },
}

/// Places for disks, alike in all machines of a shape, filled or not: what cannot be plugged in later is there from
/// the start. The guest knows slot `n` by the serial number `slot<n>`; an empty one is 1 TiB large, and so may one
/// with an image look ([`Disk::shows_size`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slots {
    /// Slots for images; the first ones.
    pub read_only: u8,
    /// Slots for disks that the guest writes; after the others.
    pub writable: u8,
}

impl Default for Slots {
    /// With NIC, entropy and agent channel these fit the 24 devices of a microvm with ACPI.
    fn default() -> Self {
        Self { read_only: 12, writable: 4 }
    }
}

impl Slots {
    /// How many there are.
    #[must_use]
    pub fn total(self) -> usize {
        usize::from(self.read_only) + usize::from(self.writable)
    }

    /// A slot after all others, for a disk whose file system is mounted in the template already. Only drivers whose
    /// templates have one have it ([`crate::Templates::premounts_disk`]).
    #[must_use]
    pub fn premounted(self) -> usize {
        self.total()
    }

    /// Is this one of the slots for images?
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
    /// As QEMU, CNI plugins and the host service name it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// One port of the host that leads into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Forward {
    /// Its protocol. Records of earlier versions have TCP only.
    #[serde(default)]
    pub protocol: Protocol,
    /// Address of the host that listens.
    pub host_address: Ipv4Addr,
    /// Port of the host.
    pub host_port: u16,
    /// Port of the guest.
    pub guest_port: u16,
}

/// Where the packets of a NIC go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicBackend {
    /// An existing tap device that the VMM may open.
    Tap {
        /// Interface name.
        name: String,
    },
    /// A network inside the VMM; no privilege, no address that the host can reach.
    User {
        /// Ports that lead in.
        forwards: Vec<Forward>,
        /// Nothing but these ports passes: the guest reaches neither the host's loopback nor a metadata address, nor any
        /// other network of the daemon's user.
        isolated: bool,
    },
}

/// The one network interface of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Address of the interface.
    pub mac: MacAddr,
    /// Its other end.
    pub backend: NicBackend,
}

/// The screen of a machine, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Display {
    /// From left to right.
    pub width: u32,
    /// From top to bottom.
    pub height: u32,
}

impl Display {
    /// That of a machine whose owner does not say.
    pub const DEFAULT: Self = Self { width: 1024, height: 768 };
    const MIN: Self = Self { width: 640, height: 480 };
    const MAX: Self = Self { width: 7680, height: 4320 };
}

impl FromStr for Display {
    type Err = String;

    /// `1024x768`.
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
    /// Which instance.
    pub id: InstanceId,
    /// Number of CPUs.
    pub vcpus: Vcpus,
    /// Guest memory.
    pub memory: MemoryMib,
    /// Kernel image on the host; unused where firmware starts another.
    pub kernel: PathBuf,
    /// Initramfs with the guest agent.
    pub initrd: PathBuf,
    /// In any order.
    pub disks: Vec<Disk>,
    /// Places for disks.
    pub slots: Slots,
    /// What kind of computer it is.
    pub machine_type: MachineType,
    /// None: the guest has only a loopback interface.
    pub nic: Option<Nic>,
    /// None: the machine has no screen.
    pub display: Option<Display>,
    /// Exists, belongs to this instance: the VMM's log goes here.
    pub state_dir: PathBuf,
    /// Exists, belongs to this instance, short enough for sockets. The process file in it is how its VMM is found again.
    pub run_dir: PathBuf,
    /// How to execute guest code.
    pub accelerator: Accelerator,
    /// Name of its driver; empty: the node's default.
    pub driver: String,
    /// User and group of its VMM, its own among the VMMs of the host; `None`: those of the daemon.
    pub uid: Option<u32>,
}

impl VmmConfig {
    /// The disk in a slot.
    #[must_use]
    pub fn disk_in(&self, slot: usize) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.slot == slot)
    }

    /// The kernel as an ELF file, where `cargo xtask guest-image` put that beside it: `vmlinux` beside `vmlinuz`. Else the
    /// kernel as it is. Blocking, for one look at a directory.
    #[must_use]
    pub fn elf_kernel(&self) -> PathBuf {
        let elf = self.kernel.with_file_name("vmlinux");
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
    fn elf_kernel_is_used_where_it_is() {
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
