//! Supervisor of the children of `coracle up`: restarts a child that ends, and gives up on one that ends shortly after each
//! start.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::plane::Program;
use coracle_cli::error::Failure;

/// Run time below which a run counts as failed at once.
const MIN_UPTIME: Duration = Duration::from_secs(5);

/// Number of consecutive runs that fail at once after which the supervisor gives up.
const MAX_FAST_EXITS: u32 = 3;

/// Pause before a restart.
const PAUSE: Duration = Duration::from_millis(700);

/// Time that our own programs get after SIGTERM: a node stops its guests in that time.
pub(crate) const CHILD_GRACE: Duration = Duration::from_secs(20);

/// Time that a part of the control plane gets after SIGTERM. Everything that it acknowledged is in etcd, which syncs before it
/// answers; an API server would wait for its watchers for a minute.
const PLANE_GRACE: Duration = Duration::from_secs(2);

/// Programs in the order in which they are stopped: each before the programs that it needs.
const ORDER: [&[&str]; 4] = [
    &["kubelet"],
    &["node", "operator"],
    &["kube-scheduler", "kube-controller-manager", "kube-apiserver", "registry"],
    &["etcd"],
];

/// Returns the position of a program in [`ORDER`].
fn rank(name: &str) -> usize {
    ORDER.iter().position(|names| names.contains(&name)).unwrap_or(1)
}

fn grace(name: &str) -> Duration {
    if rank(name) == 1 { CHILD_GRACE } else { PLANE_GRACE }
}

/// Number of log lines in the report of a program's failure.
const LAST_LINES: usize = 8;

/// Number of bytes at the end of a log that are read for these lines.
const LAST_BYTES: usize = 16 * 1024;

/// Children of one system.
pub(crate) struct Supervisor {
    logs: PathBuf,
    /// Children of each rank, and the token that stops them.
    ranks: [(CancellationToken, JoinSet<()>); ORDER.len()],
    gave_up: mpsc::Sender<Failure>,
}

impl Supervisor {
    /// The receiver yields the failure of the first program that the supervisor gives up on.
    pub(crate) fn new(logs: PathBuf) -> (Self, mpsc::Receiver<Failure>) {
        let (gave_up, failures) = mpsc::channel(1);
        (Self { logs, ranks: Default::default(), gave_up }, failures)
    }

    /// Keeps `program` running until [`Self::stop`].
    pub(crate) fn start(&mut self, program: Program) {
        let (logs, gave_up) = (self.logs.clone(), self.gave_up.clone());
        let (stop, children) = &mut self.ranks[rank(program.name)];
        let stop = stop.clone();
        children.spawn(async move {
            if let Err(failure) = supervise(&logs, &program, &stop).await {
                let _another_was_first = gave_up.try_send(failure);
            }
        });
    }

    /// Stops the kubelet, if there is one, and waits for it: otherwise it would restart VMs that are stopped next.
    pub(crate) async fn stop_kubelet(&mut self) {
        let (stop, children) = &mut self.ranks[0];
        stop.cancel();
        while children.join_next().await.is_some() {}
    }

    /// Stops every child and waits for it; children that need others are stopped first.
    pub(crate) async fn stop(self) {
        for (stop, mut children) in self.ranks {
            stop.cancel();
            while children.join_next().await.is_some() {}
        }
    }
}

/// Runs a program until `stop`, and restarts it when it ends.
async fn supervise(logs: &Path, program: &Program, stop: &CancellationToken) -> Result<(), Failure> {
    let log = logs.join(format!("{}.log", program.name));
    let mut short_lives = 0;
    while !stop.is_cancelled() {
        let began = Instant::now();
        let how = match spawn(&log, program) {
            Ok(mut child) => tokio::select! {
                ended = child.wait() => ended.map_or_else(|e| e.to_string(), |status| status.to_string()),
                () = stop.cancelled() => {
                    terminate(&mut child, grace(program.name)).await;
                    return Ok(());
                }
            },
            Err(error) => format!("it cannot be started: {error}"),
        };
        short_lives = if began.elapsed() < MIN_UPTIME { short_lives + 1 } else { 0 };
        if short_lives >= MAX_FAST_EXITS {
            return Err(crash_loop_failure(program.name, &how, &log));
        }
        eprintln!("{} ended ({how}), starting it again; see logs/{}.log", program.name, program.name);
        stop.run_until_cancelled(sleep(PAUSE)).await;
    }
    Ok(())
}

fn crash_loop_failure(name: &str, how: &str, log: &Path) -> Failure {
    let last = last_lines(&std::fs::read(log).unwrap_or_default());
    let mut message = format!("{name} ended {MAX_FAST_EXITS} times right after its start ({how})");
    for line in last {
        message += "\n  | ";
        message += &line;
    }
    Failure::new("COR-UP-008", message).help(format!("its whole log: {}", log.display()))
}

/// Returns the last lines of a log without control characters. Pure.
fn last_lines(log: &[u8]) -> Vec<String> {
    let tail = &log[log.len().saturating_sub(LAST_BYTES)..];
    let text = String::from_utf8_lossy(tail);
    let lines: Vec<_> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    let from = lines.len().saturating_sub(LAST_LINES);
    lines[from..].iter().map(|line| coracle_cli::error::printable(line)).collect()
}

fn spawn(log: &Path, program: &Program) -> std::io::Result<Child> {
    let log = File::options().create(true).append(true).open(log)?;
    Command::new(&program.path)
        .args(&program.args)
        .envs(program.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
}

/// Sends SIGTERM, then SIGKILL after `grace`.
pub(crate) async fn terminate(child: &mut Child, grace: Duration) {
    if let Some(pid) =
        child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw)
    {
        let _already_gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if timeout(grace, child.wait()).await.is_err() {
        let _already_gone = child.kill().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(path: &Path, args: &[&str]) -> Program {
        Program {
            name: "etcd",
            path: path.to_owned(),
            args: args.iter().map(|a| (*a).to_owned()).collect(),
            env: vec![],
        }
    }

    #[tokio::test]
    async fn crashing_program_is_given_up_with_log_tail() {
        let dir = tempfile::tempdir().unwrap();
        let (mut supervisor, mut failures) = Supervisor::new(dir.path().to_owned());
        let script = "echo first; echo 'listen tcp 127.0.0.1:2379: address in use' >&2; exit 3";
        supervisor.start(program(Path::new("/bin/sh"), &["-c", script]));
        let failure = timeout(Duration::from_secs(5), failures.recv()).await.unwrap().unwrap();
        assert_eq!(failure.code, "COR-UP-008");
        assert!(failure.message.starts_with("etcd ended 3 times right after its start (exit status: 3)"));
        assert!(failure.message.contains("| listen tcp 127.0.0.1:2379: address in use"), "{failure}");
        assert!(failure.help.unwrap().ends_with("etcd.log"));
        supervisor.stop().await;
    }

    #[tokio::test]
    async fn missing_program_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let (mut supervisor, mut failures) = Supervisor::new(dir.path().to_owned());
        supervisor.start(program(Path::new("/nowhere/etcd"), &[]));
        let failure = timeout(Duration::from_secs(5), failures.recv()).await.unwrap().unwrap();
        assert!(failure.message.contains("cannot be started"), "{failure}");
        supervisor.stop().await;
    }

    #[tokio::test]
    async fn etcd_stops_after_its_dependents() {
        let dir = tempfile::tempdir().unwrap();
        let (mut supervisor, _failures) = Supervisor::new(dir.path().to_owned());
        let ends = dir.path().join("ends");
        for name in ["etcd", "kube-apiserver", "node"] {
            let script = format!(
                "trap 'echo {name} >> {}; exit 0' TERM; echo up; while :; do sleep 0.02; done",
                ends.display()
            );
            let args = ["-c".to_owned(), script].to_vec();
            supervisor.start(Program { name, path: "/bin/sh".into(), args, env: vec![] });
        }
        let is_up = |name| {
            std::fs::read_to_string(dir.path().join(format!("{name}.log"))).is_ok_and(|l| !l.is_empty())
        };
        while !["etcd", "kube-apiserver", "node"].into_iter().all(is_up) {
            sleep(Duration::from_millis(10)).await;
        }
        supervisor.stop().await;
        assert_eq!(std::fs::read_to_string(ends).unwrap(), "node\nkube-apiserver\netcd\n");
    }

    #[test]
    fn last_log_lines_are_bounded_and_sanitised() {
        let log: Vec<u8> = (0..100).flat_map(|n| format!("line {n}\n\n").into_bytes()).collect();
        let lines = last_lines(&log);
        assert_eq!((lines.len(), lines[0].as_str()), (LAST_LINES, "line 92"));
        assert_eq!(last_lines(b"\x1b[2Jgone\xff"), [" [2Jgone\u{fffd}"]);
        assert!(last_lines(b"").is_empty());
    }
}
