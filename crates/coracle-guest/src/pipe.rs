//! End of a pipe or a terminal, read and written without blocking.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Size of a read from a process, and thus maximum size of a message, bytes.
pub(crate) const CHUNK: usize = 32 * 1024;

/// Descriptor of the agent that is connected to a process.
#[derive(Debug)]
pub(crate) struct Pipe(AsyncFd<OwnedFd>);

impl Pipe {
    /// Takes ownership of `fd` and makes it non-blocking.
    pub(crate) fn new(fd: OwnedFd, interest: Interest) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        crate::sys::watch(fd, interest).map(Self)
    }

    /// Reads the available data; 0 at the end. Cancel-safe.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut guard = self.0.readable().await?;
            let closed = guard.ready().is_read_closed();
            match guard.try_io(|fd| rustix::io::read(fd.get_ref(), &mut *buffer).map_err(io::Error::from)) {
                // The last process of the terminal has gone.
                Ok(Err(e)) if e.raw_os_error() == Some(Errno::IO.raw_os_error()) => return Ok(0),
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(result) => return result,
                // The other end was closed: the flag is never cleared, so waiting would spin.
                Err(_) if closed => return Ok(0),
                Err(_) => {}
            }
        }
    }

    /// Number of bytes that can be read without waiting (ioctl_tty(2), FIONREAD).
    pub(crate) fn readable(&self) -> usize {
        let count = rustix::io::ioctl_fionread(self.0.get_ref()).unwrap_or(0);
        usize::try_from(count).unwrap_or(usize::MAX)
    }

    /// Writes all bytes; waits while the process does not read.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut guard = self.0.writable().await?;
            let closed = guard.ready().is_write_closed();
            match guard.try_io(|fd| rustix::io::write(fd.get_ref(), bytes).map_err(io::Error::from)) {
                Ok(Ok(n)) => bytes = bytes.get(n..).unwrap_or_default(),
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Err(e),
                Err(_) if closed => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Sets the size of a terminal; the kernel sends SIGWINCH.
    pub(crate) fn resize(&self, rows: u16, cols: u16) -> io::Result<()> {
        Ok(rustix::termios::tcsetwinsize(self.0.get_ref(), size(rows, cols))?)
    }
}

pub(crate) fn size(rows: u16, cols: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }
}
