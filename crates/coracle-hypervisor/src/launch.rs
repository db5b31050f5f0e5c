//! Running a VMM: one process in a session of its own, and what it said when it ended.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::{DriverError, ProcessId, VmRecipe, find_by_argument};

/// The VMM's own messages, in its VM's state folder.
pub const LOG_FILE: &str = "vmm.log";
/// In a VM's `run_dir`: the one that its VMM was started with, where that was another's.
const STARTED_IN: &str = "started-in";
/// Of those, what an error shows.
const LAST_WORDS_BYTES: i64 = 2048;
/// Between two looks whether it is ready.
const POLL: Duration = Duration::from_millis(2);

/// What is run. Its environment is empty; its messages go to [`LOG_FILE`].
#[derive(Debug)]
pub struct Launch<'a> {
    /// For which VM.
    pub recipe: &'a VmRecipe,
    /// The program.
    pub program: &'a Path,
    /// Its arguments; one of them is a path beneath the VM's `run_dir`, by which it is found again.
    pub args: Vec<String>,
    /// Where it runs.
    pub folder: &'a Path,
    /// The guest's serial line, where the VMM has it on standard input and output: read from the first, written to the
    /// second.
    pub serial: Option<(OwnedFd, OwnedFd)>,
    /// Files that it sees by the numbers that they have here. The caller holds them open until this returns.
    pub inherited: Vec<RawFd>,
}

impl Launch<'_> {
    /// Starts it. The log is emptied first.
    ///
    /// # Errors
    /// [`DriverError::Spawn`], [`DriverError::Io`], [`DriverError::Exited`] when it ended at once.
    pub fn run(self) -> Result<ProcessId, DriverError> {
        let id = &self.recipe.id;
        let io = |operation: &str| {
            let operation = format!("{operation} of VM {id}");
            move |source| DriverError::Io { operation, source }
        };
        let log = self.recipe.state_dir.join(LOG_FILE);
        let log = File::options().create(true).append(true).open(log).map_err(io("open the VMM log"))?;
        log.set_len(0).map_err(io("empty the VMM log"))?;
        let mut command = Command::new(self.program);
        command.args(&self.args).env_clear().current_dir(self.folder);
        let (stdin, stdout) = match self.serial {
            Some((from, to)) => (Stdio::from(from), Stdio::from(to)),
            None => (Stdio::null(), Stdio::from(log.try_clone().map_err(io("share the VMM log"))?)),
        };
        command.stdin(stdin).stdout(stdout).stderr(log);
        own_session(&mut command, self.inherited);
        let child = command.spawn().map_err(|source| DriverError::Spawn {
            id: id.clone(),
            program: self.program.to_owned(),
            source,
        })?;
        let process = ProcessId::of_pid(child.id()).map_err(io("look at the VMM"))?;
        process.ok_or_else(|| exited(self.recipe))
    }
}

/// The living VMM of a VM, by its `run_dir`, or the one that it was started with.
///
/// # Errors
/// [`DriverError::Io`] when the process table cannot be read.
pub fn find(recipe: &VmRecipe) -> Result<Option<ProcessId>, DriverError> {
    let io = |source| DriverError::Io { operation: "read the process table".to_owned(), source };
    let own = find_by_argument(&recipe.run_dir).map_err(io)?;
    let elsewhere = match std::fs::read_to_string(recipe.run_dir.join(STARTED_IN)) {
        Ok(folder) => find_by_argument(Path::new(&folder)).map_err(io)?,
        Err(_) => vec![],
    };
    Ok(own.into_iter().chain(elsewhere).next())
}

/// From here on [`find`] sees what was started for `from` as the VMM of `to`, too.
///
/// # Errors
/// When the folder of `to` cannot be made or written.
pub fn started_in(to: &VmRecipe, from: &VmRecipe) -> io::Result<()> {
    std::fs::create_dir_all(&to.run_dir)?;
    std::fs::write(to.run_dir.join(STARTED_IN), from.run_dir.as_os_str().as_encoded_bytes())
}

/// A new VMM of this VM will be found by its own folder. Nothing of an earlier one runs.
pub fn starts_here(recipe: &VmRecipe) {
    let _usually_absent = std::fs::remove_file(recipe.run_dir.join(STARTED_IN));
}

/// Waits until `ready` says so; ends the VMM that does not become so within `limit`.
///
/// # Errors
/// [`DriverError::Exited`] with its last words, [`DriverError::NotReady`].
pub async fn wait_ready<F: Future<Output = bool> + Send>(
    recipe: &VmRecipe,
    process: ProcessId,
    limit: Duration,
    ready: impl Fn() -> F + Send,
) -> Result<(), DriverError> {
    let watched = |source| DriverError::Io { operation: format!("watch process {}", process.pid), source };
    let deadline = Instant::now() + limit;
    while !ready().await {
        if timeout(POLL, process.exited()).await.is_ok() {
            return Err(exited(recipe));
        }
        if Instant::now() >= deadline {
            process.kill().await.map_err(watched)?;
            return Err(DriverError::NotReady { id: recipe.id.clone(), seconds: limit.as_secs() });
        }
    }
    Ok(())
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

/// The error of a VMM that is gone, with the end of its log.
#[must_use]
pub fn exited(recipe: &VmRecipe) -> DriverError {
    let last_words = tail(&recipe.state_dir.join(LOG_FILE), LAST_WORDS_BYTES).unwrap_or_default();
    let last_words = if last_words.is_empty() { "it left no message".to_owned() } else { last_words };
    DriverError::Exited { id: recipe.id.clone(), last_words }
}

/// The last `limit` bytes of a text file, without control characters.
fn tail(path: &Path, limit: i64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = i64::try_from(file.metadata()?.len()).unwrap_or(i64::MAX);
    file.seek(SeekFrom::End(-limit.min(length)))?;
    let mut bytes = Vec::new();
    file.take(4096).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

/// Where a process finds the file that it has under this number.
#[must_use]
pub fn own_file(number: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{number}"))
}

/// Where any process of this user finds the file that we hold open under this number.
#[must_use]
pub fn our_file(number: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{number}", std::process::id()))
}
