//! Streaming client of client-go, as a process.

use std::process::Stdio;

use coracle_testkit::tools;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

use crate::support::{DEADLINE, Served};

/// Kind of client: its protocol, and the versions that it offers (empty: those of the library).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) via: &'static str,
    pub(crate) protocols: &'static str,
}

pub(crate) const SPDY: Kind = Kind { via: "spdy", protocols: "" };
pub(crate) const SPDY_V3: Kind = Kind { via: "spdy", protocols: "v3.channel.k8s.io" };
pub(crate) const SPDY_V2: Kind = Kind { via: "spdy", protocols: "v2.channel.k8s.io" };
pub(crate) const SPDY_V1: Kind = Kind { via: "spdy", protocols: "channel.k8s.io" };
pub(crate) const V5: Kind = Kind { via: "websocket", protocols: "" };
pub(crate) const V4: Kind = Kind { via: "websocket", protocols: "v4.channel.k8s.io" };

/// Output and exit code of a client. The exit code 99 means an error of the client.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

fn client() -> Option<Command> {
    let [client] = tools::require(["streaming-client"])?;
    let mut command = Command::new(client);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    Some(command)
}

/// Starts a client of `kind` for `program`, with `streams` out of `stdin stdout stderr tty`, and further flags. `None` if the
/// client is not installed.
pub(crate) fn start(
    served: &Served,
    kind: Kind,
    program: &str,
    streams: &str,
    flags: &[&str],
) -> Option<Child> {
    let mut command = client()?;
    command.args(["exec", "-via", kind.via, "-protocols", kind.protocols]);
    for stream in ["stdin", "stdout", "stderr", "tty"] {
        command.arg(format!("-{stream}={}", streams.split(' ').any(|wanted| wanted == stream)));
    }
    let query = streams.replace(' ', "&");
    command.args(flags).arg(served.url(&format!("/exec/{program}?{query}")));
    Some(command.spawn().unwrap())
}

/// Sends `input` to a client and waits for its end.
pub(crate) async fn finish(mut child: Child, input: &[u8]) -> Ended {
    let mut stdin = child.stdin.take().unwrap();
    let writing = async {
        // The process may end before it has read all input.
        let _either = stdin.write_all(input).await;
        drop(stdin);
    };
    let ending = async { tokio::join!(writing, child.wait_with_output()).1.unwrap() };
    let output = timeout(DEADLINE, ending).await.expect("the client does not end");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Ended { code: output.status.code(), stdout: output.stdout, stderr }
}

/// Combines [`start`] and [`finish`].
pub(crate) async fn exec(
    served: &Served,
    kind: Kind,
    program: &str,
    streams: &str,
    input: &[u8],
) -> Option<Ended> {
    Some(finish(start(served, kind, program, streams, &[])?, input).await)
}

/// Client that forwards ports.
pub(crate) struct Forwarder {
    child: Child,
    stdin: ChildStdin,
    /// Local ports, in the order of the request.
    pub(crate) local: Vec<u16>,
}

impl Forwarder {
    /// Starts to forward `ports`, and returns when the client listens.
    pub(crate) async fn start(served: &Served, via: &str, ports: &[u16]) -> Option<Self> {
        let mut command = client()?;
        command.args(["forward", "-via", via]).arg(served.url("/portforward"));
        command.args(ports.iter().map(|port| format!(":{port}")));
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let mut local = Vec::new();
        while local.len() < ports.len() {
            let line =
                timeout(DEADLINE, lines.next_line()).await.unwrap().unwrap().expect("the client ended");
            let (_, rest) = line.split_once("127.0.0.1:").unwrap();
            local.push(rest.split(' ').next().unwrap().parse().unwrap());
        }
        Some(Self { child, stdin, local })
    }

    /// Closes the client, or waits until it ends itself; returns its exit code and its standard error.
    pub(crate) async fn end(self, close: bool) -> (Option<i32>, String) {
        let Self { mut child, stdin, .. } = self;
        let kept = (!close).then_some(stdin);
        let mut stderr = String::new();
        let ending = async {
            child.stderr.take().unwrap().read_to_string(&mut stderr).await.unwrap();
            child.wait().await.unwrap().code()
        };
        let code = timeout(DEADLINE, ending).await.expect("the client does not end");
        drop(kept);
        (code, stderr)
    }
}
