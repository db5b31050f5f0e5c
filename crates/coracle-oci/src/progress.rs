//! Progress reports of long operations.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::Digest;

/// Minimum interval between two events of one item. Its first and last event are always sent.
const INTERVAL: Duration = Duration::from_millis(100);

/// Part of the work that an event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Resolving a reference to a digest.
    Resolve,
    /// Moving a blob into the store.
    Download,
    /// Writing a layer into the root file system.
    Unpack,
    /// Moving a blob into a registry.
    Upload,
}

/// Progress of one item at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgressEvent {
    /// Part of the work.
    pub step: Step,
    /// Digest of the blob; `None` for the image as a whole.
    pub item: Option<Digest>,
    /// Bytes done, at most `total_bytes`.
    pub done_bytes: u64,
    /// Bytes in total, as stored (compressed); 0 when unknown.
    pub total_bytes: u64,
}

/// Receives progress. Called from several threads, at most about ten times a second per blob; must not block.
pub trait Progress: Send + Sync {
    /// Receives one event.
    fn event(&self, event: ProgressEvent);
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn event(&self, _: ProgressEvent) {}
}

/// Reports the progress of one item at a bounded rate.
#[derive(Clone)]
pub struct Meter {
    to: Arc<dyn Progress>,
    step: Step,
    item: Option<Digest>,
    total_bytes: u64,
    last: Arc<Mutex<Option<Instant>>>,
}

impl Meter {
    /// Creates the meter of an item of `total_bytes`.
    #[must_use]
    pub fn new(to: &Arc<dyn Progress>, step: Step, item: Option<Digest>, total_bytes: u64) -> Self {
        Self { to: Arc::clone(to), step, item, total_bytes, last: Arc::default() }
    }

    /// Reports `done_bytes`, unless the last report is more recent than 100 ms. The end is always reported.
    pub fn at(&self, done_bytes: u64) {
        let now = Instant::now();
        {
            let mut last = self.last.lock();
            let young = last.is_some_and(|then| now.duration_since(then) < INTERVAL);
            if young && done_bytes < self.total_bytes {
                return;
            }
            *last = Some(now);
        }
        let done_bytes = done_bytes.min(self.total_bytes);
        self.to.event(ProgressEvent {
            step: self.step,
            item: self.item,
            done_bytes,
            total_bytes: self.total_bytes,
        });
    }
}
