//! Random histories from a tape of numbers, so that shrinking is truncating the tape.

use crate::*;

/// Parameters with a reserve of 10 and a cap of 30 micro-dollars, so that ties are common.
pub(super) fn params() -> Params {
    Params {
        tick: Price::micros(1),
        call_interval_ms: 30_000,
        min_runtime_ms: 40_000,
        notice_ms: 45_000,
        ..Params::new(Price::micros(10), Price::micros(30))
    }
}

pub(super) struct World {
    pub(super) market: Market,
    pub(super) now: Time,
    pub(super) journal: Vec<Journaled>,
    pub(super) events: Vec<Event>,
    pub(super) reply: Reply,
    gangs: bool,
    lowered: bool,
}

/// Digits of one number of the tape.
struct Digits(u64);

impl Digits {
    fn below(&mut self, n: u64) -> u64 {
        let digit = self.0 % n;
        self.0 /= n;
        digit
    }

    fn small(&mut self, n: u32) -> u32 {
        u32::try_from(self.below(u64::from(n))).unwrap()
    }

    fn price(&mut self) -> Price {
        Price::micros(i64::from(self.small(32)) + 5)
    }
}

impl World {
    pub(super) fn new(gangs: bool) -> Self {
        let now = Time(1_000_000);
        let mut world = Self {
            market: Market::new(params(), now),
            now,
            journal: Vec::new(),
            events: Vec::new(),
            reply: Reply::Done,
            gangs,
            lowered: false,
        };
        world.apply(Command::PutLot { lot: LotNo(1), supplier: SupplierNo(1), slots: 3, notice_ms: 60_000 });
        world
    }

    /// Whether the cap was ever lowered, so that allocations under notice may run above it.
    pub(super) fn cap_was_lowered(&self) -> bool {
        self.lowered
    }

    pub(super) fn apply(&mut self, command: Command) {
        self.events.clear();
        self.reply = self.market.apply(self.now, &command, &mut self.events);
        self.journal.push(Journaled { at: self.now, command });
    }

    /// Executes one step of the history. Time never passes a due event, so that each step sees it.
    pub(super) fn step(&mut self, tape: u64) {
        let mut d = Digits(tape);
        let command = match d.below(64) {
            0..18 => self.place(&mut d),
            18..24 => self.amend(&mut d),
            24..27 => self.cancel(&mut d),
            27..31 => self.release(&mut d),
            31..45 => self.report(&mut d),
            45..59 => {
                let wait = [1, 1_000, 15_000, 30_000, 600_000][usize::try_from(d.below(5)).unwrap()];
                self.now = self.now.plus_ms(wait).min(self.market.next_due().max(self.now));
                match d.below(16) {
                    0..8 => self.some_gone(&mut d),
                    8 => Command::Silent { supplier: SupplierNo(1) },
                    9 if d.below(2) == 0 => Command::Lost { supplier: SupplierNo(1) },
                    9..12 => Command::Heard { supplier: SupplierNo(1) },
                    _ => Command::Tick,
                }
            }
            59 => self.supply(&mut d),
            60 => Command::PutLot {
                lot: LotNo(1 + d.small(2)),
                supplier: SupplierNo(1),
                slots: d.small(5),
                notice_ms: 20_000 + d.below(2) * 60_000,
            },
            61 => {
                let cap = (d.below(3) > 0).then(|| Price::micros(i64::from(d.small(120))));
                self.lowered = true;
                Command::Budget { tenant: TenantNo(d.small(4)), cap }
            }
            62 => self.substitute(&mut d),
            _ => self.rare_command(&mut d),
        };
        self.apply(command);
    }

    fn place(&self, d: &mut Digits) -> Command {
        let tenant = TenantNo(d.small(4));
        let limit = d.price();
        let quantity = 1 + d.small(4);
        let min_fill = if self.gangs && d.below(3) == 0 { 1 + d.small(quantity) } else { 0 };
        let key = d.below(40);
        let request = BidRequest {
            tenant,
            owner: OwnerKey([u8::try_from(d.below(2)).unwrap(); 16]),
            if_owner_version: None,
            key: if key < 20 {
                [0; 16]
            } else {
                (u128::from(key) << 64 | u128::from(tenant.0)).to_le_bytes()
            },
            body: limit.as_micros().unsigned_abs() * 100 + u64::from(quantity),
            limit,
            quantity,
            min_fill,
            lease_ms: if d.below(4) == 0 { 50_000 } else { 900_000 },
            expires_at: (d.below(8) == 0).then(|| self.now.plus_ms(70_000)),
            labels: Vec::new(),
        };
        Command::Place { request: Box::new(request) }
    }

    fn some_bid(&self, d: &mut Digits) -> (TenantNo, BidId) {
        let bids: Vec<_> = self.market.bids().collect();
        let pick = usize::try_from(d.below(bids.len().max(1) as u64)).unwrap();
        bids.get(pick).map_or((TenantNo(0), BidId(77)), |(id, bid)| (self.market.owner_of(bid).0, *id))
    }

    fn some_allocation(&self, d: &mut Digits, wanted: &[AllocationState]) -> (TenantNo, AllocationId) {
        let units: Vec<_> = self
            .market
            .allocations()
            .filter(|(_, allocation)| wanted.contains(&allocation.state()))
            .collect();
        let pick = usize::try_from(d.below(units.len().max(1) as u64)).unwrap();
        units.get(pick).map_or((TenantNo(0), AllocationId(77)), |(id, allocation)| {
            let bid = self.market.bid(self.market.bid_of(allocation)).unwrap();
            (self.market.owner_of(bid).0, *id)
        })
    }

    fn amend(&self, d: &mut Digits) -> Command {
        let (tenant, bid) = self.some_bid(d);
        let what = d.below(3);
        let limit = (what != 0).then(|| d.price());
        let units = (what != 1).then(|| d.small(6));
        Command::Amend { amendment: Amendment { tenant, bid, if_owner_version: None, limit, units } }
    }

    fn cancel(&self, d: &mut Digits) -> Command {
        let (tenant, bid) = self.some_bid(d);
        Command::Cancel { tenant, bid, if_owner_version: None }
    }

    fn release(&self, d: &mut Digits) -> Command {
        use AllocationState::*;
        let (tenant, allocation) = self.some_allocation(d, &[Matched, Provisioning, Active, Preempting]);
        let reason = if d.below(4) == 0 { ReleaseReason::NodeFailed } else { ReleaseReason::Unneeded };
        Command::Release { tenant, allocation, if_owner_version: None, reason }
    }

    fn report(&self, d: &mut Digits) -> Command {
        use AllocationState::*;
        let (report, state) = match d.below(16) {
            0 => (SupplierReport::Launched, Provisioning),
            1 => (SupplierReport::Registered { node: "n".into() }, Provisioning),
            2 => (SupplierReport::Failed, Provisioning),
            3 => (SupplierReport::Died { by: Fault::Host }, Preempting),
            4 => (SupplierReport::Died { by: Fault::Guest }, Active),
            5 => (SupplierReport::Died { by: Fault::Host }, Active),
            _ => (SupplierReport::Ready, Provisioning),
        };
        Command::Report { allocation: self.some_allocation(d, &[state]).1, report }
    }

    /// Reports that a machine which is no longer desired is gone.
    fn some_gone(&self, d: &mut Digits) -> Command {
        let gone = self.market.observed(SupplierNo(1), self.market.epoch(), &[]);
        let pick = usize::try_from(d.below(gone.len().max(1) as u64)).unwrap();
        gone.get(pick).cloned().unwrap_or(Command::Tick)
    }

    fn supply(&self, d: &mut Digits) -> Command {
        match d.below(3) {
            0 => Command::DrainLot { lot: LotNo(1 + d.small(2)) },
            _ => Command::PutLot {
                lot: LotNo(1 + d.small(2)),
                supplier: SupplierNo(1),
                slots: 2 + d.small(4),
                notice_ms: 60_000,
            },
        }
    }

    fn substitute(&self, d: &mut Digits) -> Command {
        let (tenant, victim) = self.some_allocation(d, &[AllocationState::Preempting]);
        let (_, other) = self.some_allocation(d, &[AllocationState::Active]);
        Command::Substitute { tenant, victim, other }
    }

    fn rare_command(&mut self, d: &mut Digits) -> Command {
        match d.below(6) {
            0 => Command::Halt,
            1 | 2 => Command::Resume,
            3 => Command::Restarted,
            4 => Command::Renew { tenant: TenantNo(d.small(4)), owner: OwnerKey([0; 16]) },
            _ => {
                let reserve = Price::micros(8 + i64::from(d.small(6)));
                let cap = Price::micros(25 + i64::from(d.small(10)));
                Command::Configure {
                    params: Params { reserve, cap, ..params() },
                    effective_at: self.now.plus_ms(d.below(2) * 10_000),
                }
            }
        }
    }
}
