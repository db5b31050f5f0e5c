//! Price history, whose resolution decreases with age: every call for a week, a bar per minute for 90 days, a bar per hour for
//! two years, then nothing. Each call is in exactly one of them, so reading a span reads all three.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use coracle_auction::Time;
use parking_lot::Mutex;

use crate::error::StoreError;
use crate::store::Store;

pub(crate) const MINUTE_MS: i64 = 60_000;
pub(crate) const HOUR_MS: i64 = 60 * MINUTE_MS;
const DAY_MS: i64 = 24 * HOUR_MS;
/// Time for which every call is kept.
const CALLS_MS: i64 = 7 * DAY_MS;
/// Time for which a bar per minute is kept.
const MINUTES_MS: i64 = 90 * DAY_MS;
/// Time for which a bar per hour is kept. Older data is deleted.
pub(crate) const KEPT_MS: i64 = 2 * 366 * DAY_MS;
/// Interval of roll-ups and of percentiles.
pub(crate) const ROLL_UP_INTERVAL_MS: u64 = 3_600_000;
/// Period of the percentiles.
const PERCENTILES_MS: i64 = 30 * DAY_MS;

/// Open, high, low and close price of some calls, in micro-dollars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bar {
    /// Time of the call, or start of the minute or hour.
    pub(crate) at: i64,
    pub(crate) open: i64,
    pub(crate) high: i64,
    pub(crate) low: i64,
    pub(crate) close: i64,
    pub(crate) calls: i64,
}

impl Bar {
    /// Bar of a single call.
    pub(crate) fn of_call(at: i64, price: i64) -> Self {
        Self { at, open: price, high: price, low: price, close: price, calls: 1 }
    }

    fn take(&mut self, later: &Self) {
        self.high = self.high.max(later.high);
        self.low = self.low.min(later.low);
        self.close = later.close;
        self.calls += later.calls;
    }
}

/// Merges finer bars, in order, into bars of `step` milliseconds. Coarser bars stay unchanged; with a step of 0 all do. Pure.
pub(crate) fn merge_bars(finer: impl IntoIterator<Item = Bar>, step: i64) -> Vec<Bar> {
    let mut bars: Vec<Bar> = Vec::new();
    for bar in finer {
        let at = if step > 0 { bar.at - bar.at.rem_euclid(step) } else { bar.at };
        match bars.last_mut().filter(|last| step > 0 && last.at == at) {
            Some(last) => last.take(&bar),
            None => bars.push(Bar { at, ..bar }),
        }
    }
    bars
}

/// Smallest round step with which `span` milliseconds have at most `most` points; if none suffices, an exact one. Pure.
pub(crate) fn smallest_step(span: i64, most: i64) -> i64 {
    const ROUND: [i64; 12] = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 21_600, 86_400, 604_800];
    let least = span / most.max(1) + 1;
    ROUND.into_iter().map(|s| s * 1000).find(|step| *step >= least).unwrap_or(least)
}

/// Published percentiles.
const SHARES: [i64; 3] = [20, 50, 80];

/// Percentiles of closing prices; `None` without calls. Pure.
pub(crate) fn percentiles(mut bars: Vec<Bar>) -> Option<[i64; 3]> {
    bars.sort_unstable_by_key(|bar| bar.close);
    let all: i64 = bars.iter().map(|bar| bar.calls).sum();
    let not_passed_by = |share: i64| {
        let wanted = (all * share + 99) / 100;
        let mut seen = 0;
        bars.iter().find(|bar| {
            seen += bar.calls;
            seen >= wanted
        })
    };
    let [low, middle, high] = SHARES.map(not_passed_by);
    Some([low?.close, middle?.close, high?.close])
}

/// Published percentiles of one market; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Percentiles(Arc<Mutex<Option<[i64; 3]>>>);

impl Percentiles {
    pub(crate) fn get(&self) -> Option<[i64; 3]> {
        *self.0.lock()
    }

    /// Recomputes the percentiles from the last 30 days. Reads without the writer, so that no command waits.
    pub(crate) async fn refresh(&self, store: &Store, market: u32, now: i64) -> Result<(), StoreError> {
        let found = percentiles(store.bars(market, (now - PERCENTILES_MS, i64::MAX)).await?);
        *self.0.lock() = found;
        Ok(())
    }
}

/// Bars that are too old for their resolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Age {
    /// Length of the old bars; 0: calls.
    pub(crate) fine: i64,
    /// Length of the bars that replace them; `None`: they are deleted.
    pub(crate) coarse: Option<i64>,
    /// Upper bound of their time, a whole hour.
    pub(crate) before: i64,
    /// Rows per transaction.
    span: i64,
}

/// Age limits of the three resolutions. Pure.
pub(crate) fn ages(now: i64) -> [Age; 3] {
    let hour_before = |kept: i64| (now - kept).div_euclid(HOUR_MS) * HOUR_MS;
    [
        Age { fine: 0, coarse: Some(MINUTE_MS), before: hour_before(CALLS_MS), span: DAY_MS },
        Age { fine: MINUTE_MS, coarse: Some(HOUR_MS), before: hour_before(MINUTES_MS), span: 7 * DAY_MS },
        Age { fine: HOUR_MS, coarse: None, before: hour_before(KEPT_MS), span: KEPT_MS },
    ]
}

/// Rolls up one part of a market's history. Returns whether there may be more. Idempotent, also after an interruption.
pub(crate) async fn roll_up(store: &Store, market: u32, now: i64) -> Result<bool, StoreError> {
    for age in ages(now) {
        let Some(oldest) = store.oldest(market, age.fine).await?.filter(|at| *at < age.before) else {
            continue;
        };
        let from = oldest.div_euclid(HOUR_MS) * HOUR_MS;
        let to = age.before.min(from.saturating_add(age.span));
        let coarse = match age.coarse {
            Some(step) => merge_bars(store.bars_of(market, age.fine, (from, to)).await?, step),
            None => Vec::new(),
        };
        store.replace_bars(market, age, (from, to), &coarse).await?;
        return Ok(true);
    }
    Ok(false)
}

/// Queue of markets whose history is to be rolled up.
#[derive(Debug, Default)]
pub(crate) struct RollUpQueue {
    due: VecDeque<u32>,
    next_look: Time,
}

impl RollUpQueue {
    /// Next market to roll up, if one is due.
    pub(crate) fn next(&mut self, now: Time, all: impl FnOnce() -> BTreeSet<u32>) -> Option<u32> {
        if self.due.is_empty() && self.next_look <= now {
            self.due = all().into_iter().collect();
            self.next_look = now.plus_ms(ROLL_UP_INTERVAL_MS);
        }
        self.due.front().copied()
    }

    /// Whether markets remain in the queue.
    pub(crate) fn is_busy(&self) -> bool {
        !self.due.is_empty()
    }

    /// Records that a part of the market's history is rolled up; `more`: other parts remain.
    pub(crate) fn complete_part(&mut self, market: u32, more: bool) {
        if !more && self.due.front() == Some(&market) {
            self.due.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finer_bars_merge_into_coarser_bars() {
        let call = Bar::of_call;
        let calls = [call(1_000, 5), call(31_000, 9), call(59_999, 3), call(60_000, 4), call(200_000, 1)];
        let minutes = [
            Bar { at: 0, open: 5, high: 9, low: 3, close: 3, calls: 3 },
            Bar { at: 60_000, open: 4, high: 4, low: 4, close: 4, calls: 1 },
            Bar { at: 180_000, open: 1, high: 1, low: 1, close: 1, calls: 1 },
        ];
        assert_eq!(merge_bars(calls, MINUTE_MS), minutes);
        let hour = [Bar { at: 0, open: 5, high: 9, low: 1, close: 1, calls: 5 }];
        assert_eq!(merge_bars(calls, HOUR_MS), hour);
        assert_eq!(merge_bars(minutes, HOUR_MS), hour, "by the way of minutes it is the same");
        assert_eq!(merge_bars(hour, MINUTE_MS), hour, "what is coarse stays");
        assert_eq!(merge_bars(calls, 0), calls);
    }

    #[test]
    fn percentiles_count_calls_and_not_bars() {
        let bar = |close, calls| Bar { calls, ..Bar::of_call(0, close) };
        for (why, bars, want) in [
            ("none", vec![], None),
            ("one", vec![bar(7, 1)], Some([7, 7, 7])),
            ("ten", (1..=10).map(|n| bar(n, 1)).collect(), Some([2, 5, 8])),
            ("in any order", vec![bar(9, 1), bar(1, 1), bar(5, 1)], Some([1, 5, 9])),
            ("by calls", vec![bar(1, 1), bar(3, 90), bar(9, 9)], Some([3, 3, 3])),
        ] {
            assert_eq!(percentiles(bars), want, "{why}");
        }
    }

    #[test]
    fn suggested_step_fits_and_is_round() {
        for (span, want) in [(1, 1_000), (10_000_000, 5_000), (DAY_MS, 15_000), (KEPT_MS, 21_600_000)] {
            let step = smallest_step(span, 10_000);
            assert_eq!(step, want, "{span}");
            assert!(span / step <= 10_000);
        }
        assert!(i64::MAX / smallest_step(i64::MAX, 10_000) <= 10_000);
    }

    #[test]
    fn recent_bars_keep_their_promised_resolution() {
        let now = 1_700_000_123_456;
        for (age, days) in ages(now).iter().zip([7, 90, 732]) {
            assert!(age.before <= now - days * DAY_MS && age.before > now - days * DAY_MS - HOUR_MS);
            assert_eq!(age.before % HOUR_MS, 0);
        }
    }
}
