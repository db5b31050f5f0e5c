//! Liveness of a node by its Lease. Pure.
//!
//! The times in a Lease come from another clock. A node is alive while this process observes renewals of its Lease; times
//! before the first observation count only when both clocks agree.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// Time without renewal after which a Lease is deleted.
const KEPT: SignedDuration = SignedDuration::from_hours(24);

/// Liveness of one node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LeaseLiveness {
    /// `renewTime` of the Lease, by the node's clock.
    renewed: Option<Timestamp>,
    /// End of the Lease, by the clock of this process.
    until: Timestamp,
    /// Best estimate of the end of the Lease.
    ended: Timestamp,
    /// Time from which `ended` counts: a live node with a wrong clock renews its Lease before.
    believed_from: Timestamp,
}

impl LeaseLiveness {
    /// Returns the liveness for a Lease that is observed for the first time.
    pub(super) fn first(renewed: Option<Timestamp>, duration: Duration, now: Timestamp) -> Self {
        let end = renewed.map_or(now, |renewed| add(renewed, duration)).min(add(now, duration));
        let recent = renewed.is_some_and(|renewed| renewed <= add(now, duration));
        match recent && now < end {
            true => Self { renewed, until: end, ended: end, believed_from: end },
            false => Self { renewed, until: now, ended: end.min(now), believed_from: add(now, duration) },
        }
    }

    /// Returns the liveness after the same Lease was read again. An unchanged Lease was not renewed.
    #[must_use]
    pub(super) fn next(self, renewed: Option<Timestamp>, duration: Duration, now: Timestamp) -> Self {
        if renewed == self.renewed {
            return self;
        }
        let until = add(now, duration);
        Self { renewed, until, ended: until, believed_from: until }
    }

    /// Returns the time since which the node is gone; `None` while it is alive.
    pub(super) fn gone_since(self, now: Timestamp) -> Option<Timestamp> {
        if now < self.until {
            return None;
        }
        Some(if now < self.believed_from { self.until } else { self.ended })
    }

    /// True when the node is alive.
    pub(super) fn is_alive(self, now: Timestamp) -> bool {
        self.gone_since(now).is_none()
    }

    /// True when the Lease can be deleted.
    pub(super) fn is_expired(self, now: Timestamp) -> bool {
        now >= self.believed_from && now.duration_since(self.ended) >= KEPT
    }

    /// True when the node was ever seen alive.
    pub(super) fn was_alive(self) -> bool {
        self.believed_from == self.until
    }
}

fn add(t: Timestamp, by: Duration) -> Timestamp {
    t.saturating_add(SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX)).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURATION: Duration = Duration::from_secs(40);
    const NOW: i64 = 1_000_000;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(NOW + seconds).unwrap()
    }

    fn gone(life: LeaseLiveness, now: i64) -> Option<i64> {
        life.gone_since(at(now)).map(|since| since.as_second() - NOW)
    }

    #[test]
    fn lease_first_seen_is_alive_only_if_recently_renewed() {
        for (why, renewed, at_once, after_a_duration) in [
            ("renewed now", Some(0), None, Some(40)),
            ("renewed a moment ago", Some(-10), None, Some(30)),
            ("a clock that is a little ahead", Some(10), None, Some(40)),
            ("the node died before we started", Some(-600), Some(0), Some(-560)),
            ("a clock that is far ahead", Some(600), Some(0), Some(0)),
            ("never renewed", None, Some(0), Some(0)),
        ] {
            let life = LeaseLiveness::first(renewed.map(at), DURATION, at(0));
            assert_eq!((gone(life, 0), gone(life, 40)), (at_once, after_a_duration), "{why}");
        }
    }

    #[test]
    fn dead_lease_stays_dead_when_it_is_listed_again() {
        let dead = LeaseLiveness::first(Some(at(-600)), DURATION, at(0));
        let listed = dead.next(Some(at(-600)), DURATION, at(50));
        assert_eq!((listed, gone(listed, 50)), (dead, Some(-560)));
        let live = LeaseLiveness::first(Some(at(0)), DURATION, at(0));
        let listed = live.next(Some(at(0)), DURATION, at(30));
        assert_eq!(gone(listed, 41), Some(40), "the grace is not begun anew");
    }

    #[test]
    fn lease_is_alive_once_a_renewal_is_observed() {
        let skewed = LeaseLiveness::first(Some(at(-7200)), DURATION, at(0));
        assert!(!skewed.is_alive(at(0)) && !skewed.was_alive());
        let renewed = skewed.next(Some(at(-7190)), DURATION, at(10));
        assert!(renewed.is_alive(at(49)) && renewed.was_alive());
        assert_eq!(gone(renewed, 60), Some(50), "by our clock");
    }

    #[test]
    fn lease_is_removed_after_a_day() {
        let day = 24 * 3600;
        let old = LeaseLiveness::first(Some(at(-2 * day)), DURATION, at(0));
        assert!(!old.is_expired(at(39)), "a node whose clock is wrong would have renewed it by 40 s");
        assert!(old.is_expired(at(40)));
        let live = LeaseLiveness::first(Some(at(0)), DURATION, at(0));
        assert!(!live.is_expired(at(day)) && live.is_expired(at(day + 40)));
    }
}
