//! Simulated host: a supplier whose machines outlive its daemon.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use coracle_api::bidnode::names;
use coracle_auction::{
    AllocationId, AllocationState, Command, EndReason, Event, Fault, LotNo, Machine, MachineState,
    SupplierNo, Time,
};
use coracle_reconcile::WallTime as _;
use coracle_testkit::{elapse, sim::Sim};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tokio::{sync::watch, task::JoinSet, time::interval};

use crate::{
    sim_market::{Batch, SimMarket, allocation_name},
    supplier::{register, set_ready_at},
};

/// Notice time of every lot, in milliseconds.
pub(crate) const NOTICE_MS: u64 = 60_000;
/// Time before a deadline, in milliseconds: an operator that runs at least so long must have cordoned the Node.
const CORDON_MS: u64 = 25_000;
/// Time between reports without a change.
const REPORT: Duration = Duration::from_secs(5);
/// Resolution of the host's deadlines and of message delivery.
const CLOCK: Duration = Duration::from_millis(500);
/// Longest delay of a change on its way to a host, in milliseconds.
const WAY_MS: u64 = 4_000;

/// Injected defect of a host, to check that the tests find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostDefect {
    /// A machine whose launch failed is not ended.
    KeepsFailedLaunch,
    /// Machines that the complete set lacks after a reconnect keep running.
    KeepsUnknown,
}

/// Random number generator of one peer: splitmix64.
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

/// Violations found in a run, and facts that decide whether something is a violation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Arc<Mutex<Noted>>);

#[derive(Debug, Default)]
struct Noted {
    found: Vec<String>,
    /// Time since when the operator runs and reaches the market; `None`: it does not.
    operator_since: Option<Time>,
    /// Whether a host is away for so long that losing its allocations is correct.
    expects_lost_allocations: bool,
}

impl Watch {
    pub(crate) fn add_finding(&self, what: String) {
        self.0.lock().unwrap().found.push(what);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().found)
    }

    pub(crate) fn operator(&self, since: Option<Time>) {
        self.0.lock().unwrap().operator_since = since;
    }

    pub(crate) fn expects_lost_allocations(&self) {
        self.0.lock().unwrap().expects_lost_allocations = true;
    }

    pub(crate) fn is_lost_right(&self) -> bool {
        self.0.lock().unwrap().expects_lost_allocations
    }

    fn operator_since(&self) -> Option<Time> {
        self.0.lock().unwrap().operator_since
    }
}

/// Machine of the host.
#[derive(Clone, Debug)]
struct Running {
    slot: u32,
    node: Option<String>,
    state: MachineState,
    until: Option<Time>,
}

/// Entry of the desired set that is on its way to the host.
#[derive(Clone, Debug)]
struct Change {
    allocation: AllocationId,
    /// Slot, end and labels; `None`: the allocation left the set.
    entry: Option<(u32, Option<Time>, BTreeMap<String, String>)>,
    epoch: u64,
    at: Time,
}

/// Simulated host; clones share its state.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) no: u32,
    slots: u32,
    sim: Sim,
    market: SimMarket,
    watch: Watch,
    machines: Arc<Mutex<BTreeMap<AllocationId, Running>>>,
    random: Arc<Mutex<Random>>,
    cut: watch::Sender<bool>,
    slip: Option<HostDefect>,
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
            slip: None,
        }
    }

    /// Injects a defect.
    pub(crate) fn inject_defect(&mut self, slip: HostDefect) {
        self.slip = Some(slip);
    }

    /// Makes a running machine die.
    pub(crate) fn kill_machine(&self) {
        let by = if self.draw(2) == 0 { Fault::Guest } else { Fault::Host };
        let mut machines = self.machines.lock().unwrap();
        let ready = |m: &&mut Running| matches!(m.state, MachineState::Ready { .. });
        if let Some(machine) = machines.values_mut().find(ready) {
            machine.state = MachineState::Died { by };
        }
    }

    /// Disconnects the host from the market, or reconnects it.
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

    fn report(&self, epoch: u64) {
        let machines: Vec<_> = {
            let machines = self.machines.lock().unwrap();
            let one = |(id, m): (&AllocationId, &Running)| Machine {
                lot: LotNo(self.no),
                slot: m.slot,
                allocation: *id,
                state: m.state.clone(),
            };
            machines.iter().map(one).collect()
        };
        self.market.observe(SupplierNo(self.no), epoch, &machines);
    }

    /// Runs the host's daemon until it is killed. A new daemon finds the existing machines.
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
            let (mut epoch, set) = self.complete_set();
            self.converge(&set, &mut jobs);
            for change in set {
                self.obey(change, &mut jobs);
            }
            let (mut beat, mut clock) = (interval(REPORT), interval(CLOCK));
            let mut coming: VecDeque<Change> = VecDeque::new();
            loop {
                tokio::select! {
                    () = async { drop(cut.wait_for(|cut| *cut).await.map(drop)) } => break,
                    batch = batches.recv() => {
                        let Ok(batch) = batch else { break };
                        coming.extend(self.changes(&batch));
                    }
                    _ = beat.tick() => self.report(epoch),
                    _ = clock.tick() => {
                        self.end_due(&mut jobs);
                        let now = self.market.now();
                        let before = epoch;
                        while let Some(change) = coming.pop_front_if(|change| change.at <= now) {
                            epoch = change.epoch;
                            self.obey(change, &mut jobs);
                        }
                        if epoch != before {
                            self.report(epoch);
                        }
                    }
                    Some(_) = jobs.join_next() => self.report(epoch),
                }
            }
        }
    }

    fn complete_set(&self) -> (u64, Vec<Change>) {
        let (epoch, all) = self
            .market
            .read(|engine| (engine.epoch(), engine.desired(SupplierNo(self.no)).collect::<Vec<_>>()));
        let entry = |one: coracle_auction::Desired| Change {
            allocation: one.allocation,
            entry: Some((one.slot, one.until, self.market.labels(one.allocation))),
            epoch,
            at: Time(0),
        };
        (epoch, all.into_iter().map(entry).collect())
    }

    /// Changes of the desired set in a batch, with the present entries, each with a delivery delay.
    fn changes(&self, batch: &Batch) -> Vec<Change> {
        let at = self.market.now().plus_ms(self.draw(WAY_MS));
        let own = batch.1.iter().filter_map(|event| match event {
            Event::Desired { supplier, lot, slot, allocation, epoch, .. } if supplier.0 == self.no => {
                let found = self.market.read(|engine| engine.desired_at(*lot, *slot, *allocation));
                let entry = found.map(|one| (one.slot, one.until, self.market.labels(*allocation)));
                Some(Change { allocation: *allocation, entry, epoch: *epoch, at })
            }
            _ => None,
        });
        own.collect()
    }

    /// Ends machines that a complete set lacks.
    fn converge(&self, set: &[Change], jobs: &mut JoinSet<()>) {
        if self.slip == Some(HostDefect::KeepsUnknown) {
            return;
        }
        let unknown: Vec<_> = {
            let machines = self.machines.lock().unwrap();
            let known = |id: &AllocationId| set.iter().any(|change| change.allocation == *id);
            machines.keys().filter(|id| !known(id)).copied().collect()
        };
        for allocation in unknown {
            jobs.spawn(self.clone().end(allocation));
        }
    }

    fn obey(&self, change: Change, jobs: &mut JoinSet<()>) {
        let allocation = change.allocation;
        let Some((slot, until, labels)) = change.entry else {
            let failed = {
                let machines = self.machines.lock().unwrap();
                machines.get(&allocation).is_some_and(|m| m.state == MachineState::Starting)
            };
            if !(failed && self.slip == Some(HostDefect::KeepsFailedLaunch)) {
                jobs.spawn(self.clone().end(allocation));
            }
            return;
        };
        let mut machines = self.machines.lock().unwrap();
        if let Some(machine) = machines.get_mut(&allocation) {
            machine.until = until;
            if matches!(machine.state, MachineState::Ready { .. } | MachineState::Died { .. }) {
                return;
            }
        } else {
            let other = machines.iter().find(|(_, m)| m.slot == slot);
            if let Some((other, _)) = other {
                let no = self.no;
                self.watch.add_finding(format!("two machines in slot {no}/{slot}: {other} and {allocation}"));
            }
            let fresh = Running { slot, node: None, state: MachineState::Starting, until };
            machines.insert(allocation, fresh);
        }
        jobs.spawn(self.clone().start(allocation, labels));
    }

    fn has(&self, allocation: AllocationId) -> bool {
        self.machines.lock().unwrap().contains_key(&allocation)
    }

    async fn start(self, allocation: AllocationId, labels: BTreeMap<String, String>) {
        let slow = self.draw(8) == 0;
        // Start time of a machine; a slow one misses its deadline.
        elapse(Duration::from_millis(if slow { 70_000 } else { 500 + self.draw(6_000) })).await;
        if !self.has(allocation) {
            return;
        }
        let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
        let (bidnode, namespace) = (label(names::BIDNODE), label(names::NAMESPACE));
        let client = self.sim.client();
        let mut node = format!("other-{allocation}");
        if !bidnode.is_empty() {
            let owner = (bidnode.as_str(), namespace.as_str());
            let allocation = allocation_name(allocation);
            let Ok(name) = register(&client, owner, "us-west-2", &allocation).await else { return };
            set_ready_at(&client, &name, true, self.sim.clock().timestamp()).await;
            node = name;
        }
        if let Some(machine) = self.machines.lock().unwrap().get_mut(&allocation) {
            machine.state = MachineState::Ready { node: node.as_str().into() };
            machine.node = (!bidnode.is_empty()).then_some(node);
        }
    }

    fn end_due(&self, jobs: &mut JoinSet<()>) {
        let now = self.market.now();
        let due: Vec<_> = {
            let machines = self.machines.lock().unwrap();
            let stays =
                |m: &Running| m.state == MachineState::Stopping || m.until.is_none_or(|until| until > now);
            machines.iter().filter(|(_, m)| !stays(m)).map(|(id, _)| *id).collect()
        };
        for allocation in due {
            jobs.spawn(self.clone().end(allocation));
        }
    }

    async fn end(self, allocation: AllocationId) {
        let node = match self.machines.lock().unwrap().get_mut(&allocation) {
            Some(machine) => {
                machine.state = MachineState::Stopping;
                machine.node.clone()
            }
            None => return,
        };
        if let Some(node) = node {
            self.check_notice(allocation, &node).await;
        }
        // Time of the guest's shutdown.
        elapse(Duration::from_millis(200 + self.draw(5_000))).await;
        let Some(machine) = self.machines.lock().unwrap().remove(&allocation) else { return };
        if let Some(node) = machine.node {
            set_ready_at(&self.sim.client(), &node, false, self.sim.clock().timestamp()).await;
        }
    }

    /// Checks that a Node was cordoned before its machine ends by a preemption, if the operator was running.
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
            self.watch.add_finding(format!("machine of {allocation} ends without notice to its node"));
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
