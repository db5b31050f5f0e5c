//! Stream that its owner can shut down while a connection reads and writes it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// Connection's handle of the stream. One task reads and one task writes.
#[derive(Debug)]
pub(crate) struct SharedStream(Arc<UnixStream>);

/// Shuts the stream down when it is dropped. Dropping the connection would do so only when its task runs.
#[derive(Debug)]
pub(crate) struct Hangup(Arc<UnixStream>);

/// Splits a stream into the handle of a connection and the one of its owner. Both share one open file, because a node has
/// thousands of guests.
pub(crate) fn share(stream: UnixStream) -> (SharedStream, Hangup) {
    let stream = Arc::new(stream);
    (SharedStream(stream.clone()), Hangup(stream))
}

impl Hangup {
    /// Shuts both directions down (shutdown(2)), which the other end notices at once. Idempotent.
    pub(crate) fn hang_up(&self) {
        let _already_closed = rustix::net::shutdown(&*self.0, Shutdown::Both);
    }
}

impl Drop for Hangup {
    fn drop(&mut self) {
        self.hang_up();
    }
}

impl AsyncRead for SharedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl SharedStream {
    fn poll_write_with(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for SharedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(())) // nothing is buffered
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&*self.0, Shutdown::Write).map_err(io::Error::from))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn shared_stream_carries_large_data_both_ways() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, hangup) = share(ours);
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let (mut far_read, mut far_write) = theirs.into_split();
        let (mut near_read, mut near_write) = tokio::io::split(ours);
        let echo = async {
            tokio::io::copy(&mut far_read, &mut far_write).await.unwrap();
            far_write.shutdown().await.unwrap();
        };
        let send = async {
            near_write.write_all(&sent).await.unwrap();
            near_write.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let receive = near_read.read_to_end(&mut received);
        let ((), (), received_length) = tokio::join!(echo, send, receive);
        assert_eq!((received_length.unwrap(), received == sent), (sent.len(), true));
        drop(hangup);
    }

    #[tokio::test]
    async fn hangup_ends_a_stream_that_is_being_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (mut ours, hangup) = share(ours);
        let mut byte = [0];
        let reads = ours.read(&mut byte);
        let ends = async {
            tokio::task::yield_now().await;
            drop(hangup);
        };
        let (length, ()) = tokio::join!(reads, ends);
        assert_eq!(length.unwrap(), 0, "the connection sees the end");
        assert_eq!(theirs.read(&mut byte).await.unwrap(), 0, "and so does the guest");
    }
}
