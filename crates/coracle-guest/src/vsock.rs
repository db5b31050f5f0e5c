//! The channel to the host on machines with a vsock: the host connects, and each connection is a session (vsock(7)).
//!
//! Unlike the serial port it has an end that both sides see, so of its rules only the hello is left: the agent speaks
//! first, and a machine that was restored finds its old connections reset.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{SocketFlags, accept_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The port that the host connects to.
pub const PORT: u32 = 1024;

/// Takes connections of the host.
#[derive(Debug)]
pub(crate) struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Listens for everyone who can reach this machine's vsock: that is its VMM.
    pub(crate) fn bind() -> io::Result<Self> {
        Ok(Self(crate::sys::watch(crate::sys::listen_vsock(PORT)?, Interest::READABLE)?))
    }

    /// The next connection. Cancel-safe.
    pub(crate) async fn accept(&self) -> io::Result<OwnedFd> {
        loop {
            let mut ready = self.0.readable().await?;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let taken = ready.try_io(|fd| accept_with(fd.get_ref(), flags).map_err(io::Error::from));
            match taken {
                Ok(taken) => return taken,
                Err(_no_listener) => {}
            }
        }
    }
}
