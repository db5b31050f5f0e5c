//! A record with readers.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::Record;

/// The record of a VM, whose versions others read: a change copies it only while the version before has a reader.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedRecord(Arc<Record>);

impl SharedRecord {
    /// This version. Later changes do not show in it.
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
