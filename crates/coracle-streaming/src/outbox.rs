//! Outgoing messages of a connection: one ordered queue, with separate bounds for data and control messages.
//!
//! Data messages wait for room, so that a slow client slows down its writers. Control messages (replies, ends of streams) do
//! not wait, because the reader of the connection sends them. A client that causes them without reading is disconnected.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::{fmt, io};

use tokio::io::AsyncWrite;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::{CancellationToken, PollSemaphore};

/// Most data messages in the queue of a connection.
const DATA_MAX: usize = 16;
/// Most control messages in the queue of a connection.
const CONTROL_MAX: usize = 4096;
/// Most bytes of payload in a data message. The clients' messages have the same limit.
pub(crate) const PAYLOAD_MAX: usize = 32 << 10;
/// Most messages that are written together.
const BATCH_MAX: usize = 16;

/// Error: the client causes replies without reading them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot queue reply: {CONTROL_MAX} replies are unread")]
pub(crate) struct Full;

/// Sending side of the queue. Clones share it.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    queue: mpsc::UnboundedSender<Queued<T>>,
    data: Arc<Semaphore>,
    /// Number of control messages that are not written yet.
    control: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Queued<T> {
    Message(T, Option<OwnedSemaphorePermit>),
    /// Reports that all earlier messages are written.
    Mark(oneshot::Sender<()>),
    /// No further messages are written.
    Close,
}

/// Receiving side of the queue.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    queue: mpsc::UnboundedReceiver<Queued<T>>,
    data: Arc<Semaphore>,
    control: Arc<AtomicUsize>,
    taken: Vec<Queued<T>>,
    /// Permits, replies and marks of the last taken messages, which are released when these are written.
    room: Vec<OwnedSemaphorePermit>,
    replies: usize,
    marks: Vec<oneshot::Sender<()>>,
    closed: bool,
}

/// Creates an empty queue.
pub(crate) fn channel<T>() -> (Outbox<T>, Queue<T>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let data = Arc::new(Semaphore::new(DATA_MAX));
    let control = Arc::new(AtomicUsize::new(0));
    let outbox = Outbox { queue: sender, data: Arc::clone(&data), control: Arc::clone(&control) };
    let queue = Queue {
        queue: receiver,
        data,
        control,
        taken: Vec::new(),
        room: Vec::new(),
        replies: 0,
        marks: Vec::new(),
        closed: false,
    };
    (outbox, queue)
}

impl<T> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        let (data, control) = (Arc::clone(&self.data), Arc::clone(&self.control));
        Self { queue: self.queue.clone(), data, control }
    }
}

impl<T> Outbox<T> {
    /// Checks whether there is room for another reply, and for the few further control messages that it leads to.
    ///
    /// # Errors
    /// [`Full`].
    pub(crate) fn check(&self) -> Result<(), Full> {
        if self.control.load(Ordering::Acquire) < CONTROL_MAX { Ok(()) } else { Err(Full) }
    }

    /// Queues a control message: a reply after [`Self::check`] succeeded, the end of a stream, or the status of a session.
    pub(crate) fn control(&self, message: T) {
        self.control.fetch_add(1, Ordering::AcqRel);
        self.push(Queued::Message(message, None));
    }

    /// Ends the queue.
    pub(crate) fn close(&self) {
        self.push(Queued::Close);
    }

    /// Returns when all earlier messages are written, or cannot be written.
    pub(crate) async fn wait_until_written(&self) {
        let (mark, written) = oneshot::channel();
        self.push(Queued::Mark(mark));
        let _dropped = written.await;
    }

    /// Queues a message. If the receiver is gone, the connection is closed and the message is dropped.
    fn push(&self, queued: Queued<T>) {
        let _gone = self.queue.send(queued);
    }
}

impl<T> Drop for Queue<T> {
    fn drop(&mut self) {
        self.data.close();
    }
}

impl<T> Queue<T> {
    /// Returns the next messages to write, at least one; `None` at the end of the queue. The call implies that the previous
    /// messages are written. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Vec<T>> {
        loop {
            self.room.clear();
            self.control.fetch_sub(std::mem::take(&mut self.replies), Ordering::AcqRel);
            for mark in self.marks.drain(..) {
                let _gone = mark.send(());
            }
            if self.closed || self.queue.recv_many(&mut self.taken, BATCH_MAX).await == 0 {
                return None;
            }
            let mut messages = Vec::with_capacity(self.taken.len());
            for queued in self.taken.drain(..) {
                match queued {
                    Queued::Message(message, room) if !self.closed => {
                        messages.push(message);
                        self.replies += usize::from(room.is_none());
                        self.room.extend(room);
                    }
                    Queued::Message(..) => {}
                    Queued::Mark(mark) => self.marks.push(mark),
                    Queued::Close => self.closed = true,
                }
            }
            if !messages.is_empty() {
                return Some(messages);
            }
        }
    }
}

/// Encoding of a stream's data as messages.
pub(crate) trait Encode: Clone + fmt::Debug + Send + Unpin + 'static {
    /// Message type of the connection.
    type Message: fmt::Debug + Send + 'static;

    /// Returns a message with data: at least one byte, at most [`PAYLOAD_MAX`].
    fn data(&self, payload: &[u8]) -> Self::Message;

    /// Returns the message that ends the stream, if the protocol has one.
    fn end(&self) -> Option<Self::Message>;
}

/// Handle for ending the output of a stream. Clones share it.
#[derive(Debug)]
pub(crate) struct Ender<E: Encode> {
    encode: E,
    outbox: Outbox<E::Message>,
    ended: Arc<AtomicBool>,
    /// The stream was reset by either side, or its connection ended.
    gone: CancellationToken,
}

impl<E: Encode> Clone for Ender<E> {
    fn clone(&self) -> Self {
        Self {
            encode: self.encode.clone(),
            outbox: self.outbox.clone(),
            ended: Arc::clone(&self.ended),
            gone: self.gone.clone(),
        }
    }
}

impl<E: Encode> Ender<E> {
    /// Returns the handle of an open stream.
    pub(crate) fn new(encode: E, outbox: Outbox<E::Message>, gone: CancellationToken) -> Self {
        Self { encode, outbox, ended: Arc::default(), gone }
    }

    /// Sends the end of the stream unless it ended or was reset. Idempotent.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel)
            && !self.gone.is_cancelled()
            && let Some(message) = self.encode.end()
        {
            self.outbox.control(message);
        }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn outbox(&self) -> &Outbox<E::Message> {
        &self.outbox
    }

    pub(crate) fn reset_token(&self) -> &CancellationToken {
        &self.gone
    }
}

/// Output of one stream. Dropping it ends the stream.
#[derive(Debug)]
pub(crate) struct Output<E: Encode> {
    ender: Ender<E>,
    room: PollSemaphore,
}

impl<E: Encode> Output<E> {
    pub(crate) fn new(ender: Ender<E>) -> Self {
        let room = PollSemaphore::new(Arc::clone(&ender.outbox.data));
        Self { ender, room }
    }

    /// Queues a last text without waiting for room, and ends the stream.
    pub(crate) fn finish(self, text: &[u8]) {
        let Ender { encode, outbox, ended, gone } = &self.ender;
        if !ended.load(Ordering::Acquire) && !gone.is_cancelled() {
            text.chunks(PAYLOAD_MAX).for_each(|part| outbox.control(encode.data(part)));
        }
    }

    pub(crate) fn end_handle(&self) -> Ender<E> {
        self.ender.clone()
    }
}

impl<E: Encode> Drop for Output<E> {
    fn drop(&mut self) {
        self.ender.end();
    }
}

impl<E: Encode> AsyncWrite for Output<E> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, payload: &[u8]) -> Poll<io::Result<usize>> {
        if payload.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let room = ready!(self.room.poll_acquire(cx));
        let ender = &self.ender;
        let (Some(room), false) = (room, ender.is_ended() || ender.gone.is_cancelled()) else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let part = payload.get(..PAYLOAD_MAX).unwrap_or(payload);
        ender.outbox.push(Queued::Message(ender.encode.data(part), Some(room)));
        Poll::Ready(Ok(part.len()))
    }

    /// Does nothing: output is not buffered.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.ender.end();
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
#[path = "outbox_tests.rs"]
mod tests;
