//! Executes a command next to the workload, for as long as its client listens.

use std::sync::Arc;
use std::time::Duration;

use coracle_proto::guest::exec_request::Message as In;
use coracle_proto::guest::exec_response::Message as Out;
use coracle_proto::guest::{ExecRequest, ExecResponse, Process, Started as StartedMessage};
use futures_util::{Stream, StreamExt};
use rustix::process::{Pid, Signal};
use tokio::sync::watch;
use tonic::Status;

use crate::agent::Agent;
use crate::cgroup::Joined;
use crate::containers::Join;
use crate::error::Error;
use crate::exit::exit_status;
use crate::pipe::{CHUNK, Pipe};
use crate::process::{self, Io, Running, SpawnError};
use crate::task_stream::{Outbox, TaskStream};
use crate::workload::number;
use coracle_spawn::{Reaper, Thread};

/// Silence after which the stream ends, when the command has exited and its children still hold the pipes open.
const QUIET: Duration = Duration::from_millis(100);
/// Bytes that a terminal reads as the end of input.
const END_OF_INPUT: &[u8] = &[4];

/// Starts `process` and returns the stream of its output; `input` has the client's further messages.
pub(crate) async fn exec<S>(
    agent: &Agent,
    process: Process,
    input: S,
) -> Result<TaskStream<ExecResponse>, Error>
where
    S: Stream<Item = Result<ExecRequest, Status>> + Send + Unpin + 'static,
{
    let limit = Some(process.timeout_ms).filter(|ms| *ms > 0).map(|ms| Duration::from_millis(ms.into()));
    let reaper = Arc::clone(&agent.reaper);
    let started = match process.container.as_str() {
        "" => {
            let (root, cgroup) = (agent.root()?, agent.join_workload()?);
            process::run_start(Thread::OfFiles, move || {
                let running = process::start(&reaper, &root, &process, false, cgroup)?;
                Ok(Started::of(running, reaper, None))
            })
            .await?
        }
        id => {
            let Join { root, isolation, cgroup } = agent.containers.join(id)?;
            process::run_start(Thread::OfFiles, move || {
                let running = process::start_isolated(&reaper, &root, &process, false, isolation)?;
                Ok(Started::of(running, reaper, Some(cgroup)))
            })
            .await?
        }
    };
    match started {
        Ok(Started { running, group }) => Ok(TaskStream::new(|outbox, tasks| {
            tasks.spawn(serve_process(running, group, input, outbox, limit));
        })),
        Err(SpawnError::Request(error)) => Err(error),
        Err(SpawnError::Cannot(exit)) => Ok(TaskStream::new(|outbox, tasks| {
            tasks.spawn(async move {
                let _ = send(&outbox, Out::Exit(exit_status(exit))).await;
            });
        })),
    }
}

/// Running process. Dropping it hangs up the process, if the client has gone meanwhile.
struct Started {
    running: Running,
    group: Group,
}

impl Started {
    fn of(running: Running, reaper: Arc<Reaper>, cgroup: Option<Joined>) -> Self {
        let group = Group { reaper, pid: running.pid, cgroup };
        Self { running, group }
    }
}

/// Process group of one exec, which gets SIGHUP when its client has gone. Dropping it has no effect after its end.
struct Group {
    reaper: Arc<Reaper>,
    pid: Pid,
    /// Cgroup of the command in a container, with all its descendants.
    cgroup: Option<Joined>,
}

impl Group {
    /// Kills the command after the time limit, if there is one.
    async fn expire(&self, limit: Option<Duration>) {
        let Some(limit) = limit else { return std::future::pending().await };
        tokio::time::sleep(limit).await;
        match &self.cgroup {
            Some(cgroup) => cgroup.kill(),
            None => drop(self.reaper.signal(self.pid, Signal::KILL)),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.reaper.hang_up(self.pid);
    }
}

async fn serve_process<S>(
    running: Running,
    group: Group,
    input: S,
    outbox: Outbox<ExecResponse>,
    limit: Option<Duration>,
) where
    S: Stream<Item = Result<ExecRequest, Status>> + Send + Unpin,
{
    if send(&outbox, Out::Started(StartedMessage { pid: number(running.pid) })).await.is_err() {
        return;
    }
    let (gone, over) = watch::channel(false);
    let exit = async {
        let exit = async { running.exit.await.unwrap_or_default() };
        let exit = run_alongside(group.expire(limit), exit).await;
        gone.send_replace(true);
        exit
    };
    let exit = match running.io {
        Io::Terminal { master, stdin } => {
            let keys = Keys { target: stdin.then_some(&master), terminal: Some(&master), group: &group };
            let output = pump(&master, Out::Stdout, &outbox, over);
            run_alongside(keys.forward(input), async { tokio::join!(exit, output).0 }).await
        }
        Io::Pipes { stdin, stdout, stderr } => {
            let (out, err) = (
                pump(&stdout, Out::Stdout, &outbox, over.clone()),
                pump(&stderr, Out::Stderr, &outbox, over),
            );
            let input = async {
                let keys = Keys { target: stdin.as_ref(), terminal: None, group: &group };
                let rest = keys.until_closed(input).await;
                drop(stdin); // the command reads the end of its input
                if let Some(rest) = rest {
                    Keys { target: None, terminal: None, group: &group }.forward(rest).await;
                }
            };
            run_alongside(input, async { tokio::join!(exit, out, err).0 }).await
        }
    };
    let _ = send(&outbox, Out::Exit(exit_status(exit))).await;
}

/// Runs `input` concurrently, for as long as `work` runs.
async fn run_alongside<T>(input: impl Future<Output = ()>, work: impl Future<Output = T>) -> T {
    tokio::pin!(input, work);
    tokio::select! {
        done = &mut work => return done,
        () = input => {}
    }
    work.await
}

/// Sends the output of the command. Waits while the client does not read, which also blocks the command.
async fn pump(
    pipe: &Pipe,
    wrap: fn(Vec<u8>) -> Out,
    outbox: &Outbox<ExecResponse>,
    mut over: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = tokio::select! {
            biased;
            read = pipe.read(&mut buffer) => read,
            () = wait_for_silence(&mut over, QUIET) => return,
        };
        match read {
            Ok(n) if n > 0 => {
                let data = buffer.get(..n).unwrap_or_default().to_vec();
                if send(outbox, wrap(data)).await.is_err() {
                    return;
                }
            }
            _ => return,
        }
    }
}

/// Returns when the process has ended and `silence` has passed since this call.
async fn wait_for_silence(over: &mut watch::Receiver<bool>, silence: Duration) {
    if over.wait_for(|over| *over).await.is_err() {
        std::future::pending::<()>().await;
    }
    tokio::time::sleep(silence).await;
}

/// Destinations of the client's messages.
struct Keys<'a> {
    target: Option<&'a Pipe>,
    terminal: Option<&'a Pipe>,
    group: &'a Group,
}

impl Keys<'_> {
    /// Processes all messages of the client.
    async fn forward<S>(&self, input: S)
    where
        S: Stream<Item = Result<ExecRequest, Status>> + Unpin,
    {
        let mut input = input;
        while let Some(rest) = self.until_closed(input).await {
            if let Some(terminal) = self.target {
                let _ = terminal.write_all(END_OF_INPUT).await;
            }
            input = rest;
        }
    }

    /// Processes messages until the client closes stdin; then returns the rest of the stream, which may still resize and
    /// signal. `None` at the end of the stream.
    async fn until_closed<S>(&self, mut input: S) -> Option<S>
    where
        S: Stream<Item = Result<ExecRequest, Status>> + Unpin,
    {
        while let Some(Ok(request)) = input.next().await {
            match request.message {
                Some(In::Stdin(bytes)) => {
                    if let Some(target) = self.target {
                        let _ = target.write_all(&bytes).await; // stdin closed: the rest is lost, as in a shell's pipe
                    }
                }
                Some(In::CloseStdin(true)) => return Some(input),
                Some(In::Resize(to)) => {
                    if let Some(terminal) = self.terminal {
                        let (rows, cols) = process::dimensions(to.rows, to.cols);
                        let _ = terminal.resize(rows, cols);
                    }
                }
                Some(In::Signal(number)) => {
                    if let Some(signal) = Signal::from_named_raw(number) {
                        self.group.reaper.signal(self.group.pid, signal);
                    }
                }
                Some(In::Start(_) | In::CloseStdin(false)) | None => {}
            }
        }
        None
    }
}

async fn send(outbox: &Outbox<ExecResponse>, message: Out) -> Result<(), ()> {
    outbox.send(Ok(ExecResponse { message: Some(message) })).await.map_err(drop)
}
