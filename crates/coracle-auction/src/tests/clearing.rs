//! Invariants of a single call, over every order book that a history reaches.

use proptest::prelude::*;

use super::cases;
use super::world::World;
use crate::book::Book;
use crate::market::simulate::Hypothetical;
use crate::*;

/// Runs a history and checks the market after each step.
fn run_history(
    gangs: bool,
    tape: &[u64],
    mut look: impl FnMut(&World) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut world = World::new(gangs);
    for number in tape {
        world.step(*number);
        look(&world)?;
    }
    Ok(())
}

fn tape() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(any::<u64>(), 1..28)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn invariant_03_bounds(tape in tape()) {
        run_history(true, &tape, |w| {
            let m = &w.market;
            let o = m.outcome();
            prop_assert!(m.params.reserve <= o.price && o.price <= m.params.cap);
            for e in m.contestants() {
                let wins = if e.running { !o.preempted.contains(&e.place) } else { o.won.iter().any(|(b, ..)| *b == e.place) };
                prop_assert!(!wins || e.price >= o.price, "{e:?} wins below {}", o.price);
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_04_no_envy(tape in tape()) {
        run_history(true, &tape, |w| {
            let m = &w.market;
            let o = m.outcome();
            for e in m.contestants() {
                let won: u32 = o.won.iter().filter(|(b, ..)| *b == e.place).map(|(.., n)| n).sum();
                let open: u32 = if e.running { 1 } else { u32::from(m.bids.at(e.place).unwrap().units.open) };
                let loses = if e.running { o.preempted.contains(&e.place) } else { won < open };
                let skipped = !e.running && o.skipped.contains(&e.place);
                prop_assert!(!loses || skipped || won > 0 || e.price <= o.price, "{e:?} envies {o:?}");
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_05_uniform_price(tape in tape()) {
        run_history(true, &tape, |w| {
            let o = w.market.outcome();
            // There is one price, and at most one tenant with a lower one: the owner of all the best losing bids.
            if let Some((_, own)) = o.exempt_tenant {
                prop_assert!(own < o.price && own >= w.market.params.reserve);
            }
            // Charges follow the price: after a call every running allocation pays it, up to its limit.
            for event in &w.events {
                let Event::Call { record } = event else { continue };
                for (id, allocation) in w.market.allocations() {
                    let exempt_tenant = w.market.history.current().exempt_tenant;
                    let due = match exempt_tenant {
                        Some((tenant, price)) if tenant == allocation.tenant => price,
                        _ => record.price,
                    };
                    prop_assert_eq!(w.market.price(id), Some(due.min(allocation.ceiling)));
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_06_no_waste(tape in tape()) {
        run_history(false, &tape, |w| {
            let o = w.market.outcome();
            if o.free > 0 {
                prop_assert_eq!(o.price, w.market.params.reserve);
                let won: u32 = o.won.iter().map(|(.., n)| n).sum();
                let open: u32 = w.market.contestants().iter().filter(|e| !e.running).map(|e| e.units).sum();
                prop_assert_eq!(won, open, "a free slot and a loser");
            }
            Ok(())
        })?;
    }

    #[test]
    fn invariant_07_monotone(tape in tape(), limit in 5i64..37, raise in 1i64..20, pick in any::<usize>()) {
        let mut world = World::new(false);
        tape.iter().for_each(|number| world.step(*number));
        let m = &world.market;
        let before = m.outcome();

        let mut more = m.clone();
        more.free_slots.free.insert((0, LotNo(999), 0));
        let supplied = more.outcome();
        prop_assert!(supplied.price <= before.price, "more supply raised the price");
        prop_assert!(supplied.preempted.is_subset(&before.preempted));
        for (bid, seq, units) in &before.won {
            prop_assert!(supplied.won.iter().any(|(b, s, n)| (b, s) == (bid, seq) && n >= units));
        }

        let h = Hypothetical { tenant: TenantNo(9), limit: Price::micros(limit), units: 1, min_fill: 0 };
        prop_assert!(m.decide(Some(&h)).price >= before.price, "more demand lowered the price");

        let bids: Vec<_> = m.bids().filter(|(_, bid)| bid.units.open > 0 && !bid.held && !m.halted).collect();
        if let Some((id, bid)) = bids.get(pick % bids.len().max(1)) {
            let place = m.bids.place(id.0).unwrap();
            let had: u32 = before.won.iter().filter(|(b, ..)| *b == place).map(|(.., n)| n).sum();
            let live = bid.units.live();
            let tenant = m.owner_of(bid).0;
            let limit = Some(Price::micros(bid.limit.as_micros() + raise));
            let mut raised = m.clone();
            let amendment = Amendment { tenant, bid: *id, if_owner_version: None, limit, units: None };
            raised.apply(world.now, &Command::Amend { amendment }, &mut Vec::new());
            let after = raised.bids.at(place).unwrap();
            let won: u32 = raised.outcome().won.iter().filter(|(b, ..)| *b == place).map(|(.., n)| n).sum();
// At the cap, a raise gains nothing and still loses the time priority.
            let raises = m.params.effective(after.limit) > m.params.effective(bid.limit);
            prop_assert!(!raises || after.held || after.units.live() + won >= live + had, "a raise lost units");
        }
    }

    #[test]
    fn invariant_08_order_independence(tape in tape(), seed in any::<u64>()) {
        let mut world = World::new(true);
        tape.iter().for_each(|number| world.step(*number));
        let m = &world.market;
        let mut entries: Vec<_> = m.book.walk().map(|o| (o.tenant, o.rank, o.entry)).collect();
        entries.sort_by_key(|(_, rank, _)| rank.seq.0.wrapping_mul(seed | 1));
        let mut book = Book::default();
        entries.iter().for_each(|(t, r, e)| book.insert(*t, *r, *e, m.params.cap));
        let mut permuted = m.clone();
        permuted.book = book;
        prop_assert_eq!(permuted.outcome(), m.outcome());
        prop_assert_eq!(permuted.depth(), m.depth());
        prop_assert!(permuted.book.walk().eq(m.book.walk()));
    }

    #[test]
    fn invariant_10_incremental_equals_sorted(tape in tape()) {
        run_history(true, &tape, |w| {
            prop_assert_eq!(w.market.outcome(), w.market.oracle());
            Ok(())
        })?;
    }

    #[test]
    fn invariant_16_truthfulness(values in proptest::collection::vec(5i64..40, 1..9), slots in 1u32..6, who in any::<usize>(), lie in 1i64..45) {
        let utility = |limits: &[i64], who: usize, value: i64| {
            let mut m = Market::new(super::world::params(), Time(1));
            for (tenant, limit) in (0u32..).zip(limits) {
                m.apply(Time(2), &one(tenant, *limit), &mut Vec::new());
            }
            for slot_no in 0..slots {
                m.free_slots.yielding.insert((Time(9), LotNo(9), slot_no));
            }
            let d = m.decide(None);
            let wins = d.winners.iter().any(|(open, _)| open.tenant as usize == who);
            let price = d.exempt_tenant.filter(|(t, _)| *t as usize == who).map_or(d.price, |(_, own)| own);
            // A limit above the cap gains certainty at the list price; no bid ever pays above the cap.
            if wins { value - price.as_micros() } else { 0 }
        };
        let who = who % values.len();
        let honest = utility(&values, who, values[who]);
        let mut limits = values.clone();
        limits[who] = lie;
        let lying = utility(&limits, who, values[who]);
        // At the cap, slots are rationed by time and not by price. There a lie can change nothing either, unless it reaches the
        // cap while the true value does not.
        prop_assert!(lying <= honest, "value {} gets {honest}, the lie {lie} gets {lying}", values[who]);
    }
}

/// Bid for one unit of one tenant.
pub(super) fn one(tenant: u32, limit: i64) -> Command {
    Command::Place {
        request: Box::new(BidRequest {
            tenant: TenantNo(tenant),
            owner: OwnerKey([0; 16]),
            if_owner_version: None,
            key: [0; 16],
            body: 0,
            limit: Price::micros(limit),
            quantity: 1,
            min_fill: 0,
            lease_ms: 900_000,
            expires_at: None,
            labels: Vec::new(),
        }),
    }
}
