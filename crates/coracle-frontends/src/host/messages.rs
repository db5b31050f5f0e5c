//! Byte streams as streams of messages, for threads that read and write outside of the runtime.

use std::io::{self, Read, Write};

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio_util::io::{StreamReader, SyncIoBridge};
use tonic::{Status, Streaming};

/// Size of a message, bytes.
const CHUNK: usize = 256 * 1024;

/// Writer that sends its data as messages, and blocks until the caller takes them.
pub(super) struct MessageWriter<T> {
    to_caller: mpsc::Sender<Result<T, Status>>,
    message: fn(Vec<u8>) -> T,
    buffer: Vec<u8>,
}

impl<T> MessageWriter<T> {
    pub(super) fn new(to_caller: mpsc::Sender<Result<T, Status>>, message: fn(Vec<u8>) -> T) -> Self {
        Self { to_caller, message, buffer: Vec::new() }
    }

    fn send(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let message = (self.message)(std::mem::take(&mut self.buffer));
        self.to_caller.blocking_send(Ok(message)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl<T> Write for MessageWriter<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

/// Blocking reader of the bytes in a caller's messages. `data` extracts the bytes of a message, or fails if it has none. Must
/// be made inside of the runtime.
pub(super) fn message_reader<T: 'static>(
    input: Streaming<T>,
    data: fn(T) -> io::Result<Vec<u8>>,
) -> impl Read + Send + 'static {
    let chunks = input.map(move |message| match message {
        Ok(message) => data(message).map(Bytes::from),
        Err(status) => Err(io::Error::other(status.message().to_owned())),
    });
    SyncIoBridge::new(StreamReader::new(chunks))
}
