//! Driver of QEMU: starts, finds, kills and connects to VMMs.

use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::launch::{Launch, prepare_jail, wait_ready};
use coracle_hypervisor::{
    Accelerator, AcceleratorChoice, Disk, Driver, DriverError, Firmware, Jail, KvmProbe, MachineType,
    NicBackend, Probe, ProcessId, Snapshots, Templates, VmmConfig,
};
use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::OnceCell;

use crate::files::Files;
use crate::monitor::Monitor;
use crate::{StartMode, argv, tsc};

/// Time limit from spawn to an answer of the monitor. QEMU alone needs 50 ms, on a loaded host seconds.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// Time limit for opening the disks, sockets and tap of a VMM.
const OPEN_LIMIT: Duration = Duration::from_secs(10);

/// Settings of the driver.
#[derive(Clone, Debug)]
pub struct QemuConfig {
    /// Path of `qemu-system-x86_64`: absolute, or a name to look up.
    pub program: PathBuf,
    /// Probe of KVM; `None`: TCG without a probe.
    pub kvm: Option<KvmProbe>,
}

/// Driver that runs microVMs and PCs with QEMU. Cheap to create; its only state is the result of the probe.
#[derive(Debug)]
pub struct QemuDriver {
    config: QemuConfig,
    probe: OnceCell<Probe>,
}

impl QemuDriver {
    /// Returns a driver that has not probed the host yet.
    #[must_use]
    pub fn new(config: QemuConfig) -> Self {
        Self { config, probe: OnceCell::new() }
    }

    async fn run_probe(&self) -> Probe {
        let absent = |reason| Probe { version: String::new(), accelerator: None, reason };
        let program = self.config.program.display();
        let version = match tokio::process::Command::new(&self.config.program).arg("--version").output().await
        {
            Err(e) => return absent(format!("{program}: {e}; install Debian's qemu-system-x86")),
            Ok(output) => parse_version(&String::from_utf8_lossy(&output.stdout)),
        };
        let machines = tokio::process::Command::new(&self.config.program).args(["-M", "help"]).output().await;
        if !machines.is_ok_and(|m| String::from_utf8_lossy(&m.stdout).contains("microvm")) {
            return absent(format!("{program} {version} has no microvm machine"));
        }
        let AcceleratorChoice { accelerator, reason } = match &self.config.kvm {
            Some(probe) => probe.verdict(&version).await,
            None => {
                AcceleratorChoice { accelerator: Accelerator::Tcg, reason: "TCG by configuration".to_owned() }
            }
        };
        Probe { version, accelerator: Some(accelerator), reason }
    }

    /// Starts a process, and returns it with its open monitor. The process inherits the files of these numbers.
    pub(crate) async fn spawn<'a>(
        &self,
        vmm_config: &'a VmmConfig,
        accelerator: Accelerator,
        mode: StartMode,
        inherited: &[RawFd],
    ) -> Result<(ProcessId, Monitor<'a>), DriverError> {
        let io = |source| DriverError::Io {
            operation: format!("open the files of VMM {}", vmm_config.id),
            source,
        };
        let files = open_files(vmm_config, mode).await.map_err(io)?;
        let open = files.descriptors();
        let booted = VmmConfig { kernel: kernel(vmm_config, accelerator), ..vmm_config.clone() };
        let (shape, named) = (booted.clone(), self.config.program.clone());
        let jail = prepare_jail(vmm_config, move |jail| {
            fill(jail, &shape, named);
            Ok(())
        });
        let jail = jail.await.map_err(io)?;
        let process = Launch {
            vmm_config,
            program: &self.config.program,
            args: argv(&booted, accelerator, tsc::khz(), mode, &open),
            working_dir: Path::new("/"),
            serial: None,
            has_huge_pages: has_huge_pages(accelerator, mode),
            inherited: inherited.iter().copied().chain(open.numbers()).collect(),
            jail,
        }
        .run()?;
        // From here on only the VMM holds the files: when it ends, its monitor closes.
        drop(files);
        let monitor = OnceCell::new();
        let answers = || async { monitor.get_or_try_init(|| Monitor::open(vmm_config)).await.is_ok() };
        wait_ready(vmm_config, process, READY_LIMIT, answers).await?;
        match monitor.into_inner() {
            Some(monitor) => Ok((process, monitor)),
            None => Monitor::open(vmm_config).await.map(|monitor| (process, monitor)),
        }
    }

    pub(crate) async fn connect(
        &self,
        vmm_config: &VmmConfig,
        channel: &'static str,
    ) -> Result<UnixStream, DriverError> {
        UnixStream::connect(vmm_config.run_dir.join(format!("{channel}.sock")))
            .await
            .map_err(|source| DriverError::Channel { id: vmm_config.id.clone(), channel, source })
    }
}

#[async_trait]
impl Driver for QemuDriver {
    fn name(&self) -> &'static str {
        "qemu"
    }

    async fn probe(&self) -> Probe {
        self.probe.get_or_init(|| self.run_probe()).await.clone()
    }

    /// Starts a VMM. A VMM that exits under KVM before its monitor answers is started again under TCG, because the probe does
    /// not cover every MSR that QEMU may need.
    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError> {
        let spawned = match self.spawn(vmm_config, vmm_config.accelerator, StartMode::Cold, &[]).await {
            Err(DriverError::Exited { last_words, .. }) if vmm_config.accelerator == Accelerator::Kvm => {
                tracing::warn!(vm = %vmm_config.id, error = %last_words, "VMM exited under kvm, trying tcg");
                self.spawn(vmm_config, Accelerator::Tcg, StartMode::Cold, &[]).await
            }
            result => result,
        };
        spawned.map(|(process, _)| process)
    }

    fn accelerator_of(&self, vmm_config: &VmmConfig, process: ProcessId) -> Accelerator {
        let cmdline = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        accelerator_in(&cmdline).unwrap_or(vmm_config.accelerator)
    }

    async fn exited(&self, process: ProcessId) -> Result<(), DriverError> {
        process
            .exited()
            .await
            .map_err(|source| DriverError::Io { operation: format!("watch process {}", process.pid), source })
    }

    async fn kill(&self, process: ProcessId) -> Result<(), DriverError> {
        process
            .kill()
            .await
            .map_err(|source| DriverError::Io { operation: format!("kill process {}", process.pid), source })
    }

    async fn guest_channel(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        self.connect(vmm_config, "guest").await
    }

    async fn console(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        self.connect(vmm_config, "console").await
    }

    async fn display(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: vmm_config.id.clone(), channel: "display", source };
        if vmm_config.display.is_none() {
            return Err(refused(io::ErrorKind::Unsupported.into()));
        }
        let (near, far) = UnixStream::pair().map_err(refused)?;
        Monitor::open(vmm_config).await?.add_display_client(&far).await?;
        Ok(near)
    }

    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        Monitor::open(vmm_config).await?.run("stop", json!({})).await.map(drop)
    }

    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        Monitor::open(vmm_config).await?.run("cont", json!({})).await.map(drop)
    }

    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError> {
        Monitor::open(vmm_config).await?.attach_slot(vmm_config, disk).await
    }

    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError> {
        Monitor::open(vmm_config).await?.detach_slot(vmm_config, slot).await
    }

    fn has_machine(&self, _: &VmmConfig) -> bool {
        true
    }

    fn has_user_network(&self, _: &VmmConfig) -> bool {
        true
    }

    fn snapshots(&self, _: &VmmConfig) -> Option<&dyn Snapshots> {
        Some(self)
    }

    /// Templates need a guest that waits for its configuration. A disk image VM boots by firmware and does not wait.
    fn templates(&self, vmm_config: &VmmConfig) -> Option<&dyn Templates> {
        matches!(vmm_config.machine_type, MachineType::Microvm).then_some(self as &dyn Templates)
    }
}

/// Whether huge pages help a VMM. Under TCG, with the RAM as a private copy of a file, only translated code and the tables of the
/// firmware would be in huge pages: 4 MiB more per VMM and more time to clear them, and no workload runs faster. KVM maps huge
/// pages of the file, if the host has them.
fn has_huge_pages(accelerator: Accelerator, mode: StartMode) -> bool {
    accelerator == Accelerator::Kvm || !mode.copies_ram()
}

/// Returns the kernel to boot. Under TCG the kernel takes a quarter of a boot to decompress itself, so the uncompressed kernel
/// is booted. That kernel is at a fixed address (no KASLR), so KVM, which decompresses at full speed, boots the compressed one.
/// A PC has the ROM that loads its kernel in its saved state.
fn kernel(vmm_config: &VmmConfig, accelerator: Accelerator) -> PathBuf {
    match (accelerator, &vmm_config.machine_type) {
        (Accelerator::Tcg, MachineType::Microvm) => vmm_config.elf_kernel(),
        _ => vmm_config.kernel.clone(),
    }
}

/// Adds the files that QEMU opens by name: its boot files. Firmware is below `/usr`, which every jail has.
fn fill(jail: &mut Jail, vmm_config: &VmmConfig, program: PathBuf) {
    let boots = matches!(vmm_config.machine_type, MachineType::Microvm | MachineType::Q35(Firmware::Kernel));
    let kernel = boots.then(|| [vmm_config.kernel.clone(), vmm_config.initrd.clone()]);
    let program = Some(program).filter(|program| program.is_absolute());
    jail.read_only.extend(kernel.into_iter().flatten().chain(program));
    let nic = vmm_config.nic.as_ref();
    jail.own_network = !nic.is_some_and(|nic| matches!(nic.backend, NicBackend::User { .. }));
}

/// Opens the files of a VMM. The storage of a disk may hang: no VMM is started when it answers again.
async fn open_files(vmm_config: &VmmConfig, mode: StartMode) -> io::Result<Files> {
    let vmm_config = vmm_config.clone();
    let opened = tokio::task::spawn_blocking(move || Files::open(&vmm_config, mode));
    let opened = tokio::time::timeout(OPEN_LIMIT, opened).await.map_err(|_| io::ErrorKind::TimedOut)?;
    opened.map_err(io::Error::other)?
}

/// `QEMU emulator version 7.2.22 (Debian …)` → `7.2.22`.
fn parse_version(text: &str) -> String {
    text.split_whitespace().skip_while(|word| *word != "version").nth(1).unwrap_or("unknown").to_owned()
}

/// Returns the accelerator of a running QEMU, from its arguments.
fn accelerator_in(cmdline: &[u8]) -> Option<Accelerator> {
    let mut words = cmdline.split(|byte| *byte == 0).skip_while(|word| *word != b"-accel");
    let value = words.nth(1)?;
    let is = |accelerator: &Accelerator| accelerator.as_str().as_bytes() == value;
    [Accelerator::Kvm, Accelerator::Tcg].into_iter().find(is)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_from_the_first_line() {
        assert_eq!(parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)\nCopyright"), "7.2.22");
        assert_eq!(parse_version(""), "unknown");
    }

    #[test]
    fn accelerator_is_read_from_the_arguments() {
        let tcg = b"qemu\0-accel\0tcg\0-cpu\0max\0";
        assert_eq!(accelerator_in(tcg), Some(Accelerator::Tcg));
        assert_eq!(accelerator_in(b"qemu\0-accel\0kvm\0"), Some(Accelerator::Kvm));
        assert_eq!(accelerator_in(b"qemu\0-accel"), None);
        assert_eq!(accelerator_in(b""), None);
    }

    #[test]
    fn huge_pages_are_off_for_copies_of_ram_under_tcg() {
        let copies = [StartMode::Clone { ram: 3 }, StartMode::Fork { ram: 3 }];
        let others = [StartMode::Cold, StartMode::Restore, StartMode::Template { ram: 3 }];
        assert!(copies.iter().all(|mode| !has_huge_pages(Accelerator::Tcg, *mode)));
        assert!(others.iter().all(|mode| has_huge_pages(Accelerator::Tcg, *mode)));
        assert!(copies.iter().chain(&others).all(|mode| has_huge_pages(Accelerator::Kvm, *mode)));
    }

    #[tokio::test]
    async fn probe_without_the_program_reports_a_reason() {
        let driver = QemuDriver::new(QemuConfig { program: "/nowhere/qemu".into(), kvm: None });
        let probe = driver.probe().await;
        assert_eq!(probe.accelerator, None);
        assert!(probe.reason.contains("install"), "{}", probe.reason);
    }
}
