//! Intervals and time limits.

use std::time::Duration;

/// Intervals and time limits of the controller.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Poll interval of an object; jitter of a tenth is added.
    pub poll: Duration,
    /// Delay after each of the first three failures; afterwards the delay doubles.
    pub retry: Duration,
    /// Longest delay after a failure.
    pub retry_max: Duration,
    /// Delay while the mirror is behind the last reply.
    pub wait: Duration,
    /// Interval between steps of a drain.
    pub evict: Duration,
    /// Time within which triggers of one object are merged into one reconcile.
    pub debounce: Duration,
    /// Time without changes of pods before they are packed; a packing waits at most ten times as long.
    pub pack: Duration,
    /// Minimum time between two changes of a bid's limit that only follow the price, in milliseconds.
    pub amend_ms: i64,
    /// Time without a risk after which a raised limit is lowered again, in milliseconds.
    pub calm_ms: i64,
    /// Time for which a node that is not Ready still counts as active, in milliseconds.
    pub lost_ms: i64,
    /// Time after which a node that is not Ready is released, in milliseconds.
    pub unhealthy_ms: i64,
    /// Time after which a Node without allocation is deleted, in milliseconds.
    pub orphan_ms: i64,
    /// Time after which another region is chosen for an open bid that was not filled, in milliseconds.
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
    /// Divides all times by `by`, so that tests need not wait for minutes.
    #[must_use]
    pub fn divide(self, by: u32) -> Self {
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
