//! Charges of running allocations. Charge rows are exact, contiguous and never above the limit.

use super::Market;
use crate::timers::Timer;
use crate::{Charge, ChargeReason, EndReason, Event, Fault, Price, Time};

const HOUR_MS: u64 = 3600 * 1000;
/// Minimum charge, in milliseconds, unless the market ended the allocation.
const MINIMUM_MS: u64 = 60_000;
/// Time that is refunded for an allocation lost through no fault of the tenant, in milliseconds.
const REFUND_MS: u64 = 600_000;

impl Market {
    /// Current price of an allocation per node-hour.
    pub(super) fn price_of(&self, place: u32) -> Price {
        self.allocations.at(place).map_or(Price::ZERO, |allocation| {
            self.history.current().for_tenant(allocation.tenant).min(allocation.ceiling)
        })
    }

    /// Writes charge rows up to now, one for each price.
    pub(super) fn settle(&mut self, place: u32) {
        let (now, id) = (self.now, self.allocation_id(place));
        let Self { allocations, history, tenants, out, .. } = self;
        let Some(allocation) = allocations.at_mut(place) else { return };
        if !allocation.is_charged() || allocation.settled_to >= now {
            return;
        }
        let (tenant, matched_at) = (tenants.at(allocation.tenant).no, allocation.matched_at);
        let mut sum = allocation.charged;
        history.stretches(
            (allocation.settled_to, now),
            allocation.tenant,
            allocation.ceiling,
            |from, to, price| {
                sum = sum.checked_add(Charge::of(price, to.since_ms(from))).unwrap_or(sum);
                out.push(Event::Charge {
                    allocation: id,
                    matched_at,
                    tenant,
                    from,
                    to,
                    price,
                    reason: ChargeReason::Usage,
                });
            },
        );
        allocation.charged = sum;
        allocation.settled_to = now;
    }

    pub(super) fn settle_hourly(&mut self, place: u32) {
        self.settle(place);
        let due = self.now.plus_ms(HOUR_MS);
        self.allocation_at(place).settle_due = due;
        self.timers.set(due, Timer::Settle(place));
    }

    /// Writes the last charge rows of an allocation: the amount due, the minimum charge, and a refund if the host lost it.
    pub(super) fn close_account(&mut self, place: u32, reason: EndReason, fault: Option<Fault>) {
        self.settle(place);
        let (now, min_runtime) = (self.now, self.params.min_runtime_ms);
        let allocation = self.allocation_at(place);
        if !allocation.is_charged() {
            return;
        }
        let (active_at, due) = (allocation.active_at, allocation.settle_due);
        self.timers.unset(due, Timer::Settle(place));
        let at_once = now.since_ms(active_at) < min_runtime;
        match (reason, fault) {
            (EndReason::Released, _) | (EndReason::NodeFailed, Some(Fault::Guest))
                if now < active_at.plus_ms(MINIMUM_MS) =>
            {
                let price = self.price_of(place);
                self.adjust(place, now, active_at.plus_ms(MINIMUM_MS), price, ChargeReason::Minimum);
            }
            (EndReason::CapacityLost, _) | (EndReason::NodeFailed, Some(Fault::Host)) if at_once => {
                self.refund(place, active_at.max(Time(now.0.saturating_sub(REFUND_MS))));
            }
            _ => {}
        }
    }

    /// Refunds the charges since `from`, with the ceilings that applied at that time.
    fn refund(&mut self, place: u32, from: Time) {
        let now = self.now;
        let allocation = self.allocation_at(place);
        let mut limits = allocation.past_ceilings.clone();
        limits.push((now, allocation.ceiling));
        let tenant = allocation.tenant;
        let (mut rows, mut since) = (Vec::new(), from);
        for (until, limit) in limits.into_iter().filter(|(until, _)| *until > from) {
            self.history.stretches((since, until), tenant, limit, |a, b, price| rows.push((a, b, price)));
            since = until;
        }
        for (a, b, price) in rows {
            self.adjust(place, a, b, price, ChargeReason::Refund);
        }
    }

    fn adjust(&mut self, place: u32, from: Time, to: Time, price: Price, reason: ChargeReason) {
        let id = self.allocation_id(place);
        let mut sum = Charge::of(price, to.since_ms(from));
        if reason == ChargeReason::Refund {
            sum = Charge(-sum.0);
        }
        let allocation = self.allocation_at(place);
        allocation.charged = allocation.charged.checked_add(sum).unwrap_or(allocation.charged);
        let (tenant, matched_at) = (allocation.tenant, allocation.matched_at);
        let tenant = self.tenants.at(tenant).no;
        self.out.push(Event::Charge { allocation: id, matched_at, tenant, from, to, price, reason });
    }
}
