//! The call as its definition says it: everything sorted, from the truth and no index.

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
pub(super) struct Outcome {
    pub(super) price: Price,
    pub(super) apart: Option<(u32, Price)>,
    /// `(bid, seq, units)`.
    pub(super) won: BTreeSet<(u32, u64, u32)>,
    pub(super) displaced: BTreeSet<u32>,
    pub(super) skipped: BTreeSet<u32>,
    pub(super) free: usize,
}

impl Market {
    /// Seats that count: of open lots, not retired.
    fn oracle_seat(&self, alloc: &Alloc) -> bool {
        self.lots.get(&alloc.lot).is_some_and(|lot| {
            lot.state == LotState::Open
                && lot.units.get(alloc.unit as usize).is_some_and(|unit| !unit.retired)
        })
    }

    pub(super) fn contestants(&self) -> Vec<Entrant> {
        let mut all = Vec::new();
        for (place, alloc) in self.allocs.iter() {
            let free = alloc.state == AllocState::Active && alloc.protected_until <= self.now;
            if free && self.oracle_seat(alloc) && alloc.limit >= self.params.reserve {
                all.push(Entrant {
                    price: alloc.limit.min(self.params.cap),
                    running: true,
                    order: alloc.match_no,
                    tenant: alloc.tenant,
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

    pub(super) fn oracle(&self) -> Outcome {
        let reserve = self.params.reserve;
        let open = self.lots.values().filter(|lot| lot.state == LotState::Open);
        let seats: usize = open.map(Lot::size).sum();
        let seated = || self.allocs.iter().filter(|(_, alloc)| self.oracle_seat(alloc));
        let in_run = |alloc: &Alloc| alloc.state == AllocState::Active && alloc.protected_until <= self.now;
        let protected = seated().filter(|(_, alloc)| alloc.is_live() && !in_run(alloc)).count();
        let below = seated().filter(|(_, alloc)| in_run(alloc) && alloc.limit < reserve);
        let mut displaced: BTreeSet<u32> = below.map(|(place, _)| place).collect();
        // Capacity that goes takes its own units along, so protected units always have their seats.
        let mut k = seats.checked_sub(protected).expect("no more protected units than seats");
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
                        displaced.insert(e.place);
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
        let apart = tenants.into_iter().map(|t| (t, price_for(Some(t)))).find(|(_, own)| *own < price);
        Outcome { price, apart, won, displaced, skipped, free: k }
    }

    pub(super) fn outcome(&self) -> Outcome {
        let d = self.decide(None);
        Outcome {
            price: d.price,
            apart: d.apart,
            won: d.winners.iter().map(|(o, n)| (o.entry.bid, o.rank.seq.0, *n)).collect(),
            displaced: d.leaving().collect(),
            skipped: d.skipped.iter().copied().collect(),
            free: d.free,
        }
    }
}
