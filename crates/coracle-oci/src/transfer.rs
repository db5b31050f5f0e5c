//! The transfer engine: blobs into memory or files, blobs and manifests into registries. Transfers resume where they
//! were interrupted, are retried within bounds, and are verified by digest.

mod download;
mod upload;

pub use download::{BlobFile, fetch_bytes, fetch_file, fetch_unverified};
pub use upload::{Offered, Payload, SentBytes};

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff};

use crate::{OciError, Session};

/// Delays between the attempts of one transfer. Progress restores the full number of attempts. Blobs are bounded, so attempts
/// are bounded too.
struct Attempts<'a> {
    session: &'a Session,
    delays: ExponentialBackoff,
}

impl<'a> Attempts<'a> {
    fn new(session: &'a Session) -> Self {
        Self { session, delays: session.backoff().build() }
    }

    /// Restores the full number of attempts.
    fn reset(&mut self) {
        self.delays = self.session.backoff().build();
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// The given error, if it is not transient or no attempt is left.
    async fn after(&mut self, error: OciError) -> Result<(), OciError> {
        let delay: Duration = match self.delays.next() {
            Some(delay) if error.is_transient() => delay,
            _ => return Err(error),
        };
        tracing::debug!(error = &error as &dyn std::error::Error, ?delay, "resume transfer after error");
        tokio::time::sleep(delay).await;
        Ok(())
    }
}
