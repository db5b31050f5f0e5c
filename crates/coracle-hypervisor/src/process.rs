//! Processes by pid and start time, children or not.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Process, distinguished from a later one with the same pid by its start time in clock ticks since boot (`/proc/PID/stat`,
/// field 22).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessId {
    /// Process id.
    pub pid: u32,
    /// Start time, clock ticks since boot.
    pub start_ticks: u64,
}

impl ProcessId {
    /// Returns the process that has this pid now; `None` if there is none or it has ended, but was not reaped. A process ends
    /// with its last thread, not with its first: vCPU threads exit late on a busy host, and keep cgroup and memory of their VMM.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn of_pid(pid: u32) -> io::Result<Option<Self>> {
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(3) => return Ok(None),
            Err(e) => return Err(e),
        };
        Ok(parse_stat(&stat).filter(|s| !s.has_ended()).map(|s| Self { pid, start_ticks: s.start_ticks }))
    }

    /// Parses a line of `/proc/PID/stat`.
    pub(crate) fn of_stat(stat: &str) -> Option<Self> {
        let pid = stat.split_ascii_whitespace().next()?.parse().ok()?;
        parse_stat(stat).map(|parsed| Self { pid, start_ticks: parsed.start_ticks })
    }

    /// Returns whether the process is alive.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn is_alive(self) -> io::Result<bool> {
        Ok(Self::of_pid(self.pid)? == Some(self))
    }

    /// Resolves when the process has ended, and reaps it if it was a child. Cancel-safe.
    ///
    /// # Errors
    /// When the kernel refuses a pidfd.
    pub async fn exited(self) -> io::Result<()> {
        let Some(fd) = self.open()? else { return Ok(()) };
        let fd = AsyncFd::with_interest_compat(fd)?;
        let _ready = fd.readable().await?;
        reap(self.pid);
        Ok(())
    }

    /// Kills the process and waits until it has ended. Idempotent, cancel-safe.
    ///
    /// # Errors
    /// When the signal may not be sent.
    pub async fn kill(self) -> io::Result<()> {
        let Some(fd) = self.open()? else {
            reap(self.pid);
            return Ok(());
        };
        match rustix::process::pidfd_send_signal(&fd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => self.exited().await,
            Err(e) => Err(e.into()),
        }
    }

    /// Opens a pidfd, which cannot refer to a later process of the same pid.
    fn open(self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        match rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK) {
            // The pid may have been reused before the pidfd was opened, but not afterwards.
            Ok(fd) => Ok(self.is_alive()?.then_some(fd)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// Returns the boot id of the host (proc_sys_kernel(5), `random/boot_id`).
pub(crate) fn boot_id() -> io::Result<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned())
}

/// Reaps a child; does nothing for other processes.
fn reap(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _not_ours_or_alive =
            rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }
}

trait AsyncFdCompat: Sized {
    fn with_interest_compat(fd: OwnedFd) -> io::Result<Self>;
}

impl AsyncFdCompat for AsyncFd<OwnedFd> {
    #[allow(
        deprecated,
        reason = "the successor is unsafe; the fd is owned here and outlives the registration"
    )]
    fn with_interest_compat(fd: OwnedFd) -> io::Result<Self> {
        Self::with_interest(fd, Interest::READABLE)
    }
}

/// Fields 3, 20 and 22 of `/proc/PID/stat` (proc_pid_stat(5)).
struct Stat {
    /// Of the first thread.
    state: char,
    /// The first thread is among them until the process is reaped.
    threads: u64,
    start_ticks: u64,
}

impl Stat {
    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

/// Parses state, number of threads and start time. The command name may contain spaces and parentheses, so fields count from
/// the last `)`.
fn parse_stat(stat: &str) -> Option<Stat> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let threads = fields.nth(16)?.parse().ok()?;
    let start_ticks = fields.nth(1)?.parse().ok()?;
    Some(Stat { state, threads, start_ticks })
}

/// Finds every living process with an argument that contains `needle` as a path prefix of a comma- or equals-separated word, so
/// that `/run/x/ab` does not match `/run/x/abc`.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn find_by_argument(needle: &Path) -> io::Result<Vec<ProcessId>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // A process that ends during the search is skipped.
        let Ok(cmdline) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        if mentions(&cmdline, needle) {
            found.extend(ProcessId::of_pid(pid)?);
        }
    }
    Ok(found)
}

fn mentions(cmdline: &[u8], needle: &Path) -> bool {
    let Some(needle) = needle.to_str() else { return false };
    cmdline
        .split(|b| *b == 0)
        .filter_map(|arg| std::str::from_utf8(arg).ok())
        .flat_map(|arg| arg.split([',', '=', ':']))
        .any(|word| word.strip_prefix(needle).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_parsed_behind_a_name_with_parentheses() {
        let line = "12 (a) b) c) S 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654 1000 20";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.state, stat.threads, stat.start_ticks), ('S', 3, 987_654));
        assert!(parse_stat("garbage").is_none());
    }

    #[test]
    fn argument_matches_whole_path_components_only() {
        let cmdline = b"qemu\0-qmp\0unix:/run/c/abc/qmp.sock,server=on\0";
        assert!(mentions(cmdline, Path::new("/run/c/abc")));
        assert!(!mentions(cmdline, Path::new("/run/c/ab")));
        assert!(!mentions(cmdline, Path::new("/run/c/abcd")));
    }

    #[expect(clippy::zombie_processes, reason = "that kill() reaps is what is tested")]
    #[tokio::test]
    async fn killed_child_is_reaped_and_kill_is_idempotent() {
        let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let id = ProcessId::of_pid(child.id()).unwrap().unwrap();
        assert!(id.is_alive().unwrap());
        id.kill().await.unwrap();
        assert!(!id.is_alive().unwrap());
        assert!(!Path::new(&format!("/proc/{}", id.pid)).exists(), "no zombie is left");
        id.kill().await.unwrap();
        id.exited().await.unwrap();
    }

    #[expect(clippy::zombie_processes, reason = "that kill() reaps is what is tested")]
    #[tokio::test]
    async fn process_whose_first_thread_has_ended_is_killed() {
        let script = "import ctypes, threading, time\n\
            threading.Thread(target=time.sleep, args=(1000,)).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let child = std::process::Command::new("python3").args(["-c", script]).spawn().unwrap();
        let stat =
            || parse_stat(&std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap()).unwrap();
        while stat().state != 'Z' {
            tokio::task::yield_now().await;
        }
        let id = ProcessId::of_pid(child.id()).unwrap().unwrap();
        assert!(id.is_alive().unwrap());
        id.kill().await.unwrap();
        assert!(!Path::new(&format!("/proc/{}", id.pid)).exists(), "it has ended, and was reaped");
    }
}
