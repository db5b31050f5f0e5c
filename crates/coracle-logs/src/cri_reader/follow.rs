//! Follows a log until its container has ended.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use super::CriLogReader;

/// Interval of checks for new output.
const POLL: Duration = Duration::from_millis(100);

/// Reader of a log that is still written.
pub struct CriLogFollower {
    /// Reader of the log; `None` after a failure.
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
    /// Follows the log until `ended` is ready and everything was read. All output must be in the log when `ended` becomes
    /// ready. With a future that is ready at once, only the existing output is read.
    #[must_use]
    pub fn new(reader: CriLogReader, ended: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { reader: Some(reader), ended: Box::pin(ended), has_ended: false }
    }

    /// Returns the next output; `None` at the end, and after a failure. Not cancel-safe: if the future is dropped during a
    /// read, there is no more output.
    ///
    /// # Errors
    /// Errors of the file system.
    pub async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let Some(mut reader) = self.reader.take() else { return Ok(None) };
            if !self.has_ended {
                // Checked before the read, which then includes everything written before the end.
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
