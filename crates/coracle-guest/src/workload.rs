//! The image's command: started once, waited for by anyone, its output kept.
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
use crate::reap::{Exit, Reaper};
use crate::rootfs::Root;
use crate::sys::uptime_ms;

/// After the workload's exit its descendants may hold the pipes open; so long a silence ends the log.
const QUIET: Duration = Duration::from_millis(200);
/// A second request does not wait for a start that takes longer, but says what it is doing.
const SLOW: Duration = Duration::from_secs(30);
/// And so long at most, however much they have to say.
const LINGER: Duration = Duration::from_secs(2);

/// How far it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WorkloadPhase {
    NotStarted,
    Running(Pid),
    Exited(Exit),
}

impl WorkloadPhase {
    /// How it ended, when it has.
    pub(crate) fn exit(self) -> Option<Exit> {
        match self {
            Self::Exited(exit) => Some(exit),
            Self::NotStarted | Self::Running(_) => None,
        }
    }
}

/// Our ends of a process's input.
#[derive(Clone, Debug, Default)]
pub(crate) struct Input {
    /// `None`: it has none, or it is closed.
    pub(crate) stdin: Option<Arc<Pipe>>,
    pub(crate) terminal: Option<Arc<Pipe>>,
}

#[derive(Debug)]
pub(crate) struct Workload {
    progress: watch::Sender<WorkloadPhase>,
    /// Guest wall clock at its end, nanoseconds since 1970.
    ended_ns: AtomicI64,
    logs: Arc<Logs>,
    /// What attachments write to, while it runs.
    input: Mutex<Input>,
    /// The task that reads the output and waits for the exit; ends by itself. Locked while the command is started.
    keeper: Mutex<JoinSet<()>>,
    /// Uptime at the beginning of its start, milliseconds.
    began_ms: AtomicU64,
}

impl Workload {
    /// One that was not started, and where its output goes.
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

    /// Starts the command, once; later calls answer how the first one went. Gives the process id, 0 when it is over.
    ///
    /// # Errors
    /// An invalid request. A command that cannot run counts as an exit.
    pub(crate) fn start(
        self: &Arc<Self>,
        reaper: &Reaper,
        root: &Root,
        wanted: &Process,
        cgroup: Option<OwnedFd>,
    ) -> Result<u32, Error> {
        self.start_with(|| process::start(reaper, root, wanted, true, cgroup))
    }

    /// As [`Workload::start`], set apart from the agent.
    ///
    /// # Errors
    /// As [`Workload::start`].
    pub(crate) fn start_isolated(
        self: &Arc<Self>,
        reaper: &Reaper,
        root: &Root,
        wanted: &Process,
        isolation: Box<dyn Isolation>,
    ) -> Result<u32, Error> {
        self.start_with(|| process::start_isolated(reaper, root, wanted, true, isolation))
    }

    /// Whether nothing runs or has something to say that is not in the log.
    pub(crate) fn is_over(&self) -> bool {
        match self.progress() {
            WorkloadPhase::NotStarted => true,
            WorkloadPhase::Running(_) => false,
            WorkloadPhase::Exited(_) => self.logs.is_complete(),
        }
    }

    /// One that is over was never started.
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
                keeper.spawn(async move { this.keep(output, running.exit).await });
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

    /// Signals the workload's process group. False when there is none.
    pub(crate) fn signal(&self, reaper: &Reaper, signal: Signal) -> bool {
        match self.progress() {
            WorkloadPhase::Running(pid) => reaper.signal(pid, signal),
            WorkloadPhase::NotStarted | WorkloadPhase::Exited(_) => false,
        }
    }

    /// Guest wall clock at its end, nanoseconds since 1970.
    pub(crate) fn exited_at_ns(&self) -> i64 {
        self.ended_ns.load(Ordering::Relaxed)
    }

    /// Waits until it has started, or could not. Cancel-safe.
    pub(crate) async fn begun(&self) -> WorkloadPhase {
        let mut progress = self.progress.subscribe();
        if progress.wait_for(|phase| *phase != WorkloadPhase::NotStarted).await.is_err() {
            std::future::pending::<()>().await; // the sender lives in `self`
        }
        self.progress()
    }

    /// Waits for the exit. Cancel-safe.
    pub(crate) async fn exited(&self) -> Exit {
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

    /// Where attachments write to now.
    pub(crate) fn input(&self) -> Input {
        self.input.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The process reads the end of its input, once those have gone who write now.
    pub(crate) fn close_stdin(&self) {
        self.input.lock().unwrap_or_else(PoisonError::into_inner).stdin = None;
    }

    /// Keeps the input, so that a process that asked for an open one does not read its end; gives the output.
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

    /// Takes the output until the end, whether or not anyone reads the logs.
    async fn keep(&self, output: Output, exit: oneshot::Receiver<Exit>) {
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

    /// Takes what the process writes; after its exit, what it wrote before, and a little of what its descendants do.
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

    /// Takes a piece of output, once there is room for it; 0 at the end. Cancel-safe.
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

/// Our ends of a process's output.
enum Output {
    Pipes { stdout: Pipe, stderr: Pipe },
    Terminal(Arc<Pipe>),
}

pub(crate) fn number(pid: Pid) -> u32 {
    u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0)
}
