//! A tenant's hourly cap: the sum of all limits never exceeds it.

use super::Market;
use crate::allocation::AllocationState;
use crate::{EndReason, Price, TenantNo};

impl Market {
    pub(super) fn set_cap(&mut self, tenant: TenantNo, cap: Option<Price>) {
        let tenant = self.tenants.ensure(tenant);
        self.tenants.at_mut(tenant).cap = cap;
        self.relieved.push(tenant);
        if !self.tenants.at(tenant).covers(0) {
            self.hold_newest(tenant);
            self.end_newest(tenant);
        }
    }

    /// Holds open bids back, the newest first, until the cap covers the others.
    fn hold_newest(&mut self, tenant: u32) {
        let mut open: Vec<_> = self
            .bids
            .iter()
            .filter(|(_, bid)| bid.tenant == tenant && bid.units.open > 0 && !bid.held)
            .map(|(place, bid)| (bid.seq, place))
            .collect();
        open.sort_unstable();
        while !self.tenants.at(tenant).covers(0) {
            let Some((seq, place)) = open.pop() else { return };
            self.withdraw(place);
            self.row(place).held = true;
            self.tenants.at_mut(tenant).held.insert((seq, place));
            self.emit_bid(place);
        }
    }

    /// Ends allocations, the newest first, until those that stay are covered.
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

    /// Enters held bids of relieved tenants into the book, the oldest first.
    pub(super) fn release_held(&mut self) {
        while let Some(tenant) = self.relieved.pop() {
            while let Some((seq, place)) = self.tenants.at(tenant).held.first().copied() {
                let bid = self.row(place);
                let cost = i128::from(bid.limit.as_micros()) * i128::from(bid.units.open);
                if !self.tenants.at(tenant).covers(cost) {
                    break;
                }
                self.tenants.at_mut(tenant).held.remove(&(seq, place));
                self.open_or_hold(place);
                self.emit_bid(place);
            }
        }
    }
}
