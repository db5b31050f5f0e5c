//! What a guest may send in a time. The host reads no faster, and flow control holds the guest back: what it may cost the
//! node in work and writes does not depend on the guest.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Output in bytes per second.
const OUTPUT_BYTES_PER_SECOND: u64 = 8 << 20;
/// Starts, ends and statistics per second.
const EVENTS_PER_SECOND: u64 = 200;
/// What a quiet guest may send at once, in seconds of its rate.
const BURST: Duration = Duration::from_secs(2);
/// What a message of output costs beside its bytes: messages without bytes are work, too.
const MESSAGE_BYTES: u64 = 512;

/// The budget of one guest. It is the guest's and not that of one session, so that a new session gains nothing.
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
    /// That of a guest that has sent nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self { output: Rate::new(OUTPUT_BYTES_PER_SECOND), events: Rate::new(EVENTS_PER_SECOND) }
    }

    /// Counts output that was read, and waits for as long as the guest is ahead. Cancel-safe; what was counted stays.
    pub async fn output(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(MESSAGE_BYTES);
        pause(self.output.count(bytes, Instant::now())).await;
    }

    /// As [`Budget::output`], of one start, end or report.
    pub async fn event(&mut self) {
        pause(self.events.count(1, Instant::now())).await;
    }
}

async fn pause(ahead: Duration) {
    if !ahead.is_zero() {
        sleep(ahead).await;
    }
}

/// So much in a second, and [`BURST`] of it at once.
#[derive(Debug)]
struct Rate {
    per_second: u64,
    /// Until when what was counted is paid; it lies at most [`BURST`] in the past.
    paid_until: Option<Instant>,
}

impl Rate {
    fn new(per_second: u64) -> Self {
        Self { per_second, paid_until: None }
    }

    /// Counts an amount and gives how far it is ahead of its rate. Pure.
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
    fn rate_allows_a_burst_and_then_its_share() {
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
    async fn budget_holds_back_messages_of_every_kind() {
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
