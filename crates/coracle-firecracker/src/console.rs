//! The serial line, which Firecracker has on standard input and output.
//!
//! Both are FIFOs that the process itself holds open at both ends. So it neither ends by SIGPIPE when the daemon goes nor
//! reads an end of input, and a guest that says more than anyone reads loses the rest: the FIFO is bounded, and a write to
//! a full one fails instead of stopping the guest's CPU (docs/prod-host-setup, "8250 Serial Device").

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;

use crate::folder::CONSOLE;

/// Both ends of both FIFOs for a process that is about to start: what it reads, and what it writes.
pub(crate) fn ends(folder: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let open = |name: &str, flags: OFlags| -> io::Result<OwnedFd> {
        let flags = i32::try_from(flags.bits()).unwrap_or_default();
        Ok(File::options().read(true).write(true).custom_flags(flags).open(folder.join(name))?.into())
    };
    let [from, to] = CONSOLE;
    Ok((open(from, OFlags::empty())?, open(to, OFlags::NONBLOCK)?))
}

/// Carries bytes between the FIFOs of a process and those who look at its console.
#[derive(Debug, Default)]
pub(crate) struct Relays(Mutex<JoinSet<()>>);

impl Relays {
    /// A stream of the console in `directory`. It ends with the process, and its relay with it.
    pub(crate) fn open(&self, folder: &Path) -> io::Result<UnixStream> {
        let [from, to] = CONSOLE;
        let input = pipe::OpenOptions::new().open_sender(folder.join(from))?;
        let output = pipe::OpenOptions::new().open_receiver(folder.join(to))?;
        let (theirs, ours) = UnixStream::pair()?;
        let mut relays = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while relays.try_join_next().is_some() {}
        relays.spawn(relay(ours, input, output));
        Ok(theirs)
    }
}

async fn relay(stream: UnixStream, mut input: pipe::Sender, mut output: pipe::Receiver) {
    let (mut from, mut to) = stream.into_split();
    // Either end closing is the end of both.
    tokio::select! {
        _ = tokio::io::copy(&mut from, &mut input) => {}
        _ = tokio::io::copy(&mut output, &mut to) => {}
    }
}
