//! Port-forward with client-go's clients.

use std::sync::atomic::Ordering;

use coracle_testkit::eventually;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::clients::Forwarder;
use crate::support::{DEADLINE, Served};

/// Protocols of the client: SPDY, and the tunnel.
const VIA: [&str; 2] = ["spdy", "websocket"];
/// Number of parallel connections.
const PARALLEL: u8 = 50;

/// Sends `input`, closes that half, and returns all data until the end.
async fn exchange(port: u16, input: Vec<u8>) -> Vec<u8> {
    let exchange = async {
        let mut connection = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (mut read, mut write) = connection.split();
        let mut output = Vec::new();
        let writing = async {
            write.write_all(&input).await.unwrap();
            write.shutdown().await.unwrap();
        };
        let (read, ()) = tokio::join!(read.read_to_end(&mut output), writing);
        read.unwrap();
        output
    };
    timeout(DEADLINE, exchange).await.expect("the exchange does not end")
}

#[tokio::test]
async fn parallel_connections_get_their_own_data() {
    for via in VIA {
        let served = Served::new().await;
        let Some(forwarder) = Forwarder::start(&served, via, &[7]).await else { return };
        let mut exchanges = JoinSet::new();
        for n in 0..PARALLEL {
            let (port, input) = (forwarder.local[0], vec![n; 100_000 + usize::from(n)]);
            exchanges.spawn(async move { assert!(exchange(port, input.clone()).await == input, "{n}") });
        }
        assert_eq!(exchanges.join_all().await.len(), usize::from(PARALLEL));
        let open = || served.seen.connections.load(Ordering::SeqCst);
        eventually("the connections end", async || (open() == 0).then_some(())).await.unwrap();
        // Further connections are served as well.
        assert_eq!(exchange(forwarder.local[0], b"again".to_vec()).await, b"again");
        assert_eq!(forwarder.end(true).await.0, Some(0), "{via}");
        eventually("the task ends", async || (served.tasks.open() == 0).then_some(())).await.unwrap();
    }
}

#[tokio::test]
async fn half_close_is_passed_on_in_both_directions() {
    for via in VIA {
        let served = Served::new().await;
        let Some(forwarder) = Forwarder::start(&served, via, &[8, 9]).await else { return };
        let [count, hello] = forwarder.local[..] else { panic!("{:?}", forwarder.local) };
        // The port answers after it has received the end.
        assert_eq!(exchange(count, vec![0; 3_000_000]).await, b"3000000", "{via}");
        assert_eq!(exchange(hello, vec![]).await, b"hello", "{via}");
        assert_eq!(forwarder.end(true).await.0, Some(0), "{via}");
    }
}

#[tokio::test]
async fn refused_port_is_an_error_for_the_client() {
    for via in VIA {
        let served = Served::new().await;
        let Some(forwarder) = Forwarder::start(&served, via, &[1]).await else { return };
        assert_eq!(exchange(forwarder.local[0], vec![]).await, b"", "{via}");
        // The client ends all its connections after an error.
        let (code, stderr) = forwarder.end(false).await;
        assert!(stderr.contains("cannot forward port 1: connection refused"), "{via}: {stderr}");
        assert_eq!(code, Some(99), "{via}: {stderr}");
    }
}

#[tokio::test]
async fn stop_of_the_server_ends_forwarding() {
    for via in VIA {
        let served = Served::new().await;
        let Some(forwarder) = Forwarder::start(&served, via, &[7]).await else { return };
        let mut connection = TcpStream::connect(("127.0.0.1", forwarder.local[0])).await.unwrap();
        connection.write_all(b"x").await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), b'x');
        let ((code, stderr), ()) = tokio::join!(forwarder.end(false), served.tasks.stop());
        assert_eq!(code, Some(99), "{via}: {stderr}");
        let open = || served.seen.connections.load(Ordering::SeqCst);
        eventually("the connection ends", async || (open() == 0).then_some(())).await.unwrap();
    }
}
