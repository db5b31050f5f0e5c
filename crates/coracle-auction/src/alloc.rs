//! One unit of capacity in the hands of one bid.

use crate::slab::Link;
use crate::wire::{wire_enum, wire_struct};
use crate::{Charge, LotNo, Price, Time};

/// Where a matched unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllocState {
    /// Its seat is promised behind a unit that runs out its notice.
    Matched,
    /// The supplier launches it.
    Provisioning,
    /// Its node was ready.
    Active,
    /// It lost its place and ends at the deadline.
    Preempting,
    /// Over.
    Ended,
}

/// How far a launch came. Each stage has its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Ordered; the machine must start within 60 s.
    Ordered,
    /// The machine runs; the node must register within 5 min of the order.
    Launched,
    /// Registered; the node must be ready within 10 min of the order.
    Registered,
}

/// Why a unit ended or must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndReason {
    /// Its owner gave it back.
    Released,
    /// It lost a call.
    Preempted,
    /// The capacity under it went away.
    CapacityLost,
    /// Three launches failed.
    ProvisionFailed,
    /// Its machine or node died.
    NodeFailed,
    /// The tenant's money or cap does not cover it.
    BudgetExhausted,
}

/// One unit of a lot, given to one bid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alloc {
    pub(crate) bid: u32,
    pub(crate) tenant: u32,
    pub(crate) lot: LotNo,
    pub(crate) unit: u32,
    pub(crate) seq: u64,
    pub(crate) match_no: u64,
    pub(crate) limit: Price,
    /// Limits before, and until when: what was paid then can be found again.
    pub(crate) past_limits: Vec<(Time, Price)>,
    pub(crate) matched_at: Time,
    pub(crate) ordered_at: Time,
    pub(crate) active_at: Time,
    pub(crate) protected_until: Time,
    pub(crate) noticed_at: Time,
    pub(crate) preempt_at: Time,
    pub(crate) ended_at: Time,
    pub(crate) settled_to: Time,
    pub(crate) due: Time,
    pub(crate) settle_due: Time,
    pub(crate) charged: Charge,
    pub(crate) state: AllocState,
    pub(crate) stage: Stage,
    pub(crate) reason: Option<EndReason>,
    pub(crate) failures: u8,
    pub(crate) node: Option<Box<str>>,
    /// The units of the same bid before and behind it; made again when a snapshot is read.
    pub(crate) newer: Link,
    pub(crate) older: Link,
}

impl Alloc {
    /// Where it is.
    #[must_use]
    pub fn state(&self) -> AllocState {
        self.state
    }

    /// How far its launch is, or was.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The lot and the unit in it.
    #[must_use]
    pub fn seat(&self) -> (LotNo, u32) {
        (self.lot, self.unit)
    }

    /// Highest price it ever pays.
    #[must_use]
    pub fn limit(&self) -> Price {
        self.limit
    }

    /// When it was matched.
    #[must_use]
    pub fn matched_at(&self) -> Time {
        self.matched_at
    }

    /// When its node was first ready, and the charge began.
    #[must_use]
    pub fn active_at(&self) -> Option<Time> {
        (self.active_at != Time::NEVER).then_some(self.active_at)
    }

    /// No call displaces it before this.
    #[must_use]
    pub fn protected_until(&self) -> Option<Time> {
        (self.protected_until != Time::NEVER).then_some(self.protected_until)
    }

    /// When it ends, once it lost its place.
    #[must_use]
    pub fn preempt_at(&self) -> Option<Time> {
        (self.preempt_at != Time::NEVER).then_some(self.preempt_at)
    }

    /// When it ended.
    #[must_use]
    pub fn ended_at(&self) -> Option<Time> {
        (self.ended_at != Time::NEVER).then_some(self.ended_at)
    }

    /// Why it ended or ends.
    #[must_use]
    pub fn reason(&self) -> Option<EndReason> {
        self.reason
    }

    /// Name of its node, once registered.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// What it was charged so far, exact.
    #[must_use]
    pub fn charged(&self) -> Charge {
        self.charged
    }

    pub(crate) fn is_live(&self) -> bool {
        matches!(self.state, AllocState::Matched | AllocState::Provisioning | AllocState::Active)
    }

    /// Is it charged now?
    pub(crate) fn is_charged(&self) -> bool {
        self.active_at != Time::NEVER && self.ended_at == Time::NEVER
    }
}

wire_enum!(AllocState { 0 Matched, 1 Provisioning, 2 Active, 3 Preempting, 4 Ended });
wire_enum!(Stage { 0 Ordered, 1 Launched, 2 Registered });
wire_enum!(EndReason {
    0 Released, 1 Preempted, 2 CapacityLost, 3 ProvisionFailed, 4 NodeFailed, 5 BudgetExhausted,
});
wire_struct!(Alloc {
    bid,
    tenant,
    lot,
    unit,
    seq,
    match_no,
    limit,
    past_limits,
    matched_at,
    ordered_at,
    active_at,
    protected_until,
    noticed_at,
    preempt_at,
    ended_at,
    settled_to,
    due,
    settle_due,
    charged,
    state,
    stage,
    reason,
    failures,
    node,
    newer: derived,
    older: derived,
});
