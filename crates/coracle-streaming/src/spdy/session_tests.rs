use async_trait::async_trait;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::io::{AsyncWriteExt as _, DuplexStream};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::limits::Limits;
use crate::session::{Session, Writer};
use crate::spdy::connection;
use crate::spdy::peer::{Peer, serve_peer};

#[test]
fn wanted_streams_table() {
    let all = Streams { stdin: true, stdout: true, stderr: true, tty: false };
    for (why, streams, version, want) in [
        ("all but the size without a terminal", all, Version::V4, "error stdin stdout stderr"),
        ("nothing asked for", Streams::default(), Version::V4, "error"),
        ("a terminal has no stderr", Streams { tty: true, ..all }, Version::V4, "error stdin stdout resize"),
        ("v3 has sizes", Streams { tty: true, ..all }, Version::V3, "error stdin stdout resize"),
        ("v2 has none", Streams { tty: true, ..all }, Version::V2, "error stdin stdout"),
        ("v1 has none", Streams { tty: true, ..all }, Version::V1, "error stdin stdout"),
    ] {
        assert_eq!(Collected::default().missing(streams, version).join(" "), want, "{why}");
    }
}

/// Writes "out" and keeps its writer; without a writer, it never returns.
struct Process(Arc<Mutex<Option<Writer>>>);

#[async_trait]
impl RunSession for Process {
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome {
        let Some(mut stdout) = session.stdout else { return std::future::pending().await };
        stdout.write_all(b"out").await.unwrap();
        *self.0.lock() = Some(stdout);
        SessionOutcome::Exited(0)
    }
}

fn request(streams: Streams) -> (Request, Arc<Mutex<Option<Writer>>>) {
    let kept = Arc::default();
    let process = Box::new(Process(Arc::clone(&kept)));
    (Request { streams, version: Version::V4, process, time: Limits::default().stream_creation }, kept)
}

/// Runs the simulated `client` against a session with `streams`.
async fn serve_client<C: Future>(
    streams: Streams,
    client: impl FnOnce(Peer<DuplexStream>) -> C,
) -> C::Output {
    let (request, _kept) = request(streams);
    let session = |incoming, outbox, activity| serve(request, incoming, outbox, activity);
    serve_peer(Limits::default(), session, client).await
}

async fn open(peer: &mut Peer<DuplexStream>, id: u32, kind: &str) {
    peer.open(id, &[("streamtype", kind)]).await;
}

const OUTPUT: Streams = Streams { stdin: true, stdout: true, stderr: false, tty: false };
const SUCCESS: &str = r#"{"metadata":{},"status":"Success"}"#;

#[tokio::test]
async fn streams_end_before_the_status_and_the_connection() {
    let frames = serve_client(OUTPUT, async |mut peer| {
        // An order that no known client uses, with streams that were not asked for.
        for (id, kind) in
            [(1, "stdout"), (3, "stderr"), (5, "stdout"), (7, "video"), (9, "stdin"), (11, "error")]
        {
            open(&mut peer, id, kind).await;
        }
        let mut frames = Vec::new();
        while frames.last().is_none_or(|frame: &String| !frame.starts_with("goaway")) {
            frames.extend(peer.next().await);
        }
        frames
    });
    let status = format!("11:{SUCCESS}");
    let want = [
        "reply 1",
        "reset 3 1",
        "reset 5 1",
        "reset 7 1",
        "reply 9",
        "reply 11",
        "1:out",
        "1:.",
        "9:.",
        &status,
        "11:.",
        "goaway 11 0",
    ];
    assert_eq!(frames.await, want);
}

#[tokio::test]
async fn writer_that_outlives_the_session_fails() {
    let (request, kept) = request(OUTPUT);
    let session = |incoming, outbox, activity| serve(request, incoming, outbox, activity);
    serve_peer(Limits::default(), session, async |mut peer| {
        for (id, kind) in [(1, "error"), (3, "stdin"), (5, "stdout")] {
            open(&mut peer, id, kind).await;
        }
        while peer.next().await.is_some_and(|frame| !frame.starts_with("goaway")) {}
        let mut writer = kept.lock().take().unwrap();
        assert!(writer.write_all(b"late").await.is_err());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn missing_streams_end_the_session_in_time() {
    let start = Instant::now();
    serve_client(OUTPUT, async |mut peer| {
        open(&mut peer, 1, "error").await;
        peer.expect(&["reply 1"]).await;
        let status = peer.next().await.unwrap();
        assert!(status.contains("cannot run session: streams not opened: stdin, stdout"), "{status}");
        assert!(status.contains(r#""code":500"#), "{status}");
        assert_eq!(start.elapsed(), Limits::default().stream_creation);
        peer.expect(&["1:.", "goaway 1 0"]).await;
    })
    .await;
}

/// Without a status, the client would take the end of its streams for success.
#[tokio::test(start_paused = true)]
async fn idle_session_ends_with_a_status() {
    let start = Instant::now();
    serve_client(Streams { stdin: true, ..Streams::default() }, async |mut peer| {
        for (id, kind) in [(1, "error"), (3, "stdin")] {
            open(&mut peer, id, kind).await;
        }
        peer.expect(&["reply 1", "reply 3", "3:."]).await;
        let status = peer.next().await.unwrap();
        assert!(status.contains("session ended: connection was idle for 14400 s"), "{status}");
        assert_eq!(start.elapsed(), Limits::default().idle);
        peer.expect(&["1:.", "goaway 3 0"]).await;
    })
    .await;
}

/// Process that writes without end.
struct Endless;

#[async_trait]
impl RunSession for Endless {
    async fn run(self: Box<Self>, session: Session) -> SessionOutcome {
        let mut stdout = session.stdout.unwrap();
        while stdout.write_all(&[b'x'; 4096]).await.is_ok() {}
        SessionOutcome::Exited(0)
    }
}

#[tokio::test(start_paused = true)]
async fn stop_does_not_wait_for_a_client_that_reads_nothing() {
    let streams = Streams { stdout: true, ..Streams::default() };
    let time = Limits::default().stream_creation;
    let request = Request { streams, version: Version::V4, process: Box::new(Endless), time };
    let (near, far) = tokio::io::duplex(4096);
    let mut peer = Peer::new(far);
    for (id, kind) in [(1, "error"), (3, "stdout")] {
        open(&mut peer, id, kind).await;
    }
    let (stop, limits, start) = (CancellationToken::new(), Limits::default(), Instant::now());
    let session = |incoming, outbox, activity| serve(request, incoming, outbox, activity);
    let stopping = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        stop.cancel();
    };
    tokio::join!(connection::serve(near, &limits, stop.clone(), session), stopping);
    assert_eq!(start.elapsed(), Duration::from_secs(60) + limits.last_message);
}
