//! A response stream with the tasks that feed it. When the client goes away, the stream is dropped, and its tasks with
//! it.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Status;

/// Messages that wait for the client; with at most 32 KiB each, the memory of one stream.
const QUEUED: usize = 2;

/// Where the tasks of a [`TaskStream`] put their messages. A full queue makes them wait.
pub(crate) type Outbox<T> = mpsc::Sender<Result<T, Status>>;

/// Owns the tasks of one request and yields what they send; ends when all of them have.
#[derive(Debug)]
pub struct TaskStream<T> {
    inbox: mpsc::Receiver<Result<T, Status>>,
    tasks: JoinSet<()>,
}

impl<T> TaskStream<T> {
    /// A stream and the sender for its tasks, which `start` spawns.
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
