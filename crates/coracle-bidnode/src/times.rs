//! Intervals and limits of time.

use std::time::Duration;

/// Times of the controller.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Poll interval of an object; jitter of a tenth is added.
    pub poll: Duration,
    /// Delay after a failure, the first three times; then it doubles.
    pub retry: Duration,
    /// Longest delay after a failure.
    pub retry_max: Duration,
    /// Delay while the mirror is behind the last reply.
    pub wait: Duration,
    /// Interval between steps of a drain.
    pub evict: Duration,
    /// Triggers of one object within this time are one.
    pub debounce: Duration,
    /// Pause without changes of pods before they are packed; at most ten times that.
    pub pack: Duration,
    /// Between two changes of a bid's limit that only follow the price, in milliseconds.
    pub amend_ms: i64,
    /// A raised limit is lowered again after so long without a risk, in milliseconds.
    pub calm_ms: i64,
    /// A node that is not Ready counts as active for so long, in milliseconds.
    pub lost_ms: i64,
    /// A node that is not Ready is released after so long, in milliseconds.
    pub unhealthy_ms: i64,
    /// A Node without allocation is deleted after so long, in milliseconds.
    pub orphan_ms: i64,
    /// Another region is chosen for what was not filled for so long, in milliseconds.
    pub region_ms: i64,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            poll: Duration::from_secs(60),
            retry: Duration::from_secs(30),
            retry_max: Duration::from_secs(300),
            wait: Duration::from_secs(1),
            evict: Duration::from_secs(5),
            debounce: Duration::from_millis(200),
            pack: Duration::from_secs(1),
            amend_ms: 60_000,
            calm_ms: 600_000,
            lost_ms: 60_000,
            unhealthy_ms: 180_000,
            orphan_ms: 10_000,
            region_ms: 300_000,
        }
    }
}

impl Times {
    /// All times divided, so that tests need not wait for minutes.
    #[must_use]
    pub fn divided(self, by: u32) -> Self {
        let ms = |ms: i64| ms / i64::from(by);
        Self {
            poll: self.poll / by,
            retry: self.retry / by,
            retry_max: self.retry_max / by,
            wait: self.wait / by,
            evict: self.evict / by,
            debounce: self.debounce / by,
            pack: self.pack / by,
            amend_ms: ms(self.amend_ms),
            calm_ms: ms(self.calm_ms),
            lost_ms: ms(self.lost_ms),
            unhealthy_ms: ms(self.unhealthy_ms),
            orphan_ms: ms(self.orphan_ms),
            region_ms: ms(self.region_ms),
        }
    }
}
