//! Amending and cancelling bids.

use super::Market;
use crate::allocation::AllocationState;
use crate::timers::Timer;
use crate::{
    Amendment, BidId, Price, QUANTITY_MAX, RETENTION_MS, Rejection, Reply, TENANT_UNITS_MAX, TenantNo, Time,
};

impl Market {
    /// Finds the row of a bid of this tenant. A bid of another tenant is not found.
    pub(super) fn own_bid(&self, tenant: TenantNo, bid: BidId) -> Result<u32, Rejection> {
        let place = self.bids.place(bid.0).ok_or(Rejection::NotFound)?;
        let row = self.bids.at(place).ok_or(Rejection::NotFound)?;
        if self.tenants.at(row.tenant).no == tenant { Ok(place) } else { Err(Rejection::NotFound) }
    }

    pub(super) fn amend(&mut self, a: &Amendment) -> Result<Reply, Rejection> {
        let place = self.own_bid(a.tenant, a.bid)?;
        let bid = self.row(place);
        let (owner, terminal) = (bid.owner, bid.is_terminal());
        self.check_version(owner, a.if_owner_version)?;
        if terminal {
            return Err(Rejection::Terminal);
        }
        if self.halted {
            return Err(Rejection::Halted);
        }
        let limit = a.limit.unwrap_or(self.row(place).limit);
        self.check_limit(limit)?;
        let change = self.unit_change(place, a.units)?;
        self.check_raise(place, limit)?;

        self.withdraw(place);
        self.change_units(place, change);
        if limit != self.row(place).limit {
            self.change_limit(place, limit);
        }
        let now = self.now;
        self.row(place).renewed_at = now;
        self.open_or_hold(place);
        self.finish_bid(place);
        self.emit_bid(place);
        let owner_version = self.raise_version(owner);
        let below_reserve = limit < self.params.reserve;
        Ok(Reply::Bid { bid: a.bid, owner_version, replayed: false, below_reserve })
    }

    /// Computes the change of the number of open units.
    fn unit_change(&mut self, place: u32, units: Option<u32>) -> Result<i32, Rejection> {
        let bid = self.row(place);
        let Some(wanted) = units else { return Ok(0) };
        let (have, open, total) = (bid.units.unfinished(), u32::from(bid.units.open), bid.units.total());
        let held = self.tenants.at(self.bids.at(place).map_or(0, |bid| bid.tenant)).units;
        if wanted < have - open {
            return Err(Rejection::Invalid {
                field: "quantity",
                range: "at least the units already matched",
            });
        }
        let added = wanted.saturating_sub(have);
        if wanted > QUANTITY_MAX || total + added > u32::from(u16::MAX) {
            return Err(Rejection::Invalid { field: "quantity", range: "at most 10000" });
        }
        if held + u64::from(added) > TENANT_UNITS_MAX {
            return Err(Rejection::Quota);
        }
        i32::try_from(i64::from(wanted) - i64::from(have)).map_err(|_| Rejection::Quota)
    }

    /// Checks that the cap covers a raise of running allocations, because these cannot be held back.
    fn check_raise(&mut self, place: u32, limit: Price) -> Result<(), Rejection> {
        let tenant = self.row(place).tenant;
        let limit = i128::from(limit.as_micros());
        let live = self.units_of(place).into_iter().filter_map(|row| self.allocations.at(row));
        let live = live.filter(|allocation| allocation.is_live());
        let more: i128 = live.map(|allocation| limit - i128::from(allocation.limit.as_micros())).sum();
        if more > 0 && !self.covers(tenant, more, Some(place)) {
            return Err(Rejection::Budget);
        }
        Ok(())
    }

    /// Removes all open units from the book and the commitment, or from the held bids.
    pub(super) fn withdraw(&mut self, place: u32) {
        let bid = self.row(place);
        let (tenant, seq, held) = (bid.tenant, bid.seq, bid.held);
        if held {
            self.row(place).held = false;
            self.tenants.at_mut(tenant).held.remove(&(seq, place));
        } else {
            self.unlist(place);
            self.relieved.push(tenant);
        }
    }

    fn change_units(&mut self, place: u32, change: i32) {
        let tenant = self.row(place).tenant;
        let count = u16::try_from(change.unsigned_abs()).unwrap_or(u16::MAX);
        if change < 0 {
            let bid = self.row(place);
            bid.units.open -= count;
            bid.units.cancelled += count;
            // The newest units are cancelled first; the others keep their time priority.
            let mut left = count;
            if let Some(extra) = &mut bid.more {
                while let Some((_, units)) = extra.segments.last_mut() {
                    let cut = left.min(*units);
                    *units -= cut;
                    left -= cut;
                    if *units > 0 {
                        break;
                    }
                    extra.segments.pop();
                }
                extra.failures.truncate(usize::from(bid.units.open));
            }
            self.tenants.at_mut(tenant).units -= u64::from(count);
        } else if change > 0 {
            let seq = self.take_seq();
            let bid = self.row(place);
            let alone = bid.units.open == 0 || bid.min_fill > 1;
            bid.units.open += count;
            bid.closed = false;
            if alone {
                // A block is a single entry, with the time priority of its newest unit.
                bid.seq = seq;
                if let Some(extra) = &mut bid.more {
                    extra.segments.clear();
                }
            } else {
                bid.extra().segments.push((seq, count));
            }
            self.tenants.at_mut(tenant).units += u64::from(count);
        }
    }

    /// Sets a new limit. Open units go behind all others of their price, and live ones use it from the next call on. Until then
    /// they pay at most their highest limit since the last call.
    fn change_limit(&mut self, place: u32, limit: Price) {
        let seq = self.take_seq();
        let bid = self.row(place);
        let tenant = bid.tenant;
        bid.limit = limit;
        bid.seq = seq;
        if let Some(extra) = &mut bid.more {
            extra.segments.clear();
        }
        for allocation in self.units_of(place) {
            if !self.allocation_at(allocation).is_live() {
                continue; // Under notice: its place is promised, and its price stays below its old limit.
            }
            self.clear_preemptible(allocation);
            let price = self.price_of(allocation);
            self.take_limit(allocation, limit);
            let now = self.now;
            let row = self.allocation_at(allocation);
            if row.state == AllocationState::Active && limit < price && row.protected_until > now {
                // A limit below the present price ends the protection.
                row.protected_until = now;
            }
            self.make_preemptible(allocation);
            self.relieved.push(tenant);
            self.emit_allocation(allocation);
        }
    }

    /// Sets the limit of an allocation that is not in the contest. Until the next call it pays at most the higher of both
    /// limits.
    pub(super) fn take_limit(&mut self, place: u32, limit: Price) {
        let row = self.allocation_at(place);
        row.limit = limit;
        let ceiling = row.ceiling.max(limit);
        self.set_ceiling(place, ceiling);
        let row = self.allocation_at(place);
        if row.ceiling > row.limit {
            self.lowered.insert(place);
        } else {
            self.lowered.remove(&place);
        }
    }

    fn set_ceiling(&mut self, place: u32, ceiling: Price) {
        self.settle(place);
        let now = self.now;
        let row = self.allocation_at(place);
        if row.ceiling != ceiling {
            row.past_ceilings.push((now, row.ceiling));
            row.ceiling = ceiling;
        }
    }

    /// At a call, reduces the ceiling of allocations with a lowered limit to that limit.
    pub(super) fn lower_ceilings(&mut self) {
        for place in std::mem::take(&mut self.lowered) {
            let limit = self.allocation_at(place).limit;
            self.set_ceiling(place, limit);
        }
    }

    pub(super) fn cancel(
        &mut self,
        tenant: TenantNo,
        bid: BidId,
        version: Option<u64>,
    ) -> Result<Reply, Rejection> {
        let place = self.own_bid(tenant, bid)?;
        let row = self.row(place);
        let (owner, open) = (row.owner, row.units.open);
        if row.is_terminal() || row.closed {
            return Err(Rejection::Terminal);
        }
        self.check_version(owner, version)?;
        self.close_open(place);
        let reserve = self.params.reserve;
        let row = self.row(place);
        row.units.cancelled += open;
        row.closed = true;
        let below_reserve = row.limit < reserve;
        self.finish_bid(place);
        self.emit_bid(place);
        let owner_version = self.raise_version(owner);
        Ok(Reply::Bid { bid, owner_version, replayed: false, below_reserve })
    }

    /// Removes the open units. The caller counts them in another state.
    pub(super) fn close_open(&mut self, place: u32) {
        self.withdraw(place);
        let bid = self.row(place);
        let (tenant, open) = (bid.tenant, bid.units.open);
        bid.units.open = 0;
        if let Some(extra) = &mut bid.more {
            extra.segments.clear();
            extra.failures.clear();
        }
        self.tenants.at_mut(tenant).units -= u64::from(open);
    }

    /// Schedules the removal of a bid that has ended, after a day. Returns whether the bid has ended.
    pub(super) fn finish_bid(&mut self, place: u32) -> bool {
        let now = self.now;
        let bid = self.row(place);
        if !bid.is_terminal() {
            return false;
        }
        let (due, tenant) = (bid.due, bid.tenant);
        bid.due = now.plus_ms(RETENTION_MS);
        self.tenants.at_mut(tenant).unfinished.remove(&place);
        if due != Time::NEVER {
            self.timers.unset(due, Timer::Lease(place));
        }
        self.timers.set(now.plus_ms(RETENTION_MS), Timer::ForgetBid(place));
        true
    }

    pub(super) fn forget_bid(&mut self, place: u32) {
        let bid = self.row(place);
        let key = bid.key;
        if key != [0; 16] {
            self.keys.remove(&key, &self.bids);
        }
        for allocation in self.units_of(place) {
            self.forget_allocation(allocation);
        }
        self.unfile(place);
        self.bids.remove(place);
    }

    /// Rows of a bid's allocations, including those that ended within the last day.
    pub(crate) fn units_of(&self, bid: u32) -> Vec<u32> {
        let newest = self.bids.at(bid).and_then(|bid| bid.newest.place());
        let older = |place: &u32| self.allocations.at(*place).and_then(|allocation| allocation.older.place());
        let mut places: Vec<_> = std::iter::successors(newest, older).collect();
        // Sorted by row: the order of the linked list is not kept in snapshots.
        places.sort_unstable();
        places
    }
}
