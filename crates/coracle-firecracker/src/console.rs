//! Serial console, which Firecracker has on standard input and output.
//!
//! Both are FIFOs that the process itself holds open at both ends. Therefore it neither ends by SIGPIPE when the daemon ends
//! nor reads an end of input. A guest loses output that is not read: the FIFO is bounded, and a write to a full FIFO fails
//! instead of blocking the guest's CPU (docs/prod-host-setup, "8250 Serial Device").

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

use crate::run_dir::CONSOLE;

/// Opens both ends of both FIFOs for a process that is about to start; returns its input and its output.
pub(crate) fn open_fifos(folder: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let open = |name: &str, flags: OFlags| -> io::Result<OwnedFd> {
        let flags = i32::try_from(flags.bits()).unwrap_or_default();
        Ok(File::options().read(true).write(true).custom_flags(flags).open(folder.join(name))?.into())
    };
    let [from, to] = CONSOLE;
    Ok((open(from, OFlags::empty())?, open(to, OFlags::NONBLOCK)?))
}

/// Relays bytes between the FIFOs of a process and the clients of its console.
#[derive(Debug, Default)]
pub(crate) struct Relays(Mutex<JoinSet<()>>);

impl Relays {
    /// Opens a stream of the console in `folder`. The stream and its relay end with the process.
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
    // When either end closes, both end.
    tokio::select! {
        _ = tokio::io::copy(&mut from, &mut input) => {}
        _ = tokio::io::copy(&mut output, &mut to) => {}
    }
}
