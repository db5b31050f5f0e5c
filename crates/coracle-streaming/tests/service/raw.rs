//! Clients that these tests implement: WebSocket v1, v4 and base64, the old port-forward, and raw bytes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use coracle_streaming::Limits;
use coracle_testkit::{elapse, eventually};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::Message;
use tokio_tungstenite::tungstenite::{Bytes, Error};
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::support::{DEADLINE, Served};

type Socket = WebSocketStream<TcpStream>;

/// Opens a WebSocket at `path` with the sub-protocol; an empty name requests none.
async fn websocket(served: &Served, path: &str, protocol: &str) -> Result<Socket, Error> {
    let mut request = format!("ws://{}{path}", served.address).into_client_request().unwrap();
    if !protocol.is_empty() {
        request.headers_mut().insert("sec-websocket-protocol", protocol.parse().unwrap());
    }
    // The buffer is small, so that a client that does not read blocks the server soon.
    let tcp = TcpSocket::new_v4().unwrap();
    tcp.set_recv_buffer_size(16 << 10).unwrap();
    let (socket, response) = client_async(request, tcp.connect(served.address).await.unwrap()).await?;
    let chosen = response.headers().get("sec-websocket-protocol").map(|value| value.to_str().unwrap());
    assert_eq!(chosen.unwrap_or_default(), protocol);
    Ok(socket)
}

/// Returns the next message as text: `1:data`, `close 1000`, `pong`.
async fn next(socket: &mut Socket) -> Option<String> {
    let message = timeout(DEADLINE, socket.next()).await.expect("no message");
    Some(match message?.unwrap() {
        Message::Binary(data) => format!("{}:{}", data[0], String::from_utf8_lossy(&data[1..])),
        Message::Text(text) => text.to_string(),
        Message::Close(frame) => format!("close {}", frame.map_or(0, |frame| frame.code.into())),
        Message::Pong(_) => "pong".to_owned(),
        other => format!("{other:?}"),
    })
}

async fn rest(socket: &mut Socket) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(message) = next(socket).await {
        all.push(message);
    }
    all
}

fn binary(bytes: &'static [u8]) -> Message {
    Message::Binary(Bytes::from_static(bytes))
}

const SUCCESS: &str = r#"{"metadata":{},"status":"Success"}"#;

#[tokio::test]
async fn output_and_status_follow_the_protocol_version() {
    let served = Served::new().await;
    let exited = "command terminated with non-zero exit code: 3";
    for (protocol, program, want) in [
        ("v5.channel.k8s.io", "exit-0", vec!["1:", "1:out", "2:err", &format!("3:{SUCCESS}")]),
        ("v4.channel.k8s.io", "exit-0", vec!["1:", "1:out", "2:err", &format!("3:{SUCCESS}")]),
        ("channel.k8s.io", "exit-0", vec!["1:", "1:out", "2:err"]),
        ("", "exit-3", vec!["1:", "1:out", "2:err", &format!("3:{exited}")]),
        ("base64.channel.k8s.io", "exit-0", vec!["1", "1b3V0", "2ZXJy"]),
        (
            "v4.base64.channel.k8s.io",
            "exit-0",
            vec!["1", "1b3V0", "2ZXJy", "3eyJtZXRhZGF0YSI6e30sInN0YXR1cyI6IlN1Y2Nlc3MifQ=="],
        ),
    ] {
        let path = format!("/exec/{program}?stdout&stderr");
        let mut socket = websocket(&served, &path, protocol).await.unwrap();
        let mut all = rest(&mut socket).await;
        assert_eq!(all.pop().as_deref(), Some("close 1000"), "{protocol}");
        assert_eq!(all, want, "{protocol}");
    }
}

#[tokio::test]
async fn first_message_is_on_the_first_channel_with_output() {
    let served = Served::new().await;
    for (query, want) in [("stdout", "1:"), ("stderr", "2:"), ("stdin", "3:"), ("stdin&stderr&tty", "3:")] {
        let path = format!("/exec/hang?{query}");
        let mut socket = websocket(&served, &path, "v4.channel.k8s.io").await.unwrap();
        assert_eq!(next(&mut socket).await.as_deref(), Some(want), "{query}");
    }
}

#[tokio::test]
async fn input_of_both_codings_reaches_the_session() {
    let served = Served::new().await;
    for (protocol, input, want) in [
        ("v4.channel.k8s.io", binary(b"\x00abc"), "1:abc"),
        ("v4.channel.k8s.io", Message::text("\u{0}abc"), "1:abc"),
        ("v4.base64.channel.k8s.io", Message::text("0YWJj"), "1YWJj"),
    ] {
        let mut socket = websocket(&served, "/exec/cat?stdin&stdout", protocol).await.unwrap();
        next(&mut socket).await.unwrap();
        // None of these ends the session: no data, an unknown channel, the error channel.
        for ignored in [binary(b""), binary(b"\x09x"), binary(b"\x03x")] {
            if protocol == "v4.channel.k8s.io" {
                socket.send(ignored).await.unwrap();
            }
        }
        socket.send(input).await.unwrap();
        assert_eq!(next(&mut socket).await.as_deref(), Some(want), "{protocol}");
    }
}

#[tokio::test]
async fn client_of_v5_closes_its_input_and_v4_cannot() {
    let served = Served::new().await;
    let mut socket = websocket(&served, "/exec/cat?stdin&stdout", "v5.channel.k8s.io").await.unwrap();
    socket.send(binary(b"\xff\x00")).await.unwrap();
    assert_eq!(rest(&mut socket).await, ["1:", &format!("3:{SUCCESS}"), "close 1000"]);
    let mut socket = websocket(&served, "/exec/cat?stdin&stdout", "v4.channel.k8s.io").await.unwrap();
    for message in [&b"\xff\x00"[..], b"\x00abc"] {
        socket.send(binary(message)).await.unwrap();
    }
    assert_eq!(next(&mut socket).await.as_deref(), Some("1:"));
    assert_eq!(next(&mut socket).await.as_deref(), Some("1:abc"));
}

#[tokio::test]
async fn malformed_messages_close_with_their_code() {
    let served = Served::new().await;
    let large = Message::Binary(vec![0; (2 << 20) + 1].into());
    for (protocol, message, code) in [
        ("v4.base64.channel.k8s.io", Message::text("0a"), "close 1007"),
        ("v4.channel.k8s.io", large, "close 1009"),
    ] {
        let mut socket = websocket(&served, "/exec/cat?stdin&stdout", protocol).await.unwrap();
        next(&mut socket).await.unwrap();
        socket.send(message).await.unwrap();
        assert_eq!(next(&mut socket).await.as_deref(), Some(code));
        let open = || served.tasks.open();
        eventually("the task ends", async || (open() == 0).then_some(())).await.unwrap();
    }
}

/// A client that does not read its output blocks the process, while its input, sizes and pings are still handled.
#[tokio::test]
async fn slow_reader_blocks_only_output() {
    let served = Served::new().await;
    let mut socket = websocket(&served, "/exec/flood?stdin&stdout&tty", "v4.channel.k8s.io").await.unwrap();
    let blocked = || served.seen.blocked.load(Ordering::SeqCst) == 1;
    eventually("the session is blocked", async || blocked().then_some(())).await.unwrap();
    for message in [&b"\x04{\"Width\":80,\"Height\":24}"[..], b"\x00line\n"] {
        socket.send(binary(message)).await.unwrap();
    }
    socket.send(Message::Ping(Bytes::new())).await.unwrap();
    let got = || served.seen.got.lock().len() == 2;
    eventually("input arrives", async || got().then_some(())).await.unwrap();
    assert_eq!(*served.seen.got.lock(), ["line\n", "80x24"]);
    // Output in flight is bounded by the queue and the kernel buffers.
    let flooded = served.seen.flooded.load(Ordering::SeqCst);
    assert!(flooded < 8 << 20, "{flooded}");
    let all = rest(&mut socket).await;
    let output: usize = all.iter().filter_map(|message| Some(message.strip_prefix("1:x")?.len() + 1)).sum();
    assert_eq!(output as u64, flooded);
    assert!(all.contains(&"pong".to_owned()));
    assert_eq!(all[all.len() - 3..], ["1:end", &format!("3:{SUCCESS}"), "close 1000"]);
}

/// The client's pings are queued behind its data. Without pongs, it would consider the connection dead.
#[tokio::test]
async fn client_with_blocked_input_gets_pongs() {
    let limits = Limits { pong: Duration::from_millis(50), ..Limits::default() };
    let served = Served::with_limits(limits).await;
    let mut socket = websocket(&served, "/exec/hang?stdin&stdout", "v5.channel.k8s.io").await.unwrap();
    socket.send(Message::Binary(vec![0; 1 << 20].into())).await.unwrap();
    for want in ["1:", "pong", "pong"] {
        assert_eq!(next(&mut socket).await.as_deref(), Some(want));
    }
}

/// The last output is in the kernel buffers. Closing would destroy it, because the client's pings are unread at that time.
#[tokio::test]
async fn client_that_pings_gets_all_before_the_close() {
    let linger = Duration::from_millis(500);
    let served = Served::with_limits(Limits { linger, ..Limits::default() }).await;
    let mut socket = websocket(&served, "/exec/zeros-200000?stdout", "v5.channel.k8s.io").await.unwrap();
    for _ in 0..20 {
        socket.send(Message::Ping(Bytes::new())).await.unwrap();
        // Real time matters here: the client lives for longer than the server would wait for a silent client.
        elapse(linger / 5).await;
    }
    let all = rest(&mut socket).await;
    let zeros: usize = all.iter().filter_map(|message| Some(message.strip_prefix("1:")?.len())).sum();
    assert_eq!((zeros, all.last().map(String::as_str)), (200_000, Some("close 1000")));
    // The server does not wait longer for a silent client.
    let socket = websocket(&served, "/exec/exit-0?stdout", "v5.channel.k8s.io").await.unwrap();
    eventually("the task ends", async || (served.tasks.open() == 0).then_some(())).await.unwrap();
    drop(socket);
}

#[tokio::test]
async fn idle_connection_is_closed_with_a_reason() {
    let served = Served::with_limits(Limits { idle: Duration::from_millis(1), ..Limits::default() }).await;
    let mut socket = websocket(&served, "/exec/hang?stdout", "v4.channel.k8s.io").await.unwrap();
    let all = rest(&mut socket).await;
    let [.., status, close] = all.as_slice() else { panic!("{all:?}") };
    assert!(status.contains("session ended: connection was idle for 0 s"), "{status}");
    assert_eq!(close, "close 1000");
}

#[tokio::test]
async fn old_port_forward_has_two_channels_per_port() {
    let served = Served::new().await;
    let mut socket =
        websocket(&served, "/portforward?port=7&port=9&port=1", "v4.channel.k8s.io").await.unwrap();
    socket.send(binary(b"\x00echo")).await.unwrap();
    let mut all = Vec::new();
    while all.len() < 9 {
        all.extend(next(&mut socket).await);
    }
    assert_eq!(all[..6], ["0:\u{7}\0", "1:\u{7}\0", "2:\t\0", "3:\t\0", "4:\u{1}\0", "5:\u{1}\0"]);
    all[6..].sort();
    assert_eq!(all[6..], ["0:echo", "2:hello", "5:cannot forward port 1: connection refused"]);
    drop(socket);
    let open = || served.seen.connections.load(Ordering::SeqCst);
    eventually("the connections end", async || (open() == 0).then_some(())).await.unwrap();
    // The session ends with its last connection.
    let mut socket = websocket(&served, "/portforward?port=9", "").await.unwrap();
    assert_eq!(rest(&mut socket).await, ["0:\t\0", "1:\t\0", "0:hello", "close 1000"]);
    match websocket(&served, "/portforward", "v4.channel.k8s.io").await {
        Err(Error::Http(response)) => assert_eq!(response.status(), 400),
        other => panic!("{:?}", other.map(drop)),
    }
}

/// Sends a request and returns all data until the end of the connection.
async fn raw(served: &Served, request: &[u8]) -> Vec<u8> {
    let mut connection = TcpStream::connect(served.address).await.unwrap();
    connection.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    timeout(DEADLINE, connection.read_to_end(&mut answer)).await.unwrap().unwrap();
    answer
}

#[tokio::test]
async fn handshakes_are_refused_with_their_status() {
    let served = Served::new().await;
    let spdy = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
    for (path, headers, status, header) in [
        ("/exec/cat", "Connection: close\r\n".to_owned(), "400", ""),
        ("/exec/cat", spdy.to_owned(), "400", ""),
        (
            "/exec/cat",
            format!("{spdy}X-Stream-Protocol-Version: v5.channel.k8s.io\r\n"),
            "403",
            "x-accepted-stream-protocol-versions: v4.channel.k8s.io\r\n\
             x-accepted-stream-protocol-versions: v3.channel.k8s.io\r\n",
        ),
        (
            "/portforward",
            format!("{spdy}X-Stream-Protocol-Version: v4.channel.k8s.io\r\n"),
            "403",
            "x-accepted-stream-protocol-versions: portforward.k8s.io\r\n",
        ),
    ] {
        let request = format!("POST {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n");
        // The connection stays open for another request, which closes it.
        let request = request + "GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
        let answer = String::from_utf8(raw(&served, request.as_bytes()).await).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{headers}: {answer}");
        assert!(answer.contains(header), "{headers}: {answer}");
    }
    assert_eq!(served.tasks.open(), 0);
}

/// The client does not wait for the response: its frames are in the buffer of the HTTP server.
#[tokio::test]
async fn frames_behind_the_request_are_kept() {
    let served = Served::with_limits(Limits { linger: Duration::ZERO, ..Limits::default() }).await;
    let frames = hex::decode(concat!(
        "80030001000000280000000100000000000078f9e3c6a7c202a62346703a2b294a4dcc851625aca9a08006000000ffff",
        "800300010000001900000003000000000000c22a054ccc29f9a52500000000ffff",
    ));
    let request = b"POST /exec/exit-0?stdout HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\n\
        Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";
    let answer = raw(&served, &[&request[..], &frames.unwrap()].concat()).await;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
    let (head, frames) = answer.split_at(end + 4);
    let head = String::from_utf8_lossy(head).to_lowercase();
    assert!(head.starts_with("http/1.1 101 "), "{head}");
    for header in ["upgrade: spdy/3.1\r\n", "connection: upgrade\r\n", "version: v4.channel.k8s.io\r\n"] {
        assert!(head.contains(header), "{head}");
    }
    let status = hex::encode(SUCCESS);
    let want = [
        "800300020000001800000001",
        "7820e3c6a7c2000400fbff00000000000000ffff", // reply 1
        "800300020000001200000003",
        "000400fbff00000000000000ffff", // reply 3
        "0000000300000003",
        "6f7574",           // out
        "0000000301000000", // end of stdout
        "0000000100000022",
        &status,                            // status
        "0000000101000000",                 // end of the error stream
        "80030007000000080000000300000000", // GOAWAY
    ];
    assert_eq!(hex::encode(frames), want.concat());
}
