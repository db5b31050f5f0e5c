//! How a caller watches a long operation.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::Digest;

/// At most one event per item and this interval, besides its first and last.
const INTERVAL: Duration = Duration::from_millis(100);

/// Part of the work an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Asking the registry which bytes a reference means.
    Resolve,
    /// Moving a blob into the store.
    Download,
    /// Writing a layer into the root file system.
    Unpack,
    /// Moving a blob into a registry.
    Upload,
}

/// One report of progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgressEvent {
    /// Part of the work.
    pub step: Step,
    /// The blob it is about; `None` for the image as a whole.
    pub item: Option<Digest>,
    /// Bytes done; never above `total_bytes`.
    pub done_bytes: u64,
    /// Bytes to do, as stored (compressed); 0 when unknown.
    pub total_bytes: u64,
}

/// Receives progress. Called from several threads, at most about ten times a second per blob; must not block.
pub trait Progress: Send + Sync {
    /// One report.
    fn event(&self, event: ProgressEvent);
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn event(&self, _: ProgressEvent) {}
}

/// Reports one item at a bounded rate.
#[derive(Clone)]
pub(crate) struct Meter {
    to: Arc<dyn Progress>,
    step: Step,
    item: Option<Digest>,
    total_bytes: u64,
    last: Arc<Mutex<Option<Instant>>>,
}

impl Meter {
    pub(crate) fn new(to: &Arc<dyn Progress>, step: Step, item: Option<Digest>, total_bytes: u64) -> Self {
        Self { to: Arc::clone(to), step, item, total_bytes, last: Arc::default() }
    }

    /// Reports that `done_bytes` are done, unless the last report is too young. The end is always reported.
    pub(crate) fn at(&self, done_bytes: u64) {
        let now = Instant::now();
        {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
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
