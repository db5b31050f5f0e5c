//! Launch of a VMM: one process in a session of its own, which is found again by its process file, and whose log explains a
//! failure.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::time::{Instant, timeout};

use crate::jail::{Jail, PreparedJail};
use crate::process::boot_id;
use crate::{DriverError, ProcessId, VmmConfig};

/// Log of the VMM, in the state directory of its instance.
pub const LOG_FILE: &str = "vmm.log";
/// File in the `run_dir` of a VMM that identifies its process: boot id of the host, then the line of `/proc/PID/stat`.
const PROCESS_FILE: &str = "process";
/// Length of the end of the log that an error shows.
const LAST_WORDS_BYTES: i64 = 2048;
/// Time limit for opening the files of a VMM.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Interval between checks whether a VMM is ready.
const POLL: Duration = Duration::from_millis(2);

/// VMM process to start. Its environment is empty; its messages are written to [`LOG_FILE`].
#[derive(Debug)]
pub struct Launch<'a> {
    /// Config of the VMM.
    pub vmm_config: &'a VmmConfig,
    /// Program.
    pub program: &'a Path,
    /// Arguments.
    pub args: Vec<String>,
    /// Working directory; a jail must contain it.
    pub working_dir: &'a Path,
    /// Serial line of the guest, if the VMM has it on standard input and output: read from the first, written to the second.
    pub serial: Option<(OwnedFd, OwnedFd)>,
    /// Whether its anonymous memory may be in transparent huge pages (kernel document, admin-guide/mm/transhuge).
    pub has_huge_pages: bool,
    /// Descriptors that the VMM inherits under the same numbers. The caller keeps them open until [`Launch::run`] returns.
    pub inherited: Vec<RawFd>,
    /// Jail; `None`: the VMM has the rights of the daemon.
    pub jail: Option<PreparedJail>,
}

impl Launch<'_> {
    /// Starts the VMM. Truncates the log first.
    ///
    /// # Errors
    /// [`DriverError::Spawn`], [`DriverError::Io`], [`DriverError::Exited`] when the VMM ended at once.
    pub fn run(self) -> Result<ProcessId, DriverError> {
        let id = &self.vmm_config.id;
        let io = |operation: &str| {
            let operation = format!("{operation} of VMM {id}");
            move |source| DriverError::Io { operation, source }
        };
        let log = self.vmm_config.state_dir.join(LOG_FILE);
        let log = File::options().create(true).append(true).open(log).map_err(io("open the VMM log"))?;
        log.set_len(0).map_err(io("empty the VMM log"))?;
        let mut command = Command::new(self.program);
        command.args(&self.args).env_clear();
        if self.jail.is_none() {
            command.current_dir(self.working_dir);
        }
        let (stdin, stdout) = match self.serial {
            Some((from, to)) => (Stdio::from(from), Stdio::from(to)),
            None => (Stdio::null(), Stdio::from(log.try_clone().map_err(io("share the VMM log"))?)),
        };
        command.stdin(stdin).stdout(stdout).stderr(log);
        let process_file = process_file(self.vmm_config).map_err(io("make the process file"))?;
        let is_jailed = self.jail.is_some();
        prepare_child(&mut command, self.inherited, self.has_huge_pages, process_file, self.jail);
        let mut child = command.spawn().map_err(|source| {
            // The process in the file is about to exit, and never became a VMM.
            let _stays_without_harm = std::fs::remove_file(self.vmm_config.run_dir.join(PROCESS_FILE));
            let source = with_last_words(source, self.vmm_config);
            DriverError::Spawn { id: id.clone(), program: self.program.to_owned(), source }
        })?;
        let process = if is_jailed {
            // The child only created the namespaces of the VMM; the VMM itself is in the process file.
            child.wait().map_err(io("wait for the launcher"))?;
            find_in(&self.vmm_config.run_dir)
        } else {
            ProcessId::of_pid(child.id())
        };
        process.map_err(io("look at the VMM"))?.ok_or_else(|| exit_error(self.vmm_config))
    }
}

/// Prepares the jail of a VMM that is about to start; `None`: the VMM has the rights of the daemon. The storage of its files
/// may hang: the preparation is then given up, and no VMM starts when the storage answers again.
///
/// # Errors
/// Same as [`Jail::prepare`]; `TimedOut`.
pub async fn prepare_jail(
    vmm_config: &VmmConfig,
    fill: impl FnOnce(&mut Jail) -> io::Result<()> + Send + 'static,
) -> io::Result<Option<PreparedJail>> {
    let vmm_config = vmm_config.clone();
    let prepared = tokio::task::spawn_blocking(move || {
        let Some(mut jail) = Jail::of(&vmm_config) else { return Ok(None) };
        fill(&mut jail)?;
        jail.prepare(&vmm_config.id).map(Some)
    });
    let prepared = timeout(OPEN_LIMIT, prepared).await.map_err(|_| io::ErrorKind::TimedOut)?;
    prepared.map_err(io::Error::other)?
}

/// Returns a program as an absolute path. A bare name is looked up in the `PATH` of the daemon, which the VMM's empty
/// environment lacks.
#[must_use]
pub fn program_path(program: &Path) -> PathBuf {
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let named_alone = program.components().count() == 1 && !program.is_absolute();
    let found = std::env::split_paths(&dirs).map(|dir| dir.join(program)).find(|path| path.is_file());
    found.filter(|_| named_alone).unwrap_or_else(|| program.to_owned())
}

/// Finds the living VMM of a VM, regardless of the daemon that started it: the process that wrote itself to the process file in
/// the VM's `run_dir`. Arguments of other processes do not matter.
///
/// # Errors
/// [`DriverError::Io`] when the file or the process table cannot be read.
pub fn find(vmm_config: &VmmConfig) -> Result<Option<ProcessId>, DriverError> {
    find_in(&vmm_config.run_dir)
        .map_err(|source| DriverError::Io { operation: format!("find VMM {}", vmm_config.id), source })
}

/// Like [`find`], for the VMM with this `run_dir`.
///
/// # Errors
/// When the file or the process table cannot be read.
pub fn find_in(run_dir: &Path) -> io::Result<Option<ProcessId>> {
    let text = match std::fs::read_to_string(run_dir.join(PROCESS_FILE)) {
        Ok(text) => text,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let Some((boot, stat)) = text.split_once('\n') else { return Ok(None) };
    // A process of an earlier boot of the host has ended, whichever process has its pid now.
    if boot != boot_id()? {
        return Ok(None);
    }
    let Some(process) = ProcessId::of_stat(stat) else { return Ok(None) };
    Ok(process.is_alive()?.then_some(process))
}

/// Makes a VMM that an earlier version of the daemon started visible to [`find`]. Idempotent; does nothing if the process has
/// ended.
///
/// # Errors
/// When the VMM's `run_dir` cannot be written.
pub fn note_process(run_dir: &Path, process: ProcessId) -> io::Result<()> {
    let place = run_dir.join(PROCESS_FILE);
    if place.exists() || !process.is_alive()? {
        return Ok(());
    }
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid))?;
    let part = run_dir.join("process.part");
    std::fs::write(&part, format!("{}\n{stat}", boot_id()?))?;
    std::fs::rename(part, place)
}

/// Waits until `ready` returns true; kills a VMM that is not ready within `limit`.
///
/// # Errors
/// [`DriverError::Exited`] with the end of its log, [`DriverError::NotReady`].
pub async fn wait_ready<F: Future<Output = bool> + Send>(
    vmm_config: &VmmConfig,
    process: ProcessId,
    limit: Duration,
    ready: impl Fn() -> F + Send,
) -> Result<(), DriverError> {
    let watched = |source| DriverError::Io { operation: format!("watch process {}", process.pid), source };
    let deadline = Instant::now() + limit;
    while !ready().await {
        if timeout(POLL, process.exited()).await.is_ok() {
            return Err(exit_error(vmm_config));
        }
        if Instant::now() >= deadline {
            process.kill().await.map_err(watched)?;
            return Err(DriverError::NotReady { id: vmm_config.id.clone(), seconds: limit.as_secs() });
        }
    }
    Ok(())
}

/// Creates the process file of a VMM that is about to start: with the host's boot id, to which the child appends.
fn process_file(vmm_config: &VmmConfig) -> io::Result<File> {
    let path = vmm_config.run_dir.join(PROCESS_FILE);
    let mut file = File::options().create(true).write(true).truncate(true).open(path)?;
    writeln!(file, "{}", boot_id()?)?;
    Ok(file)
}

/// Prepares the child: a session of its own, so that neither ^C nor the end of the daemon's session reaches the VMM; its
/// process file; and `inherited` descriptors, which stay open. A VMM never runs without being in its file: the child writes the
/// file before it becomes the VMM, and until then it holds the state lock, for which a new daemon that could read the file
/// waits.
fn prepare_child(
    command: &mut Command,
    inherited: Vec<RawFd>,
    has_huge_pages: bool,
    process_file: File,
    jail: Option<PreparedJail>,
) {
    // SAFETY: setsid, prctl, fcntl, open, read, write and the calls of a prepared jail are system calls that take no memory and touch
    // only the child. The caller keeps the inherited descriptors open until the child runs.
    #[allow(unsafe_code, reason = "pre_exec has no safe form")]
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            if !has_huge_pages {
                // Stays set over fork(2) and execve(2) (prctl(2), PR_SET_THP_DISABLE). A host that forbids it loses memory only.
                let _may_be_forbidden = rustix::thread::disable_transparent_huge_pages(true);
            }
            for number in &inherited {
                let file = BorrowedFd::borrow_raw(*number);
                rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())?;
            }
            match &jail {
                Some(jail) => jail.enter(|| append_own_stat(&process_file)),
                None => append_own_stat(&process_file),
            }
        });
    }
}

/// Appends `/proc/self/stat`: pid and start time do not change at exec(2). Allocates nothing.
fn append_own_stat(to: &File) -> io::Result<()> {
    let stat = rustix::fs::open(c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = [0; 1024];
    let read = rustix::io::read(&stat, &mut bytes)?;
    let written = rustix::io::write(to, &bytes[..read])?;
    if written == read { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
}

/// Adds the messages that the child left in the log to the error of a failed start.
fn with_last_words(source: io::Error, vmm_config: &VmmConfig) -> io::Error {
    match tail(&vmm_config.state_dir.join(LOG_FILE), LAST_WORDS_BYTES) {
        Ok(words) if !words.is_empty() => io::Error::new(source.kind(), format!("{words}: {source}")),
        _ => source,
    }
}

/// Returns the error of a VMM that has ended, with the end of its log.
#[must_use]
pub fn exit_error(vmm_config: &VmmConfig) -> DriverError {
    let last_words = tail(&vmm_config.state_dir.join(LOG_FILE), LAST_WORDS_BYTES).unwrap_or_default();
    let last_words = if last_words.is_empty() { "it left no message".to_owned() } else { last_words };
    DriverError::Exited { id: vmm_config.id.clone(), last_words }
}

/// Returns the last `limit` bytes of a text file, without control characters.
fn tail(path: &Path, limit: i64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = i64::try_from(file.metadata()?.len()).unwrap_or(i64::MAX);
    file.seek(SeekFrom::End(-limit.min(length)))?;
    let mut bytes = Vec::new();
    file.take(4096).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

/// Returns the path by which a process finds its own descriptor of this number.
#[must_use]
pub fn own_file(number: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{number}"))
}

#[cfg(test)]
mod tests {
    use coracle_types::InstanceId;

    use super::*;
    use crate::{Accelerator, MachineType, Slots};

    fn vmm_config(dir: &Path) -> VmmConfig {
        VmmConfig {
            id: InstanceId::new("web", 1),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: "/boot/vmlinuz".into(),
            initrd: "/boot/initrd".into(),
            disks: vec![],
            slots: Slots::default(),
            machine_type: MachineType::Microvm,
            nic: None,
            display: None,
            state_dir: dir.to_owned(),
            run_dir: dir.to_owned(),
            accelerator: Accelerator::Tcg,
            driver: String::new(),
            uid: None,
        }
    }

    fn start(vmm_config: &VmmConfig, program: &str) -> Result<ProcessId, DriverError> {
        start_in(vmm_config, program, None)
    }

    fn start_in(vmm_config: &VmmConfig, program: &str, jail: Option<Jail>) -> Result<ProcessId, DriverError> {
        let jail = jail.map(|jail| jail.prepare(&vmm_config.id).unwrap());
        Launch { jail, ..launch(vmm_config, program) }.run()
    }

    fn launch<'a>(vmm_config: &'a VmmConfig, program: &'a str) -> Launch<'a> {
        Launch {
            vmm_config,
            program: Path::new(program),
            args: vec!["1000".to_owned()],
            working_dir: Path::new("/"),
            serial: None,
            has_huge_pages: true,
            inherited: vec![],
            jail: None,
        }
    }

    fn jail(dir: &Path, uid: u32) -> Jail {
        let vmm_config = VmmConfig { uid: Some(uid), ..vmm_config(dir) };
        let jail = Jail::of(&vmm_config).unwrap();
        Jail { read_only: vec![dir.join("kernel")], limits: None, ..jail }
    }

    /// Field of proc_pid_status(5).
    fn status(vmm: ProcessId, field: &str) -> String {
        let text = std::fs::read_to_string(format!("/proc/{}/status", vmm.pid)).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[tokio::test]
    async fn jailed_vmm_is_unprivileged_and_isolated() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(other.path().join("secret"), "of another VM").unwrap();
        let vmm_config = vmm_config(dir.path());
        std::fs::write(dir.path().join("kernel"), "of this VM").unwrap();
        let uid = Jail::uid_of(&vmm_config.id);
        let vmm = start_in(&vmm_config, "/bin/sleep", Some(jail(dir.path(), uid))).unwrap();
        assert_eq!(find(&vmm_config).unwrap(), Some(vmm), "the process file has the pid that the host knows");
        let ids = format!("{uid} {uid} {uid} {uid}");
        assert_eq!((status(vmm, "Uid"), status(vmm, "Gid")), (ids.clone(), ids));
        for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status(vmm, field), "0000000000000000", "{field}");
        }
        assert_eq!(status(vmm, "NoNewPrivs"), "1");
        let namespace = |pid: &str, kind| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        for kind in ["mnt", "pid", "net", "ipc", "uts", "user"] {
            assert_ne!(namespace(&vmm.pid.to_string(), kind), namespace("self", kind), "{kind}");
        }
        let root = PathBuf::from(format!("/proc/{}/root", vmm.pid));
        let below = |path: &Path| root.join(path.strip_prefix("/").unwrap());
        let own: Vec<_> =
            std::fs::read_dir(below(dir.path())).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(own, ["kernel"], "what it opens by name, and not what the daemon keeps beside it");
        assert!(!below(other.path()).exists(), "nothing of another VM");
        for path in ["/root", "/home", "/var", "/etc/passwd", "/etc/coracle", "/sys"] {
            assert!(!below(Path::new(path)).exists(), "{path}");
        }
        std::fs::write(below(Path::new("/new")), "").unwrap_err();
        vmm.kill().await.unwrap();
        assert_eq!(find(&vmm_config).unwrap(), None);
    }

    #[tokio::test]
    async fn vmm_thp_follows_the_launch_option() {
        let dir = tempfile::tempdir().unwrap();
        let vmm_config = vmm_config(dir.path());
        for (has_huge_pages, enabled) in [(true, "1"), (false, "0")] {
            let vmm = Launch { has_huge_pages, ..launch(&vmm_config, "sleep") }.run().unwrap();
            assert_eq!(status(vmm, "THP_enabled"), enabled);
            vmm.kill().await.unwrap();
        }
    }

    #[tokio::test]
    async fn failed_jail_start_reports_the_cause() {
        assert!(Jail::is_possible(), "this test runs as root of the host");
        let dir = tempfile::tempdir().unwrap();
        let vmm_config = vmm_config(dir.path());
        let error = jail(dir.path(), 1).prepare(&vmm_config.id).unwrap_err();
        assert!(error.to_string().contains("/kernel"), "{error:?}");
        std::fs::write(dir.path().join("kernel"), "").unwrap();
        let error = start_in(&vmm_config, "/absent/vmm", Some(jail(dir.path(), 1))).unwrap_err();
        assert!(matches!(error, DriverError::Spawn { .. }), "{error:?}");
        assert_eq!(find(&vmm_config).unwrap(), None);
    }

    #[tokio::test]
    async fn vmm_is_found_by_its_process_file() {
        let dir = tempfile::tempdir().unwrap();
        let vmm_config = vmm_config(dir.path());
        assert_eq!(find(&vmm_config).unwrap(), None, "before the first start");
        let vmm = start(&vmm_config, "sleep").unwrap();
        assert_eq!(find(&vmm_config).unwrap(), Some(vmm));
        vmm.kill().await.unwrap();
        assert_eq!(find(&vmm_config).unwrap(), None, "it is gone");
        start(&vmm_config, "/absent/vmm").unwrap_err();
        assert_eq!(find(&vmm_config).unwrap(), None, "it never became a VMM");
    }

    #[tokio::test]
    async fn process_naming_the_run_dir_in_its_arguments_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qmp.sock");
        let mut command = Command::new("sh");
        command.args(["-c", "read line"]).arg(&socket).stdin(Stdio::piped());
        let mut impostor = command.spawn().unwrap();
        assert_eq!(find(&vmm_config(dir.path())).unwrap(), None);
        impostor.kill().unwrap();
        impostor.wait().unwrap();
    }

    #[tokio::test]
    async fn process_file_table() {
        let dir = tempfile::tempdir().unwrap();
        let vmm_config = vmm_config(dir.path());
        let vmm = start(&vmm_config, "sleep").unwrap();
        let path = dir.path().join(PROCESS_FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        let (boot, stat) = text.split_once('\n').unwrap();
        let ticks = vmm.start_ticks.to_string();
        for (why, text, found) in [
            ("as it was written", text.clone(), true),
            ("an earlier boot of the host", format!("another\n{stat}"), false),
            ("a later process of this pid", text.replace(&ticks, "1"), false),
            ("cut off before the child wrote", format!("{boot}\n"), false),
            ("empty", String::new(), false),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(find(&vmm_config).unwrap().is_some(), found, "{why}");
        }
        std::fs::remove_file(&path).unwrap();
        note_process(dir.path(), vmm).unwrap();
        assert_eq!(find(&vmm_config).unwrap(), Some(vmm), "noted for an earlier version");
        vmm.kill().await.unwrap();
    }
}
