//! Rate limit of what a guest sends. The host reads no faster than the limit, and flow control slows the guest down. So the
//! guest cannot increase the work and the writes that it costs the node.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Limit of output, bytes per second.
const OUTPUT_BYTES_PER_SECOND: u64 = 8 << 20;
/// Limit of starts, ends and statistics, events per second.
const EVENTS_PER_SECOND: u64 = 200;
/// Amount that an idle guest may send at once, in seconds of its rate.
const BURST: Duration = Duration::from_secs(2);
/// Cost of an output message in addition to its bytes: empty messages are work, too.
const MESSAGE_BYTES: u64 = 512;

/// Budget of one guest. It outlives the guest's sessions, so that a new session gains nothing.
#[derive(Debug)]
pub struct Budget {
    output: Rate,
    events: Rate,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new()
    }
}

impl Budget {
    /// Full budget, for a guest that has sent nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self { output: Rate::new(OUTPUT_BYTES_PER_SECOND), events: Rate::new(EVENTS_PER_SECOND) }
    }

    /// Counts output that was read, and waits while the guest is ahead of its rate. Cancel-safe: the count is kept.
    pub async fn output(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(MESSAGE_BYTES);
        pause(self.output.count(bytes, Instant::now())).await;
    }

    /// Like [`Budget::output`], for one start, end or statistics report.
    pub async fn event(&mut self) {
        pause(self.events.count(1, Instant::now())).await;
    }
}

async fn pause(ahead: Duration) {
    if !ahead.is_zero() {
        sleep(ahead).await;
    }
}

/// Token bucket: an amount per second, with a burst of [`BURST`].
#[derive(Debug)]
struct Rate {
    per_second: u64,
    /// Time up to which the counted amount is paid; at most [`BURST`] in the past.
    paid_until: Option<Instant>,
}

impl Rate {
    fn new(per_second: u64) -> Self {
        Self { per_second, paid_until: None }
    }

    /// Counts an amount and returns how far the guest is ahead of the rate. Pure.
    fn count(&mut self, amount: u64, now: Instant) -> Duration {
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let from = self.paid_until.map_or(earliest, |paid| paid.max(earliest));
        let nanos = u128::from(amount) * 1_000_000_000 / u128::from(self.per_second);
        let until = from + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.paid_until = Some(until);
        until.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_allows_a_burst_and_then_the_steady_rate() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rate = Rate::new(100);
        for (millis, amount, ahead) in
            [(0, 200, 0), (0, 50, 500), (500, 100, 1000), (1500, 0, 0), (10_000, 200, 0), (10_000, 1, 10)]
        {
            let found = rate.count(amount, at(millis));
            assert_eq!(found, Duration::from_millis(ahead), "{amount} at {millis} ms");
        }
        assert!(rate.count(u64::MAX, at(10_000)) > Duration::from_secs(3600), "no overflow");
    }

    #[tokio::test(start_paused = true)]
    async fn budget_throttles_events_and_output() {
        let mut budget = Budget::new();
        let start = Instant::now();
        for _ in 0..1000 {
            budget.event().await;
        }
        assert_eq!(start.elapsed().as_secs(), 3, "five seconds of events, two of them at once");
        let start = Instant::now();
        for _ in 0..10 {
            budget.output(4 << 20).await;
        }
        assert_eq!(start.elapsed().as_secs(), 3, "40 MiB, 16 of them at once");
    }
}
