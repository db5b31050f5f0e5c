//! The engine alone, in this process: calls and replay at a million open bids.

use std::time::{Duration, Instant};

use coracle_auction::wire::Wire;
use coracle_auction::{
    AllocId, AllocState, Amendment, BidId, Command, Event, Journaled, LotNo, Market, OwnerKey, Params,
    Placement, Price, Reply, Report, SupplierNo, TenantNo, Time,
};

const START: Time = Time(1_700_000_000_000);
const TENANTS: u64 = 1_000;
const OWNERS: u64 = 10;
const BURST: u64 = 64;
const LOTS: u32 = 40;
const LOT_UNITS: u32 = 500;
/// Running units that each round gives up their limit, so that a call displaces as many.
const CHURN: usize = 500;

/// A market under load: a full book, all units running, and the journal of how it came so.
pub(crate) struct Load {
    pub(crate) market: Market,
    pub(crate) commands: u64,
    journal: Option<Vec<u8>>,
    now: Time,
    random: u64,
    events: Vec<Event>,
    running: Vec<(TenantNo, BidId)>,
    bids: u64,
    burst: (u64, u64),
}

fn params() -> Params {
    let mut params = Params::new(Price::micros(2_000_000), Price::micros(8_000_000));
    params.min_runtime_ms = 0;
    params.notice_ms = 10_000;
    params
}

impl Load {
    /// `open` open bids of one unit, in an order of prices that a seed fixes.
    pub(crate) fn new(open: u64, keep_journal: bool) -> Self {
        let mut load = Self {
            market: Market::new(params(), START),
            commands: 0,
            journal: keep_journal.then(Vec::new),
            now: START,
            random: 0x9e37_79b9_7f4a_7c15,
            events: Vec::new(),
            running: Vec::new(),
            bids: 0,
            burst: (0, 0),
        };
        for lot in 0..LOTS {
            let (lot, supplier) = (LotNo(lot), SupplierNo(lot % 8));
            load.apply(Command::PutLot { lot, supplier, units: LOT_UNITS, notice_ms: 10_000 });
        }
        for _ in 0..u64::from(LOTS * LOT_UNITS) {
            load.place(7_000_000);
        }
        load.boot();
        for _ in 0..open {
            load.place(0);
            load.events.clear();
        }
        load
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % n
    }

    fn apply(&mut self, command: Command) -> Reply {
        let reply = self.market.apply(self.now, &command, &mut self.events);
        self.commands += 1;
        if let Some(journal) = &mut self.journal {
            Journaled { at: self.now, command }.put(journal);
        }
        reply
    }

    fn place(&mut self, at_least: i64) {
        // Bids come in bursts: an operator places for one namespace after the other.
        if self.bids.is_multiple_of(BURST) {
            self.burst = (self.below(TENANTS), self.below(OWNERS));
        }
        let (tenant, owner) = self.burst;
        let ticks = i64::try_from(self.below(49_000)).unwrap_or(0);
        let limit = Price::micros((2_000_000 + ticks * 100).max(at_least));
        self.bids += 1;
        let mut key = [0; 16];
        // Keys are digests: spread them as digests are.
        key[..8].copy_from_slice(&self.bids.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        key[8..].copy_from_slice(&self.bids.to_le_bytes());
        let placement = Placement {
            tenant: TenantNo(u32::try_from(tenant).unwrap_or(0)),
            owner: OwnerKey([u8::try_from(owner).unwrap_or(0); 16]),
            if_owner_version: None,
            key,
            body: self.bids,
            limit,
            quantity: 1,
            min_fill: 0,
            lease_ms: u32::MAX,
            expires_at: None,
            labels: Vec::new(),
        };
        self.apply(Command::Place { placement: Box::new(placement) });
    }

    /// What was ordered becomes ready nodes; what ended is forgotten here.
    fn boot(&mut self) {
        let launched: Vec<AllocId> = std::mem::take(&mut self.events)
            .into_iter()
            .filter_map(|event| if let Event::Launch { alloc, .. } = event { Some(alloc) } else { None })
            .collect();
        for alloc in launched {
            self.apply(Command::Report { alloc, report: Report::Ready });
            let Some(unit) = self.market.alloc(alloc).filter(|unit| unit.state() == AllocState::Active)
            else {
                continue;
            };
            let bid = self.market.bid_of(unit);
            if let Some(row) = self.market.bid(bid) {
                let tenant = self.market.owner_of(row).0;
                self.running.push((tenant, bid));
            }
        }
    }

    /// One interval: running units give up their limits, new bids come, the call is held, seats
    /// change hands. Returns how long the call took and what it displaced.
    pub(crate) fn round(&mut self) -> (Duration, u64) {
        for _ in 0..CHURN {
            let pick = usize::try_from(self.below(self.running.len() as u64)).unwrap_or(0);
            let (tenant, bid) = self.running.swap_remove(pick);
            let limit = Some(Price::micros(2_000_000));
            self.apply(Command::Amend {
                amendment: Amendment { tenant, bid, if_owner_version: None, limit, units: None },
            });
            self.place(0);
        }
        for supplier in 0..8 {
            self.apply(Command::Heartbeat { supplier: SupplierNo(supplier) });
        }
        self.events.clear();
        self.now = self.market.next_call();
        // Timers of the time before are not the call's.
        let before = Time(self.now.0 - 1);
        self.market.apply(before, &Command::Tick, &mut self.events);
        if let Some(journal) = &mut self.journal {
            Journaled { at: before, command: Command::Tick }.put(journal);
        }
        let started = Instant::now();
        self.market.apply(self.now, &Command::Resume, &mut self.events);
        let took = started.elapsed();
        if let Some(journal) = &mut self.journal {
            Journaled { at: self.now, command: Command::Resume }.put(journal);
        }
        self.commands += 2;
        let displaced = self.market.last_call().map_or(0, |call| call.displaced);
        self.now = self.now.plus_ms(10_000);
        for supplier in 0..8 {
            self.apply(Command::Heartbeat { supplier: SupplierNo(supplier) });
        }
        self.boot();
        (took, displaced)
    }
}

/// Percentile of sorted values.
pub(crate) fn percentile(sorted: &[Duration], permille: usize) -> Duration {
    sorted
        .get((sorted.len() * permille / 1000).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

/// p99 of `calls` calls at `open` open bids, in milliseconds, and the most that one displaced.
pub(crate) fn call_p99(open: u64, calls: usize) -> (f64, u64) {
    let mut load = Load::new(open, false);
    let (mut took, mut most) = (Vec::with_capacity(calls), 0);
    for _ in 0..calls {
        let (one, displaced) = load.round();
        took.push(one);
        most = most.max(displaced);
    }
    took.sort_unstable();
    eprintln!(
        "  {calls} calls at {} open bids: p50 {:?}, p99 {:?}, max {:?}; at most {most} displaced",
        load.market.depth().units,
        percentile(&took, 500),
        percentile(&took, 990),
        percentile(&took, 1000),
    );
    (percentile(&took, 990).as_secs_f64() * 1000.0, most)
}

/// Commands a second when a journal with `open` open bids and `rounds` intervals is replayed.
pub(crate) fn replay(open: u64, rounds: usize) -> Option<f64> {
    let mut load = Load::new(open, true);
    for _ in 0..rounds {
        load.round();
    }
    let (journal, commands, end) = (load.journal.take()?, load.commands, load.market.snapshot());
    drop(load);
    let mut market = Market::new(params(), START);
    let (mut from, mut events) = (journal.as_slice(), Vec::new());
    let started = Instant::now();
    while !from.is_empty() {
        let entry = Journaled::get(&mut from).ok()?;
        market.apply(entry.at, &entry.command, &mut events);
        events.clear();
    }
    let took = started.elapsed();
    let same = market.snapshot() == end;
    let bytes = journal.len() as u64 / commands.max(1);
    eprintln!("  replay: {commands} commands of {bytes} B each in {took:?}; the same state: {same}");
    same.then(|| commands as f64 / took.as_secs_f64())
}
