//! Snapshots: the whole market as bytes. Indexes are rebuilt when a snapshot is restored.

use serde::{Serialize, de::DeserializeOwned};

use super::Market;
use crate::allocation::AllocationState;
use crate::bid::{Bid, Owner};
use crate::codec::{Codec, Malformed};
use crate::slab::Slab;
use crate::tenants::Tenants;
use crate::timers::Timer;
use crate::{Allocation, LotState, RETENTION_MS, Time};

/// Version of the layout. Snapshots of another version are refused.
const SCHEMA: u8 = 2;

fn put_slab<T: Serialize + DeserializeOwned>(slab: &Slab<T>, out: &mut Vec<u8>) {
    slab.rows.put(out);
    slab.vacant.put(out);
}

fn get_slab<T: Serialize + DeserializeOwned>(from: &mut &[u8]) -> Result<Slab<T>, Malformed> {
    let mut slab = Slab::new();
    slab.rows = Vec::get(from)?;
    slab.vacant = Vec::get(from)?;
    Ok(slab)
}

/// Fields in the order in which they are written.
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
            lots,
            epoch,
            at_risk
        )
    };
}

impl Market {
    /// Complete state of the market. Markets with equal snapshots behave identically from then on.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = vec![SCHEMA];
        macro_rules! put {
            ($($field:ident),*) => { $(self.$field.put(&mut out);)* };
        }
        fields!(put);
        self.tenants.rows.put(&mut out);
        put_slab::<Bid>(&self.bids, &mut out);
        put_slab::<Allocation>(&self.allocations, &mut out);
        out
    }

    /// Restores a market from a snapshot.
    ///
    /// # Errors
    /// The bytes have another schema, are truncated, or are followed by more.
    pub fn restore(mut bytes: &[u8]) -> Result<Self, Malformed> {
        let from = &mut bytes;
        if u8::get(from)? != SCHEMA {
            return Err(Malformed("schema of the snapshot"));
        }
        let mut market = Self::new(crate::Params::new(crate::Price::ZERO, crate::Price::ZERO), Time(0));
        macro_rules! get {
            ($($field:ident),*) => { $(market.$field = Codec::get(from)?;)* };
        }
        fields!(get);
        market.tenants = Tenants::from_rows(Codec::get(from)?);
        market.bids = get_slab(from)?;
        market.allocations = get_slab(from)?;
        if !from.is_empty() {
            return Err(Malformed("end of the snapshot"));
        }
        market.check_references()?;
        market.index();
        Ok(market)
    }

    /// Checks that every reference between rows names an existing row.
    fn check_references(&self) -> Result<(), Malformed> {
        let tenants = self.tenants.rows.len();
        let owner = |owner: &Owner| (owner.tenant as usize) < tenants;
        let bid = |bid: &Bid| (bid.owner as usize) < self.owners.len() && (bid.tenant as usize) < tenants;
        let allocation = |allocation: &Allocation| {
            let gone = allocation.state == AllocationState::Ended;
            let slot = self.lots.get(&allocation.lot).and_then(|lot| lot.slots.get(allocation.slot as usize));
            self.bids.at(allocation.bid).is_some() && (gone || slot.is_some())
        };
        let slots = self.lots.values().flat_map(|lot| &lot.slots);
        let known = |place: Option<u32>| place.is_none_or(|place| self.allocations.at(place).is_some());
        let good = self.owners.iter().all(owner)
            && self.bids.iter().all(|(_, row)| bid(row))
            && self.allocations.iter().all(|(_, row)| allocation(row))
            && slots.into_iter().all(|slot| known(slot.occupant) && known(slot.promised));
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
        self.live = self.allocations.iter().filter(|(_, allocation)| allocation.is_live()).count() as u64;
        let units: Vec<_> = self.allocations.iter().map(|(place, _)| place).collect();
        for place in units {
            self.link_to_bid(place);
        }
        for (place, allocation) in self.allocations.iter() {
            if allocation.due != Time::NEVER {
                self.timers.set(allocation.due, Timer::Allocation(place));
            }
            if allocation.is_charged() {
                self.timers.set(allocation.settle_due, Timer::Settle(place));
            }
            if allocation.state == AllocationState::Ended {
                self.timers.set(allocation.ended_at.plus_ms(RETENTION_MS), Timer::ForgetAllocation(place));
            }
        }
        let mut offered = Vec::new();
        for (no, lot) in &self.lots {
            self.by_supplier.insert((lot.supplier, *no));
            for (slot_no, slot) in (0u32..).zip(&lot.slots).filter(|(_, slot)| !slot.retired) {
                if !slot.is_empty() {
                    offered.push((*no, slot_no));
                } else if lot.state == LotState::Open {
                    self.free_slots.free.insert((lot.strikes, *no, slot_no));
                }
            }
        }
        for (no, slot_no) in offered {
            self.offer_slot(no, slot_no);
        }
        let lowered = |row: &Allocation| row.ceiling > row.limit && row.state != AllocationState::Ended;
        self.lowered =
            self.allocations.iter().filter(|(_, row)| lowered(row)).map(|(place, _)| place).collect();
        self.index_unfinished();
        self.rebuild_order();
    }
}
