//! Parameters of a market.

use serde::{Deserialize, Serialize};

use crate::Price;

/// Parameters of one market. Durations are milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// Lowest price at which a node is sold.
    pub reserve: Price,
    /// Highest price: the list price. A limit that reaches it is never preempted.
    pub cap: Price,
    /// Limits are multiples of this amount.
    pub tick: Price,
    /// Time between two calls.
    pub call_interval_ms: u64,
    /// Time for which an active allocation is protected from calls.
    pub min_runtime_ms: u64,
    /// Time for which a preempted allocation keeps running.
    pub notice_ms: u64,
}

/// Error of a parameter outside its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {range}")]
pub struct InvalidParams {
    /// Name of the field.
    pub field: &'static str,
    /// Allowed values.
    pub range: &'static str,
}

const SECOND: u64 = 1000;
const HOUR: u64 = 3600 * SECOND;
/// Quote of an idle market in percent of the reserve: a bid at 0.65 of the quote still buys.
const QUOTE_PERCENT: i64 = 160;

impl Params {
    /// Time between two indicative calls, in milliseconds: a quarter of the call interval, but at most 5 s.
    #[must_use]
    pub fn indicative_ms(&self) -> u64 {
        (self.call_interval_ms / 4).clamp(250, 5_000)
    }

    /// Creates parameters with these prices and the default times: calls every 30 s, 10 min of protection, 120 s of notice, a
    /// tick of 100 micro-dollars.
    #[must_use]
    pub const fn new(reserve: Price, cap: Price) -> Self {
        Self {
            reserve,
            cap,
            tick: Price::micros(100),
            call_interval_ms: 30 * SECOND,
            min_runtime_ms: 600 * SECOND,
            notice_ms: 120 * SECOND,
        }
    }

    /// # Errors
    /// The first parameter outside its range.
    pub fn check(&self) -> Result<(), InvalidParams> {
        let idle = self.idle_quote();
        let checks = [
            (self.tick >= Price::micros(1), "tick", "at least one micro-dollar"),
            (self.reserve >= Price::micros(1), "reserve", "above zero"),
            (self.cap <= Price::MAX, "cap", "at most 1000000"),
            (self.reserve.on_tick(self.tick), "reserve", "a multiple of the tick"),
            (self.cap.on_tick(self.tick), "cap", "a multiple of the tick"),
            (self.cap >= idle, "cap", "at least 1.6 times the reserve"),
            ((SECOND..=HOUR).contains(&self.call_interval_ms), "call_interval", "from 1s to 1h"),
            (self.min_runtime_ms <= 24 * HOUR, "min_runtime", "at most 24h"),
            ((10 * SECOND..=HOUR).contains(&self.notice_ms), "notice", "from 10s to 1h"),
        ];
        match checks.into_iter().find(|(good, ..)| !good) {
            Some((_, field, range)) => Err(InvalidParams { field, range }),
            None => Ok(()),
        }
    }

    /// Quote of an idle market: 1.6 × reserve, rounded up to the tick.
    #[must_use]
    pub fn idle_quote(&self) -> Price {
        let exact = self.reserve.as_micros().saturating_mul(QUOTE_PERCENT);
        Price::micros(exact.div_euclid(100) + i64::from(exact.rem_euclid(100) != 0)).ceil_to(self.tick)
    }

    /// Quote at a clearing price, of which bid strategies take a share.
    #[must_use]
    pub fn quote(&self, clearing: Price) -> Price {
        clearing.max(self.idle_quote()).min(self.cap)
    }

    /// Effective limit: not above the cap.
    #[must_use]
    pub fn effective(&self, limit: Price) -> Price {
        limit.min(self.cap)
    }
}
