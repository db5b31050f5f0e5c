//! Invariants of slots: no slot is sold twice, and no bid waits while a slot is free.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::cases;
use super::clearing::one;
use super::world::World;
use crate::*;

fn tape() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(any::<u64>(), 1..32)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn invariant_01_conservation(tape in tape()) {
        let mut w = World::new(true);
        for number in tape {
            w.step(number);
            check(&w.market)?;
        }
    }

    #[test]
    fn invariant_15_liveness(tape in tape(), strategy in 0usize..3) {
        let mut w = World::new(false);
        tape.iter().for_each(|number| w.step(*number));
        w.apply(Command::Resume);
        w.apply(Command::Heard { supplier: SupplierNo(1) });
        w.apply(Command::Budget { tenant: TenantNo(8), cap: None });
        let m = &w.market;
        let q = m.quotes();
        let better = m.book.walk().any(|open| open.rank.price >= q.reserve);
        if q.free == 0 || better {
            return Ok(());
        }
        let limit = q.quote.percent([65, 90, 120][strategy]).floor_to(m.params().tick);
        prop_assert!(limit >= q.reserve, "the quote leaves a strategy below the reserve");
        w.apply(one(8, limit.as_micros()));
        let Reply::Bid { bid, .. } = w.reply else { panic!("{:?}", w.reply) };
        if q.clearing == q.reserve {
            prop_assert_eq!(w.market.bid(bid).unwrap().units().live(), 1, "in the same step");
        }
        let call = w.market.next_call();
        while w.market.now() < call {
            w.now = w.market.next_due().min(call);
            w.apply(Command::Tick);
        }
        let units = w.market.bid(bid).unwrap().units();
        prop_assert!(units.open == 0 || w.market.quotes().free == 0, "by the next call");
    }
}

/// Allocations fit their lot: one that is not under notice never runs in a slot that was removed.
fn machines(m: &Market) -> Result<(), TestCaseError> {
    for (no, lot) in m.lots().filter(|(_, lot)| lot.state() == LotState::Open) {
        let occupants = lot.slots.iter().filter_map(|slot| m.allocations.at(slot.occupant?));
        let stay = occupants.filter(|row| row.is_live()).count();
        prop_assert!(stay <= lot.size(), "{stay} machines stay in {} slots of {no:?}", lot.size());
    }
    for desired in m.desired(SupplierNo(1)) {
        let row = m.allocation(desired.allocation);
        prop_assert!(
            row.is_some_and(|row| row.ended_at().is_none() && row.state() != AllocationState::Matched)
        );
    }
    Ok(())
}

/// Every allocation has one slot, every slot at most one occupant and one promise, and all counts are right.
fn check(m: &Market) -> Result<(), TestCaseError> {
    let mut slots = BTreeMap::new();
    for (no, lot) in m.lots() {
        for (slot_no, slot) in (0u32..).zip(&lot.slots) {
            for (place, promised) in [(slot.occupant, false), (slot.promised, true)] {
                let Some(place) = place else { continue };
                prop_assert_eq!(slots.insert(place, (no, slot_no, promised)), None, "two slots");
                let allocation = m.allocations.at(place);
                prop_assert!(allocation.is_some_and(|allocation| allocation.slot() == (no, slot_no)));
                prop_assert_eq!(promised, allocation.unwrap().state() == AllocationState::Matched);
            }
            prop_assert!(slot.promised.is_none() || !slot.is_empty(), "promised and empty");
            prop_assert!(slot.occupant.is_none() || slot.leaving.is_none(), "two machines");
            let free = m.free_slots.free.iter().any(|(_, lot, at)| (*lot, *at) == (no, slot_no));
            prop_assert!(
                !free || slot.is_empty() && !slot.retired,
                "a slot is free while its machine may run"
            );
        }
    }
    let mut by_bid: BTreeMap<u32, [u32; 5]> = BTreeMap::new();
    for (place, allocation) in m.allocations.iter() {
        by_bid.entry(allocation.bid).or_default()[allocation.state as usize] += 1;
        prop_assert_eq!(slots.contains_key(&place), allocation.state() != AllocationState::Ended);
    }
    for (bid_row, bid) in m.bids.iter() {
        let u = bid.units();
        let counted = [u.matched, u.provisioning, u.active, u.preempting, u.ended].map(u32::from);
        prop_assert_eq!(by_bid.get(&bid_row).copied().unwrap_or_default(), counted);
        let own: u32 = counted.iter().sum();
        let listed = m.units_of(bid_row);
        prop_assert!(
            listed.iter().all(|place| m.allocations.at(*place).is_some_and(|row| row.bid == bid_row))
        );
        prop_assert_eq!(listed.len(), own as usize, "each allocation once in the list of its bid");
        let apart: u32 = bid.segments().map(|(_, units)| u32::from(units)).sum();
        prop_assert_eq!(apart, u32::from(u.open));
    }
    machines(m)?;
    let live_units = m.allocations().filter(|(_, allocation)| allocation.is_live()).count();
    prop_assert_eq!(m.live(), live_units as u64);
    let usable: usize =
        m.lots().filter(|(_, lot)| lot.state() == LotState::Open).map(|(_, lot)| lot.size()).sum();
    let live = m.allocations().filter(|(_, allocation)| {
        let lot = m.lots.get(&allocation.lot);
        let counts = |lot: &Lot| lot.state == LotState::Open && !lot.slots[allocation.slot as usize].retired;
        allocation.is_live() && lot.is_some_and(counts)
    });
    prop_assert!(live.count() <= usable, "more live units than slots");
    let listed: u64 =
        m.bids().filter(|(_, bid)| !bid.is_held()).map(|(_, bid)| u64::from(bid.units().open)).sum();
    prop_assert_eq!(m.depth().units, listed);
    Ok(())
}
