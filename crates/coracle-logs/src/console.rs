//! Serial console of one VM: a bounded history on disk, live readers, input.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc};

use crate::ring::Ring;

/// Size of the history, bytes.
const HISTORY_BYTES: u64 = 256 * 1024;

/// Number of chunks that a live reader may lag before it loses bytes.
const LIVE_CHUNKS: usize = 256;

/// Handle of a VM's console, shared by any number of viewers.
#[derive(Clone, Debug)]
pub struct ConsoleHandle {
    ring: Arc<Mutex<Ring>>,
    /// Channel to live readers, made for the first one: its buffer is larger than the rest of a console.
    live: Arc<OnceLock<broadcast::Sender<Bytes>>>,
    /// Channel of input. Boxed, because a channel allocates 32 slots at once, and most consoles get no input.
    input: mpsc::Sender<Box<Bytes>>,
}

/// Receiver of console input, for the VM's task.
#[derive(Debug)]
pub struct ConsoleInput(mpsc::Receiver<Box<Bytes>>);

impl ConsoleHandle {
    /// Makes the console of a VM with its history in the file at `path`, which is opened at the first use.
    #[must_use]
    pub fn new(path: &Path) -> (Self, ConsoleInput) {
        let ring = Arc::new(Mutex::new(Ring::new(path, HISTORY_BYTES)));
        let (input, keys) = mpsc::channel(16);
        (Self { ring, live: Arc::default(), input }, ConsoleInput(keys))
    }

    /// Returns the history, and a receiver of everything after it, without a gap.
    ///
    /// # Errors
    /// When the history cannot be read.
    pub fn attach(&self) -> io::Result<(Vec<u8>, broadcast::Receiver<Bytes>)> {
        let mut ring = self.ring.lock();
        // Subscribes under the lock, so that each chunk is in the history or in the stream.
        let live = self.live.get_or_init(|| broadcast::channel(LIVE_CHUNKS).0);
        Ok((ring.contents()?, live.subscribe()))
    }

    /// Sends input to the console. Waits until earlier input was taken. Cancel-safe.
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

/// Copies bytes between the VMM's socket and the handle until either ends.
pub async fn pump(mut socket: UnixStream, handle: &ConsoleHandle, keys: &mut ConsoleInput) {
    loop {
        tokio::select! {
            readable = socket.readable() => {
                if readable.is_err() || !record_available(&socket, handle) {
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

/// Records the bytes that are readable now. Returns false when the other end is closed. The buffer is on the stack, because
/// most consoles are silent.
fn record_available(socket: &UnixStream, handle: &ConsoleHandle) -> bool {
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
