//! What running units cost. Rows are exact, contiguous and never above the limit.

use super::Market;
use crate::timers::Timer;
use crate::{Charge, ChargeReason, EndReason, Event, Price, Time};

const HOUR_MS: u64 = 3600 * 1000;
/// The least that is paid for, in milliseconds, unless we ended it.
const MINIMUM_MS: u64 = 60_000;
/// What is free of a unit lost through our fault, in milliseconds.
const REFUND_MS: u64 = 600_000;

impl Market {
    /// What a unit pays now per node-hour.
    pub(super) fn price_of(&self, place: u32) -> Price {
        self.allocs
            .at(place)
            .map_or(Price::ZERO, |alloc| self.history.current().for_tenant(alloc.tenant).min(alloc.limit))
    }

    /// Writes rows up to now, one for each price.
    pub(super) fn settle(&mut self, place: u32) {
        let (now, id) = (self.now, self.alloc_id(place));
        let Self { allocs, history, tenants, out, .. } = self;
        let Some(alloc) = allocs.at_mut(place) else { return };
        if !alloc.is_charged() || alloc.settled_to >= now {
            return;
        }
        let tenant = tenants.at(alloc.tenant).no;
        let mut sum = alloc.charged;
        history.stretches((alloc.settled_to, now), alloc.tenant, alloc.limit, |from, to, price| {
            sum = sum.checked_add(Charge::of(price, to.since_ms(from))).unwrap_or(sum);
            out.push(Event::Charge { alloc: id, tenant, from, to, price, reason: ChargeReason::Usage });
        });
        alloc.charged = sum;
        alloc.settled_to = now;
    }

    pub(super) fn settle_hourly(&mut self, place: u32) {
        self.settle(place);
        let due = self.now.plus_ms(HOUR_MS);
        self.unit(place).settle_due = due;
        self.timers.set(due, Timer::Settle(place));
    }

    /// The last rows of a unit: settled, the minimum kept, our faults paid back.
    pub(super) fn close_account(&mut self, place: u32, reason: EndReason) {
        self.settle(place);
        let (now, min_runtime) = (self.now, self.params.min_runtime_ms);
        let alloc = self.unit(place);
        if !alloc.is_charged() {
            return;
        }
        let (active_at, due) = (alloc.active_at, alloc.settle_due);
        self.timers.unset(due, Timer::Settle(place));
        match reason {
            EndReason::Released if now < active_at.plus_ms(MINIMUM_MS) => {
                let price = self.price_of(place);
                self.adjust(place, now, active_at.plus_ms(MINIMUM_MS), price, ChargeReason::Minimum);
            }
            EndReason::CapacityLost | EndReason::NodeFailed if now.since_ms(active_at) < min_runtime => {
                self.refund(place, active_at.max(Time(now.0.saturating_sub(REFUND_MS))));
            }
            _ => {}
        }
    }

    /// Gives back what was paid since `from`, under the limits of that time.
    fn refund(&mut self, place: u32, from: Time) {
        let now = self.now;
        let alloc = self.unit(place);
        let mut limits = alloc.past_limits.clone();
        limits.push((now, alloc.limit));
        let tenant = alloc.tenant;
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
        let id = self.alloc_id(place);
        let mut sum = Charge::of(price, to.since_ms(from));
        if reason == ChargeReason::Refund {
            sum = Charge(-sum.0);
        }
        let alloc = self.unit(place);
        alloc.charged = alloc.charged.checked_add(sum).unwrap_or(alloc.charged);
        let tenant = alloc.tenant;
        let tenant = self.tenants.at(tenant).no;
        self.out.push(Event::Charge { alloc: id, tenant, from, to, price, reason });
    }
}
