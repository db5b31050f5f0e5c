//! Prometheus metrics of the market.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use coracle_auction::{ChargeReason, Command, EndReason, Event, Market, Reply, SupplierReport};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Class {
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PreemptionOutcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct BidResult {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Orders {
    kind: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScopeLabel {
    scope: &'static str,
}

/// Counter of calls with a valid token, by scope.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calls(Family<ScopeLabel, Counter>);

impl Calls {
    pub(crate) fn count(&self, scope: crate::caller::Scope) {
        self.0.get_or_create(&ScopeLabel { scope: scope.as_str() }).inc();
    }
}

/// Counters of placed bids, by result.
#[derive(Clone, Debug)]
struct Placed {
    accepted: Counter,
    replayed: Counter,
    refused: Counter,
}

impl Placed {
    fn of(bids: &Family<BidResult, Counter>) -> Self {
        let of = |result| bids.get_or_create_owned(&BidResult { result });
        Self { accepted: of("accepted"), replayed: of("replayed"), refused: of("refused") }
    }
}

type Dollars = Gauge<f64, AtomicU64>;
type DollarSum = Counter<f64, AtomicU64>;

#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    clearing_price: Family<Class, Dollars>,
    quote_price: Family<Class, Dollars>,
    reserve_price: Family<Class, Dollars>,
    cap_price: Family<Class, Dollars>,
    allocations: Family<Class, Gauge>,
    free_units: Family<Class, Gauge>,
    open_units: Family<Class, Gauge>,
    preemptions: Family<PreemptionOutcome, Counter>,
    displaced: Family<Reason, Counter>,
    /// Counters of placements, stored so that no look-up is needed, because there are many placements.
    placed: Placed,
    skipped_gangs: Counter,
    cancelled_setters: Counter,
    holder_priced: Family<Class, Counter>,
    call_seconds: Histogram,
    orders: Family<Orders, Counter>,
    unknown_machines: Counter,
    without_epoch: Counter,
    charged: Family<Class, DollarSum>,
    pub(crate) calls: Calls,
    pub(crate) journal_commit: Histogram,
    pub(crate) journal_up: Gauge,
    pub(crate) replay_mismatch: Counter,
}

/// Registers and initialises the market's metrics: for the reference page, not for a running market.
pub fn register_metrics(registry: &mut Registry) {
    Metrics::register(registry).touch();
}

/// Micro-dollars as dollars, for graphs only.
fn dollars(micros: i64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a graph, not a bill")]
    let micros = micros as f64;
    micros / 1e6
}

fn count(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let bids = Family::default();
        let m = Self {
            clearing_price: Family::default(),
            quote_price: Family::default(),
            reserve_price: Family::default(),
            cap_price: Family::default(),
            allocations: Family::default(),
            free_units: Family::default(),
            open_units: Family::default(),
            preemptions: Family::default(),
            displaced: Family::default(),
            placed: Placed::of(&bids),
            skipped_gangs: Counter::default(),
            cancelled_setters: Counter::default(),
            holder_priced: Family::default(),
            call_seconds: Histogram::new(exponential_buckets(0.000_01, 2.0, 18)),
            orders: Family::default(),
            unknown_machines: Counter::default(),
            without_epoch: Counter::default(),
            charged: Family::default(),
            calls: Calls::default(),
            journal_commit: Histogram::new(exponential_buckets(0.0001, 2.0, 14)),
            journal_up: Gauge::default(),
            replay_mismatch: Counter::default(),
        };
        let r = registry;
        r.register(
            "coracle_market_clearing_price",
            "Clearing price, US$ per node-hour",
            m.clearing_price.clone(),
        );
        r.register("coracle_market_quote_price", "Quote, US$ per node-hour", m.quote_price.clone());
        r.register("coracle_market_reserve_price", "Reserve, US$ per node-hour", m.reserve_price.clone());
        r.register("coracle_market_cap_price", "Cap, US$ per node-hour", m.cap_price.clone());
        r.register("coracle_market_allocations", "Units that hold a place", m.allocations.clone());
        r.register("coracle_market_free_units", "Empty units", m.free_units.clone());
        r.register("coracle_market_open_units", "Units waiting in the book", m.open_units.clone());
        r.register("coracle_market_preemptions", "Units that ended under notice", m.preemptions.clone());
        r.register("coracle_market_displaced", "Units put under notice", m.displaced.clone());
        r.register("coracle_market_bids", "Placements by result", bids);
        r.register("coracle_market_skipped_gangs", "Blocks passed over by a call", m.skipped_gangs.clone());
        r.register(
            "coracle_market_cancelled_setters",
            "Bids that set the price of the last call and were taken back",
            m.cancelled_setters.clone(),
        );
        r.register(
            "coracle_market_holder_priced_calls",
            "Calls whose price was set by a tenant with allocations there, which does not pay it itself",
            m.holder_priced.clone(),
        );
        r.register("coracle_market_call_seconds", "Time in the engine for a call", m.call_seconds.clone());
        r.register(
            "coracle_market_orders",
            "Changes of desired sets, and reports of suppliers",
            m.orders.clone(),
        );
        r.register(
            "coracle_market_unknown_machines",
            "Observed machines in lots that the supplier does not have",
            m.unknown_machines.clone(),
        );
        r.register(
            "coracle_market_observations_without_epoch",
            "Observed machines of markets whose version the report does not name: they are ignored",
            m.without_epoch.clone(),
        );
        r.register("coracle_market_charged_dollars", "Charged, for graphs", m.charged.clone());
        r.register("coracle_market_calls", "Calls by what their token must allow", m.calls.0.clone());
        r.register(
            "coracle_market_journal_commit_seconds",
            "Time to put a group on disk",
            m.journal_commit.clone(),
        );
        r.register("coracle_market_journal_up", "Does the journal take commands?", m.journal_up.clone());
        r.register(
            "coracle_market_replay_mismatch",
            "Calls that a replay did not reproduce",
            m.replay_mismatch.clone(),
        );
        m
    }

    /// Initialises every metric with a label, for the metrics reference.
    pub(crate) fn touch(&self) {
        let class = || Class { class: "a100-4x/local".to_owned() };
        for family in [&self.clearing_price, &self.quote_price, &self.reserve_price, &self.cap_price] {
            family.get_or_create(&class()).set(0.0);
        }
        for family in [&self.allocations, &self.free_units, &self.open_units] {
            family.get_or_create(&class()).set(0);
        }
        self.preemptions.get_or_create(&PreemptionOutcome { outcome: "drained" }).inc();
        self.displaced.get_or_create(&Reason { reason: "Preempted" }).inc();
        self.observe_call(Duration::ZERO);
        self.count_cancelled_setter();
        self.holder_priced.get_or_create(&class()).inc();
        self.count_without_epoch(0);
        self.placed.accepted.inc();
        self.order("desired");
        self.count_unknown_machines(0);
        self.calls.count(crate::caller::Scope::Read);
        self.charged.get_or_create(&class()).inc_by(0.0);
    }

    /// Counts a command by its reply.
    pub(crate) fn count(&self, command: &Command, reply: &Reply) {
        match (command, reply) {
            (Command::Place { .. }, Reply::Bid { replayed: true, .. }) => self.placed.replayed.inc(),
            (Command::Place { .. }, Reply::Bid { .. }) => self.placed.accepted.inc(),
            (Command::Place { .. }, _) => self.placed.refused.inc(),
            (Command::Report { report, .. }, reply) => {
                let result = if matches!(reply, Reply::Refused(_)) { "unknown" } else { "taken" };
                self.count_report(report, result)
            }
            _ => 0,
        };
    }

    /// Counts observations of machines in unknown lots.
    pub(crate) fn count_unknown_machines(&self, count: usize) {
        self.unknown_machines.inc_by(count as u64);
    }

    /// Counts observations of markets without a version of the desired set.
    pub(crate) fn count_without_epoch(&self, count: usize) {
        self.without_epoch.inc_by(count as u64);
    }

    fn count_report(&self, report: &SupplierReport, result: &'static str) -> u64 {
        self.orders.get_or_create(&Orders { kind: report.as_str(), result }).inc()
    }

    /// Counts a cancelled bid that had set the price of the last call.
    pub(crate) fn count_cancelled_setter(&self) {
        self.cancelled_setters.inc();
    }

    /// Records the duration of a call.
    pub(crate) fn observe_call(&self, took: Duration) {
        self.call_seconds.observe(took.as_secs_f64());
    }

    /// Records the effect of a group on a market.
    pub(crate) fn observe(&self, class: &str, market: &Market, events: &[Event]) {
        let class = || Class { class: class.to_owned() };
        for event in events {
            match event {
                Event::Call { record } => {
                    self.skipped_gangs.inc_by(record.skipped);
                    if market.is_priced_by_holder() {
                        self.holder_priced.get_or_create(&class()).inc();
                    }
                    let q = market.quotes();
                    self.clearing_price.get_or_create(&class()).set(dollars(record.price.as_micros()));
                    self.quote_price.get_or_create(&class()).set(dollars(q.quote.as_micros()));
                    self.reserve_price.get_or_create(&class()).set(dollars(q.reserve.as_micros()));
                    self.cap_price.get_or_create(&class()).set(dollars(q.cap.as_micros()));
                    self.free_units.get_or_create(&class()).set(count(q.free as u64));
                    self.open_units.get_or_create(&class()).set(count(market.depth().units));
                    self.allocations.get_or_create(&class()).set(count(market.live()));
                }
                Event::Desired { .. } => self.order("desired"),
                Event::Allocation { allocation, .. } => {
                    self.count_displacement(market, *allocation);
                    self.count_preemption(market, *allocation);
                }
                Event::Charge { from, to, price, reason, .. } if *reason != ChargeReason::Refund => {
                    let micros = coracle_auction::Charge::of(*price, to.since_ms(*from)).to_micros();
                    let micros = i64::try_from(micros).unwrap_or(i64::MAX);
                    self.charged.get_or_create(&class()).inc_by(dollars(micros));
                }
                _ => {}
            }
        }
    }

    fn order(&self, kind: &'static str) {
        self.orders.get_or_create(&Orders { kind, result: "sent" }).inc();
    }

    fn count_displacement(&self, market: &Market, allocation: coracle_auction::AllocationId) {
        let Some(row) = market.allocation(allocation) else { return };
        let (now, noticed, ended) = (Some(market.now()), row.noticed_at(), row.ended_at());
        let lost = ended == now && row.reason() == Some(EndReason::CapacityLost) && noticed.is_none();
        if let Some(reason) = row.reason().filter(|_| lost || noticed == now && ended.is_none()) {
            self.displaced.get_or_create(&Reason { reason: reason.as_str() }).inc();
        }
    }

    fn count_preemption(&self, market: &Market, allocation: coracle_auction::AllocationId) {
        let Some(row) = market.allocation(allocation) else { return };
        let (Some(ended), Some(deadline)) = (row.ended_at(), row.preempt_at()) else { return };
        let outcome = if row.reason() == Some(EndReason::CapacityLost) {
            "lost"
        } else if ended < deadline {
            "drained"
        } else {
            "forced"
        };
        self.preemptions.get_or_create(&PreemptionOutcome { outcome }).inc();
    }
}
