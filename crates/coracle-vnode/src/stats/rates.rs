//! Current CPU usage, from two samples of CPU time.

use std::collections::HashMap;

use parking_lot::Mutex;

/// Shortest time between two samples, in milliseconds. Closer samples are ignored: guests report about every 10 s, and requests
/// arrive in between.
const GAP_MIN_MS: i64 = 1000;

/// The last two samples of each counter.
#[derive(Debug, Default)]
pub(crate) struct Rates(Mutex<HashMap<String, Counter>>);

#[derive(Clone, Copy, Debug)]
struct Counter {
    before: Option<(i64, u64)>,
    last: (i64, u64),
}

impl Rates {
    /// Adds a sample of the counter `key`, in nanoseconds of CPU time at a time in milliseconds, and returns its usage in
    /// nanocores. `None`: there is only one sample, or the counter was reset.
    pub(crate) fn add(&self, key: &str, time_ms: i64, cpu_ns: u64) -> Option<u64> {
        let mut counters = self.0.lock();
        let new = (time_ms, cpu_ns);
        let counter = counters.entry(key.to_owned()).or_insert(Counter { before: None, last: new });
        if cpu_ns < counter.last.1 {
            *counter = Counter { before: None, last: new };
        } else if time_ms - counter.last.0 >= GAP_MIN_MS {
            *counter = Counter { before: Some(counter.last), last: new };
        }
        let (began_ms, began_ns) = counter.before?;
        let milliseconds = u64::try_from(counter.last.0 - began_ms).ok().filter(|ms| *ms > 0)?;
        Some(counter.last.1.saturating_sub(began_ns).saturating_mul(1000) / milliseconds)
    }

    /// Forgets counters that `is_known` does not contain.
    pub(crate) fn retain(&self, is_known: impl Fn(&str) -> bool) {
        self.0.lock().retain(|key, _| is_known(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_the_difference_of_two_samples() {
        let rates = Rates::default();
        for (why, time_ms, cpu_ns, want) in [
            ("one sample", 10_000, 1_000_000_000, None),
            ("the same one", 10_000, 1_000_000_000, None),
            ("half a core", 20_000, 6_000_000_000, Some(500_000_000)),
            ("the same again", 20_000, 6_000_000_000, Some(500_000_000)),
            ("too close", 20_500, 6_100_000_000, Some(500_000_000)),
            ("idle", 30_000, 6_100_000_000, Some(10_000_000)),
            ("a new boot", 40_000, 5, None),
            ("and its next sample", 41_000, 1_000_000_005, Some(1_000_000_000)),
        ] {
            assert_eq!(rates.add("a", time_ms, cpu_ns), want, "{why}");
        }
        rates.retain(|key| key != "a");
        assert_eq!(rates.add("a", 60_000, 1), None);
    }
}
