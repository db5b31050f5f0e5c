//! Allocation: one slot of a lot, sold to one bid.

use serde::{Deserialize, Serialize};

use crate::slab::Link;
use crate::{Charge, LotNo, Price, Time};

/// State of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AllocationState {
    /// The slot is promised; its occupant is under notice.
    Matched,
    /// The supplier launches the machine.
    Provisioning,
    /// The node has been ready.
    Active,
    /// The allocation lost its slot and ends at the deadline.
    Preempting,
    /// The allocation has ended.
    Ended,
}

/// Stage of a launch. Each stage has a deadline of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// The machine is ordered and must start within 60 s.
    Ordered,
    /// The machine runs; the node must register within 5 min of the order.
    Launched,
    /// The node has registered and must be ready within 10 min of the order.
    Registered,
}

/// Why an allocation ended or must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum EndReason {
    /// The owner released the allocation.
    Released,
    /// A call preempted the allocation.
    Preempted,
    /// The capacity was removed or lost.
    CapacityLost,
    /// Three launches failed.
    ProvisionFailed,
    /// The machine or the node died.
    NodeFailed,
    /// The tenant's money or cap does not cover the allocation.
    BudgetExhausted,
}

/// One slot of a lot, sold to one bid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    pub(crate) bid: u32,
    pub(crate) tenant: u32,
    pub(crate) lot: LotNo,
    pub(crate) slot: u32,
    pub(crate) seq: u64,
    pub(crate) match_no: u64,
    pub(crate) limit: Price,
    /// Highest limit since the last call, which bounds the price until the next one.
    pub(crate) ceiling: Price,
    /// Earlier ceilings, and the time until which each applied; refunds need them.
    pub(crate) past_ceilings: Vec<(Time, Price)>,
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
    pub(crate) state: AllocationState,
    pub(crate) stage: Stage,
    pub(crate) reason: Option<EndReason>,
    pub(crate) failures: u8,
    pub(crate) node: Option<Box<str>>,
    /// Neighbours in the list of the bid's allocations; rebuilt when a snapshot is restored.
    #[serde(skip)]
    pub(crate) newer: Link,
    #[serde(skip)]
    pub(crate) older: Link,
}

impl Allocation {
    /// State of the allocation.
    #[must_use]
    pub fn state(&self) -> AllocationState {
        self.state
    }

    /// Stage of the launch.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Lot, and index of the slot in the lot.
    #[must_use]
    pub fn slot(&self) -> (LotNo, u32) {
        (self.lot, self.slot)
    }

    /// Limit in the next call.
    #[must_use]
    pub fn limit(&self) -> Price {
        self.limit
    }

    /// Highest price until the next call: the highest limit since the last one.
    #[must_use]
    pub fn ceiling(&self) -> Price {
        self.ceiling
    }

    /// Time of the match.
    #[must_use]
    pub fn matched_at(&self) -> Time {
        self.matched_at
    }

    /// Time when the node was first ready and the charge began.
    #[must_use]
    pub fn active_at(&self) -> Option<Time> {
        (self.active_at != Time::NEVER).then_some(self.active_at)
    }

    /// Time before which no call preempts the allocation.
    #[must_use]
    pub fn protected_until(&self) -> Option<Time> {
        (self.protected_until != Time::NEVER).then_some(self.protected_until)
    }

    /// Time when an allocation under notice ends.
    #[must_use]
    pub fn preempt_at(&self) -> Option<Time> {
        (self.preempt_at != Time::NEVER).then_some(self.preempt_at)
    }

    /// Time when the notice began.
    #[must_use]
    pub fn noticed_at(&self) -> Option<Time> {
        (self.noticed_at != Time::NEVER).then_some(self.noticed_at)
    }

    /// Time when the allocation ended.
    #[must_use]
    pub fn ended_at(&self) -> Option<Time> {
        (self.ended_at != Time::NEVER).then_some(self.ended_at)
    }

    /// Why the allocation has ended or will end.
    #[must_use]
    pub fn reason(&self) -> Option<EndReason> {
        self.reason
    }

    /// Name of the node, once registered.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// Exact charge so far.
    #[must_use]
    pub fn charged(&self) -> Charge {
        self.charged
    }

    pub(crate) fn is_live(&self) -> bool {
        matches!(
            self.state,
            AllocationState::Matched | AllocationState::Provisioning | AllocationState::Active
        )
    }

    /// Whether the allocation is being charged.
    pub(crate) fn is_charged(&self) -> bool {
        self.active_at != Time::NEVER && self.ended_at == Time::NEVER
    }
}
