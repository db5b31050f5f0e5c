//! What happens by itself at a time.

use std::collections::BTreeSet;

use crate::Time;

/// Ordered by time, then kind, then row: equal times have one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A bid's lease or expiry.
    Lease(u32),
    /// A unit's launch deadline, end of protection, or end of notice.
    Unit(u32),
    /// A unit's hourly account.
    Settle(u32),
    /// A lot was silent for long.
    Silent(u32),
    /// An ended bid is forgotten.
    ForgetBid(u32),
    /// An ended unit is forgotten.
    ForgetUnit(u32),
}

/// All timers of a market, each as one number: a million of them are compared all day.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers(BTreeSet<u128>);

fn packed(at: Time, timer: Timer) -> u128 {
    let (kind, row) = match timer {
        Timer::Lease(row) => (0u128, row),
        Timer::Unit(row) => (1, row),
        Timer::Settle(row) => (2, row),
        Timer::Silent(row) => (3, row),
        Timer::ForgetBid(row) => (4, row),
        Timer::ForgetUnit(row) => (5, row),
    };
    u128::from(at.0) << 64 | kind << 32 | u128::from(row)
}

fn time_of(packed: u128) -> Time {
    Time(u64::try_from(packed >> 64).unwrap_or(u64::MAX))
}

fn unpacked(packed: u128) -> (Time, Timer) {
    let row = u32::try_from(packed & u128::from(u32::MAX)).unwrap_or(u32::MAX);
    let timer = match packed >> 32 & u128::from(u32::MAX) {
        0 => Timer::Lease(row),
        1 => Timer::Unit(row),
        2 => Timer::Settle(row),
        3 => Timer::Silent(row),
        4 => Timer::ForgetBid(row),
        _ => Timer::ForgetUnit(row),
    };
    (time_of(packed), timer)
}

impl Timers {
    pub(crate) fn set(&mut self, at: Time, timer: Timer) {
        self.0.insert(packed(at, timer));
    }

    pub(crate) fn unset(&mut self, at: Time, timer: Timer) {
        self.0.remove(&packed(at, timer));
    }

    /// When the next one is due.
    pub(crate) fn next(&self) -> Time {
        self.0.first().map_or(Time::NEVER, |first| time_of(*first))
    }

    /// Takes the next one that is due at `now`.
    pub(crate) fn pop(&mut self, now: Time) -> Option<(Time, Timer)> {
        if self.next() > now { None } else { self.0.pop_first().map(unpacked) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_in_the_order_of_their_timers() {
        let kinds: [fn(u32) -> Timer; 6] =
            [Timer::Lease, Timer::Unit, Timer::Settle, Timer::Silent, Timer::ForgetBid, Timer::ForgetUnit];
        let mut all = Vec::new();
        for at in [Time(0), Time(1), Time::NEVER] {
            all.extend(kinds.iter().flat_map(|kind| [0, 7, u32::MAX].map(|row| (at, kind(row)))));
        }
        assert!(all.is_sorted(), "the order of the table");
        let numbers: Vec<_> = all.iter().map(|(at, timer)| packed(*at, *timer)).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(numbers.into_iter().map(unpacked).collect::<Vec<_>>(), all);
    }
}
