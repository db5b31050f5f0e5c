//! The serial console of one VM: a bounded history on disk, live readers, input.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc};

use crate::ring::Ring;

/// Bytes of history kept.
const HISTORY_BYTES: u64 = 256 * 1024;

/// How far a live reader may lag before it loses bytes, in chunks.
const LIVE_CHUNKS: usize = 256;

/// Access to a VM's console, shared by any number of viewers.
#[derive(Clone, Debug)]
pub struct ConsoleHandle {
    ring: Arc<Mutex<Ring>>,
    /// Made for the first reader: its buffer is larger than all else of a console that no client reads.
    live: Arc<OnceLock<broadcast::Sender<Bytes>>>,
    /// Boxed: a channel has room for 32 from its beginning, and most consoles get no input.
    input: mpsc::Sender<Box<Bytes>>,
}

/// The end that the VM's own task feeds.
#[derive(Debug)]
pub struct ConsoleInput(mpsc::Receiver<Box<Bytes>>);

impl ConsoleHandle {
    /// The console of a VM with its history in the file at `path`, which is opened when it is first used.
    #[must_use]
    pub fn new(path: &Path) -> (Self, ConsoleInput) {
        let ring = Arc::new(Mutex::new(Ring::new(path, HISTORY_BYTES)));
        let (input, keys) = mpsc::channel(16);
        (Self { ring, live: Arc::default(), input }, ConsoleInput(keys))
    }

    /// What was said so far, and what is said from then on, without a gap.
    ///
    /// # Errors
    /// When the history cannot be read.
    pub fn attach(&self) -> io::Result<(Vec<u8>, broadcast::Receiver<Bytes>)> {
        let mut ring = self.ring.lock();
        // Subscribed under the lock: a chunk is in the history or in the stream, never in neither.
        let live = self.live.get_or_init(|| broadcast::channel(LIVE_CHUNKS).0);
        Ok((ring.contents()?, live.subscribe()))
    }

    /// Types on the console. Waits while earlier input is not taken. Cancel-safe.
    pub async fn type_in(&self, keys: Bytes) {
        let _no_listener = self.input.send(Box::new(keys)).await;
    }

    fn record(&self, bytes: &[u8]) -> io::Result<()> {
        let mut ring = self.ring.lock();
        ring.append(bytes)?;
        if let Some(live) = self.live.get() {
            let _no_viewer = live.send(Bytes::copy_from_slice(bytes));
        }
        Ok(())
    }
}

/// Moves bytes between the VMM's socket and the handle until either ends.
pub async fn pump(mut socket: UnixStream, handle: &ConsoleHandle, keys: &mut ConsoleInput) {
    loop {
        tokio::select! {
            readable = socket.readable() => {
                if readable.is_err() || !take(&socket, handle) {
                    return;
                }
            }
            Some(typed) = keys.0.recv() => {
                if socket.write_all(&typed).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Records what can be read at once; false: the other end is closed. The buffer is on the stack, since most consoles are
/// silent.
fn take(socket: &UnixStream, handle: &ConsoleHandle) -> bool {
    let mut buffer = [0; 4096];
    let length = match socket.try_read(&mut buffer) {
        Ok(length) => length,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
        Err(_) => return false,
    };
    if let Err(error) = handle.record(buffer.get(..length).unwrap_or_default()) {
        tracing::warn!(%error, "console history not written");
    }
    length > 0
}
