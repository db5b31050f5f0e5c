//! Hourly cap of a tenant, which the sum of all its limits never exceeds.

use std::collections::BTreeSet;

use super::Market;
use crate::allocation::AllocationState;
use crate::{EndReason, OwnerKey, Price, TenantNo};

impl Market {
    pub(super) fn set_cap(&mut self, tenant: TenantNo, cap: Option<Price>) {
        let tenant = self.tenants.ensure(tenant);
        let unfinished = if cap.is_some() { self.unfinished_of(tenant).collect() } else { BTreeSet::new() };
        let row = self.tenants.at_mut(tenant);
        (row.cap, row.unfinished) = (cap, unfinished);
        self.relieved.push(tenant);
        if !self.covers(tenant, 0, None) {
            self.hold_newest(tenant);
            self.end_newest(tenant);
        }
    }

    /// Bids of a tenant with unfinished units. Reads all bids of its owners.
    fn unfinished_of(&self, tenant: u32) -> impl Iterator<Item = u32> + '_ {
        let from = (tenant, OwnerKey([0; 16]));
        let owners = self.owner_index.range(from..=(tenant, OwnerKey([255; 16])));
        let bids = owners.flat_map(|(_, owner)| &self.by_owner[*owner as usize]).copied();
        bids.filter(|place| self.bids.at(*place).is_some_and(|bid| !bid.is_terminal()))
    }

    /// Rebuilds the index of unfinished bids for all tenants with a cap.
    pub(super) fn index_unfinished(&mut self) {
        for tenant in 0..u32::try_from(self.tenants.rows.len()).unwrap_or(u32::MAX) {
            if self.tenants.at(tenant).cap.is_some() {
                let unfinished = self.unfinished_of(tenant).collect();
                self.tenants.at_mut(tenant).unfinished = unfinished;
            }
        }
    }

    /// Sum of the limits of all unfinished units of a tenant that are not held, in micro-dollars per hour. Computed from bids
    /// and allocations at each call.
    pub(crate) fn committed(&self, tenant: u32) -> i128 {
        let row = self.tenants.at(tenant);
        if row.cap.is_some() {
            row.unfinished.iter().map(|place| self.cost_of(*place)).sum()
        } else {
            self.unfinished_of(tenant).map(|place| self.cost_of(place)).sum()
        }
    }

    /// Sum of the limits of a bid's open units, unless it is held, and of its allocations.
    fn cost_of(&self, place: u32) -> i128 {
        let allocations = self.units_of(place).into_iter().filter_map(|row| self.allocations.at(row));
        let unfinished = allocations.filter(|row| row.state != AllocationState::Ended);
        self.open_cost(place) + unfinished.map(|row| i128::from(row.limit.as_micros())).sum::<i128>()
    }

    fn open_cost(&self, place: u32) -> i128 {
        let bid = self.bids.at(place).filter(|bid| !bid.held);
        bid.map_or(0, |bid| i128::from(bid.limit.as_micros()) * i128::from(bid.units.open))
    }

    /// Whether the cap of a tenant covers an additional amount. The open units of the bid `without` do not count.
    pub(super) fn covers(&self, tenant: u32, more: i128, without: Option<u32>) -> bool {
        let Some(cap) = self.tenants.at(tenant).cap else { return true };
        let less = without.map_or(0, |place| self.open_cost(place));
        self.committed(tenant) - less + more <= i128::from(cap.as_micros())
    }

    /// Holds open bids back, newest first, until the cap covers the rest.
    fn hold_newest(&mut self, tenant: u32) {
        let mut open: Vec<_> = self
            .bids
            .iter()
            .filter(|(_, bid)| bid.tenant == tenant && bid.units.open > 0 && !bid.held)
            .map(|(place, bid)| (bid.seq, place))
            .collect();
        open.sort_unstable();
        let cap = i128::from(self.tenants.at(tenant).cap.unwrap_or(Price::MAX).as_micros());
        let mut over = self.committed(tenant) - cap;
        while over > 0 {
            let Some((seq, place)) = open.pop() else { return };
            over -= self.open_cost(place);
            self.withdraw(place);
            self.row(place).held = true;
            self.tenants.at_mut(tenant).held.insert((seq, place));
            self.emit_bid(place);
        }
    }

    /// Ends allocations, newest first, until the cap covers the rest.
    fn end_newest(&mut self, tenant: u32) {
        let mut over = -i128::from(self.tenants.at(tenant).cap.unwrap_or(Price::MAX).as_micros());
        let mut live = Vec::new();
        for (place, allocation) in
            self.allocations.iter().filter(|(_, allocation)| allocation.tenant == tenant)
        {
            if allocation.is_live() {
                live.push((allocation.match_no, place));
                over += i128::from(allocation.limit.as_micros());
            }
        }
        live.sort_unstable();
        while over > 0 {
            let Some((_, place)) = live.pop() else { return };
            over -= i128::from(self.allocation_at(place).limit.as_micros());
            if self.allocation_at(place).state == AllocationState::Active {
                self.preempt(place, EndReason::BudgetExhausted);
            } else {
                self.end(place, EndReason::BudgetExhausted);
            }
        }
    }

    /// Puts held bids of relieved tenants into the book, oldest first. A bid that is not covered does not block smaller ones
    /// behind it.
    pub(super) fn release_held(&mut self) {
        while let Some(tenant) = self.relieved.pop() {
            for (seq, place) in self.tenants.at(tenant).held.clone() {
                let bid = self.row(place);
                let cost = i128::from(bid.limit.as_micros()) * i128::from(bid.units.open);
                if !self.covers(tenant, cost, None) {
                    continue;
                }
                self.tenants.at_mut(tenant).held.remove(&(seq, place));
                self.open_or_hold(place);
                self.emit_bid(place);
            }
        }
    }
}
