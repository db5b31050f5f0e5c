//! Arithmetic of times. Never fails: results beyond the calendar are clamped.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// Backoff after the first failure, and the longest backoff.
const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_secs(300);

/// Returns the backoff after `count` failures: none, 10 s, then twice the previous one, up to 5 min.
#[must_use]
pub fn backoff(count: u32) -> Duration {
    match count.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => BACKOFF_FIRST.saturating_mul(1 << doublings.min(10)).min(BACKOFF_MAX),
    }
}

/// Returns the time plus `later`, clamped to the latest timestamp.
#[must_use]
pub fn add(time: Timestamp, later: Duration) -> Timestamp {
    let later = SignedDuration::try_from(later).unwrap_or(SignedDuration::MAX);
    time.checked_add(later).unwrap_or(Timestamp::MAX)
}

/// Returns the time from `now` until `then`; zero when it has passed.
#[must_use]
pub fn until(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(then.duration_since(now)).unwrap_or_default()
}

/// Converts seconds of the API, which its validation guarantees to be non-negative.
#[must_use]
pub fn seconds(value: i64) -> Duration {
    Duration::from_secs(u64::try_from(value).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_five_minutes() {
        let delays: Vec<_> = (0..9).map(|count| backoff(count).as_secs()).collect();
        assert_eq!(delays, [0, 10, 20, 40, 80, 160, 300, 300, 300]);
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }

    #[test]
    fn timestamp_arithmetic_saturates() {
        assert_eq!(add(Timestamp::UNIX_EPOCH, Duration::MAX), Timestamp::MAX);
        assert_eq!(until(Timestamp::MAX, Timestamp::UNIX_EPOCH), Duration::ZERO);
    }
}
