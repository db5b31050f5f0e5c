//! A host of the simulation: a supplier whose machines outlive its daemon.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use coracle_api::bidnode::names;
use coracle_auction::{
    AllocationId, AllocationState, Command, EndReason, LotNo, SupplierNo, SupplierReport, Time,
};
use coracle_reconcile::WallTime as _;
use coracle_testkit::{elapse, sim::Sim};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tokio::{sync::watch, task::JoinSet, time::interval};

use crate::{
    sim_market::{SimMarket, allocation_name},
    sim_orders::{self, Order},
    supplier::{register, set_ready_at},
};

/// Notice of every lot, in milliseconds.
pub(crate) const NOTICE_MS: u64 = 60_000;
/// A controller that is there for so long before a deadline has cordoned the Node, in milliseconds.
const CORDON_MS: u64 = 25_000;
/// Time between heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Precision of its deadlines.
const CLOCK: Duration = Duration::from_millis(500);

/// Random numbers of one peer: splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Broken promises of a run, and facts that decide whether something is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Arc<Mutex<Noted>>);

#[derive(Debug, Default)]
struct Noted {
    found: Vec<String>,
    /// Since when the operator runs and reaches the market; `None`: it does not.
    operator_since: Option<Time>,
}

impl Watch {
    pub(crate) fn found(&self, what: String) {
        self.0.lock().unwrap().found.push(what);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().found)
    }

    pub(crate) fn operator(&self, since: Option<Time>) {
        self.0.lock().unwrap().operator_since = since;
    }

    fn operator_since(&self) -> Option<Time> {
        self.0.lock().unwrap().operator_since
    }
}

#[derive(Clone, Debug)]
struct Machine {
    slot: u32,
    node: Option<String>,
    ready: bool,
    until: Option<Time>,
}

/// One host. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) no: u32,
    slots: u32,
    sim: Sim,
    market: SimMarket,
    watch: Watch,
    machines: Arc<Mutex<BTreeMap<AllocationId, Machine>>>,
    random: Arc<Mutex<Random>>,
    cut: watch::Sender<bool>,
}

impl Host {
    pub(crate) fn new(sim: &Sim, market: &SimMarket, watch: &Watch, no: u32, slots: u32) -> Self {
        Self {
            no,
            slots,
            sim: sim.clone(),
            market: market.clone(),
            watch: watch.clone(),
            machines: Arc::default(),
            random: Arc::new(Mutex::new(Random(sim.seed() ^ u64::from(no) << 32))),
            cut: watch::channel(false).0,
        }
    }

    /// Cuts it off from the market, or connects it again.
    pub(crate) fn set_cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }

    /// Machines that exist, as `host/slot allocation`.
    pub(crate) fn inventory(&self) -> Vec<String> {
        let machines = self.machines.lock().unwrap();
        machines.iter().map(|(id, m)| format!("{}/{} {id}", self.no, m.slot)).collect()
    }

    fn draw(&self, n: u64) -> u64 {
        self.random.lock().unwrap().below(n)
    }

    fn report(&self, allocation: AllocationId, report: SupplierReport) {
        if !*self.cut.borrow() {
            drop(self.market.apply(Command::Report { allocation, report }));
        }
    }

    /// The daemon, until it is killed. It finds its machines again.
    pub(crate) async fn run(self) {
        let mut cut = self.cut.subscribe();
        loop {
            let connected = cut.wait_for(|cut| !*cut).await.is_ok();
            if !connected {
                return;
            }
            let supplier = SupplierNo(self.no);
            let mut batches = self.market.subscribe();
            let lot =
                Command::PutLot { lot: LotNo(self.no), supplier, slots: self.slots, notice_ms: NOTICE_MS };
            if self.market.apply(lot).is_err() {
                elapse(Duration::from_secs(1)).await;
                continue;
            }
            let mut jobs = JoinSet::new();
            for order in self.market.read(|engine| sim_orders::outstanding(engine, supplier)) {
                self.obey(order, &mut jobs);
            }
            let (mut beat, mut clock) = (interval(HEARTBEAT), interval(CLOCK));
            loop {
                tokio::select! {
                    () = async { drop(cut.wait_for(|cut| *cut).await.map(drop)) } => break,
                    batch = batches.recv() => {
                        let Ok(batch) = batch else { break };
                        let orders = self.market.read(|engine| sim_orders::in_events(engine, &batch.1, supplier));
                        orders.into_iter().for_each(|order| self.obey(order, &mut jobs));
                    }
                    _ = beat.tick() => {
                        drop(self.market.apply(Command::Heartbeat { supplier }));
                    }
                    _ = clock.tick() => self.end_due().await,
                    Some(_) = jobs.join_next() => {}
                }
            }
        }
    }

    fn obey(&self, order: Order, jobs: &mut JoinSet<()>) {
        let mut machines = self.machines.lock().unwrap();
        match order {
            Order::Launch { allocation, slot, labels } => {
                let other = machines.iter().find(|(id, m)| m.slot == slot && **id != allocation);
                if let Some((other, _)) = other {
                    self.watch
                        .found(format!("two machines in slot {}/{slot}: {other} and {allocation}", self.no));
                }
                let fresh = Machine { slot, node: None, ready: false, until: None };
                machines.entry(allocation).or_insert(fresh);
                jobs.spawn(self.clone().start(allocation, labels));
            }
            Order::Reclaim { allocation, deadline } => {
                if let Some(machine) = machines.get_mut(&allocation) {
                    machine.until = Some(deadline);
                }
            }
            Order::Spare { allocation } => {
                if let Some(machine) = machines.get_mut(&allocation) {
                    machine.until = None;
                }
            }
        }
    }

    fn has(&self, allocation: AllocationId) -> bool {
        self.machines.lock().unwrap().contains_key(&allocation)
    }

    async fn start(self, allocation: AllocationId, labels: BTreeMap<String, String>) {
        let slow = self.draw(8) == 0;
        // The time that a machine takes to start; a slow one misses its deadline.
        elapse(Duration::from_millis(if slow { 70_000 } else { 500 + self.draw(6_000) })).await;
        if !self.has(allocation) {
            return;
        }
        self.report(allocation, SupplierReport::Launched);
        let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
        let (bidnode, namespace) = (label(names::BIDNODE), label(names::NAMESPACE));
        let client = self.sim.client();
        let mut node = format!("other-{allocation}");
        if !bidnode.is_empty() {
            let owner = (bidnode.as_str(), namespace.as_str());
            let Ok(name) = register(&client, owner, "us-west-2", &allocation_name(allocation)).await else {
                return;
            };
            set_ready_at(&client, &name, true, self.sim.clock().timestamp()).await;
            node = name;
        }
        self.report(allocation, SupplierReport::Registered { node: node.as_str().into() });
        self.report(allocation, SupplierReport::Ready);
        if let Some(machine) = self.machines.lock().unwrap().get_mut(&allocation) {
            machine.ready = true;
            machine.node = (!bidnode.is_empty()).then_some(node);
        }
    }

    async fn end_due(&self) {
        let now = self.market.now();
        let due: Vec<_> = {
            let machines = self.machines.lock().unwrap();
            machines.iter().filter(|(_, m)| m.until.is_some_and(|t| t <= now)).map(|(id, _)| *id).collect()
        };
        for allocation in due {
            self.end(allocation).await;
        }
    }

    async fn end(&self, allocation: AllocationId) {
        let Some(machine) = self.machines.lock().unwrap().remove(&allocation) else { return };
        if let Some(node) = machine.node {
            self.check_notice(allocation, &node).await;
            set_ready_at(&self.sim.client(), &node, false, self.sim.clock().timestamp()).await;
        }
        self.report(allocation, SupplierReport::Died);
    }

    /// A Node whose machine ends by a preemption was cordoned before, when the operator was there.
    async fn check_notice(&self, allocation: AllocationId, node: &str) {
        let until = self.market.read(|engine| {
            let row = engine.allocation(allocation)?;
            row.preempt_at().filter(|_| row.reason() == Some(EndReason::Preempted))
        });
        let nodes: Api<Node> = Api::all(self.sim.client());
        let Some(until) = until.filter(|until| self.market.now() >= *until) else { return };
        let Ok(Some(node)) = nodes.get_opt(node).await else { return };
        let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
        let told = taints.iter().any(|taint| taint.key == names::PREEMPTING);
        let there = self.watch.operator_since().is_some_and(|since| since.plus_ms(CORDON_MS) <= until);
        if there && !told {
            self.watch.found(format!("machine of {allocation} ends without notice to its node"));
        }
    }
}

/// Allocations that must have a machine.
pub(crate) fn wanted(market: &SimMarket) -> Vec<String> {
    use AllocationState::{Active, Preempting, Provisioning};
    market.read(|engine| {
        let live =
            engine.allocations().filter(|(_, row)| matches!(row.state(), Provisioning | Active | Preempting));
        live.map(|(id, row)| format!("{}/{} {id}", row.slot().0.0, row.slot().1)).collect()
    })
}
