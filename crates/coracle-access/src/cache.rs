//! Cache of answers with expiry times, bounded in size.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Most entries. Beyond them, those that expire first are dropped.
const ENTRIES_MAX: usize = 4096;

/// Values by key, each with an expiry time.
#[derive(Debug)]
pub struct Cache<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Cache<K, V> {
    /// Returns the value, unless it has expired.
    #[must_use]
    pub fn get(&self, key: &K) -> Option<V> {
        let entries = self.0.lock();
        entries.get(key).filter(|(_, end)| *end > Instant::now()).map(|(value, _)| value.clone())
    }

    /// Stores a value for `time`.
    pub fn put(&self, key: K, value: V, time: Duration) {
        let now = Instant::now();
        let mut entries = self.0.lock();
        if entries.len() >= ENTRIES_MAX {
            entries.retain(|_, (_, end)| *end > now);
        }
        if entries.len() >= ENTRIES_MAX {
            let mut ends: Vec<_> = entries.values().map(|(_, end)| *end).collect();
            ends.sort_unstable();
            let median = ends.get(ends.len() / 2).copied().unwrap_or(now);
            entries.retain(|_, (_, end)| *end > median);
        }
        entries.insert(key, (value, now + time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn values_expire_and_are_bounded() {
        let cache = Cache::default();
        cache.put("a", 1, Duration::from_secs(10));
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(cache.get(&"a"), Some(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&"a"), None);
        let cache = Cache::default();
        for n in 0..3 * ENTRIES_MAX {
            cache.put(n, n, Duration::from_secs(10));
        }
        assert!(cache.0.lock().len() <= ENTRIES_MAX);
        assert_eq!(cache.get(&(3 * ENTRIES_MAX - 1)), Some(3 * ENTRIES_MAX - 1), "the newest is kept");
    }
}
