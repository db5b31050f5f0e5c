use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt as _, DuplexStream};

use super::*;
use crate::forward::Connection;
use crate::limits::Limits;
use crate::spdy::header_block::Inflater;
use crate::spdy::peer::{Deflater, Peer, serve_peer};

fn headers(all: &[(&str, &str)]) -> Headers {
    let all: Vec<_> = all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Inflater::new().headers(&Deflater::new().block(&all)).unwrap()
}

#[test]
fn purpose_table() {
    let request = |kind, port| Some(Purpose { kind, port, key: Key::Request("7".into()) });
    let stream = |kind, n| Some(Purpose { kind, port: 80, key: Key::Stream(n) });
    for (why, id, given, want) in [
        ("error stream", 1, vec!["error", "80", "7"], request(Kind::Error, 80)),
        ("data stream", 3, vec!["data", "65535", "7"], request(Kind::Data, 65535)),
        ("old client, error stream", 5, vec!["error", "80"], stream(Kind::Error, 5)),
        ("old client, data stream", 7, vec!["data", "80"], stream(Kind::Data, 5)),
        ("empty request id", 7, vec!["data", "80", ""], stream(Kind::Data, 5)),
        ("old client, no error stream before", 1, vec!["data", "80"], None),
        ("unknown type", 1, vec!["stdin", "80", "7"], None),
        ("no port", 1, vec!["data"], None),
        ("port 0", 1, vec!["data", "0", "7"], None),
        ("port too large", 1, vec!["data", "65536", "7"], None),
        ("invalid port number", 1, vec!["data", "http", "7"], None),
        ("nothing", 1, vec![], None),
    ] {
        let given: Vec<_> = ["streamtype", "port", "requestid"].into_iter().zip(given).collect();
        assert_eq!(purpose(StreamId(id), &headers(&given)), want, "{why}");
    }
}

/// Port 7 echoes one byte and closes, port 8 fails when it is read, all others refuse.
struct Ports;

#[async_trait]
impl Dial for Ports {
    async fn dial(&self, port: u16) -> Result<Connection, String> {
        match port {
            7 => {
                let (near, far) = tokio::io::duplex(1);
                Ok(Box::new(tokio::io::join(near.take(1), far)))
            }
            8 => Ok(Box::new(tokio::io::join(failing_reader(), tokio::io::sink()))),
            _ => Err("connection refused".to_owned()),
        }
    }
}

/// Returns a reader that fails.
fn failing_reader() -> impl tokio::io::AsyncRead + Send + Unpin {
    tokio_util::io::StreamReader::new(futures_util::stream::iter([Err::<bytes::Bytes, _>(io::Error::from(
        io::ErrorKind::ConnectionReset,
    ))]))
}

async fn serve_client<C: Future>(client: impl FnOnce(Peer<DuplexStream>) -> C) -> C::Output {
    let limits = Limits::default();
    let time = limits.stream_creation;
    serve_peer(limits, |incoming, _outbox, activity| serve(Arc::new(Ports), time, incoming, activity), client)
        .await
}

/// Opens a stream from the words `error` or `data`, port, and request id.
async fn open(peer: &mut Peer<DuplexStream>, id: u32, words: &str) {
    let given: Vec<_> = ["streamtype", "port", "requestid"].into_iter().zip(words.split(' ')).collect();
    peer.open(id, &given).await;
}

#[tokio::test]
async fn pairs_of_new_and_old_clients_are_forwarded() {
    for (error, data) in [("error 7 5", "data 7 5"), ("error 7", "data 7")] {
        serve_client(async |mut peer| {
            open(&mut peer, 1, error).await;
            peer.data(1, true, b"").await;
            open(&mut peer, 3, data).await;
            peer.data(3, true, b"x").await;
            peer.expect(&["reply 1", "reply 3", "3:x", "3:.", "1:."]).await;
        })
        .await;
    }
}

#[tokio::test]
async fn data_stream_before_error_stream_is_forwarded() {
    serve_client(async |mut peer| {
        open(&mut peer, 1, "data 7 5").await;
        open(&mut peer, 3, "error 7 5").await;
        peer.data(1, true, b"x").await;
        peer.expect(&["reply 1", "reply 3", "1:x", "1:.", "3:."]).await;
    })
    .await;
}

#[tokio::test]
async fn streams_that_make_no_pair_are_reset() {
    serve_client(async |mut peer| {
        open(&mut peer, 1, "error 7 5").await;
        for (id, words) in [(3, "error 7 5"), (5, "data 8 5"), (7, "stdin 7 5"), (9, "data 0 5")] {
            open(&mut peer, id, words).await;
        }
        peer.expect(&["reply 1", "reset 3 1", "reset 5 1", "reset 7 1", "reset 9 1"]).await;
        open(&mut peer, 11, "data 7 5").await;
        peer.expect(&["reply 11"]).await;
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn unpaired_stream_is_reset_after_the_timeout() {
    let start = Instant::now();
    serve_client(async |mut peer| {
        open(&mut peer, 1, "error 7 5").await;
        peer.expect(&["reply 1", "reset 1 5"]).await;
        assert_eq!(start.elapsed(), Limits::default().stream_creation);
    })
    .await;
}

#[tokio::test]
async fn failures_are_reported_on_their_own_streams() {
    serve_client(async |mut peer| {
        open(&mut peer, 1, "error 1 5").await;
        open(&mut peer, 3, "data 1 5").await;
        let refused = "1:cannot forward port 1: connection refused";
        peer.expect(&["reply 1", "reply 3", refused, "1:.", "reset 3 5"]).await;
        // A broken connection sends no text, because Go's client would end all others.
        open(&mut peer, 5, "error 8 6").await;
        open(&mut peer, 7, "data 8 6").await;
        let mut frames = Vec::new();
        while frames.len() < 4 {
            frames.extend(peer.next().await);
        }
        frames.sort();
        assert_eq!(frames, ["5:.", "reply 5", "reply 7", "reset 7 5"]);
    })
    .await;
}

#[tokio::test]
async fn forwarding_ends_when_the_client_opens_no_more() {
    serve_client(async |mut peer| {
        open(&mut peer, 1, "error 7 5").await;
        open(&mut peer, 3, "data 7 5").await;
        peer.send(crate::spdy::frame::Frame::GoAway { last: StreamId(0), status: 0 }).await;
        peer.expect(&["reply 1", "reply 3"]).await;
        peer.data(3, true, b"x").await;
        peer.expect(&["3:x", "3:.", "1:.", "goaway 3 0"]).await;
    })
    .await;
}
