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

/// All timers of a market.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers(BTreeSet<(Time, Timer)>);

impl Timers {
    pub(crate) fn set(&mut self, at: Time, timer: Timer) {
        self.0.insert((at, timer));
    }

    pub(crate) fn unset(&mut self, at: Time, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    /// When the next one is due.
    pub(crate) fn next(&self) -> Time {
        self.0.first().map_or(Time::NEVER, |(at, _)| *at)
    }

    /// Takes the next one that is due at `now`.
    pub(crate) fn pop(&mut self, now: Time) -> Option<(Time, Timer)> {
        if self.next() > now { None } else { self.0.pop_first() }
    }
}
