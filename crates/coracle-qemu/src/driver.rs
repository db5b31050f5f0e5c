//! The driver: start, find, kill and connect.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::{
    Accelerator, Driver, DriverError, Probe, ProcessId, Snapshots, Templates, VmRecipe, find_by_argument,
};
use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep, timeout};

use crate::monitor::Monitor;
use crate::{Birth, KvmProbe, Qmp, Verdict, argv, tsc};

/// From spawn to an answer on the monitor. QEMU needs 50 ms alone, seconds on a loaded host.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// How to run QEMU.
#[derive(Clone, Debug)]
pub struct QemuConfig {
    /// `qemu-system-x86_64`, an absolute path or a name to look up.
    pub program: PathBuf,
    /// How KVM is proven; `None` means TCG without asking.
    pub kvm: Option<KvmProbe>,
}

/// Runs microVMs with QEMU. Cheap to make; keeps nothing but the probe's result.
#[derive(Debug)]
pub struct QemuDriver {
    config: QemuConfig,
    probe: OnceCell<Probe>,
}

impl QemuDriver {
    /// A driver that has not looked at the host yet.
    #[must_use]
    pub fn new(config: QemuConfig) -> Self {
        Self { config, probe: OnceCell::new() }
    }

    async fn look(&self) -> Probe {
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
        let Verdict { accelerator, reason } = match &self.config.kvm {
            Some(probe) => probe.verdict(&version).await,
            None => Verdict { accelerator: Accelerator::Tcg, reason: "TCG by configuration".to_owned() },
        };
        Probe { version, accelerator: Some(accelerator), reason }
    }

    /// One process, from fork to the monitor's first answer. It inherits the files of these numbers.
    pub(crate) async fn spawn(
        &self,
        recipe: &VmRecipe,
        accelerator: Accelerator,
        birth: Birth,
        inherited: &[RawFd],
    ) -> Result<ProcessId, DriverError> {
        for socket in ["qmp.sock", "guest.sock", "console.sock"] {
            // QEMU binds anew; a stale socket of the last VMM would answer nobody.
            let _absent = std::fs::remove_file(recipe.run_dir.join(socket));
        }
        let io = |operation: &str| {
            let operation = format!("{operation} of VM {}", recipe.id);
            move |source| DriverError::Io { operation, source }
        };
        let log = File::options()
            .create(true)
            .append(true)
            .open(recipe.state_dir.join("vmm.log"))
            .map_err(io("open the VMM log"))?;
        log.set_len(0).map_err(io("empty the VMM log"))?;
        let mut command = Command::new(&self.config.program);
        command
            .args(argv(recipe, accelerator, tsc::khz(), birth))
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(io("share the VMM log"))?)
            .stderr(log);
        own_session(&mut command, inherited.to_vec());
        let child = command.spawn().map_err(|source| DriverError::Spawn {
            id: recipe.id.clone(),
            program: self.config.program.clone(),
            source,
        })?;
        let process = match ProcessId::of_pid(child.id()).map_err(io("look at the VMM"))? {
            Some(process) => process,
            None => return Err(exited(recipe)),
        };
        self.wait_ready(recipe, process).await?;
        Ok(process)
    }

    async fn wait_ready(&self, recipe: &VmRecipe, process: ProcessId) -> Result<(), DriverError> {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            if let Ok(mut qmp) = Qmp::connect(&recipe.run_dir.join("qmp.sock")).await
                && qmp.execute("query-status", json!({})).await.is_ok()
            {
                return Ok(());
            }
            if timeout(Duration::from_millis(5), self.exited(process)).await.is_ok() {
                return Err(exited(recipe));
            }
            if Instant::now() >= deadline {
                self.kill(process).await?;
                return Err(DriverError::NotReady { id: recipe.id.clone(), seconds: READY_LIMIT.as_secs() });
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn connect(
        &self,
        recipe: &VmRecipe,
        channel: &'static str,
    ) -> Result<UnixStream, DriverError> {
        UnixStream::connect(recipe.run_dir.join(format!("{channel}.sock")))
            .await
            .map_err(|source| DriverError::Channel { id: recipe.id.clone(), channel, source })
    }
}

#[async_trait]
impl Driver for QemuDriver {
    fn name(&self) -> &'static str {
        "qemu"
    }

    async fn probe(&self) -> Probe {
        self.probe.get_or_init(|| self.look()).await.clone()
    }

    /// A VMM that exits before its monitor answers under KVM is started again under
    /// TCG: the probe says nothing about every MSR that QEMU may want.
    async fn start(&self, recipe: &VmRecipe) -> Result<ProcessId, DriverError> {
        match self.spawn(recipe, recipe.accelerator, Birth::Cold, &[]).await {
            Err(DriverError::Exited { last_words, .. }) if recipe.accelerator == Accelerator::Kvm => {
                tracing::warn!(vm = %recipe.id, error = %last_words, "VMM exited under kvm, trying tcg");
                self.spawn(recipe, Accelerator::Tcg, Birth::Cold, &[]).await
            }
            result => result,
        }
    }

    async fn find(&self, recipe: &VmRecipe) -> Result<Option<ProcessId>, DriverError> {
        let found = find_by_argument(&recipe.run_dir)
            .map_err(|source| DriverError::Io { operation: "read the process table".to_owned(), source })?;
        Ok(found.into_iter().next())
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

    async fn guest_channel(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError> {
        self.connect(recipe, "guest").await
    }

    async fn console(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError> {
        self.connect(recipe, "console").await
    }

    async fn pause(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        Monitor::open(recipe).await?.run("stop", json!({})).await.map(drop)
    }

    async fn resume(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        Monitor::open(recipe).await?.run("cont", json!({})).await.map(drop)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn templates(&self) -> Option<&dyn Templates> {
        Some(self)
    }
}

/// A session of its own, so that neither ^C nor the end of the daemon's session reaches the VMM. `inherited` stay
/// open in it.
fn own_session(command: &mut Command, inherited: Vec<RawFd>) {
    // SAFETY: setsid and fcntl are async-signal-safe, take no memory and touch only the child; the numbers are of
    // files that the caller holds open until the child runs.
    #[allow(unsafe_code, reason = "pre_exec has no safe form")]
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            for number in &inherited {
                let file = BorrowedFd::borrow_raw(*number);
                rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
}

fn exited(recipe: &VmRecipe) -> DriverError {
    let last_words = tail(&recipe.state_dir.join("vmm.log"), 2048).unwrap_or_default();
    let last_words = if last_words.is_empty() { "it left no message".to_owned() } else { last_words };
    DriverError::Exited { id: recipe.id.clone(), last_words }
}

/// The last `limit` bytes of a text file, without control characters.
fn tail(path: &std::path::Path, limit: i64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = i64::try_from(file.metadata()?.len()).unwrap_or(i64::MAX);
    file.seek(SeekFrom::End(-limit.min(length)))?;
    let mut bytes = Vec::new();
    file.take(4096).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

/// `QEMU emulator version 7.2.22 (Debian …)` → `7.2.22`.
fn parse_version(text: &str) -> String {
    text.split_whitespace().skip_while(|word| *word != "version").nth(1).unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_from_the_first_line() {
        assert_eq!(parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)\nCopyright"), "7.2.22");
        assert_eq!(parse_version(""), "unknown");
    }

    #[tokio::test]
    async fn a_missing_program_is_a_reason_not_an_error() {
        let driver = QemuDriver::new(QemuConfig { program: "/nowhere/qemu".into(), kvm: None });
        let probe = driver.probe().await;
        assert_eq!(probe.accelerator, None);
        assert!(probe.reason.contains("install"), "{}", probe.reason);
    }
}
