//! Read access to a market.

use super::Market;
use crate::book::BANDS;
use crate::{
    Allocation, AllocationId, AllocationState, Bid, BidId, CallRecord, Lot, LotNo, OwnerKey, Params, Price,
    TenantNo, Time,
};

/// Published prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotes {
    /// Base of bid strategies: the clearing price, or 1.6 × reserve if that is more.
    pub quote: Price,
    /// Clearing price of the last call.
    pub clearing: Price,
    /// Clearing price that the next call would have now.
    pub indicative: Price,
    /// Lowest price.
    pub reserve: Price,
    /// Highest price.
    pub cap: Price,
    /// Number of empty slots.
    pub free: usize,
    /// Engine time.
    pub as_of: Time,
    /// Number of the last call.
    pub calls: u64,
    /// Whether the market accepts no bids and holds no calls.
    pub halted: bool,
}

/// Depth of the order book, in tenths of the cap, so that no single limit can be derived from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Open units by tenth of the cap, lowest first.
    pub bands: [u64; BANDS],
    /// Number of all open units.
    pub units: u64,
}

/// Commitment and cap of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantAccount {
    /// Part of the hourly cap for this market.
    pub cap: Option<Price>,
    /// Sum of the limits of unfinished units that are not held, in micro-dollars per hour.
    pub committed: i128,
    /// Number of unfinished units.
    pub units: u64,
}

impl Market {
    /// Published prices.
    #[must_use]
    pub fn quotes(&self) -> Quotes {
        let clearing = self.history.current().price;
        Quotes {
            quote: self.params.quote(clearing),
            clearing,
            indicative: self.indicative,
            reserve: self.params.reserve,
            cap: self.params.cap,
            free: self.free_slots.free.len(),
            as_of: self.now,
            calls: self.calls,
            halted: self.halted,
        }
    }

    /// Depth of the order book. Held bids are not in the book.
    #[must_use]
    pub fn depth(&self) -> Depth {
        Depth { bands: *self.book.bands(), units: self.book.units() }
    }

    /// Parameters in force.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Announced parameters, and the time from which they apply.
    #[must_use]
    pub fn announced(&self) -> Option<(Time, &Params)> {
        self.scheduled.as_ref().map(|(at, params)| (*at, params))
    }

    /// Engine time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// Time of the next timer or call, by which a command is due.
    #[must_use]
    pub fn next_due(&self) -> Time {
        let scheduled = self.scheduled.map_or(Time::NEVER, |(at, _)| at);
        let call = if self.halted { Time::NEVER } else { self.next_call };
        self.timers.next().min(scheduled).min(call)
    }

    /// Like [`Market::next_due`], but without a call that would change nothing. Such a call is held later, with the next
    /// command.
    #[must_use]
    pub fn next_needed(&self) -> Time {
        let scheduled = self.scheduled.map_or(Time::NEVER, |(at, _)| at);
        let call = if self.halted || !self.moved { Time::NEVER } else { self.next_call };
        self.timers.next().min(scheduled).min(call)
    }

    /// Time when the next indicative call could differ from the last one.
    #[must_use]
    pub fn next_indicative(&self) -> Time {
        if self.moved && !self.halted && !self.lots.is_empty() { self.indicative_due } else { Time::NEVER }
    }

    /// Time of the next call.
    #[must_use]
    pub fn next_call(&self) -> Time {
        self.next_call
    }

    /// Whether a bid of a tenant with running allocations set the price of the last call, above the reserve. A tenant's own
    /// bids never raise its own price, so the others pay the difference.
    #[must_use]
    pub fn is_priced_by_holder(&self) -> bool {
        let Some(record) = self.last_call.filter(|record| record.price > self.params.reserve) else {
            return false;
        };
        let tenant = record.marginal.and_then(|bid| self.bid(bid)).map(|bid| self.owner_of(bid).0);
        tenant.is_some_and(|tenant| self.bids_of_tenant(tenant).any(|(_, bid)| bid.units().active > 0))
    }

    /// The last call.
    #[must_use]
    pub fn last_call(&self) -> Option<&CallRecord> {
        self.last_call.as_ref()
    }

    /// SHA-256 over all calls so far.
    #[must_use]
    pub fn chain(&self) -> [u8; 32] {
        self.chain
    }

    /// Bid with this id; available until a day after its end.
    #[must_use]
    pub fn bid(&self, id: BidId) -> Option<&Bid> {
        self.bids.at(self.bids.place(id.0)?)
    }

    /// Tenant and owner of the bid.
    #[must_use]
    pub fn owner_of(&self, bid: &Bid) -> (TenantNo, OwnerKey) {
        let owner = &self.owners[bid.owner as usize];
        (self.tenants.at(bid.tenant).no, owner.key)
    }

    /// Version of an owner: number of its changes; 0 for an unknown owner.
    #[must_use]
    pub fn owner_version(&self, tenant: TenantNo, owner: OwnerKey) -> u64 {
        self.owner_place(tenant, owner).map_or(0, |owner| self.owners[owner as usize].version)
    }

    fn owner_place(&self, tenant: TenantNo, owner: OwnerKey) -> Option<u32> {
        self.owner_index.get(&(self.tenants.index(tenant)?, owner)).copied()
    }

    /// Bids of an owner in arbitrary order, including those that ended within the last day.
    pub fn bids_of(&self, tenant: TenantNo, owner: OwnerKey) -> impl Iterator<Item = (BidId, &Bid)> {
        let own = self.owner_place(tenant, owner).and_then(|owner| self.by_owner.get(owner as usize));
        let places = own.into_iter().flatten().copied();
        places.filter_map(|place| Some((self.bid_id(place), self.bids.at(place)?)))
    }

    /// Bids of a tenant in arbitrary order. Reads its owners only.
    pub fn bids_of_tenant(&self, tenant: TenantNo) -> impl Iterator<Item = (BidId, &Bid)> {
        let owners = self.tenants.index(tenant).into_iter().flat_map(|index| {
            let from = (index, OwnerKey([0; 16]));
            self.owner_index.range(from..=(index, OwnerKey([255; 16]))).map(|((_, key), _)| *key)
        });
        owners.flat_map(move |owner| self.bids_of(tenant, owner))
    }

    /// All owners of a tenant that ever placed a bid, with their versions; also those whose bids have all been removed.
    pub fn owners_of_tenant(&self, tenant: TenantNo) -> impl Iterator<Item = (OwnerKey, u64)> {
        let owners = self.tenants.index(tenant).into_iter().flat_map(|index| {
            let from = (index, OwnerKey([0; 16]));
            self.owner_index.range(from..=(index, OwnerKey([255; 16])))
        });
        owners.map(|((_, key), owner)| (*key, self.owners[*owner as usize].version))
    }

    /// Allocation with this id; available until a day after its end.
    #[must_use]
    pub fn allocation(&self, id: AllocationId) -> Option<&Allocation> {
        self.allocations.at(self.allocations.place(id.0)?)
    }

    /// Bid of an allocation.
    #[must_use]
    pub fn bid_of(&self, allocation: &Allocation) -> BidId {
        self.bid_id(allocation.bid)
    }

    /// Current price of an allocation per node-hour.
    #[must_use]
    pub fn price(&self, id: AllocationId) -> Option<Price> {
        self.allocations.place(id.0).map(|place| self.price_of(place))
    }

    /// Current price of a tenant per node-hour, before its limit.
    #[must_use]
    pub fn price_for(&self, tenant: TenantNo) -> Price {
        let index = self.tenants.index(tenant).unwrap_or(u32::MAX);
        self.history.current().for_tenant(index).max(self.params.reserve)
    }

    /// Allocations of a bid, including those that ended within the last day.
    pub fn allocations_of(&self, bid: BidId) -> impl Iterator<Item = (AllocationId, &Allocation)> {
        let places = self.bids.place(bid.0).map_or_else(Vec::new, |place| self.units_of(place));
        places.into_iter().filter_map(|place| Some((self.allocation_id(place), self.allocations.at(place)?)))
    }

    /// All allocations, including those that ended within the last day.
    pub fn allocations(&self) -> impl Iterator<Item = (AllocationId, &Allocation)> {
        self.allocations.iter().map(|(place, allocation)| (self.allocation_id(place), allocation))
    }

    /// All bids, including those that ended within the last day.
    pub fn bids(&self) -> impl Iterator<Item = (BidId, &Bid)> {
        self.bids.iter().map(|(place, bid)| (self.bid_id(place), bid))
    }

    /// Number of bids, including those that ended within the last day.
    #[must_use]
    pub fn bids_known(&self) -> u64 {
        (self.bids.rows.len() - self.bids.vacant.len()) as u64
    }

    /// All lots.
    pub fn lots(&self) -> impl Iterator<Item = (LotNo, &Lot)> {
        self.lots.iter().map(|(no, lot)| (*no, lot))
    }

    /// Occupant of a slot, and the allocation to which it is promised.
    #[must_use]
    pub fn slot(&self, lot: LotNo, slot_no: u32) -> (Option<AllocationId>, Option<AllocationId>) {
        let slot = self.lots.get(&lot).and_then(|lot| lot.slots.get(slot_no as usize));
        let id = |place: u32| self.allocation_id(place);
        slot.map_or((None, None), |slot| (slot.occupant.map(id), slot.promised.map(id)))
    }

    /// Commitment and cap of a tenant.
    #[must_use]
    pub fn account(&self, tenant: TenantNo) -> Option<TenantAccount> {
        let index = self.tenants.index(tenant)?;
        let row = self.tenants.at(index);
        Some(TenantAccount { cap: row.cap, committed: self.committed(index), units: row.units })
    }

    /// Tenants with a bid that is held by their cap, and the smallest amount that such a bid needs, in micro-dollars per hour.
    #[must_use]
    pub fn tenants_held(&self) -> Vec<(TenantNo, i128)> {
        let cost = |(_, place): &(u64, u32)| {
            let bid = self.bids.at(*place)?;
            Some(i128::from(bid.limit.as_micros()) * i128::from(bid.units.open))
        };
        let least = |row: &crate::tenants::Tenant| row.held.iter().filter_map(cost).min();
        self.tenants.rows.iter().filter_map(|row| Some((row.no, least(row)?))).collect()
    }

    /// Number of allocations that hold a slot: matched, provisioning or active.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Number of allocations in a state. Reads all of them.
    #[must_use]
    pub fn allocations_in(&self, state: AllocationState) -> u64 {
        self.allocations.iter().filter(|(_, allocation)| allocation.state == state).count() as u64
    }
}
