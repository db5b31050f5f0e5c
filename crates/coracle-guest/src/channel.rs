//! Virtio-serial port to the host. The stream has no boundaries: a flag is all that tells the guest whether a host is
//! connected, and the guest can miss its changes. The rules that turn the stream into sessions are those of
//! docs/reference/guest-channel.md:
//!
//! ```text
//! open ──▶ wait for a host ──▶ hello ──▶ HTTP/2 ──end of stream──▶ drop all, open again
//!                                          └─error──▶ discard until the host hangs up ─┘
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{Mode, OFlags};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// Name of the port, as the host gives it to `virtserialport`.
pub const PORT_NAME: &str = "dev.coracle.guest.0";
/// First bytes of a hello; the session number follows, big-endian.
pub const MAGIC: [u8; 8] = *b"CORACLE1";

/// Interval of checks for a port that does not exist yet, or that is still open.
const RETRY: Duration = Duration::from_millis(1);
/// Interval of checks for a port that is late.
const RETRY_SLOW: Duration = Duration::from_millis(50);
/// Number of tries after which the port is late.
const QUICK_TRIES: u32 = 3000;

/// Hello of 16 bytes, with which the agent begins a session.
#[must_use]
pub fn hello(session: u64) -> [u8; 16] {
    let [a, b, c, d, e, f, g, h] = MAGIC;
    let [i, j, k, l, m, n, o, p] = session.to_be_bytes();
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// Opens the port. Waits until the port exists and its last user has closed it.
pub(crate) async fn open(sys: &Path, dev: &Path) -> OwnedFd {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let mut tries = 0u32;
    loop {
        if let Some(fd) = find(sys, dev).and_then(|path| rustix::fs::open(path, flags, Mode::empty()).ok()) {
            return fd;
        }
        tries = tries.saturating_add(1);
        tokio::time::sleep(if tries < QUICK_TRIES { RETRY } else { RETRY_SLOW }).await;
    }
}

/// Device of the port with [`PORT_NAME`].
fn find(sys: &Path, dev: &Path) -> Option<PathBuf> {
    let ports = std::fs::read_dir(sys.join("class/virtio-ports")).ok()?;
    let ours = |path: &Path| {
        std::fs::read_to_string(path.join("name")).is_ok_and(|name| name.trim_end() == PORT_NAME)
    };
    ports.flatten().find(|port| ours(&port.path())).map(|port| dev.join(port.file_name()))
}

/// Whether no host is connected to the other end. A read must follow if a session waits for data, see [`wait_for_host`].
fn is_hung_up(fd: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
        && fds.iter().any(|f| f.revents().contains(PollFlags::HUP))
}

/// Waits until a host is connected to the other end. Waits for an edge, because poll reports a missing host continuously.
/// Returns what it waited with, which watches nothing any more: a clone closes it after its start.
///
/// # Errors
/// When the kernel refuses to watch `fd`.
pub async fn wait_for_host(fd: &OwnedFd) -> io::Result<impl Send + use<>> {
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::HUP | epoll::EventFlags::ET;
    epoll::add(&edges, fd, epoll::EventData::new_u64(0), all)?;
    let edges = crate::sys::watch(edges, Interest::READABLE)?;
    loop {
        let mut guard = edges.readable().await?;
        let mut events = [epoll::Event { flags: all, data: epoll::EventData::new_u64(0) }];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(edges.get_ref(), &mut events[..], Some(&now))?;
        guard.clear_ready();
        if events
            .iter()
            .take(count)
            .any(|&epoll::Event { flags, .. }| !flags.contains(epoll::EventFlags::HUP))
        {
            break;
        }
    }
    // A poll of the port takes received data off its queue, after which no interrupt comes for them, and only this poll reports
    // them (`port_fops_poll` in drivers/char/virtio_console.c). So nothing else may watch the port while a session waits for data.
    epoll::delete(&edges, fd)?;
    Ok(edges)
}

/// Open port, which is one session.
#[derive(Clone, Debug)]
pub struct Port(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    fd: AsyncFd<OwnedFd>,
    /// Whether the end of the stream was seen, even if another host has connected since.
    ended: AtomicBool,
}

impl Port {
    /// Registers a newly opened, non-blocking descriptor.
    ///
    /// # Errors
    /// When the kernel refuses to watch the descriptor.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let fd = crate::sys::watch(fd, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self(Arc::new(Inner { fd, ended: AtomicBool::new(false) })))
    }

    /// Discards what the host sends until it hangs up: after a broken session the data cannot be interpreted.
    pub async fn discard_until_hang_up(&self) {
        let mut port = self.clone();
        let mut waste = vec![0u8; 4096];
        while !self.0.ended.load(Ordering::Relaxed) && !is_hung_up(self.0.fd.get_ref()) {
            match tokio::io::AsyncReadExt::read(&mut port, &mut waste).await {
                Ok(n) if n > 0 => {}
                _ => return,
            }
        }
    }
}

impl AsyncRead for Port {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.fd.poll_read_ready(cx))?;
            let closed = guard.ready().is_read_closed();
            let read = guard.try_io(|fd| {
                rustix::io::read(fd.get_ref(), buffer.initialize_unfilled()).map_err(io::Error::from)
            });
            let n = match read {
                Ok(Ok(n)) => n,
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => continue,
                Ok(Err(e)) => return Poll::Ready(Err(e)),
                // The host disconnected, and another one connected before the read. Its session is not this one.
                Err(_) if closed => 0,
                Err(_) => continue,
            };
            if n == 0 {
                self.0.ended.store(true, Ordering::Relaxed);
            }
            buffer.advance(n);
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncWrite for Port {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.fd.poll_write_ready(cx))?;
            let closed = guard.ready().is_write_closed();
            match guard.try_io(|fd| rustix::io::write(fd.get_ref(), bytes).map_err(io::Error::from)) {
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(result) => return Poll::Ready(result),
                // Without a host a write would block for ever, and the flag is never cleared: waiting would spin.
                Err(_) if closed => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                Err(_) => {}
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Does nothing: the port has no half-close, and is closed when it is dropped.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn pair() -> (OwnedFd, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (ours.into(), theirs)
    }

    #[test]
    fn hello_is_magic_and_number() {
        assert_eq!(&hello(258), b"CORACLE1\0\0\0\0\0\0\x01\x02");
    }

    #[test]
    fn virtio_port_is_found_by_name() {
        let sys = tempfile::tempdir().unwrap();
        for (port, name) in [("vport0p1", "org.qemu.guest_agent.0\n"), ("vport1p3", "dev.coracle.guest.0\n")]
        {
            let dir = sys.path().join("class/virtio-ports").join(port);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("name"), name).unwrap();
        }
        assert_eq!(find(sys.path(), Path::new("/dev")), Some("/dev/vport1p3".into()));
        assert_eq!(find(Path::new("/no/such"), Path::new("/dev")), None);
    }

    #[tokio::test]
    async fn hang_up_is_eof_and_not_an_error() {
        let (ours, mut theirs) = pair();
        wait_for_host(&ours).await.unwrap();
        let mut port = Port::new(ours).unwrap();
        theirs.write_all(b"hi").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(port.read(&mut buffer).await.unwrap(), 2);
        drop(theirs);
        assert_eq!(port.read(&mut buffer).await.unwrap(), 0);
        assert!(port.0.ended.load(Ordering::Relaxed));
        port.discard_until_hang_up().await;
    }

    #[tokio::test]
    async fn port_is_unwatched_after_the_host_is_present() {
        let (ours, _theirs) = pair();
        let _waited_with = wait_for_host(&ours).await.unwrap();
        let infos = std::fs::read_dir("/proc/self/fdinfo").unwrap();
        let infos = infos.filter_map(|info| std::fs::read_to_string(info.unwrap().path()).ok());
        let watched = format!("tfd: {:8} ", ours.as_raw_fd());
        assert_eq!(infos.filter(|info| info.contains(&watched)).count(), 0);
    }

    #[tokio::test]
    async fn garbage_is_discarded_until_the_host_hangs_up() {
        let (ours, mut theirs) = pair();
        let port = Port::new(ours).unwrap();
        let writer = std::thread::spawn(move || {
            for _ in 0..100 {
                theirs.write_all(&[b'x'; 4096]).unwrap();
            }
        });
        tokio::time::timeout(Duration::from_secs(5), port.discard_until_hang_up()).await.unwrap();
        writer.join().unwrap();
    }

    #[tokio::test]
    async fn write_without_a_host_fails_at_once() {
        let (ours, theirs) = pair();
        let mut port = Port::new(ours).unwrap();
        drop(theirs);
        let write =
            tokio::time::timeout(Duration::from_secs(1), port.write_all(&[0; 1 << 20])).await.unwrap();
        assert_eq!(write.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
