//! State of the market as the planner reads it: bids, allocations and prices of one BidNode. Data only.

use std::collections::{BTreeMap, BTreeSet};

use coracle_auction::{AllocationState, Price};

use crate::ids::{AllocationName, BidName, MarketName};

/// A bid that is not over.
#[derive(Clone, Debug, PartialEq)]
pub struct Bid {
    /// Market that it is placed in.
    pub market: MarketName,
    /// Highest price that it pays.
    pub limit: Price,
    /// Units that wait in the book.
    pub open: u32,
    /// Units with a promised slot.
    pub matched: u32,
    /// Units that are launched.
    pub provisioning: u32,
    /// Units that run.
    pub active: u32,
    /// Units under notice.
    pub preempting: u32,
    /// Held back by the tenant's hourly cap.
    pub held: bool,
    /// When it was placed, in milliseconds since 1970.
    pub placed_ms: i64,
}

impl Bid {
    /// Matched, provisioning and active units.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.matched + self.provisioning + self.active
    }
}

/// An allocation that is not over.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// Its bid.
    pub bid: BidName,
    /// Market that it is placed in.
    pub market: MarketName,
    /// Lot that it runs in.
    pub lot: String,
    /// Its state; never `Ended`.
    pub state: AllocationState,
    /// Highest price that it pays.
    pub limit: Price,
    /// Price that it pays now.
    pub price: Price,
    /// When it became active, in milliseconds since 1970.
    pub active_ms: i64,
    /// End of its notice, in milliseconds since 1970; zero without notice.
    pub preempt_ms: i64,
    /// Its Node.
    pub node: String,
    /// Reason of the notice.
    pub reason: String,
    /// Lowest limit that keeps it; zero when it is not at risk.
    pub price_to_keep: Price,
}

/// Bids and allocations of one BidNode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Owner {
    /// Bids that are not over.
    pub bids: BTreeMap<BidName, Bid>,
    /// Allocations that are not over.
    pub allocations: BTreeMap<AllocationName, Allocation>,
    /// Allocations in a state that this version does not know. Their Nodes stay as they are; `allocations` has those whose
    /// last known state was not over.
    pub unknown: BTreeSet<AllocationName>,
    /// Owner version in each market, from the stream.
    pub versions: BTreeMap<MarketName, u64>,
    /// Owner version in each market, from the last reply to this controller.
    pub(super) expected: BTreeMap<MarketName, u64>,
    /// When the market accepted the last bid or change, in milliseconds since 1970.
    pub last_bid_ms: i64,
    /// When a bid's limit was changed last, in milliseconds since 1970.
    pub amended_ms: BTreeMap<BidName, i64>,
    /// Limits that bids with running nodes had before they were raised.
    pub raised_from: BTreeMap<BidName, Price>,
    /// Allocations in a row that failed to launch for good.
    pub failures: u32,
    /// When the last one did, in milliseconds since 1970.
    pub failed_ms: i64,
    /// Tenant of its bids.
    pub tenant: String,
    /// Its BidNode by the labels of its bids, as `namespace/name`; `None`: it is none.
    pub bidnode: Option<String>,
}

impl Owner {
    /// Whether the stream has reached the versions of the last replies.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.expected.iter().all(|(market, version)| self.version(market) >= *version)
    }

    /// Owner version in a market; zero when it is unknown.
    #[must_use]
    pub fn version(&self, market: &MarketName) -> u64 {
        self.versions.get(market).copied().unwrap_or(0)
    }

    /// Whether the market has this allocation, and it is not over.
    #[must_use]
    pub fn has(&self, allocation: &AllocationName) -> bool {
        self.allocations.contains_key(allocation) || self.unknown.contains(allocation)
    }

    pub(super) fn is_over(&self) -> bool {
        let none = self.bids.is_empty() && self.allocations.is_empty() && self.unknown.is_empty();
        none && self.is_current()
    }
}

/// Prices of a market.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quote {
    /// Price that strategies take a share of.
    pub quote: Price,
    /// Clearing price of the last call.
    pub clearing: Price,
    /// Lowest price of an allocation.
    pub reserve: Price,
    /// Highest price of an allocation.
    pub cap: Price,
    /// Limits are multiples of it.
    pub tick: Price,
    /// Free slots.
    pub free: u64,
    /// The market takes no bids.
    pub halted: bool,
    /// Time of the next call, in milliseconds since 1970.
    pub next_call_ms: i64,
}
