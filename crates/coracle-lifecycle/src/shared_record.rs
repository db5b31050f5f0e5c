//! Record that is shared with readers.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::Record;

/// Record of a VM whose versions are shared with readers. A change copies the record only while a reader holds the version
/// before.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedRecord(Arc<Record>);

impl SharedRecord {
    /// Returns the present version. Later changes do not affect it.
    #[must_use]
    pub fn version(&self) -> Arc<Record> {
        self.0.clone()
    }
}

impl From<Record> for SharedRecord {
    fn from(record: Record) -> Self {
        Self(Arc::new(record))
    }
}

impl Deref for SharedRecord {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.0
    }
}

impl DerefMut for SharedRecord {
    fn deref_mut(&mut self) -> &mut Record {
        Arc::make_mut(&mut self.0)
    }
}
