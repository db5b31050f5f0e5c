use std::time::Duration;

use tokio::io::DuplexStream;
use tokio::time::Instant;

use super::*;
use crate::spdy::peer::{Peer, serve_peer};

/// Echoes each stream until the client opens no more.
async fn echo(mut incoming: Incoming, _outbox: Outbox<Bytes>, _activity: Activity) {
    let mut streams = tokio::task::JoinSet::new();
    while let Some(pending) = incoming.recv().await {
        if pending.headers.get("streamtype") == Some("bad") {
            pending.refuse(Reset::Protocol);
        } else if let Some(mut stream) = pending.accept() {
            streams.spawn(async move {
                let _gone = tokio::io::copy(&mut stream.input, &mut stream.output).await;
            });
        }
    }
    streams.join_all().await;
}

const DATA: [(&str, &str); 1] = [("streamtype", "data")];

#[tokio::test]
async fn streams_are_answered_and_end_with_the_connection() {
    let rest = serve_peer(Limits::default(), echo, async |mut peer| {
        peer.open(1, &DATA).await;
        peer.data(1, false, b"one").await;
        peer.expect(&["reply 1", "1:one"]).await;
        peer.open_with(3, true, &DATA).await;
        peer.expect(&["reply 3", "3:."]).await;
        peer.data(1, true, b"two").await;
        peer.expect(&["1:two", "1:."]).await;
        peer.send(Frame::GoAway { last: StreamId(0), status: 0 }).await;
        peer.next().await
    });
    assert_eq!(rest.await.as_deref(), Some("goaway 3 0"));
}

#[tokio::test]
async fn control_frames_are_answered_as_they_ask() {
    serve_peer(Limits::default(), echo, async |mut peer| {
        peer.send(Frame::Ping { id: 2 }).await;
        peer.send(Frame::Ping { id: 3 }).await;
        peer.expect(&["ping 3"]).await;
        peer.raw(&hex::decode("800300040000000400000000").unwrap()).await;
        peer.raw(&hex::decode("80030009000000080000000100001000").unwrap()).await;
        peer.raw(&hex::decode("8003000b00000003aabbcc").unwrap()).await;
        peer.open(1, &DATA).await;
        peer.expect(&["reply 1"]).await;
        peer.open(4, &DATA).await;
        peer.open(1, &DATA).await;
        peer.open(5, &[("streamtype", "bad")]).await;
        peer.data(9, true, b"lost").await;
        peer.data(9, true, b"lost").await;
        peer.data(5, true, b"late").await;
        peer.expect(&["reset 4 1", "reset 1 1", "reset 9 2", "reset 5 1"]).await;
        peer.data(1, true, b"late").await;
        peer.send(Frame::Ping { id: 5 }).await;
        peer.expect(&["ping 5"]).await;
    })
    .await;
}

/// The header block of a refused stream must be inflated, because it changes the state of the compression.
#[tokio::test]
async fn blocks_of_refused_streams_are_inflated() {
    serve_peer(Limits::default(), echo, async |mut peer| {
        for id in [2, 4, 6] {
            peer.open(id, &[("streamtype", "something rather long")]).await;
            assert_eq!(peer.next().await, Some(format!("reset {id} 1")));
        }
        peer.open(7, &DATA).await;
        peer.expect(&["reply 7"]).await;
    })
    .await;
}

#[tokio::test]
async fn data_before_the_reply_are_kept() {
    let (sender, accept) = tokio::sync::oneshot::channel();
    let session = async |mut incoming: Incoming, outbox, activity| {
        let first = incoming.recv().await.unwrap();
        let _sent = accept.await;
        let mut stream = first.accept().unwrap();
        tokio::io::copy(&mut stream.input, &mut stream.output).await.unwrap();
        drop(stream);
        echo(incoming, outbox, activity).await;
    };
    serve_peer(Limits::default(), session, async |mut peer| {
        peer.open(1, &DATA).await;
        peer.data(1, true, b"early").await;
        peer.send(Frame::Ping { id: 1 }).await;
        peer.expect(&["ping 1"]).await;
        sender.send(()).unwrap();
        peer.expect(&["reply 1", "1:early", "1:."]).await;
    })
    .await;
}

#[tokio::test]
async fn blocked_input_does_not_stop_other_streams_or_pings() {
    let (sender, read) = tokio::sync::oneshot::channel();
    let session = async |mut incoming: Incoming, outbox, activity| {
        let mut blocked = incoming.recv().await.unwrap().accept().unwrap();
        let reading = async {
            let _sent = read.await;
            tokio::io::copy(&mut blocked.input, &mut tokio::io::sink()).await.unwrap()
        };
        let (read, ()) = tokio::join!(reading, echo(incoming, outbox, activity));
        assert_eq!(read, 4 * 1024);
    };
    let limits = Limits { input_max: 4 * 1024, ..Limits::default() };
    serve_peer(limits, session, async |mut peer| {
        peer.open(1, &DATA).await;
        peer.open(3, &DATA).await;
        peer.data(1, false, &[b'x'; 4 * 1024]).await;
        peer.data(3, false, b"other").await;
        peer.send(Frame::Ping { id: 1 }).await;
        let mut all = Vec::new();
        while all.len() < 4 {
            all.extend(peer.next().await);
        }
        all.sort();
        assert_eq!(all, ["3:other", "ping 1", "reply 1", "reply 3"]);
        sender.send(()).unwrap();
        peer.data(1, true, b"").await;
        peer.send(Frame::GoAway { last: StreamId(0), status: 0 }).await;
        peer.data(3, true, b"").await;
        let mut ends = [peer.next().await.unwrap(), peer.next().await.unwrap()];
        ends.sort();
        assert_eq!(ends, ["1:.", "3:."]);
        peer.expect(&["goaway 3 0"]).await;
    })
    .await;
}

#[tokio::test]
async fn reset_of_the_client_ends_both_halves() {
    let session = async |mut incoming: Incoming, _outbox, _activity| {
        let mut stream = incoming.recv().await.unwrap().accept().unwrap();
        stream.reset_token().cancelled().await;
        let mut rest = Vec::new();
        stream.input.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"before");
        assert!(stream.output.write_all(b"after").await.is_err());
    };
    serve_peer(Limits::default(), session, async |mut peer| {
        peer.open(1, &DATA).await;
        peer.expect(&["reply 1"]).await;
        peer.data(1, false, b"before").await;
        peer.send(Frame::RstStream { id: StreamId(1), status: Reset::Cancel as u32 }).await;
        peer.expect(&["goaway 1 0"]).await;
    })
    .await;
}

#[tokio::test]
async fn protocol_errors_end_the_connection() {
    let hostile: [(&str, &[u8]); 3] = [
        ("SPDY/2", b"\x80\x02\x00\x06\x00\x00\x00\x04\x00\x00\x00\x01"),
        ("a block without zlib", b"\x80\x03\x00\x08\x00\x00\x00\x08\x00\x00\x00\x01abcd"),
        ("a huge block", b"\x80\x03\x00\x01\x00\xff\xff\xff"),
    ];
    for (why, bytes) in hostile {
        let rest = serve_peer(Limits::default(), echo, async |mut peer| {
            peer.open(1, &DATA).await;
            peer.expect(&["reply 1"]).await;
            peer.raw(bytes).await;
            peer.rest().await
        });
        let rest = rest.await;
        assert_eq!(rest.last().map(String::as_str), Some("goaway 1 1"), "{why}: {rest:?}");
    }
}

#[tokio::test]
async fn client_that_reads_no_replies_is_disconnected() {
    serve_peer(Limits::default(), echo, async |mut peer| {
        let ping = Frame::Ping { id: 1 }.encode().repeat(1000);
        // The replies fill the pipe, and then the queue.
        while peer.try_raw(&ping).await.is_ok() {}
    })
    .await;
}

#[tokio::test]
async fn streams_beyond_the_limit_are_refused() {
    let limits = Limits { streams_max: 2, ..Limits::default() };
    serve_peer(limits, echo, async |mut peer| {
        for id in [1, 3, 5] {
            peer.open(id, &DATA).await;
        }
        peer.expect(&["reset 5 3", "reply 1", "reply 3"]).await;
        peer.data(1, true, b"").await;
        peer.expect(&["1:."]).await;
        peer.open(7, &DATA).await;
        peer.expect(&["reply 7"]).await;
    })
    .await;
}

#[tokio::test]
async fn session_is_dropped_when_the_client_is_gone() {
    struct Dropped(Option<tokio::sync::oneshot::Sender<()>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _sent = self.0.take().unwrap().send(());
        }
    }
    let (sender, dropped) = tokio::sync::oneshot::channel();
    let session = async |_incoming, _outbox, _activity| {
        let _dropped = Dropped(Some(sender));
        std::future::pending::<()>().await;
    };
    serve_peer(Limits::default(), session, async |peer| drop(peer)).await;
    dropped.await.unwrap();
}

/// Closing at once would destroy output that the client has not read yet, if the client has sent data meanwhile.
#[tokio::test(start_paused = true)]
async fn connection_lingers_until_the_client_closes_it() {
    let start = Instant::now();
    let done = async |_incoming, _outbox, _activity| {};
    serve_peer(Limits::default(), done, async |mut peer| {
        peer.expect(&["goaway 0 0"]).await;
        peer.data(1, false, b"late").await;
    })
    .await;
    assert_eq!(start.elapsed(), Duration::ZERO, "the client closed it");
    let client = async |mut peer: Peer<DuplexStream>| peer.rest().await;
    assert_eq!(serve_peer(Limits::default(), done, client).await, ["goaway 0 0"]);
    assert_eq!(start.elapsed(), Limits::default().linger);
}
