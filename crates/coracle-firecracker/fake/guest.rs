//! The guest: our agent's wire with pretended answers, for as long as its CPUs run. Told to power off, it ends the
//! process.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use coracle_hypervisor::fake::guest::{self, Handle, Progress};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

/// The agent's port.
const PORT: &str = "CONNECT 1024\n";

/// A machine's guest.
#[derive(Clone, Debug)]
pub(crate) struct Guest(Arc<Handle>);

impl Guest {
    /// One whose CPUs are held, which has not begun.
    pub(crate) fn new() -> Self {
        Self::start(None)
    }

    /// One whose CPUs are held, which goes on where another was saved; `None`: that is no guest's memory.
    pub(crate) fn after(saved: &str) -> Option<Self> {
        Progress::load(saved).map(|progress| Self::start(Some(progress)))
    }

    fn start(saved: Option<Progress>) -> Self {
        let off = || std::process::exit(0);
        let handle = guest::start(Duration::ZERO, saved, CancellationToken::new(), off);
        handle.hold(true);
        Self(Arc::new(handle))
    }

    /// Lets its CPUs run, or holds them.
    pub(crate) fn run(&self, yes: bool) {
        self.0.hold(!yes);
    }

    /// All that is in its memory.
    pub(crate) fn save(&self) -> String {
        self.0.progress().save()
    }

    /// Listens at the vsock's socket until the process ends.
    pub(crate) fn listen(&self, socket: &str) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let guest = self.clone();
        #[expect(clippy::disallowed_methods, reason = "ends with the process, as a device of a VMM does")]
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(guest.clone().meet(stream));
            }
        });
        Ok(())
    }

    /// Hands a caller that names the agent's port to the agent, once that runs.
    async fn meet(self, mut stream: UnixStream) -> io::Result<()> {
        let mut line = String::new();
        while !line.ends_with('\n') && line.len() < 32 {
            line.push(stream.read_u8().await?.into());
        }
        if line != PORT {
            return Ok(()); // nobody listens there: the VMM closes
        }
        self.0.running().await;
        stream.write_all(b"OK 1073741824\n").await?;
        let mut session = self.0.connect()?;
        copy_bidirectional(&mut stream, &mut session).await.map(|_| ())
    }
}
