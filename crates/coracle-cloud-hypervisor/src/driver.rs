//! Driver of Cloud Hypervisor: starts, finds, kills and connects to VMMs, and hot-plugs disks.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::launch::{Launch, prepare_jail, program_path, wait_ready};
use coracle_hypervisor::{
    Accelerator, ApiError, ApiSocket, Disk, Driver, DriverError, JAIL_RUN_DIR, JAIL_SAVED_DIR, KvmProbe,
    NicBackend, OwnedFile, Probe, ProcessId, Snapshots, VmmConfig, VmmFiles, attach_to_jail,
    detach_from_jail, memory_call_limit, vsock,
};
use hyper::Method;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::OnceCell;

use crate::config::{
    CONSOLE_SOCKET, GUEST_SOCKET, TapBy, disk_config, disk_in_jail, in_jail, nic_without_tap, slot_name,
    vm_config,
};
use crate::events::EVENTS_FILE;

/// Control socket.
const API_SOCKET: &str = "api.sock";
/// Time limit from spawn to an answer on the API socket, which takes milliseconds on an idle host.
const READY_LIMIT: Duration = Duration::from_secs(20);
/// Size of the mount point of an absent disk.
const EMPTY_SLOT_BYTES: u64 = 0;
/// Oldest version whose API has all calls of this driver.
const OLDEST: u32 = 50;

/// Settings of the driver.
#[derive(Clone, Debug)]
pub struct CloudHypervisorConfig {
    /// Path of `cloud-hypervisor`: absolute, or a name to look up.
    pub program: PathBuf,
    /// Probe of KVM, which Cloud Hypervisor needs; `None`: KVM is assumed to work.
    pub kvm: Option<KvmProbe>,
}

/// Driver that runs microVMs with Cloud Hypervisor. Cheap to create; its only state is the result of the probe.
#[derive(Debug)]
pub struct CloudHypervisorDriver {
    config: CloudHypervisorConfig,
    probe: OnceCell<Probe>,
}

impl CloudHypervisorDriver {
    /// Returns a driver that has not probed the host yet.
    #[must_use]
    pub fn new(config: CloudHypervisorConfig) -> Self {
        Self { config, probe: OnceCell::new() }
    }

    async fn run_probe(&self) -> Probe {
        let absent = |version: &str, reason| Probe { version: version.to_owned(), accelerator: None, reason };
        let program = self.config.program.display();
        let version = match tokio::process::Command::new(&self.config.program).arg("--version").output().await
        {
            Err(e) => {
                return absent(
                    "",
                    format!("{program}: {e}; install Cloud Hypervisor, or use the qemu driver"),
                );
            }
            Ok(output) => parse_version(&String::from_utf8_lossy(&output.stdout)),
        };
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_none_or(|major| major < OLDEST) {
            return absent(&version, format!("{program} is version {version}; {OLDEST} or newer is needed"));
        }
        let kvm = Some(Accelerator::Kvm);
        match &self.config.kvm {
            None => Probe { version, accelerator: kvm, reason: "KVM by configuration".to_owned() },
            Some(probe) => match probe.verdict(&version).await {
                proof if proof.accelerator == Accelerator::Kvm => {
                    Probe { version, accelerator: kvm, reason: proof.reason }
                }
                proof => {
                    let why = format!("Cloud Hypervisor needs KVM: {}; use the qemu driver", proof.reason);
                    absent(&version, why)
                }
            },
        }
    }

    /// Starts a process without a VM, and waits until its API answers. A jail contains `saved`, a directory of the host.
    pub(crate) async fn spawn(
        &self,
        vmm_config: &VmmConfig,
        saved: Option<&Path>,
    ) -> Result<ProcessId, DriverError> {
        let program = program_path(&self.config.program);
        let io = |source: io::Error| DriverError::Io {
            operation: format!("prepare the files of VMM {}", vmm_config.id),
            source,
        };
        for stale in [API_SOCKET, GUEST_SOCKET, CONSOLE_SOCKET, EVENTS_FILE] {
            let _absent = std::fs::remove_file(vmm_config.run_dir.join(stale));
        }
        let events = File::create(vmm_config.run_dir.join(EVENTS_FILE)).map_err(io)?;
        let saved = saved.map(|from| OwnedFile {
            from: from.to_owned(),
            at: JAIL_SAVED_DIR.into(),
            is_writable: false,
        });
        let (shape, named) = (vmm_config.clone(), program.clone());
        let jail = prepare_jail(vmm_config, move |jail| {
            jail.add_files(&shape, &named, EMPTY_SLOT_BYTES, &shape.disks);
            jail.owned.extend(saved);
            Ok(())
        });
        let jail = jail.await.map_err(io)?;
        let run_dir = if jail.is_some() { Path::new(JAIL_RUN_DIR) } else { &vmm_config.run_dir };
        let process = Launch {
            vmm_config,
            program: &program,
            args: arguments(run_dir, events.as_raw_fd()),
            working_dir: Path::new("/"),
            serial: None,
            has_huge_pages: true,
            inherited: vec![events.as_raw_fd()],
            jail,
        }
        .run()?;
        let api = api(vmm_config);
        wait_ready(vmm_config, process, READY_LIMIT, || is_answering(api.clone())).await?;
        Ok(process)
    }

    /// Creates and boots a VM in a new process.
    async fn boot(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        let Some(nic) = vmm_config.nic.as_ref().filter(|_| vmm_config.uid.is_some()) else {
            let config = visible_config(vmm_config, TapBy::Name)?;
            put(vmm_config, "vm.create", Some(&config)).await?;
            return put(vmm_config, "vm.boot", None).await;
        };
        put(vmm_config, "vm.create", Some(&visible_config(vmm_config, TapBy::Call)?)).await?;
        let config = nic_without_tap(nic).map_err(unavailable)?;
        let (api, taps) = (api(vmm_config), taps(vmm_config)?);
        let added = api.call_with(Method::PUT, "/api/v1/vm.add-net", Some(&config), taps).await;
        added.map_err(|source| control_error(vmm_config, "vm.add-net", source))?;
        put(vmm_config, "vm.boot", None).await
    }

    /// Kills a process whose VM could not be created.
    pub(crate) async fn kill_on_error<T>(
        &self,
        process: ProcessId,
        made: Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        if made.is_err() {
            self.kill(process).await?;
        }
        made
    }

    /// Changes the power state of the VM. Idempotent.
    async fn switch(
        &self,
        vmm_config: &VmmConfig,
        operation: &'static str,
        wanted: &str,
    ) -> Result<(), DriverError> {
        let Err(error) = put(vmm_config, operation, None).await else { return Ok(()) };
        let info = api(vmm_config).call(Method::GET, "/api/v1/vm.info", None).await;
        let state = info.ok().flatten().and_then(|info| Some(info.get("state")?.as_str()?.to_owned()));
        if state.as_deref() == Some(wanted) { Ok(()) } else { Err(error) }
    }
}

/// Returns the configuration of a VM, with the paths that its process sees.
fn visible_config(vmm_config: &VmmConfig, tap_by: TapBy) -> Result<Value, DriverError> {
    let config = match vmm_config.uid {
        Some(_) => vm_config(&in_jail(vmm_config), tap_by),
        None => vm_config(vmm_config, tap_by),
    };
    config.map_err(unavailable)
}

/// Opens the tap of the NIC: a jailed process is not in the network namespace in which it could open the tap.
pub(crate) fn taps(vmm_config: &VmmConfig) -> Result<Vec<OwnedFd>, DriverError> {
    let Some(NicBackend::Tap { name }) = vmm_config.nic.as_ref().map(|nic| &nic.backend) else {
        return Ok(vec![]);
    };
    let io =
        |source| DriverError::Io { operation: format!("open tap {name} of VMM {}", vmm_config.id), source };
    coracle_net::open_tap(name).map(|tap| vec![tap]).map_err(io)
}

fn arguments(run_dir: &Path, events: RawFd) -> Vec<String> {
    let socket = format!("path={}", run_dir.join(API_SOCKET).display());
    let pairs = [("--api-socket", socket), ("--event-monitor", format!("fd={events}"))];
    pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
}

pub(crate) fn api(vmm_config: &VmmConfig) -> ApiSocket {
    ApiSocket::of(vmm_config, API_SOCKET, chain)
}

/// Like [`put`], for a call that writes or reads the whole memory, with these descriptors.
pub(crate) async fn put_memory(
    vmm_config: &VmmConfig,
    operation: &'static str,
    body: &Value,
    descriptors: Vec<OwnedFd>,
) -> Result<(), DriverError> {
    let api = api(vmm_config).within(memory_call_limit(vmm_config));
    let made = api.call_with(Method::PUT, &format!("/api/v1/{operation}"), Some(body), descriptors).await;
    made.map(drop).map_err(|source| control_error(vmm_config, operation, source))
}

/// Calls `PUT /api/v1/<operation>`.
pub(crate) async fn put(
    vmm_config: &VmmConfig,
    operation: &'static str,
    body: Option<&Value>,
) -> Result<(), DriverError> {
    let made = api(vmm_config).call(Method::PUT, &format!("/api/v1/{operation}"), body).await;
    made.map(drop).map_err(|source| control_error(vmm_config, operation, source))
}

#[async_trait]
impl Driver for CloudHypervisorDriver {
    fn name(&self) -> &'static str {
        "cloud-hypervisor"
    }

    async fn probe(&self) -> Probe {
        self.probe.get_or_init(|| self.run_probe()).await.clone()
    }

    async fn start(&self, vmm_config: &VmmConfig) -> Result<ProcessId, DriverError> {
        // An unsupported config is refused before a process is started.
        visible_config(vmm_config, TapBy::Name)?;
        let process = self.spawn(vmm_config, None).await?;
        let made = self.boot(vmm_config).await;
        self.kill_on_error(process, made).await?;
        Ok(process)
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
        let files = VmmFiles::of(&vmm_config.run_dir).map_err(refused)?;
        files.connect(CONSOLE_SOCKET).await.map_err(refused)
    }

    async fn pause(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.switch(vmm_config, "vm.pause", "Paused").await
    }

    async fn resume(&self, vmm_config: &VmmConfig) -> Result<(), DriverError> {
        self.switch(vmm_config, "vm.resume", "Running").await
    }

    async fn attach_disk(&self, vmm_config: &VmmConfig, disk: &Disk) -> Result<(), DriverError> {
        let io = |source| DriverError::Io {
            operation: format!("attach disk {} of VMM {}", disk.slot, vmm_config.id),
            source,
        };
        let seen = match attach_to_jail(vmm_config, disk).await.map_err(io)? {
            true => disk_config(&disk_in_jail(disk)),
            false => disk_config(disk),
        };
        put(vmm_config, "vm.add-disk", Some(&seen)).await
    }

    async fn detach_disk(&self, vmm_config: &VmmConfig, slot: usize) -> Result<(), DriverError> {
        put(vmm_config, "vm.remove-device", Some(&json!({"id": slot_name(slot)}))).await?;
        let io = |source| DriverError::Io {
            operation: format!("detach disk {slot} of VMM {}", vmm_config.id),
            source,
        };
        detach_from_jail(vmm_config, slot).await.map(drop).map_err(io)
    }

    fn has_user_network(&self, _: &VmmConfig) -> bool {
        false
    }

    fn snapshots(&self, _: &VmmConfig) -> Option<&dyn Snapshots> {
        Some(self)
    }
}

async fn is_answering(api: ApiSocket) -> bool {
    api.call(Method::GET, "/api/v1/vmm.ping", None).await.is_ok()
}

/// Returns the message of an error body, the chain of causes as an array of strings.
fn chain(body: &Value) -> Option<String> {
    let all: Vec<_> = body.as_array()?.iter().filter_map(Value::as_str).collect();
    (!all.is_empty()).then(|| all.join(": "))
}

fn control_error(vmm_config: &VmmConfig, operation: &'static str, source: ApiError) -> DriverError {
    DriverError::Control { id: vmm_config.id.clone(), operation, source: Box::new(source) }
}

pub(crate) fn unavailable(reason: String) -> DriverError {
    DriverError::Unavailable { driver: "cloud-hypervisor", reason }
}

/// `cloud-hypervisor v51.1.0` → `51.1.0`.
fn parse_version(text: &str) -> String {
    let word = text.split_whitespace().nth(1).unwrap_or("unknown");
    word.trim_start_matches('v').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_and_refusals_are_read() {
        assert_eq!(parse_version("cloud-hypervisor v51.1.0\n"), "51.1.0");
        assert_eq!(parse_version(""), "unknown");
        let body = json!(["Error from API", "The VM is not created"]);
        assert_eq!(chain(&body).as_deref(), Some("Error from API: The VM is not created"));
        assert_eq!(chain(&json!({"fault": 1})), None);
    }

    #[tokio::test]
    async fn probe_without_the_program_reports_a_reason() {
        let config = CloudHypervisorConfig { program: "/nowhere/cloud-hypervisor".into(), kvm: None };
        let probe = CloudHypervisorDriver::new(config).probe().await;
        assert!(probe.accelerator.is_none() && probe.reason.contains("qemu driver"), "{}", probe.reason);
    }
}
