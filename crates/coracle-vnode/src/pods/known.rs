//! State of the watched objects that pods refer to, and notification of changes.

use std::sync::Arc;

use tokio::sync::watch;

/// State of a watched object.
#[derive(Clone, Debug)]
pub(super) enum Known<T> {
    /// Not read yet.
    Unknown,
    /// The object does not exist, or may not be read.
    Absent,
    /// The object exists.
    Present(Arc<T>),
}

/// Counter of changes of all watched objects. Clones share it.
pub(super) type Revision = watch::Sender<u64>;

/// Counts a change.
pub(super) fn count(revision: &Revision) {
    revision.send_modify(|revision| *revision = revision.wrapping_add(1));
}
