//! The serial console of one VM: a bounded history on disk, live readers, input.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
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
    live: broadcast::Sender<Bytes>,
    input: mpsc::Sender<Bytes>,
}

/// The end that the VM's own task feeds.
#[derive(Debug)]
pub struct ConsoleInput(mpsc::Receiver<Bytes>);

impl ConsoleHandle {
    /// Opens the history of a VM.
    pub fn open(path: &Path) -> io::Result<(Self, ConsoleInput)> {
        let ring = Arc::new(Mutex::new(Ring::open(path, HISTORY_BYTES)?));
        let (live, _) = broadcast::channel(LIVE_CHUNKS);
        let (input, keys) = mpsc::channel(16);
        Ok((Self { ring, live, input }, ConsoleInput(keys)))
    }

    /// What was said so far, and what is said from then on, without a gap.
    ///
    /// # Errors
    /// When the history cannot be read.
    pub fn attach(&self) -> io::Result<(Vec<u8>, broadcast::Receiver<Bytes>)> {
        let ring = self.ring.lock();
        // Subscribed under the lock: a chunk is in the history or in the stream, never in neither.
        Ok((ring.contents()?, self.live.subscribe()))
    }

    /// Types on the console. Waits while earlier input is not taken. Cancel-safe.
    pub async fn type_in(&self, keys: Bytes) {
        let _no_listener = self.input.send(keys).await;
    }

    fn record(&self, bytes: &[u8]) -> io::Result<()> {
        let mut ring = self.ring.lock();
        ring.append(bytes)?;
        let _no_viewer = self.live.send(Bytes::copy_from_slice(bytes));
        Ok(())
    }
}

/// Moves bytes between the VMM's socket and the handle until either ends.
pub async fn pump(mut socket: UnixStream, handle: &ConsoleHandle, keys: &mut ConsoleInput) {
    let mut buffer = vec![0; 4096];
    loop {
        tokio::select! {
            read = socket.read(&mut buffer) => match read {
                Ok(n) if n > 0 => {
                    let said = buffer.get(..n).unwrap_or_default();
                    if let Err(error) = handle.record(said) {
                        tracing::warn!(%error, "console history not written");
                    }
                }
                _ => return,
            },
            Some(typed) = keys.0.recv() => {
                if socket.write_all(&typed).await.is_err() {
                    return;
                }
            }
        }
    }
}
