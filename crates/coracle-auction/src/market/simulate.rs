//! Simulation of a bid without placing it.

use super::Market;
use crate::{Price, TenantNo};

/// Hypothetical bid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hypothetical {
    /// Tenant of the bid.
    pub tenant: TenantNo,
    /// Highest price per node-hour.
    pub limit: Price,
    /// Number of units.
    pub units: u32,
    /// Number of units that must be matched together.
    pub min_fill: u32,
}

/// Result of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simulation {
    /// Number of units that would be matched at once, without waiting for a call.
    pub at_once: u32,
    /// Number of units that the next call would match.
    pub at_call: u32,
    /// Price per node-hour after that call, for this tenant.
    pub pays: Price,
    /// Clearing price of the call with the bid.
    pub clearing: Price,
    /// Number of running allocations of others that the bid would preempt.
    pub preempted: u32,
    /// Lowest limit that wins the smallest block; `None` if no limit does.
    pub wins_at: Option<Price>,
}

impl Market {
    /// Plans the next call with one more bid. Changes nothing.
    #[must_use]
    pub fn simulate(&self, bid: &Hypothetical) -> Simulation {
        let with = self.decide(Some(bid));
        let without = self.decide(None);
        let index = self.tenants.index(bid.tenant).unwrap_or(u32::MAX);
        let price = match with.exempt_tenant {
            Some((tenant, price)) if tenant == index => price,
            _ => with.price,
        };
        let preempted = with.preempted.len().saturating_sub(without.preempted.len());
        Simulation {
            at_once: self.immediate_units(bid),
            at_call: with.supposed,
            pays: price.min(bid.limit),
            clearing: with.price,
            preempted: u32::try_from(preempted).unwrap_or(u32::MAX),
            wins_at: self.wins_at(bid),
        }
    }

    fn immediate_units(&self, bid: &Hypothetical) -> u32 {
        let free = u32::try_from(self.free_slots.free.len()).unwrap_or(u32::MAX);
        let fits = free >= bid.min_fill.clamp(1, bid.units.max(1));
        let pays = self.params.effective(bid.limit) >= self.price_for(bid.tenant);
        if fits && pays && !self.halted { free.min(bid.units) } else { 0 }
    }

    /// Lowest limit on the tick with which the smallest block wins: at once if slots are free, otherwise in the next call.
    /// Searches over ticks; each step is one indicative call.
    pub(crate) fn wins_at(&self, bid: &Hypothetical) -> Option<Price> {
        let block = bid.min_fill.clamp(1, bid.units.max(1));
        let at_price = self.price_for(bid.tenant).ceil_to(self.params.tick);
        if self.immediate_units(&Hypothetical { limit: at_price, ..*bid }) >= block {
            return Some(at_price);
        }
        let tick = self.params.tick.as_micros().max(1);
        let wins = |ticks: i64| {
            let limit = Price::micros(ticks * tick);
            self.decide(Some(&Hypothetical { limit, ..*bid })).supposed >= block
        };
        let lowest = self.params.reserve.ceil_to(self.params.tick).as_micros() / tick;
        let highest = self.params.cap.as_micros() / tick;
        if !wins(highest) {
            return None;
        }
        let (mut low, mut high) = (lowest, highest);
        while low < high {
            let middle = low + (high - low) / 2;
            if wins(middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Some(Price::micros(low * tick))
    }
}
