//! Bid, and the states of its units.

use serde::{Deserialize, Serialize};

use crate::slab::Link;
use crate::{OwnerKey, Price, Time};

/// Number of units of a bid in each state. Their sum is the bid's quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Units {
    /// Units that wait in the order book.
    pub open: u16,
    /// Units that are assigned to a slot whose occupant is under notice.
    pub matched: u16,
    /// Units that are being launched.
    pub provisioning: u16,
    /// Units that run.
    pub active: u16,
    /// Units that are preempted and run until their notice ends.
    pub preempting: u16,
    /// Units that have ended.
    pub ended: u16,
    /// Units that the owner cancelled before a match.
    pub cancelled: u16,
    /// Units whose lease ran out before a match.
    pub expired: u16,
}

impl Units {
    /// Number of matched, provisioning and active units.
    #[must_use]
    pub fn live(&self) -> u32 {
        u32::from(self.matched) + u32::from(self.provisioning) + u32::from(self.active)
    }

    /// Number of units that have not ended.
    #[must_use]
    pub fn unfinished(&self) -> u32 {
        u32::from(self.open) + self.live() + u32::from(self.preempting)
    }

    /// Number of all units that were ever requested.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.unfinished() + u32::from(self.ended) + u32::from(self.cancelled) + u32::from(self.expired)
    }
}

/// State of a bid: that of its least advanced unfinished unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BidState {
    /// The unit waits in the order book.
    Pending,
    /// The unit is assigned to a slot whose occupant is under notice.
    Matched,
    /// The unit is being launched.
    Provisioning,
    /// The unit runs.
    Active,
    /// The unit is preempted and runs until its notice ends.
    Preempting,
    /// All units have ended; at least one was matched.
    Ended,
    /// All units were cancelled.
    Cancelled,
    /// The lease ran out.
    Expired,
}

/// Rare data of a bid, stored separately so that a million plain bids stay small.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Extra {
    /// Open units with their own time priority: `(seq, units)`.
    pub(crate) segments: Vec<(u64, u16)>,
    /// Numbers of failed launches of units that are open again, one entry per unit.
    pub(crate) failures: Vec<u8>,
    /// Time at which open units expire, regardless of the lease.
    pub(crate) expires_at: Option<Time>,
    /// Labels set by the owner.
    pub(crate) labels: Vec<(Box<str>, Box<str>)>,
}

/// Bid: quantity, limit, and the number of units in each state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bid {
    pub(crate) key: [u8; 16],
    pub(crate) body: u64,
    pub(crate) limit: Price,
    pub(crate) seq: u64,
    pub(crate) placed_at: Time,
    pub(crate) renewed_at: Time,
    pub(crate) due: Time,
    pub(crate) more: Option<Box<Extra>>,
    pub(crate) tenant: u32,
    pub(crate) owner: u32,
    /// Index in the owner's list; rebuilt when a snapshot is restored.
    #[serde(skip)]
    pub(crate) filed: u32,
    /// Newest allocation of the bid; rebuilt when a snapshot is restored.
    #[serde(skip)]
    pub(crate) newest: Link,
    pub(crate) lease_ms: u32,
    pub(crate) min_fill: u16,
    pub(crate) units: Units,
    pub(crate) held: bool,
    /// Whether the bid is cancelled, so that a unit whose launch fails is not opened again.
    pub(crate) closed: bool,
}

impl Bid {
    /// Highest price per node-hour.
    #[must_use]
    pub fn limit(&self) -> Price {
        self.limit
    }

    /// Time priority: among equal limits, the lower number wins first.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Time when the bid was placed.
    #[must_use]
    pub fn placed_at(&self) -> Time {
        self.placed_at
    }

    /// Number of units that must be matched together.
    #[must_use]
    pub fn min_fill(&self) -> u32 {
        u32::from(self.min_fill)
    }

    /// Number of units in each state.
    #[must_use]
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Whether the tenant's hourly cap holds the bid back.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Labels set by the owner.
    #[must_use]
    pub fn labels(&self) -> &[(Box<str>, Box<str>)] {
        self.more.as_ref().map_or(&[], |extra| &extra.labels)
    }

    /// Whether all units of the bid have ended.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        self.units.unfinished() == 0
    }

    /// State of the bid: that of its least advanced unfinished unit.
    #[must_use]
    pub fn state(&self) -> BidState {
        let u = &self.units;
        let order = [
            (u.open, BidState::Pending),
            (u.matched, BidState::Matched),
            (u.provisioning, BidState::Provisioning),
            (u.active, BidState::Active),
            (u.preempting, BidState::Preempting),
            (u.ended, BidState::Ended),
            (u.expired, BidState::Expired),
        ];
        order.into_iter().find(|(units, _)| *units > 0).map_or(BidState::Cancelled, |(_, state)| state)
    }

    pub(crate) fn extra(&mut self) -> &mut Extra {
        self.more.get_or_insert_default()
    }

    /// Open units by time priority, the bid's own first.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (u64, u16)> + '_ {
        let rest = self.more.as_ref().map_or(&[][..], |extra| &extra.segments);
        let apart: u16 = rest.iter().map(|(_, units)| units).sum();
        let own = self.units.open - apart;
        (own > 0).then_some((self.seq, own)).into_iter().chain(rest.iter().copied())
    }

    /// Fewest units that an entry with `units` units must win together.
    pub(crate) fn block(&self, units: u32) -> u32 {
        self.min_fill().saturating_sub(self.units.live()).clamp(1, units.max(1))
    }

    /// Time at which the lease ends, given the owner's last renewal.
    pub(crate) fn lapses_at(&self, renewed: Time) -> Time {
        let lease = self.placed_at.max(self.renewed_at).max(renewed).plus_ms(u64::from(self.lease_ms));
        self.more.as_ref().and_then(|extra| extra.expires_at).map_or(lease, |at| lease.min(at))
    }
}

/// Owner of bids within a tenant. Its version rises with each accepted change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub(crate) key: OwnerKey,
    pub(crate) tenant: u32,
    pub(crate) version: u64,
    pub(crate) renewed_at: Time,
}
