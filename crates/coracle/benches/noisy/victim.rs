//! Workloads of the guest beside the noisy one, one kind at a time.

use std::time::{Duration, Instant};

use coracle_proto::host as pb;
use coracle_testkit::figures::cpu_seconds;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::VICTIM;
use super::node::{IMAGE, Node, Start};

/// Duration of one window.
const WINDOW: Duration = Duration::from_secs(3);
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

/// What the VM did in windows of one kind of workload.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    pub(super) rounds: f64,
    pub(super) seconds: f64,
    /// CPU time of the VMM.
    pub(super) cpu_seconds: f64,
}

impl Window {
    pub(super) fn sum(windows: &[Self]) -> Self {
        windows.iter().fold(Self::default(), |sum, window| Self {
            rounds: sum.rounds + window.rounds,
            seconds: sum.seconds + window.seconds,
            cpu_seconds: sum.cpu_seconds + window.cpu_seconds,
        })
    }
}

/// The VM that works.
pub(super) struct Victim {
    address: String,
    vmm: u32,
}

impl Victim {
    /// Starts the VM and its web server.
    pub(super) async fn start(node: &Node) -> Self {
        let vm = node.create(VICTIM, IMAGE, Start::Cold).await.1;
        let page = format!("/bin/busybox dd if=/dev/zero of=/page bs={PAGE} count=1 2>/dev/null");
        shell(node, &format!("{page}; /bin/busybox httpd -p {PORT} -h /")).await;
        Self { address: vm.ip_address, vmm: vm.vmm_pid }
    }

    /// Runs the workload for one window.
    pub(super) async fn window(&self, node: &Node, work: Work) -> Window {
        let (cpu, began) = (self.cpu_time(), Instant::now());
        let rounds = match work {
            Work::Compute => count_in_guest(node, "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done").await,
            Work::Write => {
                let write = "/bin/busybox dd if=/dev/zero of=/work bs=1M count=1 conv=fsync 2>/dev/null";
                count_in_guest(node, write).await
            }
            Work::Serve => count_rounds(async || fetch(&self.address).await).await,
            Work::Exec => count_rounds(async || drop(shell(node, ":").await)).await,
        };
        Window { rounds, seconds: began.elapsed().as_secs_f64(), cpu_seconds: self.cpu_time() - cpu }
    }

    fn cpu_time(&self) -> f64 {
        cpu_seconds(self.vmm).expect("the CPU time of the VMM")
    }
}

/// Returns how often the guest ran `line` in one window.
async fn count_in_guest(node: &Node, line: &str) -> f64 {
    let seconds = WINDOW.as_secs();
    let script = format!(
        "( /bin/busybox sleep {seconds}; : >/stop ) & n=0; while [ ! -e /stop ]; do {line}; n=$((n+1)); done; \
         /bin/busybox rm /stop; echo $n"
    );
    shell(node, &script).await.trim().parse().expect("a count")
}

async fn count_rounds(mut work: impl AsyncFnMut()) -> f64 {
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
async fn shell(node: &Node, script: &str) -> String {
    let start = pb::ExecStart {
        vm: VICTIM.to_owned(),
        argv: ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec(),
        ..Default::default()
    };
    let request = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(start)) };
    let mut host = node.host();
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
