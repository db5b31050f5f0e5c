//! Streams of messages with bytes, for threads outside of the runtime that read and write.

use std::io::{self, Read, Write};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tonic::Status;

/// Bytes of one message.
const CHUNK: usize = 256 * 1024;

/// Sends what is written as messages, and waits for the caller to take them.
pub(super) struct Pieces<T> {
    to_caller: mpsc::Sender<Result<T, Status>>,
    message: fn(Vec<u8>) -> T,
    piece: Vec<u8>,
}

impl<T> Pieces<T> {
    pub(super) fn new(to_caller: mpsc::Sender<Result<T, Status>>, message: fn(Vec<u8>) -> T) -> Self {
        Self { to_caller, message, piece: Vec::new() }
    }

    fn send(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let message = (self.message)(std::mem::take(&mut self.piece));
        self.to_caller.blocking_send(Ok(message)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl<T> Write for Pieces<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= CHUNK {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

/// Reads the messages of a stream. `data` is what one of them carries, or why it is none of them.
pub(super) struct Incoming<S, T> {
    runtime: Handle,
    input: S,
    data: fn(T) -> io::Result<Vec<u8>>,
    piece: Bytes,
}

impl<S, T> Incoming<S, T> {
    /// Must be made inside of the runtime.
    pub(super) fn new(input: S, data: fn(T) -> io::Result<Vec<u8>>) -> Self {
        Self { runtime: Handle::current(), input, data, piece: Bytes::new() }
    }
}

impl<T, S: Stream<Item = Result<T, Status>> + Unpin> Read for Incoming<S, T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.runtime.block_on(self.input.next()) {
                None => return Ok(0),
                Some(Ok(message)) => self.piece = (self.data)(message)?.into(),
                Some(Err(status)) => return Err(io::Error::other(status.message().to_owned())),
            }
        }
        let taken = self.piece.split_to(self.piece.len().min(buffer.len()));
        buffer.get_mut(..taken.len()).unwrap_or_default().copy_from_slice(&taken);
        Ok(taken.len())
    }
}
