//! Invariants of seats: nothing is given twice, nothing waits beside a free unit.

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
            w.apply(Command::Heartbeat { supplier: SupplierNo(1) });
        }
        let units = w.market.bid(bid).unwrap().units();
        prop_assert!(units.open == 0 || w.market.quotes().free == 0, "by the next call");
    }
}

/// Every unit has one seat, every seat one occupant and one promise at most, every count is right.
fn check(m: &Market) -> Result<(), TestCaseError> {
    let mut seats = BTreeMap::new();
    for (no, lot) in m.lots() {
        for (unit, seat) in (0u32..).zip(&lot.units) {
            for (place, promised) in [(seat.occupant, false), (seat.promised, true)] {
                let Some(place) = place else { continue };
                prop_assert_eq!(seats.insert(place, (no, unit, promised)), None, "two seats");
                let alloc = m.allocs.at(place);
                prop_assert!(alloc.is_some_and(|alloc| alloc.seat() == (no, unit)));
                prop_assert_eq!(promised, alloc.unwrap().state() == AllocState::Matched);
            }
            prop_assert!(seat.promised.is_none() || seat.occupant.is_some(), "promised and empty");
        }
    }
    let mut by_bid: BTreeMap<u32, [u32; 5]> = BTreeMap::new();
    for (place, alloc) in m.allocs.iter() {
        by_bid.entry(alloc.bid).or_default()[alloc.state as usize] += 1;
        prop_assert_eq!(seats.contains_key(&place), alloc.state() != AllocState::Ended);
    }
    for (place, bid) in m.bids.iter() {
        let u = bid.units();
        let counted = [u.matched, u.provisioning, u.active, u.preempting, u.ended].map(u32::from);
        prop_assert_eq!(by_bid.get(&place).copied().unwrap_or_default(), counted);
        let own: u32 = counted.iter().sum();
        let listed = m.units_of(place);
        prop_assert!(listed.iter().all(|unit| m.allocs.at(*unit).is_some_and(|unit| unit.bid == place)));
        prop_assert_eq!(listed.len(), own as usize, "each unit once in the list of its bid");
        let apart: u32 = bid.segments().map(|(_, units)| u32::from(units)).sum();
        prop_assert_eq!(apart, u32::from(u.open));
    }
    let live_units = m.allocs().filter(|(_, alloc)| alloc.is_live()).count();
    prop_assert_eq!(m.live(), live_units as u64);
    let usable: usize =
        m.lots().filter(|(_, lot)| lot.state() == LotState::Open).map(|(_, lot)| lot.size()).sum();
    let live = m.allocs().filter(|(_, alloc)| {
        let lot = m.lots.get(&alloc.lot);
        let counts = |lot: &Lot| lot.state == LotState::Open && !lot.units[alloc.unit as usize].retired;
        alloc.is_live() && lot.is_some_and(counts)
    });
    prop_assert!(live.count() <= usable, "more live units than seats");
    let listed: u64 =
        m.bids().filter(|(_, bid)| !bid.is_held()).map(|(_, bid)| u64::from(bid.units().open)).sum();
    prop_assert_eq!(m.depth().units, listed);
    Ok(())
}
