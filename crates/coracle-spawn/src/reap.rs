//! The only module that forks, and the only one that waits for children. As PID 1 the agent inherits every orphan.
//! `waitpid(-1)` takes the status of any child, so it is not called while a child is forked and not registered yet. That may
//! take long: the program may be in a shared directory, which this process serves.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tokio::signal::unix::SignalKind;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::program::Program;

/// Time from SIGHUP to SIGKILL for a process whose client has gone.
const HANG_UP_GRACE: Duration = Duration::from_secs(1);

/// Exit of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, 0 to 255; 128 + signal after a signal.
    pub code: i32,
    /// Signal that ended the process; 0: none.
    pub signal: i32,
    /// Reason why the process never ran; empty otherwise.
    pub error: String,
}

/// Children whose statuses are collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every child, including adopted ones: for PID 1.
    Everything,
    /// Only the children that this reaper has spawned: for a process with other children.
    Own,
}

/// Spawns processes and delivers their exit statuses.
#[derive(Debug)]
pub struct Reaper {
    scope: Scope,
    /// Read lock while a child is forked, write lock while `waitpid(-1)` is called.
    forking: RwLock<()>,
    waiting: Mutex<HashMap<Pid, Entry>>,
    doomed: Notify,
}

#[derive(Debug)]
struct Entry {
    exit: oneshot::Sender<Exit>,
    kill_at: Option<Instant>,
}

/// Spawned process, leader of its own session and process group.
#[derive(Debug)]
pub struct Spawned {
    /// Process id.
    pub pid: Pid,
    /// Resolves with the exit, while [`Reaper::run`] runs.
    pub exit: oneshot::Receiver<Exit>,
}

impl Reaper {
    /// Makes a reaper; [`Reaper::run`] collects the statuses.
    #[must_use]
    pub fn new(scope: Scope) -> Arc<Self> {
        Arc::new(Self { scope, forking: RwLock::default(), waiting: Mutex::default(), doomed: Notify::new() })
    }

    /// Forks and registers the child in one step, so that no status is lost. Blocks until the child has executed its program,
    /// which the runtime's thread must serve if it is in a shared directory: [`Thread::OfFiles`](crate::Thread::OfFiles).
    pub fn spawn(&self, program: &Program, streams: [OwnedFd; 3]) -> io::Result<Spawned> {
        let spawned = self.spawn_known(program, streams);
        // Collects statuses that could not be taken meanwhile.
        self.doomed.notify_one();
        spawned
    }

    fn spawn_known(&self, program: &Program, streams: [OwnedFd; 3]) -> io::Result<Spawned> {
        let _until_it_is_known = self.forking.read().unwrap_or_else(PoisonError::into_inner);
        let pid = program.spawn(streams)?;
        let (sender, exit) = oneshot::channel();
        self.lock().insert(pid, Entry { exit: sender, kill_at: None });
        Ok(Spawned { pid, exit })
    }

    /// Signals the process group that `pid` leads, as long as the leader was not reaped: after that the number may be reused.
    /// Returns false when the leader was reaped.
    pub fn signal(&self, pid: Pid, signal: Signal) -> bool {
        let waiting = self.lock();
        waiting.contains_key(&pid) && rustix::process::kill_process_group(pid, signal).is_ok()
    }

    /// Like [`Reaper::signal`], for the process alone.
    pub fn signal_process(&self, pid: Pid, signal: Signal) -> bool {
        let waiting = self.lock();
        waiting.contains_key(&pid) && rustix::process::kill_process(pid, signal).is_ok()
    }

    /// Hangs up a process whose client has gone: SIGHUP now, SIGKILL after a grace. Does nothing if the process has ended.
    pub fn hang_up(&self, pid: Pid) {
        if let Some(entry) = self.lock().get_mut(&pid) {
            entry.kill_at = Some(Instant::now() + HANG_UP_GRACE);
            let _ = rustix::process::kill_process_group(pid, Signal::HUP);
            let _ = rustix::process::kill_process_group(pid, Signal::CONT);
        }
        self.doomed.notify_one();
    }

    /// Collects statuses for ever. Cancel-safe.
    ///
    /// # Errors
    /// When SIGCHLD cannot be watched.
    pub async fn run(&self) -> io::Result<()> {
        let mut changed = tokio::signal::unix::signal(SignalKind::child())?;
        loop {
            self.collect();
            let next = self.kill_overdue();
            let overdue = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = changed.recv() => {}
                () = self.doomed.notified() => {}
                () = overdue => {}
            }
        }
    }

    fn collect(&self) {
        match (self.scope, self.forking.try_write()) {
            (Scope::Everything, Ok(_nothing_is_forked)) => {
                let mut waiting = self.lock();
                while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                    if let Some(entry) = waiting.remove(&pid) {
                        let _ = entry.exit.send(Exit::from(status));
                    }
                }
            }
            // Only registered children.
            (Scope::Everything | Scope::Own, _) => {
                let mut waiting = self.lock();
                let ended: Vec<_> = waiting
                    .keys()
                    .filter_map(|pid| {
                        rustix::process::waitpid(Some(*pid), WaitOptions::NOHANG).ok().flatten()
                    })
                    .collect();
                for (pid, status) in ended {
                    if let Some(entry) = waiting.remove(&pid) {
                        let _ = entry.exit.send(Exit::from(status));
                    }
                }
            }
        }
    }

    /// Kills the processes that have not ended after SIGHUP. Returns the time of the next kill.
    fn kill_overdue(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        for (pid, entry) in self.lock().iter_mut() {
            match entry.kill_at {
                Some(at) if at <= now => {
                    entry.kill_at = None;
                    let _ = rustix::process::kill_process_group(*pid, Signal::KILL);
                }
                Some(at) => next = Some(next.map_or(at, |n| n.min(at))),
                None => {}
            }
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Pid, Entry>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<WaitStatus> for Exit {
    fn from(status: WaitStatus) -> Self {
        match status.terminating_signal() {
            Some(signal) => Self { code: signal.saturating_add(128), signal, error: String::new() },
            None => Self { code: status.exit_status().unwrap_or(255), ..Self::default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Memory, no_input};
    use std::path::Path;

    /// Starts a program as the leader of a process group, without input and output.
    fn spawn(reaper: &Reaper, path: &str, args: &[&str]) -> io::Result<Spawned> {
        let program = Program::new(Path::new(path), [path].iter().chain(args).copied(), [])?;
        let program = program.with_setup(Memory::Shared, || Ok(rustix::process::setpgid(None, None)?));
        let nowhere = || OwnedFd::from(std::fs::File::options().write(true).open("/dev/null").unwrap());
        reaper.spawn(&program, [no_input()?, nowhere(), nowhere()])
    }

    async fn run_commands(commands: &[&str]) -> Vec<Exit> {
        let reaper = Reaper::new(Scope::Own);
        let mut waiters = Vec::new();
        for c in commands {
            waiters.push(spawn(&reaper, "/bin/sh", &["-c", c]).unwrap().exit);
        }
        let all = futures_util::future::join_all(waiters);
        tokio::select! {
            ended = all => ended.into_iter().map(Result::unwrap).collect(),
            r = reaper.run() => panic!("reaper ended: {r:?}"),
        }
    }

    #[tokio::test]
    async fn statuses_reach_their_waiters() {
        let got = run_commands(&["exit 0", "exit 7", "kill -9 $$", "kill -15 $$", "exit 255"]).await;
        assert_eq!(
            got.iter().map(|e| (e.code, e.signal)).collect::<Vec<_>>(),
            [(0, 0), (7, 0), (137, 9), (143, 15), (255, 0)]
        );
    }

    #[tokio::test]
    async fn concurrent_short_lived_children_are_all_reaped() {
        assert_eq!(run_commands(&["exit 3"; 50]).await.iter().filter(|e| e.code == 3).count(), 50);
    }

    /// The program of a child may be in a directory that this process serves, which makes its fork slow.
    #[test]
    fn registered_child_is_reaped_while_another_forks() {
        use rustix::process::{WaitId, WaitIdOptions, waitid};
        let reaper = Reaper::new(Scope::Everything);
        let another = reaper.forking.read().unwrap();
        let mut spawned = spawn(&reaper, "/bin/sh", &["-c", "exit 3"]).unwrap();
        waitid(WaitId::Pid(spawned.pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        reaper.collect();
        drop(another);
        assert_eq!(spawned.exit.try_recv().unwrap().code, 3);
    }

    #[tokio::test]
    async fn process_that_ignores_sighup_is_killed() {
        let reaper = Reaper::new(Scope::Own);
        let script = "trap '' HUP; sleep 60 & wait; wait; sleep 60";
        let spawned = spawn(&reaper, "/bin/sh", &["-c", script]).unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        reaper.hang_up(spawned.pid);
        let exit = tokio::select! { e = spawned.exit => e.unwrap(), r = reaper.run() => panic!("{r:?}") };
        assert_eq!((exit.code, exit.signal), (137, 9));
        assert!(!reaper.signal(spawned.pid, Signal::TERM), "collected: no longer ours to signal");
    }

    #[tokio::test]
    async fn failed_spawn_leaves_no_reaper_entry() {
        let reaper = Reaper::new(Scope::Own);
        assert!(spawn(&reaper, "/no/such", &[]).is_err());
        assert!(reaper.lock().is_empty());
    }
}
