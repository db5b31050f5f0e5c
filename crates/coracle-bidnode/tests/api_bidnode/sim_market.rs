//! In-memory market: the auction engine behind the market's API, with one market and a journal that tests can make fail.
//! [`SimMarket::new`] adds one supplier whose Nodes are Ready at once; with [`SimMarket::without_supply`] a test adds its own.

mod calls;

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hasher as _},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use coracle_api::bidnode::names;
use coracle_auction::{
    Allocation, AllocationId, AllocationState, Bid, BidId, Command, Continuity, Event, LotNo, Machine,
    MachineState, Market as Engine, OwnerKey, Params, Presence, Price, Rejection, Reply, SupplierNo,
    TenantNo, Time,
};
use coracle_bidnode::Connect;
use coracle_proto::market::{
    self as pb, market_server::MarketServer, owner_frame::Frame, trading_server::TradingServer,
};
use coracle_reconcile::WallTime as _;
use coracle_testkit::{elapse, sim::Sim};
use futures_util::{Stream, StreamExt as _};
use hyper_util::rt::TokioIo;
use tokio::{
    sync::{broadcast, watch},
    task::JoinSet,
};
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint, Server},
};

use crate::{
    supplier::{register, set_ready_at},
    world::HERE,
};

/// Address of the market in the simulated network.
pub(crate) const ADDRESS: &str = "market:7443";
const LOT: LotNo = LotNo(1);
const SUPPLIER: SupplierNo = SupplierNo(1);
/// Longest time between two commands of the market itself, in milliseconds.
const TICK_MS: u64 = 5_000;
/// Time between heartbeats of the supplier.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Connects to listeners of a simulation.
#[derive(Debug)]
pub(crate) struct MemoryConnect(pub(crate) Sim);

impl Connect for MemoryConnect {
    fn connect(&self, endpoint: &Endpoint) -> Channel {
        let network = self.0.network().clone();
        endpoint.connect_with_connector_lazy(tower::service_fn(move |uri: http::Uri| {
            let stream = network.connect(uri.authority().map_or("", |authority| authority.as_str()));
            async move { stream.map(TokioIo::new) }
        }))
    }
}

/// Events of one command.
pub(crate) type Batch = Arc<(u64, Vec<Event>)>;

/// Injected defect of the market, to check that the tests find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarketDefect {
    /// The engine is not informed of a standstill, so silences and deadlines keep counting.
    ForgetsStandstill,
    /// A slot is free at its release, without waiting for the supplier's report.
    FreesAtOnce,
    /// The epoch of a supplier's report is not compared.
    NoEpoch,
    /// The owner stream shows an allocation under notice as active.
    HidesNotice,
}

struct State {
    engine: Engine,
    continuity: Continuity,
    presence: Presence,
    plant: Option<MarketDefect>,
    seq: u64,
    /// Tenants and UIDs of owners, by number.
    names: Vec<String>,
}

/// Simulated market; clones share its state.
#[derive(Clone)]
pub(crate) struct SimMarket(Arc<Shared>);

struct Shared {
    sim: Sim,
    state: Mutex<State>,
    batches: broadcast::Sender<Batch>,
    forgets: AtomicBool,
    /// Whether the journal cannot be written: no command is applied, and engine time stops.
    down: AtomicBool,
    /// Time by which the market's clock is ahead, in milliseconds.
    ahead_ms: AtomicU64,
    /// Whether the operator is disconnected from the market.
    cut: watch::Sender<bool>,
}

impl State {
    /// Applies the commands that the service's writer puts before a group.
    fn own_commands(&mut self, now: Time, events: &mut Vec<Event>) {
        if self.continuity.has_gap(now) && self.plant != Some(MarketDefect::ForgetsStandstill) {
            self.presence.restart(now);
            self.engine.apply(now, &Command::Restarted, events);
        }
        self.continuity.served(now);
        for command in self.presence.commands(&self.engine, now) {
            self.engine.apply(now, &command, events);
        }
    }

    fn is_hidden(&self, row: &Allocation) -> bool {
        self.plant == Some(MarketDefect::HidesNotice) && row.state() == AllocationState::Preempting
    }

    fn number(&mut self, name: &str) -> u32 {
        let at = self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        u32::try_from(at + 1).unwrap()
    }

    fn name(&self, number: u32) -> String {
        self.names[usize::try_from(number).unwrap() - 1].clone()
    }

    fn owner(&mut self, uid: &str) -> OwnerKey {
        OwnerKey(u128::from(self.number(uid)).to_be_bytes())
    }

    fn uid(&self, owner: OwnerKey) -> String {
        self.name(u32::try_from(u128::from_be_bytes(owner.0)).unwrap())
    }

    fn bid(&self, id: BidId, row: &Bid) -> pb::Bid {
        let ((tenant, owner), units) = (self.engine.owner_of(row), row.units());
        pb::Bid {
            bid: format!("bid-{id}"),
            market: HERE.into(),
            tenant: self.name(tenant.0),
            owner_uid: self.uid(owner),
            limit_micros: row.limit().as_micros(),
            quantity: units.total(),
            state: pb::BidState::Unspecified.into(),
            open: units.open.into(),
            matched: units.matched.into(),
            provisioning: units.provisioning.into(),
            active: units.active.into(),
            preempting: units.preempting.into(),
            placed_at_ms: ms(row.placed_at()),
            labels: row.labels().iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            ..pb::Bid::default()
        }
    }

    fn allocation(&self, id: AllocationId, row: &Allocation) -> pb::Allocation {
        let bid = self.engine.bid_of(row);
        let owner = self.engine.bid(bid).map(|bid| self.engine.owner_of(bid).1);
        let (at, hidden) = (|time: Option<Time>| time.map_or(0, ms), self.is_hidden(row));
        pb::Allocation {
            allocation: allocation_name(id),
            bid: format!("bid-{bid}"),
            market: HERE.into(),
            owner_uid: owner.map(|owner| self.uid(owner)).unwrap_or_default(),
            lot: format!("lot-{}", row.slot().0.0),
            unit: row.slot().1,
            state: allocation_state(if hidden { AllocationState::Active } else { row.state() }).into(),
            limit_micros: row.limit().as_micros(),
            price_micros: self.engine.price(id).unwrap_or(Price::ZERO).as_micros(),
            matched_at_ms: ms(row.matched_at()),
            active_at_ms: at(row.active_at()),
            protected_until_ms: at(row.protected_until()),
            preempt_at_ms: at(row.preempt_at().filter(|_| !hidden)),
            ended_at_ms: at(row.ended_at()),
            node: row.node().unwrap_or_default().into(),
            reason: row.reason().filter(|_| !hidden).map_or("", |reason| reason.as_str()).into(),
            ..pb::Allocation::default()
        }
    }

    fn owners(&self) -> Vec<pb::OwnerVersion> {
        let tenants = self.engine.bids().map(|(_, bid)| self.engine.owner_of(bid).0).collect::<BTreeSet<_>>();
        let owners = tenants.into_iter().flat_map(|tenant| self.engine.owners_of_tenant(tenant));
        owners.map(|(owner, version)| pb::OwnerVersion { owner_uid: self.uid(owner), version }).collect()
    }

    /// All bids, allocations and versions, between two frames `synced`.
    fn frames(&self) -> Vec<pb::OwnerFrame> {
        let bids = self.engine.bids().map(|(id, row)| Frame::Bid(self.bid(id, row)));
        let allocations = self.engine.allocations();
        let allocations = allocations.map(|(id, row)| Frame::Allocation(self.allocation(id, row)));
        let owners = self.owners().into_iter().map(Frame::Owner);
        bids.chain(allocations).chain(owners).map(|frame| self.owner_frame(self.seq, frame)).collect()
    }

    fn owner_frame(&self, seq: u64, frame: Frame) -> pb::OwnerFrame {
        pb::OwnerFrame { seq, market: HERE.into(), frame: Some(frame) }
    }

    /// Frames for the events of one command, without those of hidden bids.
    fn changes(&self, (seq, events): &(u64, Vec<Event>), hidden: &BTreeSet<BidId>) -> Vec<pb::OwnerFrame> {
        let mut frames = Vec::new();
        let bid = |id: BidId| self.engine.bid(id).map(|row| Frame::Bid(self.bid(id, row)));
        for event in events {
            match event {
                Event::Bid { bid } | Event::Allocation { bid, .. } if hidden.contains(bid) => {}
                Event::Bid { bid: id } => frames.extend(bid(*id)),
                Event::Allocation { allocation, bid: id } => {
                    frames.extend(bid(*id));
                    let row = self.engine.allocation(*allocation);
                    frames.extend(row.map(|row| Frame::Allocation(self.allocation(*allocation, row))));
                }
                Event::Owner { owner, version, .. } => frames
                    .push(Frame::Owner(pb::OwnerVersion { owner_uid: self.uid(*owner), version: *version })),
                _ => {}
            }
        }
        frames.into_iter().map(|frame| self.owner_frame(*seq, frame)).collect()
    }

    fn price(&self, kind: &str) -> pb::PriceFrame {
        let quotes = self.engine.quotes();
        let price = pb::MarketPrice {
            market: HERE.into(),
            quote_micros: quotes.quote.as_micros(),
            clearing_micros: quotes.clearing.as_micros(),
            indicative_micros: quotes.indicative.as_micros(),
            reserve_micros: quotes.reserve.as_micros(),
            cap_micros: quotes.cap.as_micros(),
            free: u64::try_from(quotes.free).unwrap(),
            as_of_ms: ms(quotes.as_of),
            seq: self.seq,
            tick_micros: self.engine.params().tick.as_micros(),
            next_call_ms: ms(self.engine.next_call()),
            ..pb::MarketPrice::default()
        };
        pb::PriceFrame { seq: self.seq, market: HERE.into(), r#type: kind.into(), price: Some(price) }
    }
}

fn allocation_state(state: AllocationState) -> pb::AllocationState {
    match state {
        AllocationState::Matched => pb::AllocationState::Matched,
        AllocationState::Provisioning => pb::AllocationState::Provisioning,
        AllocationState::Active => pb::AllocationState::Active,
        AllocationState::Preempting => pb::AllocationState::Preempting,
        AllocationState::Ended => pb::AllocationState::Ended,
    }
}

fn ms(time: Time) -> i64 {
    i64::try_from(time.0).unwrap()
}

pub(crate) fn allocation_name(id: AllocationId) -> String {
    format!("allocation-{id}")
}

fn local<T>(name: &str, id: fn(u64) -> T) -> Result<T, Status> {
    let number = name.rsplit('-').next().and_then(|number| number.parse().ok());
    number.map(id).ok_or_else(|| Status::not_found(name.to_owned()))
}

fn hash(parts: impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

/// Error status with the code and constant that `coracle-market` uses.
fn rejection_status(refusal: Rejection) -> Status {
    let (code, constant) = match refusal {
        Rejection::OwnerVersion { .. } => (Code::Aborted, "OWNER_VERSION"),
        Rejection::IdempotencyConflict => (Code::AlreadyExists, "IDEMPOTENCY_CONFLICT"),
        Rejection::Terminal => (Code::FailedPrecondition, "TERMINAL"),
        Rejection::NotFound => (Code::NotFound, "NOT_FOUND"),
        _ => (Code::FailedPrecondition, "REFUSED"),
    };
    let mut status = Status::new(code, refusal.to_string());
    status.metadata_mut().insert("coracle-code", constant.parse().unwrap());
    status
}

impl SimMarket {
    /// Creates a market with `slots` slots of one supplier.
    pub(crate) fn new(sim: &Sim, slots: u32) -> Self {
        Self::with_notice(sim, slots, 10_000)
    }

    /// Creates a market with `slots` slots of one supplier, and a notice time.
    pub(crate) fn with_notice(sim: &Sim, slots: u32, notice_ms: u64) -> Self {
        let market = Self::without_supply(sim, notice_ms);
        market.apply(Command::PutLot { lot: LOT, supplier: SUPPLIER, slots, notice_ms }).unwrap();
        market
    }

    /// Creates a market without capacity, with a notice time.
    pub(crate) fn without_supply(sim: &Sim, notice_ms: u64) -> Self {
        let params = Params {
            call_interval_ms: 1500,
            min_runtime_ms: 0,
            notice_ms,
            ..Params::new(Price::micros(2_000_000), Price::micros(8_000_000))
        };
        let now = Time(u64::try_from(sim.clock().now().0).unwrap());
        let state = State {
            engine: Engine::new(params, now),
            continuity: Continuity::default(),
            presence: Presence::default(),
            plant: None,
            seq: 0,
            names: Vec::new(),
        };
        Self(Arc::new(Shared {
            sim: sim.clone(),
            state: Mutex::new(state),
            batches: broadcast::channel(4096).0,
            forgets: AtomicBool::new(false),
            down: AtomicBool::new(false),
            ahead_ms: AtomicU64::new(0),
            cut: watch::channel(false).0,
        }))
    }

    /// Sets whether the journal cannot be written.
    pub(crate) fn set_down(&self, down: bool) {
        self.0.down.store(down, Ordering::Relaxed);
    }

    /// Disconnects the operator, or reconnects it.
    pub(crate) fn set_cut(&self, cut: bool) {
        self.0.cut.send_replace(cut);
    }

    /// Moves the market's clock forward.
    pub(crate) fn step_clock(&self, ms: u64) {
        self.0.ahead_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// Wall time of the market.
    pub(crate) fn now(&self) -> Time {
        let ahead = self.0.ahead_ms.load(Ordering::Relaxed);
        Time(u64::try_from(self.0.sim.clock().now().0).unwrap() + ahead)
    }

    /// Subscribes to the events of later commands.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Batch> {
        self.0.batches.subscribe()
    }

    /// Number of a tenant that trades without an operator, and the key of its only owner.
    pub(crate) fn outsider(&self, name: &str) -> (TenantNo, OwnerKey) {
        let mut state = self.0.state.lock().unwrap();
        (TenantNo(state.number(name)), state.owner(name))
    }

    /// Reads the engine.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Engine) -> T) -> T {
        look(&self.0.state.lock().unwrap().engine)
    }

    /// Injects a defect.
    pub(crate) fn inject_defect(&self, plant: MarketDefect) {
        self.0.state.lock().unwrap().plant = Some(plant);
    }

    /// Applies the report of a supplier.
    pub(crate) fn observe(&self, supplier: SupplierNo, epoch: u64, machines: &[Machine]) {
        if self.0.down.load(Ordering::Relaxed) {
            return;
        }
        let now = self.now();
        let commands = {
            let mut state = self.0.state.lock().unwrap();
            state.presence.heard(supplier, now);
            let epoch = if state.plant == Some(MarketDefect::NoEpoch) { u64::MAX } else { epoch };
            state.engine.observed(supplier, epoch, machines)
        };
        for command in commands {
            drop(self.apply(command));
        }
    }

    fn reachable(&self) -> Result<(), Status> {
        if *self.0.cut.borrow() { Err(Status::unavailable("cut off")) } else { Ok(()) }
    }

    /// Ends a stream when the operator is disconnected.
    fn until_cut<T: Send + 'static>(&self, frames: impl Stream<Item = T> + Send + 'static) -> Frames<T> {
        let mut cut = self.0.cut.subscribe();
        let cut = async move { drop(cut.wait_for(|cut| *cut).await.map(drop)) };
        Box::pin(frames.take_until(Box::pin(cut)).map(Ok))
    }

    /// Breaks the contract: new streams and queries show no earlier bids, and versions and keys are not checked.
    pub(crate) fn forget(&self) {
        self.0.forgets.store(true, Ordering::Relaxed);
    }

    fn unless_forgotten<T>(&self, all: Vec<T>) -> Vec<T> {
        if self.forgets() { Vec::new() } else { all }
    }

    fn forgets(&self) -> bool {
        self.0.forgets.load(Ordering::Relaxed)
    }

    pub(crate) fn apply(&self, command: Command) -> Result<(Reply, Time), Status> {
        if self.0.down.load(Ordering::Relaxed) {
            return Err(Status::unavailable("the journal cannot be written"));
        }
        let mut events = Vec::new();
        let mut state = self.0.state.lock().unwrap();
        let now = self.now();
        state.own_commands(now, &mut events);
        let reply = state.engine.apply(now, &command, &mut events);
        state.seq += 1;
        if state.plant == Some(MarketDefect::FreesAtOnce) {
            for gone in state.engine.observed(SupplierNo(1), u64::MAX, &[]) {
                state.engine.apply(now, &gone, &mut events);
            }
        }
        // An error only means that no stream is open.
        let _ = self.0.batches.send(Arc::new((state.seq, events)));
        match reply {
            Reply::Refused(refusal) => Err(rejection_status(refusal)),
            reply => Ok((reply, now)),
        }
    }

    /// Facts for comparison: quantities of all bids ever placed, number of all allocations ever made, and of those that have
    /// not ended.
    pub(crate) fn facts(&self) -> Vec<String> {
        let state = self.0.state.lock().unwrap();
        let bids: Vec<_> = state.engine.bids().map(|(_, bid)| bid.units().total()).collect();
        let allocations: Vec<_> = state.engine.allocations().map(|(_, row)| row.state()).collect();
        let live = allocations.iter().filter(|state| **state != AllocationState::Ended).count();
        vec![
            format!("bids placed: {bids:?}"),
            format!("allocations made: {}", allocations.len()),
            format!("allocations left: {live}"),
        ]
    }

    /// Serves calls, advances time and supplies Nodes, until the result is dropped.
    pub(crate) fn serve(&self) -> JoinSet<()> {
        let mut tasks = self.serve_operator();
        tasks.spawn(self.clone().supply(self.0.batches.subscribe()));
        tasks.spawn(self.clone().heartbeats());
        tasks
    }

    /// Serves the operator's calls and advances time, until the result is dropped.
    pub(crate) fn serve_operator(&self) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let (incoming, market) = (self.0.sim.network().listen_at(ADDRESS), self.clone());
        tasks.spawn(async move {
            Server::builder()
                .add_service(MarketServer::new(market.clone()))
                .add_service(TradingServer::new(market))
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        tasks.spawn(self.clone().pass_time());
        tasks
    }

    async fn pass_time(self) {
        let mut changes = self.0.batches.subscribe();
        loop {
            let due = self.read(Engine::next_due).since_ms(self.now()).clamp(1, TICK_MS);
            tokio::select! {
                () = elapse(Duration::from_millis(due)) => drop(self.apply(Command::Tick)),
                // The next due time may have changed.
                _ = changes.recv() => {}
            }
        }
    }

    async fn heartbeats(self) {
        loop {
            elapse(HEARTBEAT).await;
            self.0.state.lock().unwrap().presence.heard(SUPPLIER, self.now());
        }
    }

    /// Built-in supplier whose machines start and end at once.
    async fn supply(self, mut batches: broadcast::Receiver<Batch>) {
        let mut nodes: std::collections::BTreeMap<AllocationId, Box<str>> = std::collections::BTreeMap::new();
        while batches.recv().await.is_ok() {
            let (epoch, desired) =
                self.read(|engine| (engine.epoch(), engine.desired(SUPPLIER).collect::<Vec<_>>()));
            for one in desired.iter().filter(|one| one.until.is_none()) {
                if nodes.contains_key(&one.allocation) {
                    continue;
                }
                let labels = self.labels(one.allocation);
                let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
                let client = self.0.sim.client();
                let owner = (&*label(names::BIDNODE), &*label(names::NAMESPACE));
                let node =
                    register(&client, owner, "us-west-2", &allocation_name(one.allocation)).await.unwrap();
                set_ready_at(&client, &node, true, self.0.sim.clock().timestamp()).await;
                nodes.insert(one.allocation, node.into());
            }
            let machine = |one: &coracle_auction::Desired| {
                let node = nodes.get(&one.allocation)?.clone();
                let state = MachineState::Ready { node };
                Some(Machine { lot: one.lot, slot: one.slot, allocation: one.allocation, state })
            };
            self.observe(SUPPLIER, epoch, &desired.iter().filter_map(machine).collect::<Vec<_>>());
        }
    }

    /// Labels of the bid of an allocation.
    pub(crate) fn labels(&self, allocation: AllocationId) -> std::collections::BTreeMap<String, String> {
        self.read(|engine| {
            let bid = engine.allocation(allocation).and_then(|row| engine.bid(engine.bid_of(row)));
            let labels = bid.map(|bid| bid.labels().to_vec()).unwrap_or_default();
            labels.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
        })
    }

    /// Executes a command of the controller and converts the reply.
    async fn execute_command(&self, call: &str, command: Command) -> Result<Response<pb::BidReply>, Status> {
        let done = self.reachable().and_then(|()| self.apply(command));
        let reply = done.and_then(|(reply, at)| match reply {
            Reply::Bid { bid, owner_version, replayed, below_reserve } => Ok(Response::new(pb::BidReply {
                bid: format!("bid-{bid}"),
                owner_version,
                replayed,
                below_reserve,
                at_ms: ms(at),
            })),
            _ => Err(Status::internal("a reply without a bid")),
        });
        self.0.sim.after_call(call).await;
        reply
    }
}

type Frames<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
