//! Replies and events of a market.

use serde::{Deserialize, Serialize};

use crate::{AllocationId, BidId, LotNo, OwnerKey, Price, SupplierNo, TenantNo, Time};

/// Reason why a command was refused and changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// The object does not exist or belongs to another tenant.
    #[error("not found")]
    NotFound,
    /// The bid or allocation has ended.
    #[error("already over")]
    Terminal,
    /// The owner's version is not the expected one: another change was first.
    #[error("the owner's version is {current}")]
    OwnerVersion {
        /// Present version.
        current: u64,
    },
    /// The key was used for another request.
    #[error("the idempotency key was used for another request")]
    IdempotencyConflict,
    /// A field is out of range.
    #[error("{field} must be {range}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// Allowed values.
        range: &'static str,
    },
    /// The market is halted and accepts no bids.
    #[error("the market is halted")]
    Halted,
    /// The tenant has too many units.
    #[error("the tenant has too many units")]
    Quota,
    /// The tenant's hourly cap does not cover the request.
    #[error("the hourly cap does not cover it")]
    Budget,
    /// The deadline has passed.
    #[error("too late")]
    TooLate,
}

/// Reply to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The command was applied.
    Done,
    /// The bid is in the order book, or was there before.
    Bid {
        /// The bid.
        bid: BidId,
        /// Version of the owner after the command.
        owner_version: u64,
        /// Whether an earlier request with the same key placed the bid.
        replayed: bool,
        /// Whether the limit is below the reserve, so that the bid only rests.
        below_reserve: bool,
    },
    /// The command was refused and changed nothing.
    Refused(Rejection),
}

/// Reason of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ChargeReason {
    /// The node ran.
    Usage,
    /// The rest of the first minute.
    Minimum,
    /// Refund: the allocation was lost through no fault of the tenant.
    Refund,
}

/// Record of a call, as published and chained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallRecord {
    /// Number of the call in this market, from 1.
    pub number: u64,
    /// Time of the call.
    pub at: Time,
    /// Clearing price.
    pub price: Price,
    /// Free slots that no bid took.
    pub free: u64,
    /// Number of units that took part: unprotected running allocations, and the eligible open units examined.
    pub demand: u64,
    /// Number of units newly matched.
    pub won: u64,
    /// Number of allocations that lost their slot.
    pub preempted: u64,
    /// Number of bids that were skipped because their block did not fit.
    pub skipped: u64,
    /// Best losing bid, which sets the price.
    pub marginal: Option<BidId>,
    /// SHA-256 over the previous chain value and this record.
    pub chain: [u8; 32],
}

/// State change. Events are in the order of occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A bid was placed, changed or held, or some of its units have ended.
    Bid {
        /// The bid.
        bid: BidId,
    },
    /// An allocation was created, changed its state, or ended.
    Allocation {
        /// The allocation.
        allocation: AllocationId,
        /// Bid of the allocation.
        bid: BidId,
    },
    /// A launch failed, and the unit of the bid is open again.
    Returned {
        /// The former allocation.
        allocation: AllocationId,
        /// Bid of the former allocation.
        bid: BidId,
        /// Time of the match, which is part of the allocation's public name.
        matched_at: Time,
    },
    /// One entry of a supplier's desired set changed: see [`crate::Market::desired_at`].
    Desired {
        /// The supplier.
        supplier: SupplierNo,
        /// The lot.
        lot: LotNo,
        /// Index of the slot.
        slot: u32,
        /// The allocation that entered, changed, or left.
        allocation: AllocationId,
        /// Time of the match, which is part of the allocation's public name.
        matched_at: Time,
        /// New version of the desired sets of this market.
        epoch: u64,
    },
    /// The next call would preempt this allocation, as two consecutive indicative calls found.
    AtRisk {
        /// The allocation.
        allocation: AllocationId,
        /// Lowest limit that keeps the allocation.
        price_to_keep: Price,
        /// Time of the call.
        call_at: Time,
    },
    /// The allocation is no longer at risk.
    RiskOver {
        /// The allocation.
        allocation: AllocationId,
    },
    /// A call was held.
    Call {
        /// Record of the call. Boxed, because it is three times as large as any other event, and the rarest.
        record: Box<CallRecord>,
    },
    /// The clearing price that the next call would have now.
    Indicative {
        /// Clearing price.
        price: Price,
    },
    /// A charge or a refund.
    Charge {
        /// The allocation.
        allocation: AllocationId,
        /// Time of the match, which is part of the allocation's public name.
        matched_at: Time,
        /// Tenant that pays.
        tenant: TenantNo,
        /// Start of the period.
        from: Time,
        /// End of the period.
        to: Time,
        /// Price per node-hour.
        price: Price,
        /// Reason of the charge.
        reason: ChargeReason,
    },
    /// A lot was resized, became silent, was lost, came back, or was removed.
    Lot {
        /// The lot.
        lot: LotNo,
    },
    /// The market was halted or resumed.
    Halted {
        /// Whether the market is halted.
        halted: bool,
    },
    /// An owner changed something or sent a heartbeat.
    Owner {
        /// Tenant of the owner.
        tenant: TenantNo,
        /// The owner.
        owner: OwnerKey,
        /// New version of the owner.
        version: u64,
    },
}
