//! The whole market as bytes. Indexes are made again when it is read.

use super::Market;
use crate::alloc::AllocState;
use crate::bid::{Bid, Owner};
use crate::slab::Slab;
use crate::tenants::Tenants;
use crate::timers::Timer;
use crate::wire::{Malformed, Wire};
use crate::{Alloc, LotState, RETENTION_MS, Time};

/// Layout of a snapshot. Another one is refused, never guessed.
const SCHEMA: u8 = 1;

fn put_slab<T: Wire>(slab: &Slab<T>, out: &mut Vec<u8>) {
    (slab.rows.len() as u64).put(out);
    for (uses, row) in &slab.rows {
        uses.put(out);
        row.put(out);
    }
    slab.vacant.put(out);
}

fn get_slab<T: Wire>(from: &mut &[u8]) -> Result<Slab<T>, Malformed> {
    let mut slab = Slab::new();
    slab.rows = Vec::get(from)?;
    slab.vacant = Vec::get(from)?;
    Ok(slab)
}

/// Fields in the order of their writing.
macro_rules! fields {
    ($each:ident) => {
        $each!(
            params,
            scheduled,
            halted,
            now,
            restarted_at,
            next_call,
            indicative_due,
            next_seq,
            next_match,
            calls,
            chain,
            last_call,
            indicative,
            history,
            owners,
            lots
        )
    };
}

impl Market {
    /// All of the market's truth. Two markets with equal snapshots behave alike for ever.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = vec![SCHEMA];
        macro_rules! put {
            ($($field:ident),*) => { $(self.$field.put(&mut out);)* };
        }
        fields!(put);
        self.tenants.rows.put(&mut out);
        put_slab::<Bid>(&self.bids, &mut out);
        put_slab::<Alloc>(&self.allocs, &mut out);
        out
    }

    /// The market of a snapshot.
    ///
    /// # Errors
    /// Bytes of another schema, cut short, or followed by more.
    pub fn restore(mut bytes: &[u8]) -> Result<Self, Malformed> {
        let from = &mut bytes;
        if u8::get(from)? != SCHEMA {
            return Err(Malformed("schema of the snapshot"));
        }
        let mut market = Self::new(crate::Params::new(crate::Price::ZERO, crate::Price::ZERO), Time(0));
        macro_rules! get {
            ($($field:ident),*) => { $(market.$field = Wire::get(from)?;)* };
        }
        fields!(get);
        market.tenants = Tenants::from_rows(Wire::get(from)?);
        market.bids = get_slab(from)?;
        market.allocs = get_slab(from)?;
        if !from.is_empty() {
            return Err(Malformed("end of the snapshot"));
        }
        market.check_references()?;
        market.index();
        Ok(market)
    }

    /// Every number that points somewhere points at something.
    fn check_references(&self) -> Result<(), Malformed> {
        let tenants = self.tenants.rows.len();
        let owner = |owner: &Owner| (owner.tenant as usize) < tenants;
        let bid = |bid: &Bid| (bid.owner as usize) < self.owners.len() && (bid.tenant as usize) < tenants;
        let alloc = |alloc: &Alloc| {
            let gone = alloc.state == AllocState::Ended;
            let seat = self.lots.get(&alloc.lot).and_then(|lot| lot.units.get(alloc.unit as usize));
            self.bids.at(alloc.bid).is_some() && (gone || seat.is_some())
        };
        let seats = self.lots.values().flat_map(|lot| &lot.units);
        let seat = |place: Option<u32>| place.is_none_or(|place| self.allocs.at(place).is_some());
        let good = self.owners.iter().all(owner)
            && self.bids.iter().all(|(_, row)| bid(row))
            && self.allocs.iter().all(|(_, row)| alloc(row))
            && seats.into_iter().all(|unit| seat(unit.occupant) && seat(unit.promised));
        if good { Ok(()) } else { Err(Malformed("reference in the snapshot")) }
    }

    fn index(&mut self) {
        self.owner_index = (0u32..).zip(&self.owners).map(|(at, o)| ((o.tenant, o.key), at)).collect();
        self.by_owner = vec![Vec::new(); self.owners.len()];
        let filed: Vec<_> = self.bids.iter().map(|(place, bid)| (bid.owner, place)).collect();
        for (owner, place) in filed {
            self.file(owner, place);
        }
        for (place, bid) in self.bids.iter() {
            let timer = if bid.is_terminal() { Timer::ForgetBid(place) } else { Timer::Lease(place) };
            self.timers.set(bid.due, timer);
            if bid.key != [0; 16] {
                self.keys.insert(place, &bid.key);
            }
        }
        self.live = self.allocs.iter().filter(|(_, alloc)| alloc.is_live()).count() as u64;
        let units: Vec<_> = self.allocs.iter().map(|(place, _)| place).collect();
        for place in units {
            self.join(place);
        }
        for (place, alloc) in self.allocs.iter() {
            if alloc.due != Time::NEVER {
                self.timers.set(alloc.due, Timer::Unit(place));
            }
            if alloc.is_charged() {
                self.timers.set(alloc.settle_due, Timer::Settle(place));
            }
            if alloc.state == AllocState::Ended {
                self.timers.set(alloc.ended_at.plus_ms(RETENTION_MS), Timer::ForgetUnit(place));
            }
        }
        let mut offered = Vec::new();
        for (no, lot) in &self.lots {
            self.by_supplier.insert((lot.supplier, *no));
            self.timers.set(lot.silent_due, Timer::Silent(no.0));
            for (unit, seat) in (0u32..).zip(&lot.units).filter(|(_, seat)| !seat.retired) {
                match seat.occupant {
                    None if lot.state == LotState::Open => {
                        self.seats.free.insert((lot.strikes, *no, unit));
                    }
                    None => {}
                    Some(_) => offered.push((*no, unit)),
                }
            }
        }
        for (no, unit) in offered {
            self.offer_seat(no, unit);
        }
        self.rebuild_order();
    }
}
