//! Jittered exponential backoff, one sequence for each object.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// First delay, and the longest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// Delay after the first failure.
    pub base: Duration,
    /// No delay is longer.
    pub max: Duration,
}

impl Backoff {
    /// The delay after failure number `n` (the first is 0), without jitter: `base · 2ⁿ`, at most `max`.
    #[must_use]
    pub fn delay(&self, n: u32) -> Duration {
        self.base.saturating_mul(2u32.saturating_pow(n.min(31))).min(self.max)
    }

    /// As [`Self::delay`], spread over its upper half by `random` in 0–1, so that objects that failed together do not
    /// come back together.
    #[must_use]
    pub fn jittered(&self, n: u32, random: f64) -> Duration {
        let whole = self.delay(n);
        whole.mul_f64(0.5 + 0.5 * random.clamp(0.0, 1.0))
    }
}

/// Failure counts by key. An entry goes when its object succeeds or is forgotten.
#[derive(Debug)]
pub struct Backoffs<K> {
    backoff: Backoff,
    failures: Mutex<HashMap<K, u32>>,
}

impl<K: Eq + Hash> Backoffs<K> {
    /// None has failed yet.
    #[must_use]
    pub fn new(backoff: Backoff) -> Self {
        Self { backoff, failures: Mutex::default() }
    }

    /// Counts a failure and returns how long to wait.
    pub fn failed(&self, key: K) -> Duration {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key).or_default();
        let delay = self.backoff.jittered(*count, rand::random());
        *count = count.saturating_add(1);
        delay
    }

    /// Starts anew for an object that succeeded or is gone.
    pub fn reset(&self, key: &K) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_longest_and_starts_anew() {
        let backoff = Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) };
        for (n, want) in [(0, 1), (1, 2), (5, 32), (6, 60), (40, 60), (u32::MAX, 60)] {
            assert_eq!(backoff.delay(n), Duration::from_secs(want), "failure {n}");
            assert!(
                backoff.jittered(n, 0.0) * 2 == backoff.delay(n)
                    && backoff.jittered(n, 1.0) == backoff.delay(n)
            );
        }
        let all = Backoffs::new(backoff);
        for _ in 0..10 {
            all.failed("a");
        }
        assert!(all.failed("a") >= Duration::from_secs(30) && all.failed("b") <= Duration::from_secs(1));
        all.reset(&"a");
        assert!(all.failed("a") <= Duration::from_secs(1));
    }
}
