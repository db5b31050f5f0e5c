//! Stream that sends descriptors with its first bytes (unix(7), `SCM_RIGHTS`).

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// Maximum number of descriptors of one call.
const DESCRIPTORS_MAX: usize = 4;

/// Connection that sends descriptors with the first bytes that are written.
pub(super) struct DescriptorStream {
    stream: UnixStream,
    unsent: Vec<OwnedFd>,
}

impl DescriptorStream {
    /// # Errors
    /// `InvalidInput` for more than [`DESCRIPTORS_MAX`].
    pub(super) fn new(stream: UnixStream, unsent: Vec<OwnedFd>) -> io::Result<Self> {
        if unsent.len() > DESCRIPTORS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { stream, unsent })
    }
}

fn send(socket: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> io::Result<usize> {
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

impl AsyncWrite for DescriptorStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.unsent.is_empty() || bytes.is_empty() {
            return Pin::new(&mut self.stream).poll_write(cx, bytes);
        }
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            let sent = self.stream.try_io(Interest::WRITABLE, || send(&self.stream, bytes, &self.unsent));
            match sent {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Ok(sent) => {
                    self.unsent.clear();
                    return Poll::Ready(Ok(sent));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl AsyncRead for DescriptorStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}
