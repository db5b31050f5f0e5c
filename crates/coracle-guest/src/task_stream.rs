//! Response stream with the tasks that feed it. When the client has gone, the stream is dropped together with its tasks.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Status;

/// Maximum number of queued messages; with at most 32 KiB each, this bounds the memory of a stream.
const QUEUED: usize = 2;

/// Sender for the messages of a [`TaskStream`]'s tasks. A full queue makes them wait.
pub(crate) type Outbox<T> = mpsc::Sender<Result<T, Status>>;

/// Owner of the tasks of one request. Yields their messages and ends when all tasks have ended.
#[derive(Debug)]
pub struct TaskStream<T> {
    inbox: mpsc::Receiver<Result<T, Status>>,
    tasks: JoinSet<()>,
}

impl<T> TaskStream<T> {
    /// Makes a stream, and spawns its tasks by `start`.
    pub(crate) fn new(start: impl FnOnce(Outbox<T>, &mut JoinSet<()>)) -> Self {
        let (outbox, inbox) = mpsc::channel(QUEUED);
        let mut tasks = JoinSet::new();
        start(outbox, &mut tasks);
        Self { inbox, tasks }
    }
}

impl<T> Stream for TaskStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while self.tasks.try_join_next().is_some() {}
        self.inbox.poll_recv(cx)
    }
}
