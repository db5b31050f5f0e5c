//! Benchmark of the engine alone, in this process: calls and replay with a million open bids.

use std::time::{Duration, Instant};

use coracle_auction::codec::Codec;
use coracle_auction::{
    AllocationId, AllocationState, Amendment, BidId, BidRequest, Command, Event, Journaled, LotNo, Market,
    OwnerKey, Params, Price, Reply, SupplierNo, SupplierReport, TenantNo, Time,
};

const START: Time = Time(1_700_000_000_000);
const TENANTS: u64 = 1_000;
const OWNERS: u64 = 10;
const BURST: u64 = 64;
const LOTS: u32 = 40;
const LOT_UNITS: u32 = 500;
/// Number of running units whose owners lower their limits in each round, so that a call preempts as many.
const CHURN: usize = 500;
const NOTICE_MS: u64 = 10_000;

/// Market under load: a full order book, all units running, and the journal that led to this state.
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
    params.notice_ms = NOTICE_MS;
    params
}

impl Load {
    /// Creates a market with `open` open bids of one unit, whose order of prices is fixed by a seed.
    pub(crate) fn new(open: u64, keep_journal: bool) -> Self {
        Self::of((LOTS, LOT_UNITS), open, keep_journal)
    }

    /// Creates a market of ten units.
    fn small(open: u64) -> Self {
        Self::of((1, 10), open, false)
    }

    fn of((lots, units): (u32, u32), open: u64, keep_journal: bool) -> Self {
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
        for lot in 0..lots {
            let (lot, supplier) = (LotNo(lot), SupplierNo(lot % 8));
            load.apply(Command::PutLot { lot, supplier, slots: units, notice_ms: NOTICE_MS });
        }
        for _ in 0..u64::from(lots * units) {
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
        // Bids come in bursts, because an operator places for one namespace after the other.
        if self.bids.is_multiple_of(BURST) {
            self.burst = (self.below(TENANTS), self.below(OWNERS));
        }
        let (tenant, owner) = self.burst;
        let ticks = i64::try_from(self.below(49_000)).unwrap_or(0);
        let limit = Price::micros((2_000_000 + ticks * 100).max(at_least));
        self.bids += 1;
        let mut key = [0; 16];
        // Keys are digests, so spread these as digests are spread.
        key[..8].copy_from_slice(&self.bids.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        key[8..].copy_from_slice(&self.bids.to_le_bytes());
        let request = BidRequest {
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
        self.apply(Command::Place { request: Box::new(request) });
    }

    /// Makes ordered machines ready nodes, and removes ended allocations from the list.
    fn boot(&mut self) {
        let launched: Vec<AllocationId> = std::mem::take(&mut self.events)
            .into_iter()
            .filter_map(
                |event| if let Event::Desired { allocation, .. } = event { Some(allocation) } else { None },
            )
            .collect();
        for allocation in launched {
            self.apply(Command::Report { allocation, report: SupplierReport::Ready });
            let Some(unit) =
                self.market.allocation(allocation).filter(|unit| unit.state() == AllocationState::Active)
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

    /// Simulates one call interval: running units give up their limits, new bids are placed, the call is held, and allocations
    /// change.
    pub(crate) fn round(&mut self) -> Took {
        self.round_of(CHURN)
    }

    /// Like [`Self::round`], with `churn` units that give up their limits.
    fn round_of(&mut self, churn: usize) -> Took {
        for _ in 0..churn {
            let pick = usize::try_from(self.below(self.running.len() as u64)).unwrap_or(0);
            let (tenant, bid) = self.running.swap_remove(pick);
            let limit = Some(Price::micros(2_000_000));
            self.apply(Command::Amend {
                amendment: Amendment { tenant, bid, if_owner_version: None, limit, units: None },
            });
            self.place(0);
        }
        self.events.clear();
        self.now = self.market.next_call();
        // Timers that were due earlier must not be measured with the call.
        let before = Time(self.now.0 - 1);
        self.market.apply(before, &Command::Tick, &mut self.events);
        if let Some(journal) = &mut self.journal {
            Journaled { at: before, command: Command::Tick }.put(journal);
        }
        let (worked, started) = (cpu_time(), Instant::now());
        self.market.apply(self.now, &Command::Resume, &mut self.events);
        let (wall, cpu) = (started.elapsed(), cpu_time().saturating_sub(worked));
        if let Some(journal) = &mut self.journal {
            Journaled { at: self.now, command: Command::Resume }.put(journal);
        }
        self.commands += 2;
        let preempted = self.market.last_call().map_or(0, |call| call.preempted);
        // The notice ends: the machines of preempted allocations are gone, those of the winners run.
        self.now = self.now.plus_ms(NOTICE_MS);
        self.apply(Command::Tick);
        self.clear();
        self.boot();
        Took { wall, cpu, preempted }
    }

    /// Reports that machines which must no longer run are gone.
    fn clear(&mut self) {
        for supplier in (0..8).map(SupplierNo) {
            for gone in self.market.observed(supplier, self.market.epoch(), &[]) {
                self.apply(gone);
            }
        }
    }
}

/// Cost of one call.
#[derive(Clone, Copy)]
pub(crate) struct Took {
    pub(crate) wall: Duration,
    /// CPU time: what the wall clock would show on a computer without other work.
    pub(crate) cpu: Duration,
    pub(crate) preempted: u64,
}

/// CPU time of this thread so far. The kernel updates it when the thread yields.
pub(crate) fn cpu_time() -> Duration {
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// Percentile of sorted values.
pub(crate) fn percentile(sorted: &[Duration], permille: usize) -> Duration {
    sorted
        .get((sorted.len() * permille / 1000).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

/// Cost of many calls with `open` open bids.
pub(crate) struct Calls {
    /// p99 of wall-clock time, in milliseconds.
    pub(crate) wall_ms: f64,
    /// p99 of CPU time, in milliseconds.
    pub(crate) cpu_ms: f64,
    /// Largest number of preemptions in one call.
    pub(crate) preempted: u64,
}

/// Holds `calls` calls with `open` open bids.
pub(crate) fn calls(open: u64, calls: usize) -> Calls {
    let mut load = Load::new(open, false);
    let took: Vec<Took> = (0..calls).map(|_| load.round()).collect();
    let preempted = took.iter().map(|one| one.preempted).max().unwrap_or(0);
    let p99_ms = |what: &str, of: fn(&Took) -> Duration| {
        let mut took: Vec<_> = took.iter().map(of).collect();
        took.sort_unstable();
        let (p50, p99) = (percentile(&took, 500), percentile(&took, 990));
        eprintln!("  {what}: p50 {p50:?}, p99 {p99:?}, max {:?}", percentile(&took, 1000));
        p99.as_secs_f64() * 1000.0
    };
    let units = load.market.depth().units;
    eprintln!("  {calls} calls at {units} open bids, at most {preempted} preempted");
    Calls { wall_ms: p99_ms("wall", |one| one.wall), cpu_ms: p99_ms("core", |one| one.cpu), preempted }
}

/// Commands per second in the replay of a journal.
pub(crate) struct Replay {
    /// By wall-clock time.
    pub(crate) wall: f64,
    /// By CPU time.
    pub(crate) cpu: f64,
}

/// Replays a journal with `open` open bids and `rounds` intervals. `None`: the replay led to another state.
pub(crate) fn replay(open: u64, rounds: usize) -> Option<Replay> {
    let mut load = Load::new(open, true);
    for _ in 0..rounds {
        load.round();
    }
    let (journal, commands, end) = (load.journal.take()?, load.commands, load.market.snapshot());
    drop(load);
    let mut market = Market::new(params(), START);
    let (mut from, mut events) = (journal.as_slice(), Vec::new());
    let (worked, started) = (cpu_time(), Instant::now());
    while !from.is_empty() {
        let entry = Journaled::get(&mut from).ok()?;
        market.apply(entry.at, &entry.command, &mut events);
        events.clear();
    }
    let (wall, cpu) = (started.elapsed(), cpu_time().saturating_sub(worked));
    let same = market.snapshot() == end;
    let bytes = journal.len() as u64 / commands.max(1);
    eprintln!(
        "  {commands} commands of {bytes} B each in {wall:?}, {cpu:?} of it on a core; the same state: {same}"
    );
    let rate = |took: Duration| commands as f64 / took.as_secs_f64().max(1e-9);
    same.then(|| Replay { wall: rate(wall), cpu: rate(cpu) })
}

/// Holds one call in each of many markets with `open` bids each, one after the other on one core. Returns the longest of
/// several rounds, in milliseconds.
pub(crate) fn round_of_markets(markets: usize, open: u64) -> f64 {
    let mut all: Vec<Load> = (0..markets).map(|_| Load::small(open)).collect();
    let mut rounds: Vec<Duration> =
        (0..10).map(|_| all.iter_mut().map(|load| load.round_of(1).wall).sum()).collect();
    rounds.sort_unstable();
    eprintln!("  {markets} markets of {open} bids: p50 {:?}, max {:?}", rounds[5], rounds[9]);
    rounds[9].as_secs_f64() * 1000.0
}
