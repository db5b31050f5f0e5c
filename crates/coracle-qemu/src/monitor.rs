//! Monitor of one VM: commands whose errors name the VM, and waiting for a migration.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use coracle_hypervisor::{Disk, DriverError, VmmConfig, allow_file_bytes};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

use crate::{Qmp, QmpError};

/// Time limit for opening a disk.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for saving or loading device state, which takes milliseconds, more on a loaded host.
const STATE_LIMIT: Duration = Duration::from_secs(20);
/// Lowest rate, that of a slow disk, at which memory in the state may be transferred.
const SLOWEST_MIB_PER_SECOND: u64 = 16;
/// Interval between queries of a migration.
const STATE_POLL: Duration = Duration::from_millis(1);

/// File that the VMM may open, by the number of its file descriptor set.
#[derive(Debug)]
pub(crate) struct FdSet {
    set: u64,
    bytes: u64,
}

impl FdSet {
    /// Returns the VMM's name of the file.
    pub(crate) fn name(&self) -> String {
        format!("/dev/fdset/{}", self.set)
    }

    /// Returns the length of the file when it was opened.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the command that removes the file descriptor set; afterwards the VMM keeps only what its block nodes have
    /// opened.
    pub(crate) fn remove_command(&self) -> (&'static str, Value) {
        ("remove-fd", json!({"fdset-id": self.set}))
    }
}

/// Monitor whose errors name the VM.
pub(crate) struct Monitor<'a> {
    vmm_config: &'a VmmConfig,
    qmp: Qmp,
}

impl<'a> Monitor<'a> {
    pub(crate) async fn open(vmm_config: &'a VmmConfig) -> Result<Self, DriverError> {
        let refused = |source| control_error(vmm_config, "connect", source);
        let qmp = Qmp::connect(&vmm_config.run_dir.join("qmp.sock")).await.map_err(refused)?;
        Ok(Self { vmm_config, qmp })
    }

    pub(crate) async fn run(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Value, DriverError> {
        self.qmp
            .execute(command, arguments)
            .await
            .map_err(|source| control_error(self.vmm_config, command, source))
    }

    /// Like [`Qmp::execute_all`].
    pub(crate) async fn run_all(&mut self, commands: Vec<(&'static str, Value)>) -> Result<(), DriverError> {
        let what = commands.first().map_or("", |(command, _)| command);
        self.qmp.execute_all(commands).await.map_err(|source| control_error(self.vmm_config, what, source))
    }

    async fn pass_file(&mut self, name: &str, file: BorrowedFd<'_>) -> Result<(), DriverError> {
        let passed = self.qmp.pass_file("getfd", json!({"fdname": name}), file).await;
        passed.map(drop).map_err(|source| control_error(self.vmm_config, "getfd", source))
    }

    /// Makes the VMM serve its display on this socket.
    pub(crate) async fn add_display_client(&mut self, socket: &impl AsFd) -> Result<(), DriverError> {
        self.pass_file("display", socket.as_fd()).await?;
        let client = json!({"protocol": "vnc", "fdname": "display", "skipauth": true});
        self.run("add_client", client).await.map(drop)
    }

    /// Like [`Monitor::add_fd_set`], for a disk; allows the VMM to write up to the length of the disk.
    pub(crate) async fn add_disk_fd_set(&mut self, disk: &Disk) -> Result<FdSet, DriverError> {
        let fd_set = self.add_fd_set(&disk.path, disk.read_only).await?;
        let failed = |source| DriverError::Io {
            operation: format!("let VMM {} write {}", self.vmm_config.id, disk.path.display()),
            source,
        };
        allow_file_bytes(self.vmm_config, fd_set.bytes()).map_err(failed)?;
        Ok(fd_set)
    }

    /// Opens a file for the VMM, as a file descriptor set of its own, until it is [`FdSet::remove_command`].
    pub(crate) async fn add_fd_set(&mut self, path: &Path, read_only: bool) -> Result<FdSet, DriverError> {
        let failed = |source| DriverError::Io {
            operation: format!("open {} for VMM {}", path.display(), self.vmm_config.id),
            source,
        };
        let (file, bytes) = open(path, read_only).await.map_err(failed)?;
        let fd_set = self.qmp.pass_file("add-fd", json!({}), file.as_fd()).await;
        let fd_set = fd_set.map_err(|source| control_error(self.vmm_config, "add-fd", source))?;
        let set = fd_set.get("fdset-id").and_then(Value::as_u64);
        set.map(|set| FdSet { set, bytes })
            .ok_or_else(|| control_error(self.vmm_config, "add-fd", QmpError::Protocol))
    }

    /// Sets whether RAM that is mapped shared is left out of the state. Saving and loading must use the same setting; a clone
    /// keeps the setting that it was loaded with.
    pub(crate) async fn ignore_shared_ram(&mut self, ignore: bool) -> Result<(), DriverError> {
        let capabilities = json!({"capabilities": [{"capability": "x-ignore-shared", "state": ignore}]});
        self.run("migrate-set-capabilities", capabilities).await.map(drop)
    }

    /// Writes the state to the file, from its current offset.
    pub(crate) async fn save_to(&mut self, file: BorrowedFd<'_>) -> Result<(), DriverError> {
        // Unlimited; the default would limit a save to 128 MiB/s.
        self.run("migrate-set-parameters", json!({"max-bandwidth": 0})).await?;
        self.pass_file("state", file).await?;
        self.run("migrate", json!({"uri": "fd:state"})).await?;
        self.wait_migrated().await
    }

    /// Loads the state from the file that the VMM has inherited under this number, from its current offset.
    pub(crate) async fn load_from(&mut self, number: RawFd) -> Result<(), DriverError> {
        self.run("migrate-incoming", json!({"uri": format!("fd:{number}")})).await?;
        self.wait_migrated().await
    }

    /// Waits until the state is saved or loaded.
    async fn wait_migrated(&mut self) -> Result<(), DriverError> {
        let memory = u64::from(self.vmm_config.memory.get());
        let deadline = Instant::now() + STATE_LIMIT + Duration::from_secs(memory / SLOWEST_MIB_PER_SECOND);
        loop {
            let report = self.run("query-migrate", json!({})).await?;
            let text = |key: &str| report.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
            match text("status").as_str() {
                "completed" => return Ok(()),
                "failed" | "cancelled" => {
                    let refused = QmpError::Refused {
                        command: "migrate",
                        class: text("status"),
                        description: text("error-desc"),
                    };
                    return Err(control_error(self.vmm_config, "migrate", refused));
                }
                _ if Instant::now() >= deadline => {
                    let late = io::Error::from(io::ErrorKind::TimedOut);
                    return Err(control_error(self.vmm_config, "migrate", late.into()));
                }
                _ => sleep(STATE_POLL).await,
            }
        }
    }
}

/// Opens a disk of a VM, and returns its length. The storage of the disk may hang.
async fn open(path: &Path, read_only: bool) -> io::Result<(File, u64)> {
    let path = path.to_owned();
    let opened = spawn_blocking(move || {
        let file = File::options().read(true).write(!read_only).open(path)?;
        let bytes = file.metadata()?.len();
        Ok((file, bytes))
    });
    timeout(OPEN_LIMIT, opened).await.map_err(|_| io::ErrorKind::TimedOut)?.map_err(io::Error::other)?
}

pub(crate) fn control_error(
    vmm_config: &VmmConfig,
    operation: &'static str,
    source: QmpError,
) -> DriverError {
    DriverError::Control { id: vmm_config.id.clone(), operation, source: Box::new(source) }
}
