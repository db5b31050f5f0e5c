//! Command line of QEMU from a VMM config. Pure; covered by golden tests.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use coracle_hypervisor::{
    Accelerator, Disk, Display, Firmware, KERNEL_PARAMETERS, MachineType, Nic, NicBackend, VmmConfig,
};

/// Name of the port that the guest agent looks for.
const GUEST_PORT: &str = "dev.coracle.guest.0";

/// Size of a slot without a disk, 1 TiB, by which the guest recognises an empty slot.
pub(crate) const EMPTY_SLOT_BYTES: u64 = 1 << 40;

/// Way in which a VMM gets its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartMode {
    /// Boots, with its disks and its network.
    Cold,
    /// Boots with empty slots and no network, with the RAM in the memory file that the child inherits under this number.
    Template {
        /// Descriptor number of the RAM file.
        ram: RawFd,
    },
    /// Waits for a saved state, with the RAM as a private copy of the file.
    Clone {
        /// Descriptor number of the RAM file.
        ram: RawFd,
    },
    /// Waits for a saved state that includes the RAM; disks are in their slots.
    Restore,
    /// Waits for such a state, to load its RAM into the memory file that the child inherits under this number. The guest never
    /// runs, and the VMM has no disks.
    Materialize {
        /// Descriptor number of the RAM file.
        ram: RawFd,
    },
    /// Waits for a saved state, with the RAM as a private copy of the file; disks are in their slots.
    Fork {
        /// Descriptor number of the RAM file.
        ram: RawFd,
    },
}

/// Open descriptors that QEMU inherits, with their numbers. QEMU opens or creates missing ones itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Files of disks and firmware variables, each open for its use.
    pub files: Vec<(PathBuf, RawFd)>,
    /// Listening sockets, by file name.
    pub sockets: Vec<(&'static str, RawFd)>,
    /// Tap of the NIC.
    pub tap: Option<RawFd>,
}

impl Descriptors {
    /// Returns QEMU's name of a file: its file descriptor set (QEMU manual, `-add-fd`), or its path.
    fn name(&self, path: &Path) -> String {
        match self.files.iter().position(|(known, _)| known == path) {
            Some(at) => format!("/dev/fdset/{}", at + 1),
            None => escape(&path.display().to_string()),
        }
    }

    /// Returns the options of a character device that listens on the socket of this file name in `run_dir`.
    fn listener(&self, run_dir: &Path, socket: &'static str) -> String {
        match self.sockets.iter().find(|(known, _)| *known == socket) {
            Some((_, number)) => format!("fd={number},server=on,wait=off"),
            None => {
                format!("path={},server=on,wait=off", escape(&run_dir.join(socket).display().to_string()))
            }
        }
    }
}

impl StartMode {
    /// Returns whether the VMM waits for a state instead of running.
    fn waits_for_state(self) -> bool {
        !matches!(self, Self::Cold | Self::Template { .. })
    }

    /// Returns whether the RAM is a private copy of a file.
    pub(crate) fn copies_ram(self) -> bool {
        matches!(self, Self::Clone { .. } | Self::Fork { .. })
    }

    /// Returns whether the VMM has its disks from the start.
    pub(crate) fn has_disks(self) -> bool {
        matches!(self, Self::Cold | Self::Restore | Self::Fork { .. })
    }

    /// Returns whether the NIC is connected.
    pub(crate) fn has_network(self) -> bool {
        !matches!(self, Self::Template { .. })
    }
}

/// Returns the arguments of `qemu-system-x86_64` for this VM.
///
/// `tsc_khz` is the rate of the host's time-stamp counter: under TCG the guest kernel of a microvm with ACPI cannot calibrate
/// the counter, and hangs without the rate.
#[must_use]
pub fn argv(
    vmm_config: &VmmConfig,
    accelerator: Accelerator,
    tsc_khz: u64,
    mode: StartMode,
    open: &Descriptors,
) -> Vec<String> {
    let mut args = Args { open, list: vec![] };
    args.flag("-nodefaults").flag("-no-user-config");
    if boots_host_kernel(&vmm_config.machine_type) {
        // The guest of a container image ends by a reboot; a guest with its own firmware reboots.
        args.flag("-no-reboot");
    }
    args.pair("-display", "none");
    args.pair("-name", format!("coracle-{},debug-threads=on", vmm_config.id));
    args.pair("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    for (number, set) in open.files.iter().map(|(_, number)| number).zip(1..) {
        args.pair("-add-fd", format!("fd={number},set={set}"));
    }
    args.ram(vmm_config.memory.get(), mode);
    args.machine_type(&vmm_config.machine_type);
    args.pair("-accel", accelerator.as_str());
    args.pair("-cpu", cpu(accelerator));
    args.pair("-smp", vmm_config.vcpus.get().to_string());
    args.pair("-m", vmm_config.memory.get().to_string());
    if reads_kernel(&vmm_config.machine_type, mode) {
        args.pair("-kernel", escape(&vmm_config.kernel.display().to_string()));
        args.pair("-initrd", escape(&vmm_config.initrd.display().to_string()));
        args.pair("-append", kernel_command_line(accelerator, tsc_khz));
    }
    let bus = bus(&vmm_config.machine_type);
    let listener = |socket| open.listener(&vmm_config.run_dir, socket);
    args.pair("-chardev", format!("socket,id=console,{}", listener("console.sock")));
    args.pair("-serial", "chardev:console");
    args.pair("-device", format!("virtio-serial-{bus}"));
    args.pair("-chardev", format!("socket,id=guest,{}", listener("guest.sock")));
    args.pair("-device", format!("virtserialport,chardev=guest,name={GUEST_PORT},id=guest"));
    match vmm_config.machine_type {
        MachineType::Microvm => args.slots(vmm_config, mode),
        MachineType::Q35(_) => args.ports(vmm_config, mode),
    }
    match (&vmm_config.nic, mode.has_network()) {
        // The NIC must exist for a state that is loaded later; its backend is added with that.
        (Some(nic), true) => args.nic(bus, nic, netdev(&nic.backend, open.tap)),
        (Some(nic), false) => args.nic(bus, nic, "hubport,id=net0,hubid=0".to_owned()),
        (None, _) => {}
    }
    if let Some(display) = vmm_config.display {
        args.display(display);
    }
    args.pair("-device", format!("virtio-rng-{bus}"));
    args.pair("-chardev", format!("socket,id=qmp,{}", listener("qmp.sock")));
    args.pair("-mon", "chardev=qmp,mode=control");
    if mode.waits_for_state() {
        args.pair("-incoming", "defer");
    }
    args.list
}

/// Like [`argv`] of a cold boot, with the accelerator of the VMM config and the rate of this host.
#[must_use]
pub fn argv_for_this_host(vmm_config: &VmmConfig) -> Vec<String> {
    argv(vmm_config, vmm_config.accelerator, crate::tsc::khz(), StartMode::Cold, &Descriptors::default())
}

/// Returns the CPU model: all features of the accelerator, except those that harm. Under KVM, nested virtualisation and
/// performance counters would expose host state that the guest does not need. TCG emulates both itself, and Debian's guests
/// fail under QEMU 7.2 without SVM. TCG emulates `rep movsb` byte by byte, and a kernel that sees ERMS copies and clears all
/// its memory with that instruction; without ERMS a boot takes a sixth less time.
fn cpu(accelerator: Accelerator) -> &'static str {
    match accelerator {
        Accelerator::Kvm => "max,-vmx,-svm,pmu=off",
        Accelerator::Tcg => "max,-erms",
    }
}

/// Returns whether the VM boots the kernel of its VMM config.
fn boots_host_kernel(machine_type: &MachineType) -> bool {
    matches!(machine_type, MachineType::Microvm | MachineType::Q35(Firmware::Kernel))
}

/// Returns whether QEMU needs the kernel files. A microvm that waits for a state has its kernel in that state and never boots
/// again: with the files, QEMU would hold 20 MiB that are never used. A PC's firmware reads a ROM for the files, which becomes
/// part of the saved state.
fn reads_kernel(machine_type: &MachineType, mode: StartMode) -> bool {
    boots_host_kernel(machine_type) && !(*machine_type == MachineType::Microvm && mode.waits_for_state())
}

/// Returns the suffix of the names of virtio devices.
fn bus(machine_type: &MachineType) -> &'static str {
    match machine_type {
        MachineType::Microvm => "device",
        MachineType::Q35(_) => "pci",
    }
}

/// Returns the kernel command line. `reboot=t` with `-no-reboot` ends the VMM by a triple fault.
fn kernel_command_line(accelerator: Accelerator, tsc_khz: u64) -> String {
    let mut line = format!("console=ttyS0 quiet reboot=t panic=-1 {KERNEL_PARAMETERS}");
    if accelerator == Accelerator::Tcg {
        line += &format!(" tsc_early_khz={tsc_khz} tsc=reliable no_timer_check lapic=notscdeadline");
    }
    line
}

fn netdev(backend: &NicBackend, tap: Option<RawFd>) -> String {
    match (backend, tap) {
        (NicBackend::Tap { .. }, Some(number)) => format!("tap,id=net0,fd={number}"),
        (NicBackend::Tap { name }, None) => {
            format!("tap,id=net0,ifname={},script=no,downscript=no", escape(name))
        }
        (NicBackend::User { forwards, isolated }, _) => {
            // QEMU's network has no finer switch: without it the guest may connect to everything that this process may.
            let restrict = if *isolated { ",restrict=on" } else { "" };
            let forwards = forwards.iter().map(|f| {
                let protocol = f.protocol.as_str();
                format!(",hostfwd={protocol}:{}:{}-:{}", f.host_address, f.host_port, f.guest_port)
            });
            format!("user,id=net0{restrict}{}", forwards.collect::<String>())
        }
    }
}

struct Args<'a> {
    open: &'a Descriptors,
    list: Vec<String>,
}

impl Args<'_> {
    fn flag(&mut self, name: &str) -> &mut Self {
        self.list.push(name.to_owned());
        self
    }

    fn pair(&mut self, name: &str, value: impl Into<String>) {
        self.list.extend([name.to_owned(), value.into()]);
    }

    /// All variants have the same id, by which the saved state identifies the RAM.
    fn ram(&mut self, mib: u32, mode: StartMode) {
        let file = |number, share| {
            format!("memory-backend-file,id=ram,size={mib}M,mem-path=/proc/self/fd/{number},share={share}")
        };
        self.pair(
            "-object",
            match mode {
                StartMode::Cold | StartMode::Restore => format!("memory-backend-ram,id=ram,size={mib}M"),
                StartMode::Template { ram } | StartMode::Materialize { ram } => file(ram, "on"),
                StartMode::Clone { ram } | StartMode::Fork { ram } => file(ram, "off"),
            },
        );
    }

    /// Adds a device for every slot, used or not, so that all VMs of one shape are alike. The slots of a clone are filled
    /// later, because its devices must first look as they did when the template was saved. The premounted disk is there from
    /// the start for the same reason.
    fn slots(&mut self, vmm_config: &VmmConfig, mode: StartMode) {
        let premounted = vmm_config.slots.premounted();
        for slot in 0..=premounted {
            let disk = vmm_config.disk_in(slot).filter(|_| mode.has_disks() || slot == premounted);
            let read_only = if vmm_config.slots.is_read_only(slot) { "on" } else { "off" };
            let backing = match disk {
                Some(disk) => {
                    let path = self.open.name(&disk.path);
                    self.pair(
                        "-blockdev",
                        format!("driver=file,node-name=disk{slot},filename={path},read-only={read_only},discard=unmap"),
                    );
                    format!("disk{slot}")
                }
                None => {
                    self.pair(
                        "-blockdev",
                        format!(
                            "driver=null-co,node-name=empty{slot},size={EMPTY_SLOT_BYTES},read-zeroes=on"
                        ),
                    );
                    format!("empty{slot}")
                }
            };
            self.pair(
                "-blockdev",
                format!("driver=raw,node-name=slot{slot},file={backing},read-only={read_only}"),
            );
            self.pair(
                "-device",
                format!("virtio-blk-device,drive=slot{slot},id=slot{slot},serial=slot{slot}"),
            );
        }
    }

    /// The guest agent announces the address of a resumed guest; the kernel must not do so before.
    fn nic(&mut self, bus: &str, nic: &Nic, netdev: String) {
        self.pair("-netdev", netdev);
        let device = format!("virtio-net-{bus},netdev=net0,mac={},id=nic0,guest_announce=off", nic.mac);
        self.pair("-device", device);
    }

    /// Adds a display only for clients that the monitor passes in: QEMU does not listen. The pointer is absolute, because a
    /// relative one cannot follow the client's.
    fn display(&mut self, Display { width, height }: Display) {
        self.pair("-device", format!("VGA,edid=on,xres={width},yres={height}"));
        self.pair("-vnc", "none");
        self.pair("-device", "virtio-tablet-pci");
    }

    fn machine_type(&mut self, machine_type: &MachineType) {
        let pc = "q35,memory-backend=ram";
        match machine_type {
            MachineType::Microvm => {
                self.pair("-M", "microvm,acpi=on,x-option-roms=off,rtc=on,memory-backend=ram");
                return;
            }
            MachineType::Q35(Firmware::Kernel | Firmware::Bios) => self.pair("-M", pc),
            MachineType::Q35(Firmware::Uefi { code, variables }) => {
                let (code, variables) = (self.open.name(code), self.open.name(variables));
                let code = format!("driver=file,node-name=firmware,filename={code},read-only=on");
                self.pair("-blockdev", code);
                self.pair("-blockdev", format!("driver=file,node-name=variables,filename={variables}"));
                self.pair("-M", format!("{pc},pflash0=firmware,pflash1=variables"));
            }
        }
        // Tells the guest kernel that the VM was copied (docs/specs/vmgenid).
        self.pair("-device", "vmgenid,guid=auto,id=generation");
    }

    /// Adds a port for every slot, so that a disk can be attached to any of them later; present disks are attached.
    fn ports(&mut self, vmm_config: &VmmConfig, mode: StartMode) {
        let writable = |disk: &&Disk| !disk.read_only;
        let first = vmm_config.disks.iter().filter(writable).map(|disk| disk.slot).min();
        for slot in 0..vmm_config.slots.total() {
            let number = slot + 1;
            self.pair("-device", format!("pcie-root-port,id=port{slot},chassis={number},slot={number}"));
            let Some(disk) = vmm_config.disk_in(slot).filter(|_| mode.has_disks()) else { continue };
            self.node(disk);
            let boot = if first == Some(slot) { ",bootindex=1" } else { "" };
            self.pair(
                "-device",
                format!(
                    "virtio-blk-pci,drive=slot{slot},id=slot{slot},serial=slot{slot},bus=port{slot}{boot}"
                ),
            );
        }
    }

    /// Adds the block node of a disk, with its backing file. Files that an image header names are not opened.
    fn node(&mut self, Disk { slot, path, read_only, backing, .. }: &Disk) {
        let path = self.open.name(path);
        let only = if *read_only { "on" } else { "off" };
        let file = format!("driver=file,node-name=disk{slot},filename={path},read-only={only},discard=unmap");
        self.pair("-blockdev", file);
        let Some(backing) = backing else {
            let raw =
                format!("driver=raw,node-name=slot{slot},file=disk{slot},read-only={only},discard=unmap");
            self.pair("-blockdev", raw);
            return;
        };
        let backing = self.open.name(backing);
        self.pair("-blockdev", format!("driver=file,node-name=under{slot},filename={backing},read-only=on"));
        self.pair("-blockdev", format!("driver=raw,node-name=base{slot},file=under{slot},read-only=on"));
        let over = format!("driver=qcow2,node-name=slot{slot},file=disk{slot},backing=base{slot}");
        self.pair("-blockdev", format!("{over},read-only={only},discard=unmap"));
    }
}

/// In QEMU's option strings a comma inside a value is doubled.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor::{Disk, Forward, Protocol, Slots};
    use coracle_types::{InstanceId, MacAddr, VmId};

    use super::*;

    fn argv(vmm_config: &VmmConfig, accelerator: Accelerator, tsc_khz: u64, mode: StartMode) -> Vec<String> {
        super::argv(vmm_config, accelerator, tsc_khz, mode, &Descriptors::default())
    }

    fn vmm_config(backend: NicBackend) -> VmmConfig {
        let id = InstanceId::from(VmId::of_name(&"web".parse().unwrap()));
        VmmConfig {
            vcpus: 2.try_into().unwrap(),
            memory: 256.try_into().unwrap(),
            kernel: "/boot/vmlinuz".into(),
            initrd: "/boot/initrd".into(),
            disks: vec![Disk::raw(0, "/images/a.erofs", true), Disk::raw(2, "/vms/we,b/overlay.ext4", false)],
            slots: Slots { read_only: 2, writable: 1 },
            machine_type: Default::default(),
            nic: Some(Nic { mac: MacAddr::of(&id), backend }),
            display: None,
            state_dir: "/state/vms/web".into(),
            run_dir: "/run/coracle/0123/abc".into(),
            accelerator: Accelerator::Tcg,
            driver: String::new(),
            uid: None,
            id,
        }
    }

    fn tap() -> VmmConfig {
        vmm_config(NicBackend::Tap { name: "ct0123".into() })
    }

    #[test]
    fn golden_tap_under_tcg() {
        insta::assert_snapshot!(argv(&tap(), Accelerator::Tcg, 2_500_000, StartMode::Cold).join("\n"));
    }

    #[test]
    fn golden_user_under_kvm() {
        let forward = Forward {
            protocol: Protocol::Tcp,
            host_address: [127, 0, 0, 1].into(),
            host_port: 8080,
            guest_port: 80,
        };
        let vmm_config = vmm_config(NicBackend::User { forwards: vec![forward], isolated: true });
        insta::assert_snapshot!(argv(&vmm_config, Accelerator::Kvm, 2_500_000, StartMode::Cold).join("\n"));
    }

    #[test]
    fn user_network_is_restricted_when_isolated() {
        for (isolated, want) in [(true, "user,id=net0,restrict=on"), (false, "user,id=net0")] {
            assert_eq!(netdev(&NicBackend::User { forwards: vec![], isolated }, None), want);
        }
    }

    #[test]
    fn golden_pc_with_uefi() {
        let mut vmm_config = tap();
        vmm_config.machine_type =
            MachineType::Q35(Firmware::Uefi { code: "/ovmf/code".into(), variables: "/vms/v".into() });
        vmm_config.disks[1].backing = Some("/images/base.raw".into());
        insta::assert_snapshot!(argv(&vmm_config, Accelerator::Tcg, 2_500_000, StartMode::Cold).join("\n"));
    }

    #[test]
    fn display_adds_vga_without_vnc_listener() {
        let pc = VmmConfig { machine_type: MachineType::Q35(Firmware::Bios), ..tap() };
        let with = VmmConfig { display: Some(Display { width: 1920, height: 1080 }), ..pc.clone() };
        let lines = |vmm_config| argv(vmm_config, Accelerator::Tcg, 2_500_000, StartMode::Cold);
        let (without, with) = (lines(&pc), lines(&with));
        assert!(!without.contains(&"-vnc".to_owned()));
        let added: Vec<_> = with.iter().filter(|line| !without.contains(line)).map(String::as_str).collect();
        assert_eq!(added, ["VGA,edid=on,xres=1920,yres=1080", "-vnc", "virtio-tablet-pci"]);
    }

    #[test]
    fn q35_takes_kernel_arguments_only_with_kernel_firmware() {
        let lines = |firmware| {
            let vmm_config = VmmConfig { machine_type: MachineType::Q35(firmware), ..tap() };
            argv(&vmm_config, Accelerator::Tcg, 2_500_000, StartMode::Cold)
        };
        let has = |lines: &[String], word: &str| lines.iter().any(|line| line == word);
        let (host, own) = (lines(Firmware::Kernel), lines(Firmware::Bios));
        for word in ["-kernel", "-initrd", "-append", "-no-reboot"] {
            assert!(has(&host, word) && !has(&own, word), "{word}");
        }
    }

    #[test]
    fn golden_template() {
        insta::assert_snapshot!(
            argv(&tap(), Accelerator::Tcg, 2_500_000, StartMode::Template { ram: 7 }).join("\n")
        );
    }

    #[test]
    fn restore_argv_differs_from_cold_in_kernel_and_incoming() {
        let lines = |mode| argv(&tap(), Accelerator::Tcg, 2_500_000, mode);
        let restored = lines(StartMode::Restore);
        let mut booted = without_kernel(lines(StartMode::Cold));
        booted.extend(["-incoming".to_owned(), "defer".to_owned()]);
        assert_eq!(restored, booted);
        let pc = VmmConfig { machine_type: MachineType::Q35(Firmware::Kernel), ..tap() };
        let pc = argv(&pc, Accelerator::Tcg, 2_500_000, StartMode::Restore);
        assert!(pc.iter().any(|argument| argument == "-kernel"), "its ROM is part of the state");
    }

    fn without_kernel(mut lines: Vec<String>) -> Vec<String> {
        for option in ["-kernel", "-initrd", "-append"] {
            let at = lines.iter().position(|line| line == option).unwrap();
            lines.drain(at..at + 2);
        }
        lines
    }

    #[test]
    fn fork_argv_maps_materialized_ram_privately() {
        let lines = |mode| argv(&tap(), Accelerator::Tcg, 2_500_000, mode);
        let only = |a: &[String], b: &[String]| -> Vec<String> {
            a.iter().filter(|line| !b.contains(line)).cloned().collect()
        };
        let (template, reader) =
            (lines(StartMode::Template { ram: 7 }), lines(StartMode::Materialize { ram: 7 }));
        let network = "tap,id=net0,ifname=ct0123,script=no,downscript=no";
        assert_eq!(only(&reader, &template), [network, "-incoming", "defer"]);
        let (restored, fork) = (lines(StartMode::Restore), lines(StartMode::Fork { ram: 7 }));
        let private = "memory-backend-file,id=ram,size=256M,mem-path=/proc/self/fd/7,share=off";
        assert_eq!(only(&fork, &restored), [private]);
    }

    #[test]
    fn clone_argv_differs_from_template_in_ram_network_and_incoming() {
        let lines = |mode| argv(&tap(), Accelerator::Tcg, 2_500_000, mode);
        let (template, clone) = (lines(StartMode::Template { ram: 7 }), lines(StartMode::Clone { ram: 7 }));
        let only_clone: Vec<_> = clone.iter().filter(|a| !template.contains(a)).collect();
        assert_eq!(
            only_clone,
            [
                "memory-backend-file,id=ram,size=256M,mem-path=/proc/self/fd/7,share=off",
                "tap,id=net0,ifname=ct0123,script=no,downscript=no",
                "-incoming",
                "defer",
            ]
        );
    }

    #[test]
    fn inherited_files_are_named_by_number() {
        let file = |path: &str, number| (PathBuf::from(path), number);
        let open = Descriptors {
            files: vec![file("/images/a.erofs", 20), file("/vms/we,b/overlay.ext4", 21)],
            sockets: vec![("console.sock", 22), ("guest.sock", 23), ("qmp.sock", 24)],
            tap: Some(25),
        };
        let lines = super::argv(&tap(), Accelerator::Tcg, 2_500_000, StartMode::Cold, &open);
        let paths = argv(&tap(), Accelerator::Tcg, 2_500_000, StartMode::Cold);
        let only: Vec<_> = lines.iter().filter(|line| !paths.contains(line)).map(String::as_str).collect();
        assert_eq!(
            only,
            [
                "-add-fd",
                "fd=20,set=1",
                "-add-fd",
                "fd=21,set=2",
                "socket,id=console,fd=22,server=on,wait=off",
                "socket,id=guest,fd=23,server=on,wait=off",
                "driver=file,node-name=disk0,filename=/dev/fdset/1,read-only=on,discard=unmap",
                "driver=file,node-name=disk2,filename=/dev/fdset/2,read-only=off,discard=unmap",
                "tap,id=net0,fd=25",
                "socket,id=qmp,fd=24,server=on,wait=off",
            ]
        );
        assert!(!lines.iter().any(|line| line.contains("/run/") || line.contains("/vms/")), "{lines:?}");
    }
}
