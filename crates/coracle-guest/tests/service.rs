//! Service of the agent in this process, without being PID 1: all calls that do not change the host, over an in-memory
//! connection.

#[path = "support/client.rs"]
#[expect(dead_code, reason = "the socket half is for real machines")]
mod client;

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use client::{exec, process, sh};
use coracle_guest::{Agent, Root};
use coracle_proto::guest::exec_request::Message as In;
use coracle_proto::guest::exec_response::Message as Out;
use coracle_proto::guest::guest_client::GuestClient;
use coracle_proto::guest::*;
use coracle_testkit::eventually;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::Channel;

type Client = GuestClient<Channel>;

/// Agent with its reaper, and one session on a socket pair.
struct Bench {
    agent: Arc<Agent>,
    tasks: JoinSet<()>,
    client: Client,
}

impl Bench {
    /// `None`, with a printed reason, if processes cannot change their user.
    async fn start() -> Result<Option<Self>> {
        if std::fs::metadata("/proc/self")?.uid() != 0 {
            ensure!(std::env::var("CI").as_deref() != Ok("true"), "these tests need root");
            eprintln!("skipped: needs root");
            return Ok(None);
        }
        let agent = Agent::of_directory(Root::open(Path::new("/"))?);
        let mut tasks = JoinSet::new();
        let reaper = Arc::clone(&agent);
        tasks.spawn(async move { reaper.reap().await.expect("SIGCHLD can be listened to") });
        let client = session(&agent, &mut tasks).await?;
        Ok(Some(Self { agent, tasks, client }))
    }
}

async fn session(agent: &Arc<Agent>, tasks: &mut JoinSet<()>) -> Result<Client> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let (ours, agent) = (tokio::net::UnixStream::from_std(ours)?, Arc::clone(agent));
    tasks.spawn(async move { coracle_guest::session::serve(ours, &agent).await });
    client::client(theirs).await
}

macro_rules! bench {
    () => {
        match Bench::start().await? {
            Some(bench) => bench,
            None => return Ok(()),
        }
    };
}

#[tokio::test]
async fn workload_runs_once_and_keeps_its_status_and_logs() -> Result<()> {
    let mut b = bench!();
    let script = "echo one; echo two >&2; read x; echo never; exit 5";
    let start = StartWorkloadRequest { process: Some(sh(script)) };
    b.client.start_workload(start.clone()).await?;
    let exit = b.client.wait_workload(WaitWorkloadRequest {}).await?.into_inner().exit.context("exit")?;
    ensure!(exit.code == 5, "stdin is /dev/null, so read ends: {exit:?}");
    ensure!(b.client.start_workload(start).await?.into_inner().pid == 0, "over, and not started again");

    let mut another = session(&b.agent, &mut b.tasks).await?;
    let status = another.status(StatusRequest {}).await?.into_inner();
    ensure!(status.workload == WorkloadState::Exited as i32 && status.exit.is_some_and(|e| e.code == 5));
    let mut logs = another.logs(LogsRequest { from_offset: 0 }).await?.into_inner();
    let mut seen = Vec::new();
    while let Some(chunk) = logs.message().await? {
        seen.push((chunk.stream(), String::from_utf8(chunk.data)?));
    }
    seen.sort();
    ensure!(
        seen == [(Stream::Stdout, "one\nnever\n".into()), (Stream::Stderr, "two\n".into())]
            || seen.len() == 3,
        "{seen:?}"
    );
    let future = another.logs(LogsRequest { from_offset: 1000 }).await;
    ensure!(future.is_err_and(|e| e.code() == Code::OutOfRange));
    Ok(())
}

#[tokio::test]
async fn unread_output_is_trimmed_and_does_not_block_the_workload() -> Result<()> {
    let mut b = bench!();
    let flood = "dd if=/dev/zero bs=64k count=160 2>/dev/null; echo end";
    b.client.start_workload(StartWorkloadRequest { process: Some(sh(flood)) }).await?;
    let exit = b.client.wait_workload(WaitWorkloadRequest {}).await?.into_inner().exit.context("exit")?;
    ensure!(exit.code == 0, "it ends without a reader");
    let mut logs = b.client.logs(LogsRequest { from_offset: 0 }).await?.into_inner();
    let (mut first, mut last) = (None, Vec::new());
    while let Some(chunk) = logs.message().await? {
        first.get_or_insert(chunk.offset);
        last = chunk.data;
    }
    ensure!(first.is_some_and(|o| o >= (10 << 20) - (256 << 10)), "the oldest is gone: {first:?}");
    ensure!(last.ends_with(b"end\n"));
    Ok(())
}

#[tokio::test]
async fn background_children_do_not_delay_the_end_of_output() -> Result<()> {
    let mut b = bench!();
    let since = Instant::now();
    b.client.start_workload(StartWorkloadRequest { process: Some(sh("sleep 5 & echo x")) }).await?;
    let mut logs = b.client.logs(LogsRequest { from_offset: 0 }).await?.into_inner();
    while logs.message().await?.is_some() {}
    ensure!(since.elapsed() < Duration::from_secs(3));
    let since = Instant::now();
    let got = exec(&mut b.client, sh("sleep 5 & echo y"), vec![]).await?;
    ensure!(got.text() == "y\n" && since.elapsed() < Duration::from_secs(3));
    // Output that continues is waited for. On a busy host a line may be later than the limit.
    let times = tempfile::NamedTempFile::new()?;
    let got = exec(&mut b.client, sh(&print_command(times.path())), vec![]).await?.text();
    let printed = eventually("it has printed all", async || {
        let text = std::fs::read_to_string(times.path()).unwrap();
        let printed: Vec<(f64, f64)> = text.lines().filter_map(span).collect();
        (printed.len() == 7).then_some(printed)
    });
    let printed = printed.await?;
    let heard: Vec<f64> = got.lines().map(str::parse).collect::<Result<_, _>>()?;
    let begun: Vec<f64> = printed.iter().map(|line| line.0).collect();
    ensure!(!heard.is_empty() && begun.starts_with(&heard), "heard {heard:?} of {printed:?}");
    if let Some((_, ended)) = printed.get(heard.len()) {
        ensure!(ended - heard[heard.len() - 1] > 0.09, "heard {heard:?} of {printed:?}");
    }
    Ok(())
}

/// Command that prints the uptime and ends; its child prints it six times more, every 20 ms. The file gets the uptime before
/// and after each line.
fn print_command(times: &Path) -> String {
    let line = format!(
        "t() {{ read t rest < /proc/uptime; }}; line() {{ t; b=$t; echo $b; t; echo $b $t >> {}; }}",
        times.display()
    );
    format!("{line}; line; (for i in 1 2 3 4 5 6; do sleep 0.02; line; done) &")
}

/// Both times of a complete line.
fn span(line: &str) -> Option<(f64, f64)> {
    let (before, after) = line.split_once(' ')?;
    Some((before.parse().ok()?, after.parse().ok()?))
}

#[tokio::test]
async fn exec_ends_when_the_client_disconnects() -> Result<()> {
    let mut b = bench!();
    let mark = format!("86{}", std::process::id());
    let alive = || -> bool {
        let commands = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .map(|p| std::fs::read(p.path().join("cmdline")).unwrap_or_default());
        commands.into_iter().any(|c| String::from_utf8_lossy(&c) == format!("sleep\0{mark}\0"))
    };
    for whole_session in [false, true] {
        let mut own = session(&b.agent, &mut b.tasks).await?;
        let requests =
            tokio_stream::iter([ExecRequest { message: Some(In::Start(process(&["sleep", &mark]))) }]);
        let mut output = own.exec(requests).await?.into_inner();
        ensure!(matches!(output.message().await?.and_then(|m| m.message), Some(Out::Started(_))));
        ensure!(alive(), "it runs");
        if whole_session {
            drop(own);
        }
        drop(output);
        let what = format!("the command ends (whole session: {whole_session})");
        eventually(&what, async || (!alive()).then_some(())).await?;
    }
    ensure!(exec(&mut b.client, process(&["true"]), vec![]).await?.exit.code == 0, "other sessions continue");
    let piped = exec(&mut b.client, sh("yes | head -1"), vec![]).await?;
    ensure!(piped.text() == "y\n" && piped.stderr.is_empty(), "SIGPIPE is what a process expects: {piped:?}");
    Ok(())
}

#[tokio::test]
async fn concurrent_execs_keep_output_and_exit_codes_apart() -> Result<()> {
    let b = bench!();
    let mut all = JoinSet::new();
    for n in 0..30 {
        let mut client = b.client.clone();
        all.spawn(async move {
            let cat = Process { stdin: true, ..sh(&format!("cat; echo e{n} >&2; exit {n}")) };
            let input = vec![In::Stdin(vec![b'a'; 100_000]), In::CloseStdin(true)];
            (n, exec(&mut client, cat, input).await)
        });
    }
    while let Some(ended) = all.join_next().await {
        let (n, got) = ended?;
        let got = got?;
        ensure!(
            got.exit.code == n && got.stdout.len() == 100_000 && got.stderr == format!("e{n}\n").as_bytes(),
            "{n}: {:?}",
            got.exit
        );
    }
    Ok(())
}

#[tokio::test]
async fn exec_tty_is_resized_and_reads_input() -> Result<()> {
    let mut b = bench!();
    let tty = Process {
        tty: true,
        stdin: true,
        rows: 11,
        cols: 77,
        ..sh("stty size; read x; stty size; echo $TERM $x")
    };
    let got = exec(
        &mut b.client,
        tty,
        vec![In::Resize(Resize { rows: 22, cols: 99 }), In::Stdin(b"in\n".to_vec())],
    )
    .await?;
    ensure!(got.text().contains("22 99") && got.text().contains("xterm in"), "{}", got.text());
    Ok(())
}

#[tokio::test]
async fn copy_out_then_copy_in_preserves_files() -> Result<()> {
    let mut b = bench!();
    let dir = tempfile::tempdir()?;
    std::fs::create_dir(dir.path().join("src"))?;
    std::fs::write(dir.path().join("src/f"), vec![b'q'; 200_000])?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mut out = b
        .client
        .copy_out(CopyOutRequest { path: path("src"), ..CopyOutRequest::default() })
        .await?
        .into_inner();
    let mut messages =
        vec![copy_in_request::Message::Header(CopyInHeader { path: path("dst"), ..CopyInHeader::default() })];
    while let Some(chunk) = out.message().await? {
        messages.push(copy_in_request::Message::Data(chunk.data));
    }
    let requests = messages.into_iter().map(|m| CopyInRequest { message: Some(m) });
    let done = b.client.copy_in(tokio_stream::iter(requests)).await?.into_inner();
    ensure!((done.entries, done.bytes) == (2, 200_000), "{done:?}");
    ensure!(std::fs::read(dir.path().join("dst/src/f"))? == vec![b'q'; 200_000]);
    Ok(())
}

#[tokio::test]
async fn port_forward_half_closes_and_reports_a_closed_port() -> Result<()> {
    let mut b = bench!();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = u32::from(listener.local_addr()?.port());
    b.tasks.spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut all = Vec::new();
        socket.read_to_end(&mut all).await.unwrap(); // ends only by the half-close
        all.reverse();
        socket.write_all(&all).await.unwrap();
    });
    use port_forward_request::Message::{CloseWrite, Data, Header};
    let request = |m| PortForwardRequest { message: Some(m) };
    let header = Header(PortForwardHeader { port, host: "127.0.0.1".into() });
    let sent =
        tokio_stream::iter([request(header), request(Data(b"abc".to_vec())), request(CloseWrite(true))]);
    let mut back = b
        .client
        .port_forward(tokio_stream::StreamExt::chain(sent, tokio_stream::pending()))
        .await?
        .into_inner();
    let mut got = Vec::new();
    while let Some(chunk) = back.message().await? {
        got.extend(chunk.data);
    }
    ensure!(got == b"cba", "{got:?}");
    let header = Header(PortForwardHeader { port: 1, host: String::new() });
    let refused = b.client.port_forward(tokio_stream::iter([request(header)])).await;
    ensure!(refused.is_err_and(|e| e.code() == Code::Unavailable && e.message().contains("port 1 ")));
    Ok(())
}

#[tokio::test]
async fn invalid_requests_are_refused_and_agent_stays_usable() -> Result<()> {
    let mut b = bench!();
    let long = "x".repeat(5000);
    for (why, process) in [
        ("no command", Process::default()),
        ("relative working directory", Process { cwd: "tmp".into(), ..process(&["true"]) }),
        ("long working directory", Process { cwd: format!("/{long}"), ..process(&["true"]) }),
        ("NUL in an argument", process(&["true", "a\0b"])),
        ("5000 arguments", process(&["x"; 5000])),
        ("environment without a name", Process { env: vec!["=x".into()], ..process(&["true"]) }),
    ] {
        let got = exec(&mut b.client, process, vec![]).await;
        let status = got.unwrap_err().downcast::<tonic::Status>()?;
        ensure!(status.code() == Code::InvalidArgument, "{why}: {status:?}");
    }
    let first_is_wrong = tokio_stream::iter([ExecRequest { message: Some(In::Signal(9)) }]);
    ensure!(b.client.exec(first_is_wrong).await.is_err_and(|e| e.code() == Code::InvalidArgument));
    ensure!(b.client.exec(tokio_stream::empty()).await.is_err_and(|e| e.code() == Code::InvalidArgument));
    let huge = Process { argv: vec!["true".into(), "x".repeat(2 << 20)], ..Process::default() };
    ensure!(
        b.client
            .start_workload(StartWorkloadRequest { process: Some(huge) })
            .await
            .is_err_and(|e| e.code() == Code::OutOfRange)
    );
    for signal in [0, -1, 99, i32::MAX, i32::MIN] {
        ensure!(
            b.client
                .signal_workload(SignalWorkloadRequest { signal })
                .await
                .is_err_and(|e| e.code() == Code::InvalidArgument)
        );
    }
    for path in ["", "relative", "/a\0b"] {
        ensure!(
            b.client
                .copy_out(CopyOutRequest { path: path.into(), ..CopyOutRequest::default() })
                .await
                .is_err_and(|e| e.code() == Code::InvalidArgument)
        );
    }
    ensure!(
        b.client
            .copy_out(CopyOutRequest { path: "/no/such".into(), ..CopyOutRequest::default() })
            .await
            .is_err_and(|e| e.code() == Code::NotFound)
    );
    let configure = b
        .client
        .configure(ConfigureRequest { hostname: "never".into(), ..ConfigureRequest::default() })
        .await;
    ensure!(
        configure.is_err_and(|e| e.code() == Code::FailedPrecondition),
        "this machine is not the agent's"
    );
    ensure!(b.client.status(StatusRequest {}).await.is_ok());
    Ok(())
}

/// Serves a port on a socket pair, and returns its host side after the hello of session 7.
async fn open_session(tasks: &mut JoinSet<()>) -> Result<tokio::net::UnixStream> {
    let agent = Agent::of_directory(Root::open(Path::new("/"))?);
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let mut host = tokio::net::UnixStream::from_std(theirs)?;
    tasks.spawn(async move {
        coracle_guest::session::serve_port(ours.into(), 7, &agent).await.expect("the port can be watched");
    });
    let mut hello = [0; 16];
    host.read_exact(&mut hello).await?;
    ensure!(hello == coracle_guest::channel::hello(7));
    Ok(host)
}

/// Response to a start request.
async fn start_response(host: &mut tokio::net::UnixStream) -> Result<start_response::Result> {
    let mut bytes = vec![0; usize::try_from(host.read_u32().await?)?];
    host.read_exact(&mut bytes).await?;
    unframe::<StartResponse>(&bytes)?.result.context("no result")
}

#[tokio::test]
async fn session_continues_after_a_refused_start_request() -> Result<()> {
    let complete =
        StartRequest { configure: Some(ConfigureRequest::default()), process: Some(process(&["true"])) };
    for (why, request, code) in [
        ("nothing to start", frame(&StartRequest::default()), Code::InvalidArgument),
        ("no message", vec![0, 0, 0, 1, 0xff], Code::InvalidArgument),
        ("not the agent's machine", frame(&complete), Code::FailedPrecondition),
    ] {
        let mut tasks = JoinSet::new();
        let mut host = open_session(&mut tasks).await?;
        host.write_all(&[&START_MAGIC[..], &request].concat()).await?;
        let response = start_response(&mut host).await.context(why)?;
        ensure!(
            matches!(&response, start_response::Result::Error(e) if e.code == i32::from(code)),
            "{why}: {response:?}"
        );
        let mut client = client::client(host.into_std()?).await?;
        ensure!(client.status(StatusRequest {}).await.is_ok(), "{why}: HTTP/2 follows");
    }
    Ok(())
}

#[tokio::test]
async fn oversized_start_request_ends_the_session() -> Result<()> {
    let mut tasks = JoinSet::new();
    let mut host = open_session(&mut tasks).await?;
    host.write_all(&[&START_MAGIC[..], &[0xff; 4]].concat()).await?;
    // Far more than the sockets buffer: the agent discards it.
    for _ in 0..1000 {
        host.write_all(&[0xff; 4096]).await?;
    }
    ensure!(tasks.try_join_next().is_none(), "it waits for the host to go");
    drop(host);
    tokio::time::timeout(Duration::from_secs(2), tasks.join_next()).await?.context("task")??;
    Ok(())
}

/// Rules of the channel on a pair of sockets: hello first, discard after garbage, end by hang-up.
#[tokio::test]
async fn port_sends_hello_and_discards_garbage_until_hangup() -> Result<()> {
    let mut tasks = JoinSet::new();
    let mut host = open_session(&mut tasks).await?;
    // Far more than the sockets buffer: the last byte is written when the agent has read most of it.
    for _ in 0..1000 {
        host.write_all(&[b'!'; 4096]).await?;
    }
    ensure!(tasks.try_join_next().is_none(), "it waits for the host to go");
    drop(host);
    tokio::time::timeout(Duration::from_secs(2), tasks.join_next()).await?.context("task")??;
    Ok(())
}
