//! Limits on the resources that clients of a gRPC service may hold: connections, handshakes, calls.
//!
//! A guest reaches the node's ports through its gateway. Without limits one guest could keep connections open until the daemon
//! has no file descriptor left.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

/// Time limit of a TLS handshake.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Maximum number of concurrent calls on one connection.
const STREAMS: u32 = 256;
/// Interval of keep-alive pings on a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Time limit for the answer to a keep-alive ping.
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(10);

/// Maximum number of open connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Connections {
    /// Maximum over all clients.
    pub(super) all: usize,
    /// Maximum for one address.
    pub(super) per_address: usize,
}

impl Default for Connections {
    /// An operator holds one connection to a node; the command line opens one for each command.
    fn default() -> Self {
        Self { all: 1024, per_address: 128 }
    }
}

/// Returns a server that limits concurrent calls and closes connections of clients that are gone.
pub(super) fn server() -> Server {
    Server::builder()
        .trace_fn(coracle_telemetry::call_span)
        .max_concurrent_streams(STREAMS)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_ANSWER))
}

/// Yields the connections of `listener` within `limits`; a connection beyond them is closed at once. TCP_NODELAY is set: short
/// frames must not wait up to 40 ms for the acknowledgement of earlier ones.
pub(super) fn incoming(
    listener: TcpListener,
    limits: Connections,
) -> impl Stream<Item = io::Result<Connection>> + Send {
    let open = Open { limits, counts: Arc::default() };
    TcpIncoming::from(listener).with_nodelay(Some(true)).filter_map(move |accepted| {
        let taken = match accepted {
            Ok(stream) => open.admit(stream).map(Ok),
            Err(error) => Some(Err(error)),
        };
        std::future::ready(taken)
    })
}

/// Number of open connections, by address.
#[derive(Clone, Debug)]
struct Open {
    limits: Connections,
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Open {
    /// Counts a connection. `None`: the limit is reached, or the connection is already closed.
    fn admit(&self, stream: TcpStream) -> Option<Connection> {
        let peer = stream.peer_addr().ok()?;
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = counts.values().sum();
        let of_peer = counts.entry(peer.ip()).or_default();
        if all >= self.limits.all || *of_peer >= self.limits.per_address {
            tracing::debug!(%peer, open = *of_peer, "connection refused: too many are open");
            if *of_peer == 0 {
                counts.remove(&peer.ip());
            }
            return None;
        }
        *of_peer += 1;
        drop(counts);
        Some(Connection { stream, peer, open: self.clone() })
    }
}

/// Connection that is counted while it is open.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    open: Open,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut counts = self.open.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.peer.ip()) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.peer.ip());
            }
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn connection_beyond_the_limit_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let mut accepted = Box::pin(incoming(listener, Connections { all: 10, per_address: 2 }));
        let _first = TcpStream::connect(at).await.unwrap();
        let held = accepted.next().await.unwrap().unwrap();
        let _second = TcpStream::connect(at).await.unwrap();
        let _held_too = accepted.next().await.unwrap().unwrap();

        let mut third = TcpStream::connect(at).await.unwrap();
        let mut byte = [0];
        tokio::select! {
            more = accepted.next() => panic!("{more:?}"),
            end = third.read(&mut byte) => assert_eq!(end.unwrap_or(0), 0),
        }

        drop(held);
        let _fourth = TcpStream::connect(at).await.unwrap();
        accepted.next().await.unwrap().unwrap();
    }
}
