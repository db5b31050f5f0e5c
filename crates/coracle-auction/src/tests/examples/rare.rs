//! Rare sequences of events: notices that change, hosts that are lost, refusals.

use super::*;

/// A unit under notice is amended, takes the place of a sibling of another bid, and is amended again: the cap still covers
/// everything.
#[test]
fn cap_holds_after_amend_under_notice_and_substitute() {
    let mut desk = Desk::new(2);
    desk.apply(Command::Budget { tenant: TenantNo(1), cap: Some(dollars("10.00")) });
    let (a, _b) = (desk.bid(1, "2.50", 1), desk.bid(1, "2.50", 1));
    desk.boot();
    desk.wait(600_000);
    desk.bid(2, "5.00", 1);
    desk.wait(30_000);
    let amend = |desk: &mut Desk, bid, limit: &str| {
        let limit = Some(dollars(limit));
        let amendment = Amendment { tenant: TenantNo(1), bid, if_owner_version: None, limit, units: None };
        desk.apply(Command::Amend { amendment })
    };
    let (victim, _) = desk.units(AllocationState::Preempting)[0];
    let (other, _) = desk.units(AllocationState::Active)[0];
    let own = desk.market.bid_of(desk.market.allocation(victim).unwrap());
    amend(&mut desk, own, "1000.00");
    assert_eq!(desk.apply(Command::Substitute { tenant: TenantNo(1), victim, other }), Reply::Done);
    assert_eq!(amend(&mut desk, own, "9.00"), Reply::Refused(Rejection::Budget));
    let account = desk.market.account(TenantNo(1)).unwrap();
    assert_eq!(account.committed, 5_000_000, "both run at 2.50; {a:?}");
}

/// The victim's slot was removed, so nothing can stay in it.
#[test]
fn victim_of_a_retired_slot_is_not_substituted() {
    let mut desk = Desk::new(3);
    desk.bid(1, "3.00", 3);
    desk.boot();
    desk.wait(600_000);
    desk.bid(2, "5.00", 1);
    desk.wait(30_000);
    let (victim, _) = desk.units(AllocationState::Preempting)[0];
    let (other, _) = desk.units(AllocationState::Active)[0];
    desk.apply(Command::PutLot { lot: LotNo(1), supplier: SupplierNo(1), slots: 2, notice_ms: 120_000 });
    let swap = Command::Substitute { tenant: TenantNo(1), victim, other };
    assert_eq!(desk.apply(swap), Reply::Refused(Rejection::TooLate));
}

/// A guest that powers itself off is not the host's fault: nothing is refunded.
#[test]
fn guest_that_powers_off_is_charged() {
    let mut desk = Desk::new(1);
    let bid = desk.bid(1, "8.00", 1);
    desk.boot();
    desk.wait(590_000);
    let (allocation, _) = desk.market.allocations_of(bid).next().unwrap();
    desk.apply(Command::Report { allocation, report: SupplierReport::Died { by: Fault::Guest } });
    let charged = desk.market.allocation(allocation).unwrap().charged();
    assert_eq!(charged, Charge::of(dollars("2.00"), 590_000));
}

/// A supplier that does not know yet that a machine must not run may be about to start it, so the slot is not free.
#[test]
fn slot_is_free_when_the_supplier_knows_and_says_so() {
    let mut desk = Desk::new(1);
    let bid = desk.bid(1, "8.00", 1);
    let (allocation, _) = desk.market.allocations_of(bid).next().unwrap();
    let knows = desk.market.epoch();
    let reason = ReleaseReason::Unneeded;
    desk.apply(Command::Release { tenant: TenantNo(1), allocation, if_owner_version: None, reason });
    let one = SupplierNo(1);
    assert_eq!(desk.market.observed(one, knows, &[]), [], "it knows the set before");
    let machine = |state| Machine { lot: LotNo(1), slot: 0, allocation, state };
    let epoch = desk.market.epoch();
    assert_eq!(desk.market.observed(one, epoch, &[machine(MachineState::Stopping)]), [], "still there");
    assert_eq!(desk.market.quotes().free, 0);
    desk.clear();
    assert_eq!(desk.market.quotes().free, 1);
}

/// A lost supplier returns with running machines, which must end before their slots are sold again.
#[test]
fn slots_of_a_lost_lot_are_free_only_after_supplier_report() {
    let mut desk = Desk::new(1);
    let bid = desk.bid(1, "8.00", 1);
    desk.boot();
    let (allocation, _) = desk.market.allocations_of(bid).next().unwrap();
    desk.apply(Command::Silent { supplier: SupplierNo(1) });
    desk.apply(Command::Lost { supplier: SupplierNo(1) });
    assert_eq!(desk.market.allocation(allocation).unwrap().reason(), Some(EndReason::CapacityLost));
    desk.apply(Command::Heard { supplier: SupplierNo(1) });
    assert_eq!((desk.market.quotes().free, desk.market.desired(SupplierNo(1)).count()), (0, 0));
    desk.clear();
    assert_eq!(desk.market.quotes().free, 1);
}

/// A refused bid leaves no row of its tenant or owner behind.
#[test]
fn refused_bid_leaves_no_owner() {
    let mut desk = Desk::new(1);
    let before = desk.market.snapshot();
    assert!(matches!(desk.bid_reply(7, "3.00", 0), Reply::Refused(_)));
    assert_eq!(desk.market.snapshot(), before);
}

/// A challenger puts an allocation at risk if it stays for two indicative calls, and until it leaves.
#[test]
fn risk_is_reported_after_two_calls_and_withdrawn() {
    let mut desk = Desk::new(1);
    desk.bid(1, "3.00", 1);
    desk.boot();
    desk.wait(600_000);
    desk.wait(5_000);
    let risks = |desk: &mut Desk| {
        let events = std::mem::take(&mut desk.events);
        let of = |event: &Event| match event {
            Event::AtRisk { .. } => Some("risk"),
            Event::RiskOver { .. } => Some("over"),
            _ => None,
        };
        events.iter().filter_map(of).collect::<Vec<_>>()
    };
    risks(&mut desk);
    let challenger = desk.bid(2, "5.00", 1);
    let step = |desk: &mut Desk| {
        desk.now = desk.now.plus_ms(5_000);
        desk.apply(Command::Tick);
        risks(desk)
    };
    assert_eq!(step(&mut desk), [""; 0], "once");
    assert_eq!(step(&mut desk), ["risk"], "twice");
    desk.apply(Command::Cancel { tenant: TenantNo(2), bid: challenger, if_owner_version: None });
    assert_eq!(step(&mut desk), ["over"]);
}

/// A losing bid just below the winners raises the price of all others. If its tenant holds a slot, this is reported.
#[test]
fn price_set_by_holder_is_noted() {
    for (tenant, noted) in [(1, true), (3, false)] {
        let mut desk = Desk::new(2);
        desk.bid(1, "5.00", 1);
        desk.bid(2, "5.00", 1);
        desk.boot();
        assert!(!desk.market.is_priced_by_holder(), "the reserve is the price");
        desk.bid(tenant, "4.50", 1);
        desk.wait(30_000);
        assert_eq!(desk.market.quotes().clearing.to_string(), "4.5000");
        assert_eq!(desk.market.is_priced_by_holder(), noted, "tenant {tenant}");
    }
}

/// If a tenant reports that its node failed, the next launch is elsewhere, and the tenant pays only for the time used.
#[test]
fn release_of_failed_node_changes_lot_and_charges_usage_only() {
    for (reason, minimum, moves) in
        [(ReleaseReason::Unneeded, true, false), (ReleaseReason::NodeFailed, false, true)]
    {
        let mut desk = Desk::new(2);
        let lot = Command::PutLot { lot: LotNo(2), supplier: SupplierNo(1), slots: 2, notice_ms: 120_000 };
        desk.apply(lot);
        let launch = |desk: &mut Desk| {
            let bid = desk.bid(1, "2.00", 1);
            desk.boot();
            let (id, row) = desk.market.allocations_of(bid).next().unwrap();
            (id, row.slot().0)
        };
        let (allocation, first) = launch(&mut desk);
        desk.now = desk.now.plus_ms(20_000);
        desk.events.clear();
        let tenant = TenantNo(1);
        desk.apply(Command::Release { tenant, allocation, if_owner_version: None, reason });
        let charged = desk.events.iter().filter_map(|event| match event {
            Event::Charge { reason, from, to, .. } => Some((*reason, to.since_ms(*from))),
            _ => None,
        });
        let charged: Vec<_> = charged.collect();
        let used = (ChargeReason::Usage, 20_000);
        let want = if minimum { vec![used, (ChargeReason::Minimum, 40_000)] } else { vec![used] };
        assert_eq!(charged, want, "{reason:?}");
        desk.clear();
        let (_, second) = launch(&mut desk);
        assert_eq!(second != first, moves, "{reason:?}: {first:?}, then {second:?}");
    }
}

/// After a day without service the market ends and removes an allocation in one step. Its charges still name it.
#[test]
fn charge_of_forgotten_allocation_names_its_match() {
    let mut desk = Desk::new(1);
    let weak = desk.bid(1, "2.00", 1);
    desk.boot();
    desk.wait(600_000);
    desk.bid(2, "4.00", 1);
    desk.wait(30_000);
    let (id, row) = desk.market.allocations_of(weak).next().unwrap();
    let matched = row.matched_at();
    assert_eq!(row.state(), AllocationState::Preempting);
    desk.events.clear();
    desk.now = desk.now.plus_ms(30 * 3_600_000);
    desk.apply(Command::Tick);
    assert!(desk.market.allocation(id).is_none(), "it is forgotten");
    let named = desk.events.iter().filter_map(|event| match event {
        Event::Charge { allocation, matched_at, .. } if *allocation == id => Some(*matched_at),
        _ => None,
    });
    let named: Vec<_> = named.collect();
    assert!(!named.is_empty() && named.iter().all(|at| *at == matched), "{named:?}, matched at {matched:?}");
}
