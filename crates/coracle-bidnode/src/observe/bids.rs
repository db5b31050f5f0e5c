//! Market state as input of the planner: bids, allocations and prices of one BidNode. Data only.

use std::collections::{BTreeMap, BTreeSet};

use coracle_auction::{AllocationState, Price};

use crate::ids::{AllocationName, BidName, MarketName};

/// Bid that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Bid {
    /// Market of the bid.
    pub market: MarketName,
    /// Highest price that the bid pays.
    pub limit: Price,
    /// Units that wait in the order book.
    pub open: u32,
    /// Units that have a matched slot.
    pub matched: u32,
    /// Units whose machines are being launched.
    pub provisioning: u32,
    /// Units that run.
    pub active: u32,
    /// Units under notice.
    pub preempting: u32,
    /// Whether the tenant's hourly cap holds the bid back.
    pub held: bool,
    /// Time when the bid was placed, in milliseconds since 1970.
    pub placed_ms: i64,
}

impl Bid {
    /// Matched, provisioning and active units.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.matched + self.provisioning + self.active
    }
}

/// Allocation that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// Bid that bought the allocation.
    pub bid: BidName,
    /// Market of the allocation.
    pub market: MarketName,
    /// Lot of the allocation's slot.
    pub lot: String,
    /// State of the allocation; never `Ended`.
    pub state: AllocationState,
    /// Highest price that the allocation pays.
    pub limit: Price,
    /// Current price of the allocation.
    pub price: Price,
    /// Time when the allocation became active, in milliseconds since 1970.
    pub active_ms: i64,
    /// End of the preemption notice, in milliseconds since 1970; zero without notice.
    pub preempt_ms: i64,
    /// Name of the Node.
    pub node: String,
    /// Reason of the preemption notice.
    pub reason: String,
    /// Lowest limit that keeps the allocation; zero when it is not at risk.
    pub price_to_keep: Price,
}

/// Bids and allocations of one BidNode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Owner {
    /// Bids that have not ended.
    pub bids: BTreeMap<BidName, Bid>,
    /// Allocations that have not ended.
    pub allocations: BTreeMap<AllocationName, Allocation>,
    /// Allocations in a state that this version does not know. Their Nodes stay as they are. `allocations` has those of them
    /// whose last known state was not the end.
    pub unknown: BTreeSet<AllocationName>,
    /// Owner version in each market, as the stream reported it.
    pub versions: BTreeMap<MarketName, u64>,
    /// Owner version in each market, from the last reply that this controller received.
    pub(super) expected: BTreeMap<MarketName, u64>,
    /// Time when the market accepted the last bid or change, in milliseconds since 1970.
    pub last_bid_ms: i64,
    /// Time of the last change of each bid's limit, in milliseconds since 1970.
    pub amended_ms: BTreeMap<BidName, i64>,
    /// Limits of bids with running nodes before they were raised.
    pub raised_from: BTreeMap<BidName, Price>,
    /// Consecutive allocations that failed to launch for good.
    pub failures: u32,
    /// Time of the last such failure, in milliseconds since 1970.
    pub failed_ms: i64,
    /// Tenant of the bids.
    pub tenant: String,
    /// BidNode named by the labels of the bids, as `namespace/name`; `None`: the bids do not belong to a BidNode.
    pub bidnode: Option<String>,
}

impl Owner {
    /// Whether the stream has reached the versions of the last replies.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.expected.iter().all(|(market, version)| self.version(market) >= *version)
    }

    /// Owner version in a market; zero if unknown.
    #[must_use]
    pub fn version(&self, market: &MarketName) -> u64 {
        self.versions.get(market).copied().unwrap_or(0)
    }

    /// Whether the market has this allocation and it has not ended.
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
    /// Price that bid strategies take a share of.
    pub quote: Price,
    /// Clearing price of the last call.
    pub clearing: Price,
    /// Lowest price of an allocation.
    pub reserve: Price,
    /// Highest price of an allocation.
    pub cap: Price,
    /// Limits are multiples of this amount.
    pub tick: Price,
    /// Free slots.
    pub free: u64,
    /// Whether the market accepts no bids.
    pub halted: bool,
    /// Time of the next call, in milliseconds since 1970.
    pub next_call_ms: i64,
}
