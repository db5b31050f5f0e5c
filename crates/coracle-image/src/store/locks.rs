//! Locks and pins by digest: who works on what, inside this process.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::OwnedMutexGuard;

use crate::Digest;

/// One lock per digest, so that two pulls of one blob share the work: the second finds it done.
#[derive(Default)]
pub(crate) struct KeyedLocks(Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>);

/// Holds a digest's lock.
pub(crate) type KeyGuard = OwnedMutexGuard<()>;

impl KeyedLocks {
    /// Waits for the digest's lock. Cancel-safe.
    pub(crate) async fn lock(&self, key: Digest) -> KeyGuard {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            let found = locks.get(&key).and_then(Weak::upgrade);
            found.unwrap_or_else(|| {
                let new = Arc::default();
                locks.insert(key, Arc::downgrade(&new));
                new
            })
        };
        lock.lock_owned().await
    }
}

/// Digests that a running operation needs, and that prune therefore leaves alone.
#[derive(Clone, Default)]
pub(crate) struct Pins(Arc<Mutex<HashMap<Digest, usize>>>);

/// Keeps its digests pinned until it is dropped.
pub(crate) struct Pinned {
    pins: Pins,
    digests: Vec<Digest>,
}

impl Pins {
    /// Pins `digests`. To be done before looking whether they exist.
    pub(crate) fn pin(&self, digests: impl IntoIterator<Item = Digest>) -> Pinned {
        let digests: Vec<_> = digests.into_iter().collect();
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for digest in &digests {
            *counts.entry(*digest).or_default() += 1;
        }
        drop(counts);
        Pinned { pins: self.clone(), digests }
    }

    /// Runs `remove` unless `digest` is pinned; nobody can pin it meanwhile.
    pub(crate) fn unless_pinned<T>(&self, digest: &Digest, remove: impl FnOnce() -> T) -> Option<T> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (!counts.contains_key(digest)).then(remove)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut counts = self.pins.0.lock().unwrap_or_else(PoisonError::into_inner);
        for digest in &self.digests {
            if let Some(count) = counts.get_mut(digest) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(digest);
                }
            }
        }
    }
}
