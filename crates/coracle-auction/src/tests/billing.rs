//! Invariants of money: limits, protection, charge rows, caps.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::cases;
use super::world::World;
use crate::*;

fn tape() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(any::<u64>(), 1..32)
}

fn limits(m: &Market) -> BTreeMap<AllocationId, Price> {
    m.allocations().map(|(id, allocation)| (id, allocation.limit())).collect()
}

/// Allocations that a call preempted, except those that their tenant released.
fn taken<'a>(w: &'a World) -> impl Iterator<Item = (AllocationId, Time)> + 'a {
    let last = w.journal.last().map(|entry| &entry.command);
    let offered = matches!(last, Some(Command::Substitute { .. })) && w.reply == Reply::Done;
    w.events.iter().filter_map(move |event| match event {
        Event::Desired { allocation, .. } if !offered => {
            let row = w.market.allocation(*allocation)?;
            let taken = row.reason() == Some(EndReason::Preempted) && row.noticed_at == w.market.now();
            row.preempt_at().filter(|_| taken && row.ended_at().is_none()).map(|at| (*allocation, at))
        }
        _ => None,
    })
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn invariant_02_individual_rationality(tape in tape()) {
        let mut w = World::new(true);
        // Highest limit of each allocation since the call before the last one, for charges that a call settles.
        let (mut highest_before, mut highest) = (BTreeMap::new(), BTreeMap::new());
        for number in tape {
            let (before, reserve) = (limits(&w.market), w.market.params().reserve);
            w.step(number);
            if w.events.iter().any(|event| matches!(event, Event::Call { .. })) {
                highest_before = std::mem::take(&mut highest);
            }
            for (id, limit) in before.iter().map(|(id, limit)| (*id, *limit)).chain(limits(&w.market)) {
                let known = highest.entry(id).or_insert(limit);
                *known = limit.max(*known);
            }
            for event in &w.events {
                let Event::Charge { allocation, price, reason, .. } = event else { continue };
                // A refund has the price that was paid, even if the limit has changed since.
                if *reason != ChargeReason::Refund {
                    let known = [highest.get(allocation), highest_before.get(allocation)];
                    let highest = known.into_iter().flatten().max().copied().unwrap();
                    prop_assert!(*price <= highest, "{price} above the limit {highest}");
                }
            }
            let lowest = reserve.min(w.market.params().reserve);
            for (id, allocation) in w.market.allocations().filter(|(id, _)| !before.contains_key(id)) {
                prop_assert!(allocation.limit() >= lowest, "{id} matched below the reserve");
            }
        }
    }

    /// Between two calls an amendment does not reduce what is paid: the price, or the limit that the call used.
    #[test]
    fn invariant_02_amendment_counts_at_the_call(tape in tape()) {
        let mut w = World::new(true);
        let mut at_call: BTreeMap<AllocationId, Price> = BTreeMap::new();
        for number in tape {
            w.step(number);
            let called = w.events.iter().any(|event| matches!(event, Event::Call { .. }));
            for (id, limit) in limits(&w.market) {
                let known = at_call.entry(id).or_insert(limit);
                *known = if called { limit } else { *known };
            }
            for (id, row) in w.market.allocations().filter(|(_, row)| row.is_charged()) {
                let price = w.market.history.current().for_tenant(row.tenant);
                let least = price.min(at_call[&id]).min(row.limit().max(at_call[&id]));
                prop_assert!(w.market.price(id).unwrap() >= least, "{id} pays less than {least}");
            }
        }
    }

    #[test]
    fn invariant_11_firmness(tape in tape()) {
        let mut w = World::new(true);
        for number in tape {
            let (before, cap) = (limits(&w.market), w.market.params().cap);
            w.step(number);
            for (id, _) in taken(&w) {
                let limit = before.get(&id).copied().min(w.market.allocation(id).map(Allocation::limit)).unwrap();
                prop_assert!(limit < cap.max(w.market.params().cap), "{id} was firm");
            }
        }
    }

    #[test]
    fn invariant_12_protection(tape in tape()) {
        let mut w = World::new(true);
        for number in tape {
            w.step(number);
            for (id, deadline) in taken(&w) {
                let allocation = w.market.allocation(id).unwrap();
                prop_assert!(allocation.protected_until <= allocation.noticed_at, "{id} was protected");
                let own = w.market.lots().find(|(no, _)| *no == allocation.lot).map_or(0, |(_, lot)| lot.notice_ms);
                let notice = w.market.params().notice_ms.min(own);
                prop_assert!(deadline >= allocation.noticed_at.plus_ms(notice), "{id} has a short notice");
            }
        }
    }

    #[test]
    fn invariant_13_billing(tape in tape()) {
        let mut w = World::new(true);
        let mut rows: BTreeMap<AllocationId, Vec<(Time, Time, Price, ChargeReason)>> = BTreeMap::new();
        let mut integral: BTreeMap<AllocationId, i128> = BTreeMap::new();
        let mut prices: BTreeMap<AllocationId, Price> = BTreeMap::new();
        let mut last = w.now;
        for number in tape {
            w.step(number);
            let spent = i128::from(w.now.since_ms(last));
            for (id, price) in &prices {
                *integral.entry(*id).or_default() += i128::from(price.as_micros()) * spent;
            }
            last = w.now;
            prices = w.market.allocations().filter(|(_, a)| a.is_charged()).map(|(id, _)| (id, w.market.price(id).unwrap())).collect();
            for event in &w.events {
                if let Event::Charge { allocation, from, to, price, reason, .. } = event {
                    rows.entry(*allocation).or_default().push((*from, *to, *price, *reason));
                }
            }
            for tenant in (0..4).map(TenantNo) {
                check_cap(&w, tenant)?;
            }
        }
        for (id, allocation) in w.market.allocations().filter(|(_, a)| a.ended_at().is_some()) {
            check_rows(allocation, rows.get(&id).map_or(&[][..], Vec::as_slice), integral.get(&id).copied().unwrap_or(0))?;
        }
    }
}

/// The commitment of a tenant is the sum of its limits, and the cap covers it.
fn check_cap(w: &World, tenant: TenantNo) -> Result<(), TestCaseError> {
    let Some(account) = w.market.account(tenant) else { return Ok(()) };
    let (mut going, mut leaving, mut units) = (0i128, 0i128, 0u64);
    for (_, bid) in w.market.bids_of_tenant(tenant) {
        let open = if bid.is_held() { 0 } else { bid.units().open };
        going += i128::from(bid.limit().as_micros()) * i128::from(open);
        units += u64::from(bid.units().unfinished());
    }
    for (_, allocation) in w.market.allocations().filter(|(_, a)| a.state() != AllocationState::Ended) {
        let bid = w.market.bid(w.market.bid_of(allocation)).unwrap();
        if w.market.owner_of(bid).0 != tenant {
            continue;
        }
        if allocation.is_live() {
            going += i128::from(allocation.limit().as_micros());
        } else {
            leaving += i128::from(allocation.limit().as_micros());
        }
    }
    prop_assert_eq!(account.committed, going + leaving);
    prop_assert_eq!(account.units, units);
    if let Some(cap) = account.cap {
        let cap = i128::from(cap.as_micros());
        prop_assert!(going <= cap, "{going} committed under a cap of {cap}");
        prop_assert!(w.cap_was_lowered() || going + leaving <= cap);
    }
    Ok(())
}

/// Charge rows cover exactly the active time, without gap or overlap, and sum to the integral of the price.
fn check_rows(
    allocation: &Allocation,
    rows: &[(Time, Time, Price, ChargeReason)],
    integral: i128,
) -> Result<(), TestCaseError> {
    let usage: Vec<_> = rows.iter().filter(|row| row.3 == ChargeReason::Usage).collect();
    let Some(active) = allocation.active_at() else {
        prop_assert!(rows.is_empty() && allocation.charged().0 == 0, "charged before it was active");
        return Ok(());
    };
    let mut at = active;
    for (from, to, ..) in &usage {
        prop_assert_eq!(*from, at);
        prop_assert!(to > from);
        at = *to;
    }
    prop_assert_eq!(Some(at), allocation.ended_at());
    let worth = |row: &(Time, Time, Price, ChargeReason)| Charge::of(row.2, row.1.since_ms(row.0)).0;
    prop_assert_eq!(usage.iter().map(|row| worth(row)).sum::<i128>(), integral);
    let total: i128 =
        rows.iter().map(|row| if row.3 == ChargeReason::Refund { -worth(row) } else { worth(row) }).sum();
    prop_assert_eq!(allocation.charged().0, total);
    prop_assert!(total >= 0, "more was given back than paid");
    Ok(())
}
