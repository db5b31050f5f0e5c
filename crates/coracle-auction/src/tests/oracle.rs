//! Reference implementation of a call: sorts all bids and allocations, and uses no index.

use std::collections::BTreeSet;

use crate::*;

#[derive(Clone, Debug)]
pub(super) struct Entrant {
    pub(super) price: Price,
    pub(super) running: bool,
    order: u64,
    pub(super) tenant: u32,
    pub(super) units: u32,
    block: u32,
    pub(super) place: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct CallOutcome {
    pub(super) price: Price,
    pub(super) exempt_tenant: Option<(u32, Price)>,
    /// Winning entries: `(bid, seq, units)`.
    pub(super) won: BTreeSet<(u32, u64, u32)>,
    pub(super) preempted: BTreeSet<u32>,
    pub(super) skipped: BTreeSet<u32>,
    pub(super) free: usize,
}

impl Market {
    /// Whether the slot of an allocation counts: its lot is open and the slot not retired.
    fn holds_slot(&self, allocation: &Allocation) -> bool {
        self.lots.get(&allocation.lot).is_some_and(|lot| {
            lot.state == LotState::Open
                && lot.slots.get(allocation.slot as usize).is_some_and(|slot| !slot.retired)
        })
    }

    pub(super) fn contestants(&self) -> Vec<Entrant> {
        let mut all = Vec::new();
        for (place, allocation) in self.allocations.iter() {
            let free = allocation.state == AllocationState::Active && allocation.protected_until <= self.now;
            if free && self.holds_slot(allocation) && allocation.limit >= self.params.reserve {
                all.push(Entrant {
                    price: allocation.limit.min(self.params.cap),
                    running: true,
                    order: allocation.match_no,
                    tenant: allocation.tenant,
                    units: 1,
                    block: 1,
                    place,
                });
            }
        }
        for (place, bid) in self.bids.iter().filter(|(_, bid)| !bid.held) {
            for (seq, units) in bid.segments() {
                let units = u32::from(units);
                let need = u32::from(bid.min_fill).saturating_sub(bid.units.live());
                all.push(Entrant {
                    price: bid.limit.min(self.params.cap),
                    running: false,
                    order: seq,
                    tenant: bid.tenant,
                    units,
                    block: need.min(units).max(1),
                    place,
                });
            }
        }
        all.retain(|e| e.price >= self.params.reserve);
        all.sort_by_key(|e| (std::cmp::Reverse(e.price), !e.running, e.order, e.place));
        all
    }

    pub(super) fn oracle(&self) -> CallOutcome {
        let reserve = self.params.reserve;
        let open = self.lots.values().filter(|lot| lot.state == LotState::Open);
        let slots: usize = open.map(Lot::size).sum();
        let holding = || self.allocations.iter().filter(|(_, allocation)| self.holds_slot(allocation));
        let in_run = |allocation: &Allocation| {
            allocation.state == AllocationState::Active && allocation.protected_until <= self.now
        };
        let protected =
            holding().filter(|(_, allocation)| allocation.is_live() && !in_run(allocation)).count();
        let below = holding().filter(|(_, allocation)| in_run(allocation) && allocation.limit < reserve);
        let mut preempted: BTreeSet<u32> = below.map(|(place, _)| place).collect();
        // Removed capacity ends its own allocations, so protected ones always have their slots.
        let mut k = slots.checked_sub(protected).expect("no more protected allocations than slots");
        let (mut won, mut skipped) = (BTreeSet::new(), BTreeSet::new());
        let (mut losers, mut worst): (Vec<(Price, u32)>, _) = (Vec::new(), None);
        for e in self.contestants() {
            let n = (e.units as usize).min(k);
            if n < (e.block.min(e.units)) as usize {
                if k > 0 {
                    skipped.insert(e.place);
                } else {
                    losers.push((e.price, e.tenant));
                    if e.running {
                        preempted.insert(e.place);
                    }
                }
                continue;
            }
            k -= n;
            worst = Some(e.price);
            if !e.running {
                won.insert((e.place, e.order, u32::try_from(n).unwrap()));
            }
            if n < e.units as usize {
                losers.push((e.price, e.tenant));
            }
        }
        let worst = worst.unwrap_or(self.params.cap);
        let price_for = |tenant: Option<u32>| {
            let best = losers.iter().filter(|(_, t)| Some(*t) != tenant).map(|(p, _)| *p).max();
            worst.min(best.unwrap_or(Price::ZERO)).max(reserve)
        };
        let price = price_for(None);
        let tenants: BTreeSet<u32> = losers.iter().map(|(_, t)| *t).collect();
        let exempt_tenant =
            tenants.into_iter().map(|t| (t, price_for(Some(t)))).find(|(_, own)| *own < price);
        CallOutcome { price, exempt_tenant, won, preempted, skipped, free: k }
    }

    pub(super) fn outcome(&self) -> CallOutcome {
        let d = self.decide(None);
        CallOutcome {
            price: d.price,
            exempt_tenant: d.exempt_tenant,
            won: d.winners.iter().map(|(o, n)| (o.entry.bid, o.rank.seq.0, *n)).collect(),
            preempted: d.victims().collect(),
            skipped: d.skipped.iter().copied().collect(),
            free: d.free,
        }
    }
}
