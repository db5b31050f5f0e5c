//! A guest that speaks the guest protocol while its vCPUs run. A power-off ends the process.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::fake::guest::{self, GuestState, Handle};

/// Request for the port of the guest agent.
const PORT: &str = "CONNECT 1024\n";

/// Guest of one VMM; clones are handles of the same guest.
#[derive(Clone, Debug)]
pub struct Guest {
    handle: Arc<Handle>,
    /// The listener and its connections, which end with the last clone.
    tasks: Arc<Mutex<JoinSet<()>>>,
}

impl Guest {
    /// Returns a guest that has not booted, with paused vCPUs.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it starts tasks")]
    pub fn new() -> Self {
        Self::start(None)
    }

    /// Returns a guest with paused vCPUs in a saved state; `None` when `saved` is not one.
    #[must_use]
    pub fn after(saved: &str) -> Option<Self> {
        GuestState::load(saved).map(|progress| Self::start(Some(progress)))
    }

    fn start(saved: Option<GuestState>) -> Self {
        let off = || std::process::exit(0);
        let handle = guest::start(Duration::ZERO, saved, CancellationToken::new(), off);
        handle.hold(true);
        Self { handle: Arc::new(handle), tasks: Arc::default() }
    }

    /// Resumes or pauses the vCPUs.
    pub fn run(&self, yes: bool) {
        self.handle.hold(!yes);
    }

    /// Returns the state, for [`Guest::after`].
    #[must_use]
    pub fn save(&self) -> String {
        self.handle.progress().save()
    }

    /// Listens on the vsock socket while this guest lives.
    ///
    /// # Errors
    /// When the socket cannot be bound.
    pub fn listen(&self, socket: &str) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let handle = self.handle.clone();
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(connect(handle.clone(), stream));
            }
        });
        Ok(())
    }
}

/// Connects a caller that names the guest agent's port, once the agent runs.
async fn connect(handle: Arc<Handle>, mut stream: UnixStream) -> io::Result<()> {
    let mut line = String::new();
    while !line.ends_with('\n') && line.len() < 32 {
        line.push(stream.read_u8().await?.into());
    }
    if line != PORT {
        return Ok(()); // no listener on that port: the VMM closes the stream
    }
    handle.running().await;
    stream.write_all(b"OK 1073741824\n").await?;
    let mut session = handle.connect()?;
    copy_bidirectional(&mut stream, &mut session).await.map(|_| ())
}
