//! Worked examples of the design, with their exact numbers.

mod rare;

use crate::*;

const T0: Time = Time(1_700_000_000_000);

fn dollars(text: &str) -> Price {
    Price::parse(text).unwrap()
}

/// Market of `a100-4x` with one lot.
struct Desk {
    market: Market,
    now: Time,
    events: Vec<Event>,
}

impl Desk {
    fn new(units: u32) -> Self {
        let market = Market::new(Params::new(dollars("2.00"), dollars("8.00")), T0);
        let mut desk = Self { market, now: T0, events: Vec::new() };
        desk.apply(Command::PutLot {
            lot: LotNo(1),
            supplier: SupplierNo(1),
            slots: units,
            notice_ms: 120_000,
        });
        desk
    }

    fn apply(&mut self, command: Command) -> Reply {
        self.market.apply(self.now, &command, &mut self.events)
    }

    fn bid_block(&mut self, tenant: u32, limit: &str, quantity: u32, min_fill: u32) -> BidId {
        match self.block_reply(tenant, limit, quantity, min_fill) {
            Reply::Bid { bid, .. } => bid,
            other => panic!("{other:?}"),
        }
    }

    fn bid_reply(&mut self, tenant: u32, limit: &str, quantity: u32) -> Reply {
        self.block_reply(tenant, limit, quantity, 0)
    }

    fn block_reply(&mut self, tenant: u32, limit: &str, quantity: u32, min_fill: u32) -> Reply {
        let request = BidRequest {
            tenant: TenantNo(tenant),
            owner: OwnerKey([1; 16]),
            if_owner_version: None,
            key: [0; 16],
            body: 0,
            limit: dollars(limit),
            quantity,
            min_fill,
            lease_ms: 900_000_000,
            expires_at: None,
            labels: Vec::new(),
        };
        self.apply(Command::Place { request: Box::new(request) })
    }

    fn bid(&mut self, tenant: u32, limit: &str, quantity: u32) -> BidId {
        self.bid_block(tenant, limit, quantity, 0)
    }

    /// Makes every node that is being launched ready.
    fn boot(&mut self) {
        for (allocation, _) in self.units(AllocationState::Provisioning) {
            self.apply(Command::Report { allocation, report: SupplierReport::Ready });
        }
    }

    /// Reports that all machines that must not run are gone.
    fn clear(&mut self) {
        for gone in self.market.observed(SupplierNo(1), self.market.epoch(), &[]) {
            self.apply(gone);
        }
    }

    fn units(&self, state: AllocationState) -> Vec<(AllocationId, Price)> {
        let units = self.market.allocations().filter(|(_, allocation)| allocation.state() == state);
        units.map(|(id, _)| (id, self.market.price(id).unwrap())).collect()
    }

    /// Advances time, with heartbeats from the supplier.
    fn wait(&mut self, ms: u64) {
        let until = self.now.plus_ms(ms);
        while self.now < until {
            self.now = self.now.plus_ms(10_000).min(until);
            self.apply(Command::Tick);
            self.clear();
        }
    }

    fn unit_prices(&self, bid: BidId) -> Vec<String> {
        let units = self.market.allocations_of(bid).filter(|(_, allocation)| allocation.ended_at().is_none());
        units.map(|(id, _)| self.market.price(id).unwrap().to_string()).collect()
    }
}

/// Default catalogue: list price, reserve, quote of an idle market.
#[test]
fn idle_market_quotes_follow_the_catalogue() {
    for (name, cap, reserve, quote) in [
        ("h100-8x", "64.00", "16.00", "25.6000"),
        ("h100-4x", "32.00", "8.00", "12.8000"),
        ("a100-8x", "16.00", "4.00", "6.4000"),
        ("a100-4x", "8.00", "2.00", "3.2000"),
        ("l40s-4x", "5.00", "1.25", "2.0000"),
    ] {
        let params = Params::new(dollars(reserve), dollars(cap));
        assert_eq!(params.check(), Ok(()), "{name}");
        let market = Market::new(params, T0);
        assert_eq!(market.quotes().quote.to_string(), quote, "{name}");
        assert!(market.quotes().quote.percent(65) >= params.reserve, "{name}: 0.65 of the quote buys");
    }
}

/// `maxBid` 4.50 in an idle market: three strategies, three limits, one price.
#[test]
fn strategies_pay_the_reserve_in_an_idle_market() {
    let mut desk = Desk::new(3);
    let quote = desk.market.quotes().quote;
    for (tenant, percent, limit) in [(1, 65, "2.0800"), (2, 90, "2.8800"), (3, 120, "3.8400")] {
        let shown =
            quote.percent(percent).floor_to(desk.market.params().tick).min(dollars("4.50")).to_string();
        assert_eq!(shown, limit);
        let bid = desk.bid(tenant, limit, 1);
        assert_eq!(desk.market.bid(bid).unwrap().state(), BidState::Provisioning, "in the same step");
        assert_eq!(desk.unit_prices(bid), ["2.0000"], "all pay the reserve");
    }
}

/// The same strategies at a clearing price of 4.00: 2.60 and 3.60 rest, 4.50 wins and pays the clearing price.
#[test]
fn highest_strategy_alone_wins_at_a_clearing_price_of_four() {
    let mut desk = Desk::new(2);
    let weak = desk.bid(7, "4.00", 1);
    let strong = desk.bid(8, "8.00", 1);
    desk.boot();
    desk.wait(600_000);
    let other = desk.bid(9, "4.00", 1);
    desk.wait(30_000);
    assert_eq!(desk.market.quotes().clearing.to_string(), "4.0000", "the best losing bid");
    assert_eq!(desk.market.quotes().quote.to_string(), "4.0000");
    let quote = desk.market.quotes().quote;
    let limit = |percent| quote.percent(percent).min(dollars("4.50")).to_string();
    assert_eq!([limit(65), limit(90), limit(120)], ["2.6000", "3.6000", "4.5000"]);
    let (cost, balanced, available) =
        (desk.bid(1, "2.60", 1), desk.bid(2, "3.60", 1), desk.bid(3, "4.50", 1));
    desk.wait(30_000);
    let state = |bid| desk.market.bid(bid).unwrap().state();
    assert_eq!([cost, balanced, other].map(state), [BidState::Pending; 3]);
    assert_eq!(state(available), BidState::Matched, "its slot is promised behind the one that must go");
    assert_eq!(state(weak), BidState::Preempting);
    assert_eq!(desk.unit_prices(available), ["4.0000"]);
    assert_eq!(desk.unit_prices(strong), ["4.0000"]);
}

/// One tenant with 5 bids for 3 slots: its own losing bids do not raise its own price.
#[test]
fn own_bids_never_raise_the_own_price() {
    let mut desk = Desk::new(3);
    let bid = desk.bid(1, "5.00", 5);
    desk.wait(30_000);
    assert_eq!(desk.market.quotes().clearing.to_string(), "5.0000", "what another would have to pay");
    assert_eq!(desk.unit_prices(bid), ["2.0000"; 3], "and not its own limit");
    let rival = desk.bid(2, "3.00", 1);
    desk.wait(30_000);
    assert_eq!(desk.unit_prices(bid), ["3.0000"; 3], "the best bid of another");
    assert_eq!(desk.market.bid(rival).unwrap().state(), BidState::Pending);
}

/// A limit at the list price is never preempted.
#[test]
fn limit_at_the_list_price_is_never_preempted() {
    let mut desk = Desk::new(1);
    let firm = desk.bid(1, "8.00", 1);
    desk.boot();
    desk.wait(700_000);
    desk.bid(2, "100.00", 1);
    desk.wait(60_000);
    assert_eq!(desk.market.bid(firm).unwrap().state(), BidState::Active);
    assert_eq!(desk.unit_prices(firm), ["8.0000"], "the list price is the guarantee");
}

/// The allocation with the lowest limit leaves first; among equal limits, the newest match.
#[test]
fn lowest_limit_then_newest_match_is_preempted_first() {
    let mut desk = Desk::new(3);
    let (old, new, low) = (desk.bid(1, "4.00", 1), desk.bid(2, "4.00", 1), desk.bid(3, "3.00", 1));
    desk.boot();
    desk.wait(600_000);
    let state = |desk: &Desk, bid| desk.market.bid(bid).unwrap().state();
    desk.bid(4, "5.00", 1);
    desk.wait(30_000);
    assert_eq!(
        [old, new, low].map(|bid| state(&desk, bid)),
        [BidState::Active, BidState::Active, BidState::Preempting]
    );
    desk.bid(5, "4.00", 1);
    desk.wait(30_000);
    assert_eq!(state(&desk, new), BidState::Active, "an equal bid preempts no allocation");
    desk.bid(6, "4.0001", 1);
    desk.wait(30_000);
    assert_eq!([old, new].map(|bid| state(&desk, bid)), [BidState::Active, BidState::Preempting]);
}

/// A block that does not fit is skipped and does not set the price.
#[test]
fn skipped_gang_does_not_set_the_price() {
    let mut desk = Desk::new(3);
    desk.bid(1, "8.00", 1);
    let gang = desk.bid_block(2, "6.00", 3, 3);
    desk.wait(30_000);
    let record = *desk.market.last_call().unwrap();
    assert_eq!((record.price.to_string().as_str(), record.skipped), ("2.0000", 1));
    let why = desk.market.explain(gang).unwrap();
    assert_eq!(why.standing, Standing::SkippedGang);
    assert!(why.to_string().contains("SKIPPED_GANG: price below your bid, block did not fit"), "{why}");
    desk.bid(3, "3.00", 2);
    desk.wait(30_000);
    assert_eq!(
        desk.market.last_call().unwrap().price.to_string(),
        "6.0000",
        "with no slot left it lost like all"
    );
}

/// `rank 14 of 22, 12 units sold; clearing 2.4100 set by another tenant; …`
#[test]
fn explain_reports_rank_clearing_price_and_winning_limit() {
    let mut desk = Desk::new(13);
    let holders: Vec<_> = (0..13).map(|n| desk.bid(100 + n, "3.00", 1)).collect();
    let setter = desk.bid(50, "2.41", 1);
    desk.bid(51, "2.30", 1);
    let mine = desk.bid(1, "2.08", 1);
    for tenant in 60..68 {
        desk.bid(tenant, "2.05", 1);
    }
    desk.wait(30_000);
    desk.apply(Command::Cancel { tenant: TenantNo(50), bid: setter, if_owner_version: None });
    let (allocation, _) = desk.market.allocations_of(holders[0]).next().unwrap();
    desk.apply(Command::Release {
        tenant: TenantNo(100),
        allocation,
        if_owner_version: None,
        reason: ReleaseReason::Unneeded,
    });
    desk.clear();
    let why = desk.market.explain(mine).unwrap();
    assert_eq!(
        why.to_string(),
        "rank 14 of 22, 12 units sold; clearing 2.4100 set by another tenant; your limit 2.0800; \
         would win now at ≥ 2.4100"
    );
    assert_eq!(why.standing, Standing::Outbid, "one slot is free, and 2.30 comes first");
}

/// Three units run at 5, 4 and 3 dollars; a fourth bid is simulated.
#[test]
fn simulate_predicts_the_next_call_without_changes() {
    let mut desk = Desk::new(3);
    for (tenant, limit) in [(1, "5.00"), (2, "4.00"), (3, "3.00")] {
        desk.bid(tenant, limit, 1);
    }
    desk.boot();
    desk.wait(600_000);
    let before = desk.market.snapshot();
    let play = |limit: &str, units, min_fill| {
        let h = Hypothetical { tenant: TenantNo(9), limit: dollars(limit), units, min_fill };
        let s = desk.market.simulate(&h);
        let text = |price: Price| price.to_string();
        (s.at_once, s.at_call, text(s.pays), text(s.clearing), s.preempted, s.wins_at.map(text))
    };
    let at = |price: &str| Some(price.to_owned());
    assert_eq!(play("3.50", 1, 0), (0, 1, "3.0000".into(), "3.0000".into(), 1, at("3.0001")));
    assert_eq!(play("3.00", 1, 0), (0, 0, "2.0000".into(), "3.0000".into(), 0, at("3.0001")), "ties stay");
    assert_eq!(play("4.50", 2, 2), (0, 2, "4.0000".into(), "4.0000".into(), 2, at("4.0001")));
    assert_eq!(play("8.00", 4, 4), (0, 0, "2.0000".into(), "2.0000".into(), 0, None), "four of three");
    assert_eq!(desk.market.snapshot(), before, "nothing was done");
}

/// One hour at 2.00 and a half at 3.00 is 3.50, to the micro-dollar, whenever it is settled.
#[test]
fn charges_follow_the_price() {
    let mut desk = Desk::new(1);
    let bid = desk.bid(1, "8.00", 1);
    desk.boot();
    desk.wait(3_600_000);
    desk.bid(2, "3.00", 1);
    desk.wait(30_000);
    let at_two = desk.market.last_call().unwrap().at;
    desk.wait(1_800_000);
    let (allocation, _) = desk.market.allocations_of(bid).next().unwrap();
    desk.apply(Command::Release {
        tenant: TenantNo(1),
        allocation,
        if_owner_version: None,
        reason: ReleaseReason::Unneeded,
    });
    let row = desk.market.allocation(allocation).unwrap();
    let (start, end) = (row.active_at().unwrap(), row.ended_at().unwrap());
    let exact = 2 * i128::from(at_two.since_ms(start)) + 3 * i128::from(end.since_ms(at_two));
    assert_eq!(row.charged().0, exact * 1_000_000);
}

#[test]
fn charge_has_a_one_minute_minimum_and_excludes_host_faults() {
    let mut desk = Desk::new(2);
    let (short, lost) = (desk.bid(1, "8.00", 1), desk.bid(2, "8.00", 1));
    desk.boot();
    desk.wait(20_000);
    let first = |desk: &Desk, bid| desk.market.allocations_of(bid).next().unwrap().0;
    let (a, b) = (first(&desk, short), first(&desk, lost));
    desk.apply(Command::Release {
        tenant: TenantNo(1),
        allocation: a,
        if_owner_version: None,
        reason: ReleaseReason::Unneeded,
    });
    desk.wait(280_000);
    desk.apply(Command::Report { allocation: b, report: SupplierReport::Died { by: Fault::Host } });
    let charged = |allocation| desk.market.allocation(allocation).unwrap().charged();
    assert_eq!(charged(a), Charge::of(dollars("2.00"), 60_000), "the rest of the first minute");
    assert_eq!(charged(b), Charge(0), "lost within its minimum runtime");
}

/// After three failed launches the unit fails; until then it keeps its time priority.
#[test]
fn unit_ends_after_three_failed_launches() {
    let mut desk = Desk::new(1);
    let bid = desk.bid(1, "3.00", 1);
    let seq = desk.market.bid(bid).unwrap().seq();
    for failures in 1..=3 {
        let (allocation, _) = desk.units(AllocationState::Provisioning)[0];
        desk.apply(Command::Report { allocation, report: SupplierReport::Failed });
        assert_eq!(desk.units(AllocationState::Provisioning), [], "not before the remains are gone");
        desk.clear();
        assert_eq!(desk.market.bid(bid).unwrap().seq(), seq, "after {failures}");
    }
    assert_eq!(desk.market.bid(bid).unwrap().state(), BidState::Ended);
    let (_, allocation) = desk.market.allocations_of(bid).next().unwrap();
    assert_eq!(allocation.reason(), Some(EndReason::ProvisionFailed));
}

/// For 15 s, a notice can be moved to another allocation of the same lot.
#[test]
fn tenant_moves_a_notice_to_another_allocation() {
    let mut desk = Desk::new(2);
    let bid = desk.bid(1, "3.00", 2);
    desk.boot();
    desk.wait(600_000);
    desk.bid(2, "5.00", 1);
    desk.wait(30_000);
    let (victim, _) = desk.units(AllocationState::Preempting)[0];
    let (other, _) = desk.units(AllocationState::Active)[0];
    let deadline = desk.market.allocation(victim).unwrap().preempt_at();
    let swap = Command::Substitute { tenant: TenantNo(1), victim, other };
    assert_eq!(desk.apply(swap.clone()), Reply::Done);
    assert_eq!(desk.market.allocation(victim).unwrap().state(), AllocationState::Active);
    assert_eq!(desk.market.allocation(other).unwrap().preempt_at(), deadline);
    assert_eq!(desk.apply(swap), Reply::Refused(Rejection::Terminal));
    desk.wait(120_000);
    assert_eq!(desk.market.bid(bid).unwrap().units().active, 1);
    assert_eq!(desk.units(AllocationState::Provisioning).len(), 1, "the promise moved with the notice");
}

/// An announced reserve applies from its time on. Allocations that pay less then lose the next call, with their notice.
#[test]
fn announced_reserve_applies_from_its_effective_time() {
    let mut desk = Desk::new(2);
    let low = desk.bid(1, "2.50", 1);
    desk.boot();
    let params = Params::new(dollars("3.00"), dollars("8.00"));
    let effective_at = desk.now.plus_ms(605_000);
    desk.apply(Command::Configure { params, effective_at });
    assert_eq!(desk.market.announced(), Some((effective_at, &params)));
    desk.wait(604_999);
    assert_eq!(
        (desk.market.quotes().reserve, desk.unit_prices(low)),
        (dollars("2.00"), vec!["2.0000".into()])
    );
    desk.wait(1);
    assert_eq!((desk.market.quotes().reserve, desk.market.announced()), (dollars("3.00"), None));
    assert_eq!(desk.market.quotes().quote, dollars("4.80"));
    assert_eq!(desk.units(AllocationState::Active).len(), 1, "until the next call");
    desk.wait(30_000);
    let under_notice = desk.units(AllocationState::Preempting);
    assert_eq!(under_notice.len(), 1);
    assert!(under_notice[0].1 <= dollars("2.50"), "never above its limit");
    let rests = desk.bid(2, "2.90", 1);
    assert_eq!(desk.market.bid(rests).unwrap().state(), BidState::Pending, "although a slot is free");
}

/// Rows of the table of invalid input that concern bids.
#[test]
fn bad_input() {
    let mut desk = Desk::new(1);
    let mut refused = |change: fn(&mut BidRequest)| {
        let mut request = BidRequest {
            tenant: TenantNo(1),
            owner: OwnerKey([1; 16]),
            if_owner_version: Some(0),
            key: [3; 16],
            body: 1,
            limit: dollars("2.00"),
            quantity: 1,
            min_fill: 0,
            lease_ms: 900_000,
            expires_at: None,
            labels: Vec::new(),
        };
        change(&mut request);
        match desk.apply(Command::Place { request: Box::new(request) }) {
            Reply::Refused(refusal) => refusal.to_string(),
            Reply::Bid { below_reserve, replayed, .. } => format!("below={below_reserve} again={replayed}"),
            Reply::Done => "done".into(),
        }
    };
    assert_eq!(refused(|p| p.limit = Price::ZERO), "limit must be above 0 and at most 1000000");
    assert_eq!(refused(|p| p.limit = Price::micros(2_000_050)), "limit must be a multiple of the tick");
    assert_eq!(refused(|p| p.quantity = 0), "quantity must be from 1 to 10000");
    assert_eq!(refused(|p| p.quantity = 10_001), "quantity must be from 1 to 10000");
    assert_eq!(refused(|p| p.min_fill = 2), "min_fill must be at most the quantity");
    assert_eq!(refused(|p| p.if_owner_version = Some(4)), "the owner's version is 0");
    assert_eq!(refused(|p| p.limit = dollars("1.00")), "below=true again=false");
    assert_eq!(refused(|p| p.limit = dollars("1.00")), "below=true again=true");
    assert_eq!(refused(|p| p.body = 2), "the idempotency key was used for another request");
    let unknown = Command::Cancel { tenant: TenantNo(2), bid: BidId(0), if_owner_version: None };
    assert_eq!(desk.apply(unknown), Reply::Refused(Rejection::NotFound), "another tenant's bid");
    let cancel = Command::Cancel { tenant: TenantNo(1), bid: BidId(0), if_owner_version: None };
    assert!(matches!(desk.apply(cancel.clone()), Reply::Bid { .. }));
    assert_eq!(desk.apply(cancel), Reply::Refused(Rejection::Terminal));
}
