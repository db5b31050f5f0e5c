//! Jittered exponential backoff, one sequence per object.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Bounds of exponential delays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// Delay after the first failure.
    pub base: Duration,
    /// Longest delay.
    pub max: Duration,
}

impl Backoff {
    /// Returns the delay after failure number `n` (the first is 0), without jitter: `base · 2ⁿ`, at most `max`.
    #[must_use]
    pub fn delay(&self, n: u32) -> Duration {
        self.base.saturating_mul(2u32.saturating_pow(n.min(31))).min(self.max)
    }

    /// Like [`Self::delay`], spread over its upper half by `random` in 0–1, so that objects that failed together are not all
    /// retried together.
    #[must_use]
    pub fn jittered(&self, n: u32, random: f64) -> Duration {
        let whole = self.delay(n);
        whole.mul_f64(0.5 + 0.5 * random.clamp(0.0, 1.0))
    }
}

/// Returns `time` with a jitter of a tenth up or down, so that polls of objects that arrived together drift apart.
#[must_use]
pub fn spread(time: Duration) -> Duration {
    time.mul_f64(0.9 + 0.2 * rand::random::<f64>())
}

/// Number of failures in a row by key. [`Backoffs::reset`] removes an entry.
#[derive(Debug)]
pub struct Backoffs<K> {
    backoff: Backoff,
    /// Failures in a row with the first delay before it doubles; `None`: the delay doubles at once.
    steady: Option<u32>,
    failures: Mutex<HashMap<K, u32>>,
}

impl<K: Eq + Hash> Backoffs<K> {
    /// Creates delays that double from the first failure on.
    #[must_use]
    pub fn new(backoff: Backoff) -> Self {
        Self { backoff, steady: None, failures: Mutex::default() }
    }

    /// Creates delays that double only after `steady` failures in a row with the same delay, each with a jitter of a tenth like
    /// [`spread`].
    #[must_use]
    pub fn steady_for(steady: u32, backoff: Backoff) -> Self {
        Self { backoff, steady: Some(steady), failures: Mutex::default() }
    }

    /// Counts a failure and returns the delay before the next attempt.
    pub fn failed(&self, key: K) -> Duration {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key).or_default();
        let delay = match self.steady {
            None => self.backoff.jittered(*count, rand::random()),
            Some(steady) => spread(self.backoff.delay(count.saturating_sub(steady))),
        };
        *count = count.saturating_add(1);
        delay
    }

    /// Forgets the failures of an object that succeeded or was deleted.
    pub fn reset(&self, key: &K) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_doubles_up_to_max_until_reset() {
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
        let steady = Backoffs::steady_for(2, backoff);
        for most in [1u32, 1, 1, 2, 4] {
            let wait = steady.failed("a");
            let share = wait.as_secs_f64() / f64::from(most);
            assert!((0.9..=1.1).contains(&share), "{wait:?}, {most}");
        }
    }
}
