//! Locks and pins of digests within this process.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use coracle_oci::Digest;

/// One lock per digest: of two concurrent pulls of a blob, the second finds it complete.
#[derive(Default)]
pub(crate) struct KeyedLocks(Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>);

/// Held lock of a digest.
pub(crate) type KeyGuard = OwnedMutexGuard<()>;

impl KeyedLocks {
    /// Waits for the lock of a digest. Cancel-safe.
    pub(crate) async fn lock(&self, key: Digest) -> KeyGuard {
        let lock = {
            let mut locks = self.0.lock();
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

/// Digests that running operations need. A prune keeps them.
#[derive(Clone, Default)]
pub(crate) struct Pins(Arc<Mutex<HashMap<Digest, usize>>>);

/// Pins of some digests, removed on drop.
pub(crate) struct Pinned {
    pins: Pins,
    digests: Vec<Digest>,
}

impl Pins {
    /// Pins `digests`. Call it before checking whether they exist.
    pub(crate) fn pin(&self, digests: impl IntoIterator<Item = Digest>) -> Pinned {
        let digests: Vec<_> = digests.into_iter().collect();
        let mut counts = self.0.lock();
        for digest in &digests {
            *counts.entry(*digest).or_default() += 1;
        }
        drop(counts);
        Pinned { pins: self.clone(), digests }
    }

    /// Runs `remove` unless `digest` is pinned. The digest cannot be pinned while `remove` runs.
    pub(crate) fn unless_pinned<T>(&self, digest: &Digest, remove: impl FnOnce() -> T) -> Option<T> {
        let counts = self.0.lock();
        (!counts.contains_key(digest)).then(remove)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut counts = self.pins.0.lock();
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
