//! Timers of the engine.

use std::collections::BTreeSet;

use crate::Time;

/// Kind and row of a timer. Timers are ordered by time, then kind, then row, so that equal times have one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// Lease or expiry of a bid.
    Lease(u32),
    /// Launch deadline, end of protection, or end of notice of an allocation.
    Allocation(u32),
    /// Hourly settlement of an allocation.
    Settle(u32),
    /// Removal of an ended bid.
    ForgetBid(u32),
    /// Removal of an ended allocation.
    ForgetAllocation(u32),
}

/// All timers of a market. Each is a single number, so that comparisons are cheap: there may be a million.
#[derive(Clone, Debug)]
pub(crate) struct Timers {
    all: BTreeSet<u128>,
    /// First timer, which every command reads; `MAX`: there is none.
    first: u128,
}

impl Default for Timers {
    fn default() -> Self {
        Self { all: BTreeSet::new(), first: u128::MAX }
    }
}

fn pack(at: Time, timer: Timer) -> u128 {
    let (kind, row) = match timer {
        Timer::Lease(row) => (0u128, row),
        Timer::Allocation(row) => (1, row),
        Timer::Settle(row) => (2, row),
        Timer::ForgetBid(row) => (4, row),
        Timer::ForgetAllocation(row) => (5, row),
    };
    u128::from(at.0) << 64 | kind << 32 | u128::from(row)
}

fn time_of(packed: u128) -> Time {
    Time(u64::try_from(packed >> 64).unwrap_or(u64::MAX))
}

fn unpack(packed: u128) -> (Time, Timer) {
    let row = u32::try_from(packed & u128::from(u32::MAX)).unwrap_or(u32::MAX);
    let timer = match packed >> 32 & u128::from(u32::MAX) {
        0 => Timer::Lease(row),
        1 => Timer::Allocation(row),
        2 => Timer::Settle(row),
        4 => Timer::ForgetBid(row),
        _ => Timer::ForgetAllocation(row),
    };
    (time_of(packed), timer)
}

impl Timers {
    pub(crate) fn set(&mut self, at: Time, timer: Timer) {
        let one = pack(at, timer);
        self.first = self.first.min(one);
        self.all.insert(one);
    }

    pub(crate) fn unset(&mut self, at: Time, timer: Timer) {
        let one = pack(at, timer);
        self.all.remove(&one);
        if self.first == one {
            self.update_first();
        }
    }

    /// Time of the next timer.
    pub(crate) fn next(&self) -> Time {
        time_of(self.first)
    }

    /// Removes and returns the next timer that is due at `now`.
    pub(crate) fn pop(&mut self, now: Time) -> Option<(Time, Timer)> {
        if self.next() > now {
            return None;
        }
        let first = self.all.pop_first();
        self.update_first();
        first.map(unpack)
    }

    fn update_first(&mut self) {
        self.first = self.all.first().copied().unwrap_or(u128::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_timer_is_known_after_set_and_unset() {
        let mut timers = Timers::default();
        assert_eq!((timers.next(), timers.pop(Time(u64::MAX - 1))), (Time::NEVER, None));
        for at in [5, 3, 4] {
            timers.set(Time(at), Timer::Allocation(1));
        }
        assert_eq!(timers.next(), Time(3));
        timers.unset(Time(4), Timer::Allocation(1));
        timers.unset(Time(3), Timer::Allocation(1));
        timers.unset(Time(1), Timer::Allocation(1));
        assert_eq!((timers.next(), timers.pop(Time(4))), (Time(5), None));
        assert_eq!(timers.pop(Time(5)), Some((Time(5), Timer::Allocation(1))));
        assert_eq!(timers.next(), Time::NEVER);
    }

    #[test]
    fn packed_timers_keep_order_and_round_trip() {
        let kinds: [fn(u32) -> Timer; 5] =
            [Timer::Lease, Timer::Allocation, Timer::Settle, Timer::ForgetBid, Timer::ForgetAllocation];
        let mut all = Vec::new();
        for at in [Time(0), Time(1), Time::NEVER] {
            all.extend(kinds.iter().flat_map(|kind| [0, 7, u32::MAX].map(|row| (at, kind(row)))));
        }
        assert!(all.is_sorted(), "the order of the table");
        let numbers: Vec<_> = all.iter().map(|(at, timer)| pack(*at, *timer)).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(numbers.into_iter().map(unpack).collect::<Vec<_>>(), all);
    }
}
