//! Following a log until its container has ended.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use super::CriLogReader;

/// Between two looks at a log to which nothing was added.
const POLL: Duration = Duration::from_millis(100);

/// A log that is read while it is written.
pub struct CriLogFollower {
    /// `None` after a failure.
    reader: Option<CriLogReader>,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_ended: bool,
}

impl std::fmt::Debug for CriLogFollower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CriLogFollower").field("reader", &self.reader).finish_non_exhaustive()
    }
}

impl CriLogFollower {
    /// Follows until `ended` is ready and all was read. When `ended` is ready, all output must be in the log. A future that
    /// is ready at once reads what is there.
    #[must_use]
    pub fn new(reader: CriLogReader, ended: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { reader: Some(reader), ended: Box::pin(ended), has_ended: false }
    }

    /// The next output; `None` at the end, and after a failure. Not cancel-safe: dropped while it reads, it has no more
    /// output.
    ///
    /// # Errors
    /// As of the file system.
    pub async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let Some(mut reader) = self.reader.take() else { return Ok(None) };
            if !self.has_ended {
                // Before reading: what was written before the end is read then.
                self.has_ended = has_ended(&mut self.ended).await;
            }
            let read = tokio::task::spawn_blocking(move || reader.read().map(|output| (reader, output)));
            let (reader, output) = read.await.map_err(io::Error::other)??;
            let is_complete = reader.is_complete();
            self.reader = Some(reader);
            if output.is_some() {
                return Ok(output);
            }
            if self.has_ended || is_complete {
                return Ok(None);
            }
            tokio::select! {
                () = &mut self.ended => self.has_ended = true,
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }
}

async fn has_ended(ended: &mut Pin<Box<dyn Future<Output = ()> + Send>>) -> bool {
    tokio::select! {
        biased;
        () = ended => true,
        () = std::future::ready(()) => false,
    }
}
