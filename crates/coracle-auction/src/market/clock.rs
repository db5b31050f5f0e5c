//! Effects of time, in the order of their deadlines.

use super::Market;
use crate::allocation::AllocationState;
use crate::timers::Timer;
use crate::{EndReason, Event, Params, Rejection, Time};

/// Consecutive indicative calls that an allocation must lose before its owner is notified. A challenger that comes and leaves
/// must not move limits.
const RISK_CALLS: u8 = 2;

impl Market {
    /// Fires all due timers, each at its own time, so that a late tick does not change deadlines.
    pub(super) fn advance(&mut self, at: Time) {
        loop {
            let timer = self.timers.next();
            let scheduled = self.scheduled.map_or(Time::NEVER, |(at, _)| at);
            let call = if self.halted { Time::NEVER } else { self.next_call };
            let due = timer.min(scheduled).min(call);
            if due > at {
                break;
            }
            self.now = self.now.max(due);
            if timer == due {
                if let Some((_, timer)) = self.timers.pop(due) {
                    self.fire(timer);
                }
            } else if scheduled == due {
                if let Some((_, params)) = self.scheduled.take() {
                    self.take_params(params);
                }
            } else if at.since_ms(call) >= self.params.call_interval_ms {
                // The service was down at the calls between: hold one call now instead of many at once.
                self.next_call = at;
                continue;
            } else {
                self.call();
            }
            self.fill();
        }
        self.now = at;
    }

    fn fire(&mut self, timer: Timer) {
        self.moved |= matches!(timer, Timer::Lease(_) | Timer::Allocation(_));
        match timer {
            Timer::Lease(bid) => self.lapse(bid),
            Timer::Allocation(allocation) => self.allocation_due(allocation),
            Timer::Settle(allocation) => self.settle_hourly(allocation),
            Timer::ForgetBid(bid) => self.forget_bid(bid),
            Timer::ForgetAllocation(allocation) => self.forget_allocation(allocation),
        }
    }

    fn allocation_due(&mut self, place: u32) {
        let allocation = self.allocation_at(place);
        allocation.due = Time::NEVER;
        match allocation.state {
            AllocationState::Provisioning => {
                let deadline = self.launch_deadline(place);
                if deadline > self.now {
                    self.wake(place, deadline);
                } else {
                    self.launch_failed(place);
                }
            }
            AllocationState::Active => self.make_preemptible(place),
            AllocationState::Preempting => {
                let reason = allocation.reason.unwrap_or(EndReason::Preempted);
                self.end(place, reason);
            }
            AllocationState::Matched | AllocationState::Ended => {}
        }
    }

    /// Holds an indicative call, several times in each call interval.
    pub(super) fn indicate(&mut self) {
        if self.halted || self.now < self.indicative_due {
            return;
        }
        self.indicative_due = self.now.plus_ms(self.params.indicative_ms());
        let decision = self.decide(None);
        if decision.price != self.indicative {
            self.indicative = decision.price;
            self.out.push(Event::Indicative { price: decision.price });
        }
        let keep = decision.price_to_keep(self.params.reserve);
        let before = std::mem::take(&mut self.at_risk);
        for place in decision.victims() {
            let (count, price) = before.get(&place).copied().unwrap_or((0, keep));
            let count = count.saturating_add(1).min(RISK_CALLS + 1);
            self.at_risk.insert(place, (count, keep));
            if count == RISK_CALLS || count > RISK_CALLS && price != keep {
                let allocation = self.allocation_id(place);
                self.out.push(Event::AtRisk { allocation, price_to_keep: keep, call_at: self.next_call });
            }
        }
        for (place, (count, _)) in before {
            if count >= RISK_CALLS && !self.at_risk.contains_key(&place) {
                let allocation = self.allocation_id(place);
                self.out.push(Event::RiskOver { allocation });
            }
        }
    }

    /// Announces parameters that apply from `effective_at` on, and replaces an earlier announcement.
    pub(super) fn configure(&mut self, params: Params, effective_at: Time) -> Result<(), Rejection> {
        params.check().map_err(|e| Rejection::Invalid { field: e.field, range: e.range })?;
        if effective_at > self.now {
            self.scheduled = Some((effective_at, params));
        } else {
            self.scheduled = None;
            self.take_params(params);
        }
        Ok(())
    }

    fn take_params(&mut self, params: Params) {
        let sooner = self.now.plus_ms(params.call_interval_ms);
        self.params = params;
        self.moved = true;
        self.next_call = self.next_call.min(sooner);
        self.rebuild_order();
    }
}
