//! Workloads of the guest beside the noisy one, one kind at a time.

use std::time::{Duration, Instant};

use coracle_proto::host as pb;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::system::System;

/// Duration of one window.
const WINDOW: Duration = Duration::from_secs(8);
/// Size of the served page in bytes.
const PAGE: usize = 1 << 20;
const PORT: u16 = 8080;

/// Kind of workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Counts in a shell.
    Compute,
    /// Writes 1 MiB and flushes it to the disk.
    Write,
    /// Serves a page of 1 MiB to the node.
    Serve,
    /// Runs a process that does nothing, for an exec client on the node.
    Exec,
}

impl Work {
    pub(super) const ALL: [Self; 4] = [Self::Compute, Self::Write, Self::Serve, Self::Exec];

    /// Returns the part of a figure's name that stands for the workload.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Compute => "cpu",
            Self::Write => "disk",
            Self::Serve => "network",
            Self::Exec => "exec",
        }
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Compute => "thousands/s",
            Self::Write | Self::Serve => "MiB/s",
            Self::Exec => "1/s",
        }
    }
}

/// Starts the web server in the VM.
pub(super) async fn serve(system: &System, vm: &str) {
    let line =
        format!("/bin/busybox dd if=/dev/zero of=/page bs={PAGE} count=1; /bin/busybox httpd -p {PORT} -h /");
    shell(system, vm, &line).await;
}

/// Returns the rounds per second of the workload in one window.
pub(super) async fn rate(system: &System, vm: &str, address: &str, work: Work) -> f64 {
    let began = Instant::now();
    let rounds = match work {
        Work::Compute => counted(system, vm, "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done").await,
        Work::Write => {
            let write = "/bin/busybox dd if=/dev/zero of=/work bs=1M count=1 conv=fsync 2>/dev/null";
            counted(system, vm, write).await
        }
        Work::Serve => {
            repeated(async || {
                fetch(address).await;
            })
            .await
        }
        Work::Exec => {
            repeated(async || {
                shell(system, vm, ":").await;
            })
            .await
        }
    };
    rounds / began.elapsed().as_secs_f64()
}

/// Returns how often the guest ran `line` in one window.
async fn counted(system: &System, vm: &str, line: &str) -> f64 {
    let seconds = WINDOW.as_secs();
    let script = format!(
        "( /bin/busybox sleep {seconds}; : >/stop ) & n=0; while [ ! -e /stop ]; do {line}; n=$((n+1)); done; \
         /bin/busybox rm /stop; echo $n"
    );
    shell(system, vm, &script).await.trim().parse().expect("a count")
}

async fn repeated(mut work: impl AsyncFnMut()) -> f64 {
    let (began, mut rounds) = (Instant::now(), 0.0);
    while began.elapsed() < WINDOW {
        work().await;
        rounds += 1.0;
    }
    rounds
}

async fn fetch(address: &str) {
    let mut stream = TcpStream::connect((address, PORT)).await.expect("connect to the guest");
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").await.expect("a request");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    assert!(answer.len() > PAGE, "a whole page: {} bytes", answer.len());
}

/// Runs a shell script in the VM and returns its standard output.
async fn shell(system: &System, vm: &str, script: &str) -> String {
    let start = pb::ExecStart {
        vm: vm.to_owned(),
        argv: ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec(),
        ..Default::default()
    };
    let request = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(start)) };
    let mut host = system.host();
    let mut replies = host.exec(tokio_stream::once(request)).await.expect("exec").into_inner();
    let (mut output, mut code) = (Vec::new(), None);
    while let Some(reply) = replies.message().await.expect("a reply") {
        match reply.message {
            Some(pb::exec_response::Message::Stdout(bytes)) => output.extend(bytes),
            Some(pb::exec_response::Message::Stderr(bytes)) => eprint!("{}", String::from_utf8_lossy(&bytes)),
            Some(pb::exec_response::Message::Exit(status)) => code = Some(status.code),
            None => {}
        }
    }
    assert_eq!(code, Some(0), "{script}");
    String::from_utf8(output).expect("text")
}
