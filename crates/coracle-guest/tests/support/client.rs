//! Host side of the guest channel, as small as the rules permit (docs/reference/guest-channel.md).

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use coracle_proto::guest::exec_request::Message as In;
use coracle_proto::guest::exec_response::Message as Out;
use coracle_proto::guest::guest_client::GuestClient;
use coracle_proto::guest::{ExecRequest, ExitStatus, Process};
use coracle_testkit::elapse;
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

/// Pause between two connections: the guest does not notice that a port was closed if it is opened again at once
/// (docs/reference/guest-channel.md, rule 2). The channel has no event for it.
pub(crate) const CHANNEL_PAUSE: Duration = Duration::from_millis(50);
/// Time limit for the hello of a running agent: twice that of the host core, because the test host may be compiling.
const HELLO: Duration = Duration::from_millis(600);

/// Connection from hello to close.
pub(crate) struct Session {
    pub(crate) client: GuestClient<Channel>,
    pub(crate) number: u64,
    closer: UnixStream,
}

impl Session {
    /// Connects, waits for the hello and only then sends data. Retries according to the rules.
    pub(crate) async fn open(socket: &Path, limit: Duration) -> Result<Self> {
        let deadline = Instant::now() + limit;
        let mut wait = limit; // the first hello may be a whole boot away
        loop {
            match Self::attempt(socket, wait).await {
                Ok(session) => return Ok(session),
                Err(e) if Instant::now() > deadline => return Err(e),
                Err(_) => elapse(CHANNEL_PAUSE).await,
            }
            wait = HELLO;
        }
    }

    /// Like [`Session::open`], for an agent that is running.
    pub(crate) async fn reopen(socket: &Path) -> Result<Self> {
        for _ in 0..5 {
            if let Ok(session) = Self::attempt(socket, HELLO).await {
                return Ok(session);
            }
            elapse(CHANNEL_PAUSE).await;
        }
        bail!("no hello in five tries")
    }

    async fn attempt(socket: &Path, wait: Duration) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let closer = stream.try_clone()?;
        let hello = tokio::task::spawn_blocking(move || hello(stream, wait)).await?;
        let (stream, number) = match hello {
            Ok(found) => found,
            Err(e) => {
                let _ = closer.shutdown(std::net::Shutdown::Both);
                return Err(e);
            }
        };
        Ok(Self { client: client(stream).await?, number, closer })
    }

    /// Closes the stream by shutdown(2), which takes effect at once.
    pub(crate) fn close(self) {
        let _ = self.closer.shutdown(std::net::Shutdown::Both);
    }
}

/// Reads and discards everything up to the magic, then reads the session number.
fn hello(mut stream: UnixStream, wait: Duration) -> Result<(UnixStream, u64)> {
    let deadline = Instant::now() + wait;
    let mut seen = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "no hello in {wait:?}");
        stream.set_read_timeout(Some(left))?;
        let mut byte = [0; 1];
        match stream.read(&mut byte) {
            Ok(0) => bail!("closed before the hello"),
            Ok(_) => seen.extend(byte),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                bail!("no hello in {wait:?}")
            }
            Err(e) => return Err(e.into()),
        }
        if seen.ends_with(&coracle_guest::channel::MAGIC) {
            let mut number = [0; 8];
            stream.read_exact(&mut number)?;
            return Ok((stream, u64::from_be_bytes(number)));
        }
        if seen.len() > 4096 {
            seen.drain(..seen.len() - 7);
        }
    }
}

/// Client whose channel has only this connection.
pub(crate) async fn client(stream: UnixStream) -> Result<GuestClient<Channel>> {
    stream.set_nonblocking(true)?;
    let mut once = Some(tokio::net::UnixStream::from_std(stream)?);
    let connector = tower::service_fn(move |_| {
        let stream = once.take();
        async move { stream.map(TokioIo::new).ok_or_else(|| std::io::Error::from(ErrorKind::NotConnected)) }
    });
    let endpoint = Endpoint::from_static("http://guest")
        .initial_stream_window_size(256 * 1024)
        .initial_connection_window_size(1024 * 1024);
    Ok(GuestClient::new(endpoint.connect_with_connector(connector).await?))
}

/// Result of an exec.
#[derive(Debug, Default)]
pub(crate) struct ExecOutput {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exit: ExitStatus,
}

impl ExecOutput {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

pub(crate) fn process(argv: &[&str]) -> Process {
    Process { argv: argv.iter().map(|s| (*s).to_owned()).collect(), ..Process::default() }
}

/// Process that runs `script` in a shell.
pub(crate) fn sh(script: &str) -> Process {
    process(&["/bin/sh", "-c", script])
}

/// Runs `process` to its end, with `messages` after its start.
pub(crate) async fn exec(
    client: &mut GuestClient<Channel>,
    process: Process,
    messages: Vec<In>,
) -> Result<ExecOutput> {
    let requests: Vec<_> = std::iter::once(In::Start(process))
        .chain(messages)
        .map(|m| ExecRequest { message: Some(m) })
        .collect();
    let mut output = client.exec(tokio_stream::iter(requests)).await?.into_inner();
    let mut outcome = ExecOutput::default();
    while let Some(message) = output.message().await? {
        match message.message.context("empty message")? {
            Out::Started(started) => ensure!(started.pid > 0),
            Out::Stdout(data) => outcome.stdout.extend(data),
            Out::Stderr(data) => outcome.stderr.extend(data),
            Out::Exit(exit) => {
                outcome.exit = exit;
                ensure!(output.message().await?.is_none(), "something came after the exit");
                return Ok(outcome);
            }
        }
    }
    bail!("no exit; stdout {:?}", outcome.text())
}
