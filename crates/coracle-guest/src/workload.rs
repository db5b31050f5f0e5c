//! Workload: the command of the image, started once. Any number of callers can wait for it, and its output is kept.
//!
//! ```text
//! NotStarted ──start──▶ Running ──exit──▶ Exited
//!      └──────────start, cannot run─────────▲
//! ```

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_proto::guest::{Process, Stream};
use rustix::process::{Pid, Signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::Error;
use crate::logs::{Logs, READ};
use crate::pipe::Pipe;
use crate::process::{self, Io, Isolation, Running, SpawnError};
use crate::rootfs::Root;
use crate::sys::uptime_ms;
use coracle_spawn::{Exit, Reaper};

/// Silence after which the log ends, when the workload has exited and its descendants still hold the pipes open.
const QUIET: Duration = Duration::from_millis(200);
/// Time after which a second start request does not wait for a slow start any more, but reports its state.
const SLOW: Duration = Duration::from_secs(30);
/// Maximum time to read the output of descendants after the exit, even if they keep writing.
const LINGER: Duration = Duration::from_secs(2);

/// Phase of the workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WorkloadPhase {
    NotStarted,
    Running(Pid),
    Exited(Exit),
}

impl WorkloadPhase {
    /// Exit of the workload, if it has ended.
    pub(crate) fn exit(self) -> Option<Exit> {
        match self {
            Self::Exited(exit) => Some(exit),
            Self::NotStarted | Self::Running(_) => None,
        }
    }
}

/// Agent's ends of a process's input.
#[derive(Clone, Debug, Default)]
pub(crate) struct Input {
    /// Standard input; `None` if the process has none, or it is closed.
    pub(crate) stdin: Option<Arc<Pipe>>,
    pub(crate) terminal: Option<Arc<Pipe>>,
}

#[derive(Debug)]
pub(crate) struct Workload {
    progress: watch::Sender<WorkloadPhase>,
    /// Wall clock of the guest at the exit, nanoseconds since 1970.
    ended_ns: AtomicI64,
    logs: Arc<Logs>,
    /// Input for attachments, while the process runs.
    input: Mutex<Input>,
    /// Task that reads the output and waits for the exit; it ends by itself. Locked while the command is started.
    keeper: Mutex<JoinSet<()>>,
    /// Uptime at the beginning of the start, milliseconds.
    began_ms: AtomicU64,
}

impl Workload {
    /// Makes a workload that was not started, with the log for its output.
    pub(crate) fn new(logs: Arc<Logs>) -> Arc<Self> {
        let progress = watch::Sender::new(WorkloadPhase::NotStarted);
        Arc::new(Self {
            progress,
            ended_ns: AtomicI64::new(0),
            logs,
            input: Mutex::default(),
            keeper: Mutex::default(),
            began_ms: AtomicU64::new(0),
        })
    }

    pub(crate) fn progress(&self) -> WorkloadPhase {
        self.progress.borrow().clone()
    }

    pub(crate) fn logs(&self) -> &Arc<Logs> {
        &self.logs
    }

    /// Starts the command, once; later calls return the result of the first one. Returns the process id, 0 if it has ended.
    ///
    /// # Errors
    /// The request is invalid. A command that cannot run counts as an exit.
    pub(crate) fn start(
        self: &Arc<Self>,
        reaper: &Reaper,
        root: &Root,
        wanted: &Process,
        cgroup: Option<OwnedFd>,
    ) -> Result<u32, Error> {
        self.start_with(|| process::start(reaper, root, wanted, true, cgroup))
    }

    /// Like [`Workload::start`], with the isolation of the caller.
    ///
    /// # Errors
    /// As for [`Workload::start`].
    pub(crate) fn start_isolated(
        self: &Arc<Self>,
        reaper: &Reaper,
        root: &Root,
        wanted: &Process,
        isolation: Box<dyn Isolation>,
    ) -> Result<u32, Error> {
        self.start_with(|| process::start_isolated(reaper, root, wanted, true, isolation))
    }

    /// Whether no process runs, and the output in the log is complete.
    pub(crate) fn is_over(&self) -> bool {
        match self.progress() {
            WorkloadPhase::NotStarted => true,
            WorkloadPhase::Running(_) => false,
            WorkloadPhase::Exited(_) => self.logs.is_complete(),
        }
    }

    /// Resets an ended workload to not started.
    pub(crate) fn reset(&self) {
        self.logs.reset();
        self.progress.send_replace(WorkloadPhase::NotStarted);
    }

    /// Waits until no start is under way; blocking.
    pub(crate) fn settle(&self) {
        drop(self.keeper());
    }

    fn start_with(
        self: &Arc<Self>,
        start: impl FnOnce() -> Result<Running, SpawnError>,
    ) -> Result<u32, Error> {
        let mut keeper = match self.keeper.try_lock() {
            Ok(keeper) => keeper,
            Err(_) => {
                let since =
                    Duration::from_millis(uptime_ms().saturating_sub(self.began_ms.load(Ordering::Relaxed)));
                if since >= SLOW {
                    let doing = coracle_procfs::stuck::describe();
                    return Err(Error::UnderWay(format!("being started for {} s: {doing}", since.as_secs())));
                }
                self.keeper()
            }
        };
        match self.progress() {
            WorkloadPhase::Running(pid) => return Ok(number(pid)),
            WorkloadPhase::Exited(_) => return Ok(0),
            WorkloadPhase::NotStarted => {}
        }
        self.began_ms.store(uptime_ms(), Ordering::Relaxed);
        match start() {
            Ok(running) => {
                self.progress.send_replace(WorkloadPhase::Running(running.pid));
                let this = Arc::clone(self);
                let output = self.split(running.io);
                keeper.spawn(async move { this.drain_output(output, running.exit).await });
                Ok(number(running.pid))
            }
            Err(SpawnError::Cannot(exit)) => {
                self.ended_ns.store(crate::sys::wall_clock_ns(), Ordering::Relaxed);
                self.progress.send_replace(WorkloadPhase::Exited(exit));
                self.logs.complete();
                Ok(0)
            }
            Err(SpawnError::Request(error)) => Err(error),
        }
    }

    /// Signals the process group of the workload. Returns false if it does not run.
    pub(crate) fn signal(&self, reaper: &Reaper, signal: Signal) -> bool {
        match self.progress() {
            WorkloadPhase::Running(pid) => reaper.signal(pid, signal),
            WorkloadPhase::NotStarted | WorkloadPhase::Exited(_) => false,
        }
    }

    /// Wall clock of the guest at the exit, nanoseconds since 1970.
    pub(crate) fn exited_at_ns(&self) -> i64 {
        self.ended_ns.load(Ordering::Relaxed)
    }

    /// Waits until the workload has started, or could not start. Cancel-safe.
    pub(crate) async fn wait_begun(&self) -> WorkloadPhase {
        let mut progress = self.progress.subscribe();
        if progress.wait_for(|phase| *phase != WorkloadPhase::NotStarted).await.is_err() {
            std::future::pending::<()>().await; // the sender lives in `self`
        }
        self.progress()
    }

    /// Waits for the exit. Cancel-safe.
    pub(crate) async fn wait_exit(&self) -> Exit {
        let mut progress = self.progress.subscribe();
        loop {
            if let WorkloadPhase::Exited(exit) = &*progress.borrow_and_update() {
                return exit.clone();
            }
            if progress.changed().await.is_err() {
                std::future::pending::<()>().await; // the sender lives in `self`
            }
        }
    }

    /// Current input for attachments.
    pub(crate) fn input(&self) -> Input {
        self.input.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Closes the input. The process reads the end of it once current writers have finished.
    pub(crate) fn close_stdin(&self) {
        self.input.lock().unwrap_or_else(PoisonError::into_inner).stdin = None;
    }

    /// Stores the input, so that a process which needs an open input does not read its end, and returns the output.
    fn split(&self, io: Io) -> Output {
        let (input, output) = match io {
            Io::Pipes { stdin, stdout, stderr } => {
                (Input { stdin: stdin.map(Arc::new), terminal: None }, Output::Pipes { stdout, stderr })
            }
            Io::Terminal { master, stdin } => {
                let master = Arc::new(master);
                let typed = stdin.then(|| master.clone());
                (Input { stdin: typed, terminal: Some(master.clone()) }, Output::Terminal(master))
            }
        };
        *self.input.lock().unwrap_or_else(PoisonError::into_inner) = input;
        output
    }

    /// Reads the output to the end, whether or not the logs are read.
    async fn drain_output(&self, output: Output, exit: oneshot::Receiver<Exit>) {
        let (gone, over) = watch::channel(false);
        let exit = async {
            let exit =
                exit.await.unwrap_or(Exit { code: 255, signal: 0, error: "its status was lost".into() });
            self.ended_ns.store(crate::sys::wall_clock_ns(), Ordering::Relaxed);
            self.progress.send_replace(WorkloadPhase::Exited(exit));
            *self.input.lock().unwrap_or_else(PoisonError::into_inner) = Input::default();
            gone.send_replace(true);
        };
        match output {
            Output::Pipes { stdout, stderr } => {
                tokio::join!(
                    exit,
                    self.record(&stdout, Stream::Stdout, over.clone()),
                    self.record(&stderr, Stream::Stderr, over)
                );
            }
            Output::Terminal(master) => {
                tokio::join!(exit, self.record(&master, Stream::Stdout, over));
            }
        }
        self.logs.complete();
    }

    /// Reads the output of the process. After the exit it reads what was written before, and for a limited time the output of
    /// descendants.
    async fn record(&self, pipe: &Pipe, stream: Stream, mut over: watch::Receiver<bool>) {
        let mut buffer = vec![0; READ];
        let ended = async { drop(over.wait_for(|over| *over).await) };
        tokio::select! {
            biased;
            () = ended => {}
            () = async { while self.take(pipe, stream, &mut buffer).await > 0 {} } => return,
        }
        let mut left = pipe.readable();
        while left > 0 {
            match self.take(pipe, stream, &mut buffer).await {
                0 => return,
                taken => left = left.saturating_sub(taken),
            }
        }
        let descendants =
            async { while matches!(timeout(QUIET, self.take(pipe, stream, &mut buffer)).await, Ok(1..)) {} };
        let _as_much_as_they_like = timeout(LINGER, descendants).await;
    }

    /// Reads a piece of output, once there is space for it; 0 at the end. Cancel-safe.
    async fn take(&self, pipe: &Pipe, stream: Stream, buffer: &mut [u8]) -> usize {
        tokio::task::yield_now().await; // a flood must not starve the other requests
        self.logs.room().await;
        let taken = pipe.read(buffer).await.unwrap_or(0);
        if taken > 0 {
            self.logs.push(stream, buffer.get(..taken).unwrap_or_default(), crate::sys::wall_clock_ns());
        }
        taken
    }

    fn keeper(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Agent's ends of a process's output.
enum Output {
    Pipes { stdout: Pipe, stderr: Pipe },
    Terminal(Arc<Pipe>),
}

pub(crate) fn number(pid: Pid) -> u32 {
    u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0)
}
