//! The call: decides which bids hold a slot until the next call, and the price.

use sha2::{Digest, Sha256};

use super::simulate::Hypothetical;
use super::{Market, Running};
use crate::book::Open;
use crate::codec::Codec;
use crate::history::PricePoint;
use crate::{CallRecord, EndReason, Event, Price};

/// Decision of a call, before it is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Clearing price.
    pub(crate) price: Price,
    /// Tenant that owns all the best losing bids, and its lower price.
    pub(crate) exempt_tenant: Option<(u32, Price)>,
    /// Winning open entries, best first, with the number of units won.
    pub(crate) winners: Vec<(Open, u32)>,
    /// Number of units won by the hypothetical bid.
    pub(crate) supposed: u32,
    /// Running allocations below the reserve.
    pub(crate) below: Vec<u32>,
    /// Running allocations that lose to a winner, worst first.
    pub(crate) preempted: Vec<u32>,
    /// Bids whose block did not fit.
    pub(crate) skipped: Vec<u32>,
    /// The best losing bid.
    pub(crate) marginal: Option<u32>,
    /// Price of the worst winner that was open before.
    pub(crate) worst_new: Option<Price>,
    /// Number of free slots that remain.
    pub(crate) free: usize,
    /// Number of open units examined.
    pub(crate) demand: u64,
}

impl Decision {
    /// All running allocations that would be preempted.
    pub(crate) fn victims(&self) -> impl Iterator<Item = u32> + '_ {
        self.below.iter().chain(&self.preempted).copied()
    }

    /// Lowest limit that keeps a running allocation. At the price of the worst new winner, running allocations stay.
    pub(crate) fn price_to_keep(&self, reserve: Price) -> Price {
        self.worst_new.unwrap_or(reserve).max(reserve)
    }
}

/// The best losers of two different tenants.
#[derive(Clone, Copy, Default)]
struct Losers {
    first: Option<(Price, u32)>,
    second: Option<(Price, u32)>,
}

impl Losers {
    fn offer(&mut self, price: Price, tenant: u32) {
        match (self.first, self.second) {
            (Some((best, same)), _) if same == tenant => self.first = Some((best.max(price), same)),
            (Some((best, _)), _) if best >= price => {
                if self.second.is_none_or(|(second, _)| second < price) {
                    self.second = Some((price, tenant));
                }
            }
            (first, _) => {
                self.second = first;
                self.first = Some((price, tenant));
            }
        }
    }
}

/// Running allocations, worst first, read on demand.
struct Worst<'a, I: Iterator<Item = (&'a Running, &'a u32)>> {
    rest: I,
    seen: Vec<(Price, u32)>,
    taken: usize,
}

impl<'a, I: Iterator<Item = (&'a Running, &'a u32)>> Worst<'a, I> {
    fn peek_nth(&mut self, index: usize) -> Option<(Price, u32)> {
        while self.seen.len() <= index {
            let (running, place) = self.rest.next()?;
            self.seen.push((running.price, *place));
        }
        self.seen.get(index).copied()
    }

    /// Counts allocations, at most `most`, that are not taken yet and are worse than a price.
    fn worse_than(&mut self, price: Price, most: usize) -> usize {
        let from = self.taken;
        (0..most).take_while(|n| self.peek_nth(from + n).is_some_and(|(worse, _)| worse < price)).count()
    }
}

impl Market {
    /// Decides a call without changing anything. Walks the best open bids against the worst running allocations until they no
    /// longer cross: O((changes + 1) log n).
    pub(crate) fn decide(&self, supposed: Option<&Hypothetical>) -> Decision {
        let reserve = self.params.reserve;
        let below: Vec<_> = self
            .running
            .values()
            .copied()
            .take_while(|place| {
                self.allocations.at(*place).is_some_and(|allocation| allocation.limit < reserve)
            })
            .collect();
        let mut slots = self.free_slots.len() + self.freed_slots(&below);
        let mut worst = Worst { rest: self.running.iter().skip(below.len()), seen: Vec::new(), taken: 0 };
        let mut walk = Contest { walk: self.book.walk(), supposed, market: self };
        let mut losers = Losers::default();
        let mut d = Decision {
            price: reserve,
            exempt_tenant: None,
            winners: Vec::new(),
            supposed: 0,
            below,
            preempted: Vec::new(),
            skipped: Vec::new(),
            marginal: None,
            worst_new: None,
            free: 0,
            demand: 0,
        };
        while let Some(entrant) = walk.next() {
            let units = entrant.units as usize;
            d.demand += units as u64;
            let crossing = worst.worse_than(entrant.price, units.saturating_sub(slots));
            let room = slots.min(units) + crossing;
            if room > 0 && room < (entrant.block as usize).min(units) {
                d.skipped.extend(entrant.open.map(|open| open.entry.bid));
                continue;
            }
            if room > 0 {
                let from_free = room.min(slots);
                slots -= from_free;
                worst.taken += room - from_free;
                d.worst_new = Some(entrant.price);
                let won = u32::try_from(room).unwrap_or(u32::MAX);
                match entrant.open {
                    Some(open) => d.winners.push((open, won)),
                    None => d.supposed = won,
                }
            }
            if room < units {
                // Not all units got a slot, so this entrant and all behind it lose.
                losers.offer(entrant.price, entrant.tenant);
                d.marginal = entrant.open.map(|open| open.entry.bid);
                walk.offer_rest(entrant.tenant, &mut losers);
                break;
            }
        }
        for index in 0..worst.taken {
            if let Some((price, place)) = worst.peek_nth(index) {
                d.preempted.push(place);
                if let Some(allocation) = self.allocations.at(place) {
                    if losers.first.is_none_or(|(best, _)| price > best) {
                        d.marginal = Some(allocation.bid);
                    }
                    losers.offer(price, allocation.tenant);
                }
            }
        }
        let last_running = worst.peek_nth(worst.taken).map(|(price, _)| price);
        let ceiling = [d.worst_new, last_running].into_iter().flatten().min().unwrap_or(self.params.cap);
        let price_of = |loser: Option<(Price, u32)>| {
            loser.map_or(Price::ZERO, |(price, _)| price).min(ceiling).max(reserve)
        };
        d.price = price_of(losers.first);
        d.exempt_tenant = losers
            .first
            .map(|(_, tenant)| (tenant, price_of(losers.second)))
            .filter(|(_, price)| *price < d.price);
        d.free = slots;
        d
    }

    /// Fewest units of an open entry that must win at once.
    pub(super) fn block_of(&self, open: &Open) -> u32 {
        let bid = if open.entry.is_block { self.bids.at(open.entry.bid) } else { None };
        bid.map_or(1, |bid| bid.block(u32::from(open.entry.units)))
    }

    /// Number of slots that these running allocations would free, without slots that are being removed.
    fn freed_slots(&self, leaving: &[u32]) -> usize {
        leaving
            .iter()
            .filter_map(|place| self.allocations.at(*place))
            .filter_map(|allocation| self.lots.get(&allocation.lot)?.slots.get(allocation.slot as usize))
            .filter(|slot| !slot.retired)
            .count()
    }

    /// Holds the call that is due.
    pub(super) fn call(&mut self) {
        let decision = self.decide(None);
        let same = self.history.current().price == decision.price
            && self.history.current().exempt_tenant == decision.exempt_tenant;
        self.moved = !same || !decision.winners.is_empty() || decision.victims().next().is_some();
        self.lower_ceilings();
        // After the call an allocation stays or is under notice, so none is at risk.
        self.at_risk.clear();
        for place in decision.victims() {
            // The decision lists exactly the first entries of `running`, in the same order.
            let worst = self.running.pop_first().map(|(_, worst)| worst);
            debug_assert_eq!(worst, Some(place));
            self.give_notice(place, EndReason::Preempted);
        }
        let (mut won, preempted) = (0, decision.below.len() + decision.preempted.len());
        for (open, units) in &decision.winners {
            self.take(*open, *units);
            won += u64::from(*units);
        }
        self.history.push(PricePoint {
            at: self.now,
            price: decision.price,
            exempt_tenant: decision.exempt_tenant,
        });
        self.indicative = decision.price;
        self.calls += 1;
        self.next_call = self.now.plus_ms(self.params.call_interval_ms);
        let mut record = CallRecord {
            number: self.calls,
            at: self.now,
            price: decision.price,
            free: decision.free as u64,
            demand: decision.demand + self.running.len() as u64,
            won,
            preempted: preempted as u64,
            skipped: decision.skipped.len() as u64,
            marginal: decision.marginal.map(|bid| self.bid_id(bid)),
            chain: self.chain,
        };
        record.chain = record_hash(&record);
        self.chain = record.chain;
        self.last_call = Some(record);
        self.out.push(Event::Call { record: Box::new(record) });
    }
}

/// SHA-256 of a record that contains the previous chain value.
fn record_hash(record: &CallRecord) -> [u8; 32] {
    let mut bytes = Vec::with_capacity(128);
    record.put(&mut bytes);
    Sha256::digest(&bytes).into()
}

/// Entry of the contest: an open entry or the hypothetical bid.
struct Entrant {
    price: Price,
    tenant: u32,
    units: u32,
    block: u32,
    open: Option<Open>,
}

/// Iterator over the book, with a hypothetical bid behind the others of the same price.
struct Contest<'a> {
    walk: crate::book::Walk<'a>,
    supposed: Option<&'a Hypothetical>,
    market: &'a Market,
}

impl Contest<'_> {
    fn next(&mut self) -> Option<Entrant> {
        let params = &self.market.params;
        let open = self.walk.peek().filter(|open| open.rank.price >= params.reserve);
        if let Some(h) = self.supposed {
            let price = params.effective(h.limit);
            if price >= params.reserve && open.is_none_or(|open| open.rank.price < price) {
                self.supposed = None;
                let tenant = self.market.tenants.index(h.tenant).unwrap_or(u32::MAX);
                let block = h.min_fill.clamp(1, h.units.max(1));
                return Some(Entrant { price, tenant, units: h.units, block, open: None });
            }
        }
        let open = open?;
        self.walk.next();
        let units = u32::from(open.entry.units);
        let block = self.market.block_of(&open);
        Some(Entrant { price: open.rank.price, tenant: open.tenant, units, block, open: Some(open) })
    }

    /// Offers the losers behind the first one. Only the best of them that is of another tenant matters.
    fn offer_rest(&mut self, first: u32, losers: &mut Losers) {
        if let Some(h) = self.supposed {
            let tenant = self.market.tenants.index(h.tenant).unwrap_or(u32::MAX);
            losers.offer(self.market.params.effective(h.limit), tenant);
        }
        if let Some((price, tenant)) = self.walk.best_without(first) {
            losers.offer(price, tenant);
        }
    }
}
