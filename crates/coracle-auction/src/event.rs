//! What a market answers and what it tells.

use crate::alloc::EndReason;
use crate::wire::{wire_enum, wire_struct};
use crate::{AllocId, BidId, LotNo, OwnerKey, Price, TenantNo, Time};

/// Why a command changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No such thing, or another tenant's.
    #[error("not found")]
    NotFound,
    /// The bid or unit is over.
    #[error("already over")]
    Terminal,
    /// Somebody else acted for this owner.
    #[error("the owner's version is {current}")]
    OwnerVersion {
        /// The version now.
        current: u64,
    },
    /// The key was used for another request.
    #[error("the idempotency key was used for another request")]
    IdempotencyConflict,
    /// A field that cannot be.
    #[error("{field} must be {range}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// What it may be.
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
    /// It came after its time.
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
    Refused(Refusal),
}

/// Why a row of a charge stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChargeReason {
    /// The node ran.
    Usage,
    /// The rest of the first minute.
    Minimum,
    /// Given back: it was lost through our fault.
    Refund,
}

/// One call, as published and chained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// Number of the call in this market, from 1.
    pub number: u64,
    /// When.
    pub at: Time,
    /// Clearing price.
    pub price: Price,
    /// Seats left over.
    pub free: u64,
    /// Units that were in the contest: unprotected running ones and eligible open ones looked at.
    pub demand: u64,
    /// Units newly matched.
    pub won: u64,
    /// Units that lost their place.
    pub displaced: u64,
    /// Bids passed over because their block did not fit.
    pub skipped: u64,
    /// The best losing bid, which sets the price.
    pub marginal: Option<BidId>,
    /// SHA-256 over the chain before and this record.
    pub chain: [u8; 32],
}

/// Something happened. In the order of happening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A bid was placed, changed, held, or some of its units are over.
    Bid {
        /// The bid.
        bid: BidId,
    },
    /// A unit was matched, moved on, came back, or ended.
    Unit {
        /// The unit.
        alloc: AllocId,
        /// Its bid.
        bid: BidId,
    },
    /// A launch came to nothing and the unit waits in the book again.
    Returned {
        /// The unit that is no more.
        alloc: AllocId,
        /// Its bid.
        bid: BidId,
        /// When it was matched: part of the name that it was known by.
        matched_at: Time,
    },
    /// Order to the supplier: start a machine.
    Launch {
        /// For this unit.
        alloc: AllocId,
        /// In this lot.
        lot: LotNo,
        /// The machine must run by then.
        deadline: Time,
    },
    /// Order to the supplier: end a machine by the deadline.
    Reclaim {
        /// Of this unit.
        alloc: AllocId,
        /// In this lot.
        lot: LotNo,
        /// By then.
        deadline: Time,
        /// Why.
        reason: EndReason,
    },
    /// Order to the supplier: the machine stays after all.
    Spare {
        /// Of this unit.
        alloc: AllocId,
        /// In this lot.
        lot: LotNo,
    },
    /// The next call would displace this unit.
    AtRisk {
        /// The unit.
        alloc: AllocId,
        /// The lowest limit that keeps it.
        price_to_keep: Price,
        /// When the call is.
        call_at: Time,
    },
    /// A call was held.
    Call {
        /// Its record. Boxed: it is three times as large as any other event, and rarer than all.
        record: Box<CallRecord>,
    },
    /// What the next call would clear at.
    Indicative {
        /// The price.
        price: Price,
    },
    /// Money.
    Charge {
        /// The unit.
        alloc: AllocId,
        /// Who pays.
        tenant: TenantNo,
        /// From when.
        from: Time,
        /// Until when.
        to: Time,
        /// Per node-hour.
        price: Price,
        /// Why.
        reason: ChargeReason,
    },
    /// A lot changed: more, fewer, silent, back, or gone.
    Lot {
        /// The lot.
        lot: LotNo,
    },
    /// The market stopped or goes on.
    Halted {
        /// Is it stopped?
        halted: bool,
    },
    /// An owner changed something or showed life.
    Owner {
        /// Its tenant.
        tenant: TenantNo,
        /// The owner.
        owner: OwnerKey,
        /// Its version now.
        version: u64,
    },
}

wire_struct!(CallRecord { number, at, price, free, demand, won, displaced, skipped, marginal, chain });
wire_enum!(ChargeReason { 0 Usage, 1 Minimum, 2 Refund });
