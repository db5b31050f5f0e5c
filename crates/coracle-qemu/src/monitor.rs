//! One VM's monitor: commands whose errors name the VM, and the waiting for a state.

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

/// Opening a disk.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Saving or loading device state; milliseconds alone, more on a loaded host.
const STATE_LIMIT: Duration = Duration::from_secs(20);
/// Memory that goes with it may take as long as at this rate: a slow disk.
const SLOWEST_MIB_PER_SECOND: u64 = 16;
/// Between two looks at a migration.
const STATE_POLL: Duration = Duration::from_millis(1);

/// A file that the VMM may open, by the number of its file descriptor set.
#[derive(Debug)]
pub(crate) struct Lent {
    set: u64,
    bytes: u64,
}

impl Lent {
    /// What the VMM calls it.
    pub(crate) fn name(&self) -> String {
        format!("/dev/fdset/{}", self.set)
    }

    /// Its length when it was opened.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The command that takes it back, after which the VMM has what its nodes have opened.
    pub(crate) fn taken_back(&self) -> (&'static str, Value) {
        ("remove-fd", json!({"fdset-id": self.set}))
    }
}

/// A monitor whose errors name the VM.
pub(crate) struct Monitor<'a> {
    vmm_config: &'a VmmConfig,
    qmp: Qmp,
}

impl<'a> Monitor<'a> {
    pub(crate) async fn open(vmm_config: &'a VmmConfig) -> Result<Self, DriverError> {
        let refused = |source| control(vmm_config, "connect", source);
        let qmp = Qmp::connect(&vmm_config.run_dir.join("qmp.sock")).await.map_err(refused)?;
        Ok(Self { vmm_config, qmp })
    }

    pub(crate) async fn run(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Value, DriverError> {
        self.qmp.execute(command, arguments).await.map_err(|source| control(self.vmm_config, command, source))
    }

    /// As [`Qmp::execute_all`].
    pub(crate) async fn run_all(&mut self, commands: Vec<(&'static str, Value)>) -> Result<(), DriverError> {
        let what = commands.first().map_or("", |(command, _)| command);
        self.qmp.execute_all(commands).await.map_err(|source| control(self.vmm_config, what, source))
    }

    async fn pass_file(&mut self, name: &str, file: BorrowedFd<'_>) -> Result<(), DriverError> {
        let passed = self.qmp.pass_file("getfd", json!({"fdname": name}), file).await;
        passed.map(drop).map_err(|source| control(self.vmm_config, "getfd", source))
    }

    /// Has the VMM serve its screen on this socket.
    pub(crate) async fn add_display_client(&mut self, socket: &impl AsFd) -> Result<(), DriverError> {
        self.pass_file("display", socket.as_fd()).await?;
        let client = json!({"protocol": "vnc", "fdname": "display", "skipauth": true});
        self.run("add_client", client).await.map(drop)
    }

    /// As [`Monitor::lend`], of a disk, which the VMM may write as far as it goes.
    pub(crate) async fn lend_disk(&mut self, disk: &Disk) -> Result<Lent, DriverError> {
        let lent = self.lend(&disk.path, disk.read_only).await?;
        let failed = |source| DriverError::Io {
            operation: format!("let VMM {} write {}", self.vmm_config.id, disk.path.display()),
            source,
        };
        allow_file_bytes(self.vmm_config, lent.bytes()).map_err(failed)?;
        Ok(lent)
    }

    /// Opens a file for the VMM, as a file descriptor set of its own, until it is [`Lent::taken_back`].
    pub(crate) async fn lend(&mut self, path: &Path, read_only: bool) -> Result<Lent, DriverError> {
        let failed = |source| DriverError::Io {
            operation: format!("open {} for VMM {}", path.display(), self.vmm_config.id),
            source,
        };
        let (file, bytes) = open(path, read_only).await.map_err(failed)?;
        let lent = self.qmp.pass_file("add-fd", json!({}), file.as_fd()).await;
        let lent = lent.map_err(|source| control(self.vmm_config, "add-fd", source))?;
        let set = lent.get("fdset-id").and_then(Value::as_u64);
        set.map(|set| Lent { set, bytes })
            .ok_or_else(|| control(self.vmm_config, "add-fd", QmpError::Protocol))
    }

    /// Leaves RAM that is mapped shared out of the state, or not. Who loads must say the same as who saved; a clone
    /// remembers what it was loaded with.
    pub(crate) async fn ignore_shared_ram(&mut self, ignore: bool) -> Result<(), DriverError> {
        let capabilities = json!({"capabilities": [{"capability": "x-ignore-shared", "state": ignore}]});
        self.run("migrate-set-capabilities", capabilities).await.map(drop)
    }

    /// Writes the state to the file, from where it stands.
    pub(crate) async fn save_to(&mut self, file: BorrowedFd<'_>) -> Result<(), DriverError> {
        // Unlimited; the default would hold a save back to 128 MiB/s.
        self.run("migrate-set-parameters", json!({"max-bandwidth": 0})).await?;
        self.pass_file("state", file).await?;
        self.run("migrate", json!({"uri": "fd:state"})).await?;
        self.migrated().await
    }

    /// Loads the state from the file that the VMM has inherited by this number, from where it stands.
    pub(crate) async fn load_from(&mut self, number: RawFd) -> Result<(), DriverError> {
        self.run("migrate-incoming", json!({"uri": format!("fd:{number}")})).await?;
        self.migrated().await
    }

    /// Waits until the state is saved or loaded.
    async fn migrated(&mut self) -> Result<(), DriverError> {
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
                    return Err(control(self.vmm_config, "migrate", refused));
                }
                _ if Instant::now() >= deadline => {
                    let late = io::Error::from(io::ErrorKind::TimedOut);
                    return Err(control(self.vmm_config, "migrate", late.into()));
                }
                _ => sleep(STATE_POLL).await,
            }
        }
    }
}

/// Opens a disk of a VM, and looks at its length. What it lies on may hang.
async fn open(path: &Path, read_only: bool) -> io::Result<(File, u64)> {
    let path = path.to_owned();
    let opened = spawn_blocking(move || {
        let file = File::options().read(true).write(!read_only).open(path)?;
        let bytes = file.metadata()?.len();
        Ok((file, bytes))
    });
    timeout(OPEN_LIMIT, opened).await.map_err(|_| io::ErrorKind::TimedOut)?.map_err(io::Error::other)?
}

pub(crate) fn control(vmm_config: &VmmConfig, operation: &'static str, source: QmpError) -> DriverError {
    DriverError::Control { id: vmm_config.id.clone(), operation, source: Box::new(source) }
}
