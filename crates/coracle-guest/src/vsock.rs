//! Channel to the host in VMs with a vsock: the host connects, and each connection is a session (vsock(7)).
//!
//! Unlike the serial port a vsock connection has an end that both sides see, so only the rule of the hello remains: the agent
//! speaks first. A restored guest finds its old connections reset.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{SocketFlags, accept_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Port that the host connects to.
pub const PORT: u32 = 1024;

/// Accepts connections of the host.
#[derive(Debug)]
pub(crate) struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Listens on the vsock, which only the VMM can reach.
    pub(crate) fn bind() -> io::Result<Self> {
        Ok(Self(crate::sys::watch(crate::sys::listen_vsock(PORT)?, Interest::READABLE)?))
    }

    /// Accepts the next connection. Cancel-safe.
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
