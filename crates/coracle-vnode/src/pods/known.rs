//! What is known of the objects that pods name, and that something of it changed.

use std::sync::Arc;

use tokio::sync::watch;

/// What is known of an object.
#[derive(Clone, Debug)]
pub(super) enum Known<T> {
    /// Nothing yet.
    Unknown,
    /// It does not exist, or may not be read.
    Absent,
    /// It is there.
    Present(Arc<T>),
}

/// Counts changes of all objects. Clones are the same.
pub(super) type Revision = watch::Sender<u64>;

/// Counts a change.
pub(super) fn count(revision: &Revision) {
    revision.send_modify(|revision| *revision = revision.wrapping_add(1));
}
