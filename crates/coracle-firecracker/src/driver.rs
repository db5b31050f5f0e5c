//! Driver of Firecracker: starts, finds, kills and connects to VMMs.

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::launch::{LOG_FILE, Launch, prepare_jail, program_path, wait_ready};
use coracle_hypervisor::{
    Accelerator, ApiError, ApiSocket, Disk, Driver, DriverError, JAIL_BOOT_FILES, JAIL_RUN_DIR, Jail,
    KvmProbe, NicBackend, OwnedFile, PreparedJail, Probe, ProcessId, Snapshots, Templates, VmmConfig,
    VmmFiles, attach_to_jail, detach_from_jail, memory_call_limit, vsock,
};
use hyper::Method;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::OnceCell;

use crate::calls::{BootPaths, Call, GUEST_SOCKET, boot_calls, refill};
use crate::console::{self, Relays};
use crate::run_dir::{self, API_SOCKET, EMPTY_BYTES};

/// Time limit from spawn to an answer on the API socket, which takes milliseconds on an idle host.
const READY_LIMIT: Duration = Duration::from_secs(20);
/// Path of the log in a jail.
const LOG_IN_JAIL: &str = "/vmm/vmm.log";
/// Oldest version whose API has all calls of this driver.
const OLDEST: (u32, u32) = (1, 13);

/// Settings of the driver.
#[derive(Clone, Debug)]
pub struct FirecrackerConfig {
    /// Path of `firecracker`: absolute, or a name to look up.
    pub program: PathBuf,
    /// Probe of KVM, which Firecracker needs; `None`: KVM is assumed to work.
    pub kvm: Option<KvmProbe>,
}

/// Driver that runs microVMs with Firecracker. Cheap to create; its only state is the result of the probe and the relays of
/// consoles.
#[derive(Debug)]
pub struct FirecrackerDriver {
    config: FirecrackerConfig,
    probe: OnceCell<Probe>,
    relays: Relays,
}

impl FirecrackerDriver {
    /// Returns a driver that has not probed the host yet.
    #[must_use]
    pub fn new(config: FirecrackerConfig) -> Self {
        Self { config, probe: OnceCell::new(), relays: Relays::default() }
    }

    async fn run_probe(&self) -> Probe {
        let absent = |version: &str, reason| Probe { version: version.to_owned(), accelerator: None, reason };
        let program = self.config.program.display();
        let version = match tokio::process::Command::new(&self.config.program).arg("--version").output().await
        {
            Err(e) => {
                return absent("", format!("{program}: {e}; install Firecracker, or use the qemu driver"));
            }
            Ok(output) => parse_version(&String::from_utf8_lossy(&output.stdout)),
        };
        if numbers(&version).is_none_or(|found| found < OLDEST) {
            let (major, minor) = OLDEST;
            return absent(
                &version,
                format!("{program} is version {version}; {major}.{minor} or newer is needed"),
            );
        }
        let proof = match &self.config.kvm {
            Some(probe) => probe.verdict(&version).await,
            None => {
                return Probe {
                    version,
                    accelerator: Some(Accelerator::Kvm),
                    reason: "KVM by configuration".into(),
                };
            }
        };
        match proof.accelerator {
            Accelerator::Kvm => Probe { version, accelerator: Some(Accelerator::Kvm), reason: proof.reason },
            Accelerator::Tcg => {
                absent(&version, format!("Firecracker needs KVM: {}; use the qemu driver", proof.reason))
            }
        }
    }

    /// Starts a process without a microVM, and waits until its API answers. The process inherits the files of these numbers.
    pub(crate) async fn spawn(
        &self,
        vmm_config: &VmmConfig,
        filled: bool,
        inherited: &[RawFd],
    ) -> Result<ProcessId, DriverError> {
        let program = program_path(&self.config.program);
        let io = |source| DriverError::Io {
            operation: format!("prepare the files of VMM {}", vmm_config.id),
            source,
        };
        let jail = self.jail(vmm_config, &program, filled).await.map_err(io)?;
        if jail.is_none() {
            run_dir::prepare(vmm_config, filled).map_err(io)?;
        }
        let serial = Some(console::open_fifos(&vmm_config.run_dir).map_err(io)?);
        let (args, working_dir) = (arguments(vmm_config, jail.is_some()), &vmm_config.run_dir);
        let inherited = inherited.to_vec();
        let process = Launch {
            vmm_config,
            program: &program,
            args,
            working_dir,
            serial,
            has_huge_pages: true,
            inherited,
            jail,
        }
        .run()?;
        let api = api(vmm_config);
        wait_ready(vmm_config, process, READY_LIMIT, || is_answering(api.clone())).await?;
        Ok(process)
    }

    /// Prepares the jail with the files that Firecracker opens by name: all but its memory and its serial console. Firecracker
    /// opens its tap by name, too, and finds it only in its own network namespace: with a NIC it has the network of the host
    /// (docs/limits.md).
    async fn jail(
        &self,
        vmm_config: &VmmConfig,
        program: &Path,
        filled: bool,
    ) -> io::Result<Option<PreparedJail>> {
        let shape = VmmConfig { kernel: vmm_config.elf_kernel(), ..vmm_config.clone() };
        let program = program.to_owned();
        prepare_jail(vmm_config, move |jail| fill(jail, &shape, &program, filled)).await
    }

    /// Makes `calls` in order.
    pub(crate) async fn call(&self, vmm_config: &VmmConfig, calls: &[Call]) -> Result<(), DriverError> {
        for call in calls {
            let api = api(vmm_config);
            let api = if call.moves_memory { api.within(memory_call_limit(vmm_config)) } else { api };
            let made = api.call(call.method.clone(), &call.path, Some(&call.body)).await;
            made.map_err(|source| control_error(vmm_config, "configure", source))?;
        }
        Ok(())
    }

    /// Makes `calls` to a new process, and kills it when one is refused.
    pub(crate) async fn call_or_kill(
        &self,
        vmm_config: &VmmConfig,
        process: ProcessId,
        calls: &[Call],
    ) -> Result<(), DriverError> {
        let made = self.call(vmm_config, calls).await;
        if made.is_err() {
            self.kill(process).await?;
        }
        made
    }

    async fn set_state(&self, vmm_config: &VmmConfig, state: &'static str) -> Result<(), DriverError> {
        let call = api(vmm_config).call(Method::PATCH, "/vm", Some(&json!({"state": state}))).await;
        call.map(drop).map_err(|source| control_error(vmm_config, state, source))
    }

    /// Starts a process and boots a microVM in it.
    pub(crate) async fn boot(
        &self,
        vmm_config: &VmmConfig,
        filled: bool,
        inherited: &[RawFd],
    ) -> Result<ProcessId, DriverError> {
        let calls = boot_calls(vmm_config, &paths(vmm_config)).map_err(unavailable)?;
        let process = self.spawn(vmm_config, filled, inherited).await?;
        self.call_or_kill(vmm_config, process, &calls).await?;
        Ok(process)
    }

    /// Replaces the disk of a slot, and makes the VMM reopen it.
    async fn swap(
        &self,
        vmm_config: &VmmConfig,
        slot: usize,
        disk: Option<&Disk>,
    ) -> Result<(), DriverError> {
        let io = |source| DriverError::Io {
            operation: format!("change disk {slot} of VMM {}", vmm_config.id),
            source,
        };
        let is_jailed = match disk {
            Some(disk) => attach_to_jail(vmm_config, disk).await,
            None => detach_from_jail(vmm_config, slot).await,
        };
        if !is_jailed.map_err(io)? {
            run_dir::fill(&vmm_config.run_dir, slot, disk).map_err(io)?;
        }
        self.call(vmm_config, &[refill(slot)]).await
    }
}

fn paths(vmm_config: &VmmConfig) -> BootPaths {
    // Firecracker before 1.17 does not read a bzImage.
    let kernel = vmm_config.elf_kernel().display().to_string();
    let [kernel_in_jail, initrd_in_jail] = JAIL_BOOT_FILES;
    match vmm_config.uid {
        Some(_) => BootPaths { kernel: kernel_in_jail.into(), initrd: initrd_in_jail.into() },
        None => BootPaths { kernel, initrd: vmm_config.initrd.display().to_string() },
    }
}

fn api(vmm_config: &VmmConfig) -> ApiSocket {
    ApiSocket::of(vmm_config, API_SOCKET, fault)
}

/// Adds the files of a jail.
fn fill(jail: &mut Jail, vmm_config: &VmmConfig, program: &Path, filled: bool) -> io::Result<()> {
    run_dir::prepare_console(&vmm_config.run_dir)?;
    let log = vmm_config.state_dir.join(LOG_FILE);
    File::options().create(true).append(true).open(&log)?;
    jail.owned.push(OwnedFile { from: log, at: LOG_IN_JAIL.into(), is_writable: true });
    jail.add_files(vmm_config, program, EMPTY_BYTES, if filled { &vmm_config.disks } else { &[] });
    if let Some(NicBackend::Tap { name }) = vmm_config.nic.as_ref().map(|nic| &nic.backend) {
        (jail.own_network, jail.has_no_sockets) = (false, true);
        jail.devices.push("/dev/net/tun".into());
        coracle_net::set_tap_owner(name, jail.uid)?;
    }
    Ok(())
}

#[async_trait]
impl Driver for FirecrackerDriver {
    fn name(&self) -> &'static str {
        "firecracker"
    }

    async fn probe(&self) -> Probe {
        self.probe.get_or_init(|| self.run_probe()).await.clone()
    }

    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError> {
        self.boot(vmm_config, true, &[]).await
    }

    async fn exited(&self, process: ProcessId) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("watch process {}", process.pid), source };
        process.exited().await.map_err(io)
    }

    async fn kill(&self, process: ProcessId) -> Result<(), DriverError> {
        let io = |source| DriverError::Io { operation: format!("kill process {}", process.pid), source };
        process.kill().await.map_err(io)
    }

    async fn guest_channel(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: vmm_config.id.clone(), channel: "guest", source };
        let open = || async { VmmFiles::of(&vmm_config.run_dir)?.connect(GUEST_SOCKET).await };
        vsock::connect(open, vsock::GUEST_PORT).await.map_err(refused)
    }

    async fn console(&self, vmm_config: &VmmConfig) -> Result<UnixStream, DriverError> {
        let refused = |source| DriverError::Channel { id: vmm_config.id.clone(), channel: "console", source };
        self.relays.open(&vmm_config.run_dir).map_err(refused)
    }

    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.set_state(vmm_config, "Paused").await
    }

    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.set_state(vmm_config, "Resumed").await
    }

    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError> {
        self.swap(vmm_config, disk.slot, Some(disk)).await
    }

    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError> {
        self.swap(vmm_config, slot, None).await
    }

    fn has_user_network(&self, _: &VmmConfig) -> bool {
        false
    }

    fn snapshots(&self, _: &VmmConfig) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn templates(&self, _: &VmmConfig) -> Option<&dyn Templates> {
        Some(self)
    }
}

fn arguments(vmm_config: &VmmConfig, is_jailed: bool) -> Vec<String> {
    let (run_dir, log) = match is_jailed {
        true => (Path::new(JAIL_RUN_DIR), PathBuf::from(LOG_IN_JAIL)),
        false => (vmm_config.run_dir.as_path(), vmm_config.state_dir.join(LOG_FILE)),
    };
    let pairs = [
        ("--api-sock", run_dir.join(API_SOCKET).display().to_string()),
        ("--id", vmm_config.id.to_string()),
        ("--log-path", log.display().to_string()),
        ("--level", "Warn".into()),
    ];
    let pairs = pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    pairs.chain(["--enable-pci".to_owned()]).collect()
}

async fn is_answering(api: ApiSocket) -> bool {
    api.call(Method::GET, "/", None).await.is_ok()
}

/// Returns the message of an error body, `{"fault_message": "…"}`.
fn fault(body: &Value) -> Option<String> {
    Some(body.get("fault_message")?.as_str()?.to_owned())
}

pub(crate) fn control_error(
    vmm_config: &VmmConfig,
    operation: &'static str,
    source: ApiError,
) -> DriverError {
    DriverError::Control { id: vmm_config.id.clone(), operation, source: Box::new(source) }
}

pub(crate) fn unavailable(reason: String) -> DriverError {
    DriverError::Unavailable { driver: "firecracker", reason }
}

/// `Firecracker v1.16.0` → `1.16.0`.
fn parse_version(text: &str) -> String {
    let word = text.split_whitespace().find_map(|word| word.strip_prefix('v')).unwrap_or("unknown");
    word.to_owned()
}

fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_and_compared_by_number() {
        let version =
            parse_version("Firecracker v1.16.0\n\nSupported snapshot data format versions: v8.0.0\n");
        assert_eq!((version.as_str(), numbers(&version)), ("1.16.0", Some((1, 16))));
        assert!(numbers("1.9.1").unwrap() < OLDEST);
        assert_eq!(numbers(&parse_version("something else")), None);
    }

    #[tokio::test]
    async fn probe_without_the_program_reports_a_reason() {
        let config = FirecrackerConfig { program: "/nowhere/firecracker".into(), kvm: None };
        let probe = FirecrackerDriver::new(config).probe().await;
        assert!(probe.accelerator.is_none() && probe.reason.contains("qemu driver"), "{}", probe.reason);
    }
}
