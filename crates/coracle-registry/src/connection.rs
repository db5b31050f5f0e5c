//! Connections: serves them, and closes those whose client does not read.
//!
//! Such a client has one of two symptoms. The socket accepts no bytes for the idle time ([`Drained`]). Or the socket accepts
//! control frames of HTTP/2, but no stream has a window, and responses wait in the server ([`Flow`]).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::Watcher;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Bytes that hyper reads ahead per connection.
const READ_AHEAD: usize = 256 << 10;
/// Minimum rate of a client over the idle time, bytes per second.
const RATE_MIN: u64 = 128;

/// Settings of all connections.
pub(crate) fn builder(head_idle: Duration) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head_idle).max_buf_size(READ_AHEAD);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(head_idle).max_concurrent_streams(64);
    builder
}

/// Serves one connection until its client, `watcher` or a stall ends the connection.
pub(crate) async fn drive<S>(
    builder: auto::Builder<TokioExecutor>,
    stream: S,
    router: Router,
    watcher: Watcher,
    flow: Arc<Flow>,
    idle: Duration,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        ended = watcher.watch(connection.into_owned()) => {
            if let Err(error) = ended {
                tracing::debug!(error, "connection ended");
            }
        }
        () = flow.stalled(idle) => tracing::debug!("connection closed: the client does not read"),
    }
}

/// Bytes of responses on one connection: those given to the HTTP server, and those that it has sent.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    given: AtomicU64,
    sent: AtomicU64,
}

impl Flow {
    /// Wraps a body so that its bytes are counted.
    pub(crate) fn count(self: &Arc<Self>, body: Body) -> Body {
        let flow = Arc::clone(self);
        Body::new(body.map_frame(move |frame| frame.map_data(|bytes| flow.track(bytes))))
    }

    fn track(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        self.given.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Bytes::from_owner(Held { bytes, flow: Arc::clone(self) })
    }

    /// Completes when a client reads too slowly: too few of the waiting bytes were sent within the idle time. Cancel-safe.
    async fn stalled(&self, idle: Duration) {
        let enough = RATE_MIN.saturating_mul(idle.as_secs()).max(1);
        loop {
            let before = self.sent.load(Ordering::Relaxed);
            let waited = self.given.load(Ordering::Relaxed) > before;
            sleep(idle).await;
            let sent = self.sent.load(Ordering::Relaxed);
            if waited && sent - before < enough && self.given.load(Ordering::Relaxed) > sent {
                return;
            }
        }
    }
}

/// Bytes that wait to be sent. Dropping them counts them as sent.
struct Held {
    bytes: Bytes,
    flow: Arc<Flow>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.flow.sent.fetch_add(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

/// Stream whose writes fail when the peer accepts almost no bytes during the idle time.
#[derive(Debug)]
pub(crate) struct Drained<S> {
    stream: S,
    idle: Duration,
    /// End of the idle time and bytes sent since then, from the first write that had to wait.
    waiting: Option<(Pin<Box<Sleep>>, u64)>,
}

impl<S> Drained<S> {
    pub(crate) fn new(stream: S, idle: Duration) -> Self {
        Self { stream, idle, waiting: None }
    }

    /// Checks the result of a write of `offered` bytes.
    fn check_write(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        offered: usize,
    ) -> Poll<io::Result<usize>> {
        let enough = RATE_MIN.saturating_mul(self.idle.as_secs()).max(1);
        match written {
            Poll::Ready(Ok(n)) => {
                if let Some((_, bytes)) = &mut self.waiting {
                    *bytes += n as u64;
                    if n == offered || *bytes >= enough {
                        self.waiting = None;
                    }
                }
                Poll::Ready(Ok(n))
            }
            Poll::Pending => {
                let idle = self.idle;
                let (end, _) = self.waiting.get_or_insert_with(|| (Box::pin(sleep(idle)), 0));
                ready!(end.as_mut().poll(cx));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
            }
            failed => failed,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Drained<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Drained<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.check_write(cx, written, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.check_write(cx, written, slices.iter().map(|slice| slice.len()).sum())
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const IDLE: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn write_to_a_client_that_does_not_read_fails() {
        let (near, _far) = tokio::io::duplex(100);
        let mut near = Drained::new(near, IDLE);
        let refused = near.write_all(&[0; 200]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn write_to_a_slow_client_continues() {
        let (near, mut far) = tokio::io::duplex(5_000);
        let mut near = Drained::new(near, IDLE);
        let read = async {
            let mut bytes = [0; 5_000];
            for _ in 0..10 {
                sleep(IDLE / 4).await;
                far.read_exact(&mut bytes).await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(near.write_all(&[0; 50_000]), read);
        written.unwrap();
        near.write_all(&[0; 5_000]).await.unwrap();
        sleep(IDLE * 3).await;
        let drain = async {
            let mut bytes = [0; 5_000];
            far.read_exact(&mut bytes).await.unwrap();
        };
        let (written, ()) = tokio::join!(near.write_all(&[0; 100]), drain);
        written.unwrap();
    }

    #[tokio::test]
    async fn flow_stalls_while_tracked_bytes_are_unsent() {
        let flow = Arc::new(Flow::default());
        let patient = tokio::time::timeout(IDLE * 4, flow.stalled(IDLE));
        assert!(patient.await.is_err(), "a connection without a response does not stall");
        let sent = flow.track(Bytes::from_static(&[0; 10_000]));
        drop(sent);
        assert!(tokio::time::timeout(IDLE * 4, flow.stalled(IDLE)).await.is_err(), "all was sent");
        let _waits = flow.track(Bytes::from_static(b"x"));
        tokio::time::timeout(IDLE * 20, flow.stalled(IDLE)).await.unwrap();
    }
}
