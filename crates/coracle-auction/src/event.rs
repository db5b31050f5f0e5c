//! Replies and events of a market.

use serde::{Deserialize, Serialize};

use crate::{AllocationId, BidId, LotNo, OwnerKey, Price, SupplierNo, TenantNo, Time};

/// Why a command changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// No such thing, or another tenant's.
    #[error("not found")]
    NotFound,
    /// The bid or allocation is over.
    #[error("already over")]
    Terminal,
    /// The owner's version is not the expected one: another change came first.
    #[error("the owner's version is {current}")]
    OwnerVersion {
        /// The version now.
        current: u64,
    },
    /// The key was used for another request.
    #[error("the idempotency key was used for another request")]
    IdempotencyConflict,
    /// A field is out of range.
    #[error("{field} must be {range}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// Allowed values.
        range: &'static str,
    },
    /// The market takes no bids now.
    #[error("the market is halted")]
    Halted,
    /// The tenant has too many units.
    #[error("the tenant has too many units")]
    Quota,
    /// The tenant's hourly cap does not cover it.
    #[error("the hourly cap does not cover it")]
    Budget,
    /// The deadline has passed.
    #[error("too late")]
    TooLate,
}

/// The answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done.
    Done,
    /// A bid is in the book, or was before.
    Bid {
        /// The bid.
        bid: BidId,
        /// The owner's version after it.
        owner_version: u64,
        /// True when an earlier request under the same key placed it.
        replayed: bool,
        /// True when its limit is below the reserve: it rests.
        below_reserve: bool,
    },
    /// Nothing changed.
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

/// One call, as published and chained.
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
    /// Units that took part: unprotected running allocations and the eligible open units examined.
    pub demand: u64,
    /// Units newly matched.
    pub won: u64,
    /// Allocations that lost their slot.
    pub preempted: u64,
    /// Bids passed over because their block did not fit.
    pub skipped: u64,
    /// The best losing bid, which sets the price.
    pub marginal: Option<BidId>,
    /// SHA-256 over the chain before and this record.
    pub chain: [u8; 32],
}

/// State change, in order of occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A bid was placed, changed, held, or some of its units are over.
    Bid {
        /// The bid.
        bid: BidId,
    },
    /// An allocation was made, changed state, or ended.
    Allocation {
        /// The allocation.
        allocation: AllocationId,
        /// Its bid.
        bid: BidId,
    },
    /// A launch failed; the unit of the bid is open again.
    Returned {
        /// The former allocation.
        allocation: AllocationId,
        /// Its bid.
        bid: BidId,
        /// When it was matched: part of the name that it was known by.
        matched_at: Time,
    },
    /// The desired set of a supplier changed in one entry: see [`crate::Market::desired_at`].
    Desired {
        /// The supplier.
        supplier: SupplierNo,
        /// The lot.
        lot: LotNo,
        /// Index of the slot.
        slot: u32,
        /// The allocation that entered, changed, or left.
        allocation: AllocationId,
        /// When it was matched: part of the name that it is known by.
        matched_at: Time,
        /// Version of the desired sets of this market from now on.
        epoch: u64,
    },
    /// The next call would preempt this allocation, as two indicative calls found one after the other.
    AtRisk {
        /// The allocation.
        allocation: AllocationId,
        /// The lowest limit that keeps it.
        price_to_keep: Price,
        /// When the call is.
        call_at: Time,
    },
    /// The allocation is not at risk any more.
    RiskOver {
        /// The allocation.
        allocation: AllocationId,
    },
    /// A call was held.
    Call {
        /// Its record. Boxed: it is three times as large as any other event, and rarer than all.
        record: Box<CallRecord>,
    },
    /// Clearing price of the next call, if it were held now.
    Indicative {
        /// The price.
        price: Price,
    },
    /// A charge or a refund.
    Charge {
        /// The allocation.
        allocation: AllocationId,
        /// When that was matched: part of the name that it is known by.
        matched_at: Time,
        /// Tenant that pays.
        tenant: TenantNo,
        /// Start of the period.
        from: Time,
        /// End of the period.
        to: Time,
        /// Per node-hour.
        price: Price,
        /// Reason.
        reason: ChargeReason,
    },
    /// A lot changed: more, fewer, silent, lost, back, or gone.
    Lot {
        /// The lot.
        lot: LotNo,
    },
    /// The market was halted or resumed.
    Halted {
        /// Whether it is halted.
        halted: bool,
    },
    /// An owner changed something or sent a heartbeat.
    Owner {
        /// Its tenant.
        tenant: TenantNo,
        /// The owner.
        owner: OwnerKey,
        /// Its version now.
        version: u64,
    },
}
