//! Whole system in one simulation: a market, three hosts, the operator, a rival tenant and workload, with faults from one seed.
//! At the end the machines match the allocations, and the charges add up.

use std::{
    collections::BTreeMap,
    num::NonZero,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use coracle_api::BidNode;
use coracle_auction::{
    AllocationId, BidId, BidRequest, ChargeReason, Command, EndReason, Event, Price, ReleaseReason, Reply,
    Time,
};
use coracle_bidnode::{Config, MarketAt, Times};
use coracle_testkit::{elapse, sim::Sim};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, CustomResourceExt as _, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    sim_host::{Host, HostDefect, NOTICE_MS, Random, Watch, wanted},
    sim_market::{ADDRESS, MarketDefect, MemoryConnect, SimMarket},
    world::{CLUSTER, create_in},
};

const NS: &str = "team";
/// Number of faults in one run.
const FAULTS: usize = 8;
/// Number of seeds in which an injected defect must be found.
const PLANT_SEEDS: u64 = 40;
/// Time after the last fault in which the system must converge.
const SETTLE: Duration = Duration::from_secs(420);
/// Longest absence after which a supplier keeps its allocations, in seconds.
const AWAY_MAX_S: u64 = 90;

/// Number of runs of a test: `CORACLE_SEEDS`, or 20.
fn seeds() -> u64 {
    std::env::var("CORACLE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(20)
}

/// System of one run.
struct System {
    sim: Sim,
    market: SimMarket,
    watch: Watch,
    hosts: Vec<Host>,
    daemons: Vec<AbortHandle>,
    operator: Option<AbortHandle>,
    random: Random,
    rival: Option<BidId>,
    tasks: JoinSet<()>,
}

impl System {
    async fn start(sim: Sim, mistake: InjectedDefect) -> anyhow::Result<Self> {
        sim.prepare(&[BidNode::crd()], NS);
        let market = SimMarket::without_supply(&sim, NOTICE_MS);
        let watch = Watch::default();
        let mut tasks = market.serve_operator();
        tasks.spawn(workload(sim.clone()));
        tasks.spawn(audit(market.clone(), watch.clone()));
        let mut hosts: Vec<_> = (1..=3).map(|no| Host::new(&sim, &market, &watch, no, 2)).collect();
        match mistake {
            InjectedDefect::None => {}
            InjectedDefect::Market(plant) => market.inject_defect(plant),
            InjectedDefect::Host(slip) => hosts.iter_mut().for_each(|host| host.inject_defect(slip)),
        }
        let daemons = hosts.iter().map(|host| tasks.spawn(host.clone().run())).collect();
        let random = Random(sim.seed());
        let mut system =
            Self { sim, market, watch, hosts, daemons, operator: None, random, rival: None, tasks };
        system.start_operator();
        create_in(&system.sim.client(), NS, "pool", |object| object.spec.max_nodes = 4).await?;
        Ok(system)
    }

    fn start_operator(&mut self) {
        let mut config = Config::new(MarketAt {
            url: format!("http://{ADDRESS}"),
            token: "token".into(),
            ca: None,
            token_file: None,
            cluster: CLUSTER.into(),
            rate: 1000,
        });
        config.connect = Arc::new(MemoryConnect(self.sim.clone()));
        config.times = Times::default().divide(5);
        config.clock = self.sim.clock();
        let client = self.sim.client();
        self.operator = Some(self.tasks.spawn(async move {
            let _ = coracle_bidnode::run(client, config, CancellationToken::new()).await;
        }));
        self.watch.operator(Some(self.market.now()));
    }

    /// Advances time by a random duration, for the length of faults and the pauses between them.
    async fn wait(&mut self, from_s: u64, to_s: u64) {
        elapse(Duration::from_secs(from_s + self.random.below(to_s - from_s))).await;
    }

    /// Waits for the duration of a fault. The rival may trade meanwhile.
    async fn wait_for_fault(&mut self, from_s: u64, to_s: u64) {
        if self.random.below(2) == 0 {
            elapse(Duration::from_secs(1)).await;
            self.rival();
        }
        self.wait(from_s, to_s).await;
    }

    async fn fault(&mut self) {
        let host = usize::try_from(self.random.below(3)).unwrap();
        match self.random.below(10) {
            0 => {
                self.daemons[host].abort();
                self.wait_for_fault(2, AWAY_MAX_S).await;
                self.daemons[host] = self.tasks.spawn(self.hosts[host].clone().run());
            }
            1 => {
                self.hosts[host].set_cut(true);
                self.wait_for_fault(2, AWAY_MAX_S).await;
                self.hosts[host].set_cut(false);
            }
            2 | 8 => {
                self.operator.take().into_iter().for_each(|task| task.abort());
                self.watch.operator(None);
                self.wait_for_fault(2, 40).await;
                self.start_operator();
            }
            3 | 9 => {
                self.market.set_cut(true);
                self.watch.operator(None);
                self.wait_for_fault(2, 40).await;
                self.market.set_cut(false);
                self.watch.operator(Some(self.market.now()));
            }
            4 => {
                self.market.set_down(true);
                self.watch.operator(None);
                self.wait_for_fault(5, 300).await;
                self.market.set_down(false);
                self.watch.operator(Some(self.market.now()));
            }
            5 => {
                let ahead = 1_000 + self.random.below(300_000);
                self.market.step_clock(ahead);
                self.watch.operator(Some(self.market.now()));
            }
            6 => self.resize().await,
            7 if self.random.below(2) == 0 => self.hosts[host].kill_machine(),
            _ => self.rival(),
        }
    }

    async fn resize(&mut self) {
        let wanted = json!({"spec": {"minNodes": 1 + self.random.below(3)}});
        let objects: Api<BidNode> = Api::namespaced(self.sim.client(), NS);
        drop(objects.patch("pool", &PatchParams::default(), &Patch::Merge(wanted)).await);
    }

    /// Makes the rival bid above all others for most of the capacity, or cancel its bid.
    fn rival(&mut self) {
        let (tenant, owner) = self.market.outsider("rival");
        if let Some(bid) = self.rival.take() {
            let own: Vec<AllocationId> =
                self.market.read(|engine| engine.allocations_of(bid).map(|(id, _)| id).collect());
            drop(self.market.apply(Command::Cancel { tenant, bid, if_owner_version: None }));
            for allocation in own {
                drop(self.market.apply(Command::Release {
                    tenant,
                    allocation,
                    if_owner_version: None,
                    reason: ReleaseReason::Unneeded,
                }));
            }
            return;
        }
        let request = BidRequest {
            tenant,
            owner,
            if_owner_version: None,
            key: [0; 16],
            body: 0,
            limit: Price::micros(7_000_000),
            quantity: [5, 5, 3, 6][usize::try_from(self.random.below(4)).unwrap()],
            min_fill: 0,
            lease_ms: 86_400_000,
            expires_at: None,
            labels: Vec::new(),
        };
        if let Ok((Reply::Bid { bid, .. }, _)) =
            self.market.apply(Command::Place { request: Box::new(request) })
        {
            self.rival = Some(bid);
        }
    }

    /// Compares machines with allocations.
    fn check(&self) {
        let mut machines: Vec<_> = self.hosts.iter().flat_map(Host::inventory).collect();
        let mut wanted = wanted(&self.market);
        machines.sort();
        wanted.sort();
        if machines != wanted {
            self.watch.add_finding(format!("machines {machines:?} and allocations {wanted:?} differ"));
        }
    }
}

/// Creates pods on every second free Node, and removes them when they are evicted.
async fn workload(sim: Sim) {
    let (nodes, pods): (Api<Node>, Api<Pod>) = (Api::all(sim.client()), Api::namespaced(sim.client(), NS));
    let mut random = Random(sim.seed() + 7);
    let mut seen: BTreeMap<String, bool> = BTreeMap::new();
    loop {
        // Typical interval of a scheduler.
        elapse(Duration::from_secs(3)).await;
        let Ok(list) = nodes.list(&ListParams::default()).await else { continue };
        for node in
            list.items.iter().filter(|n| n.spec.as_ref().is_none_or(|s| s.unschedulable != Some(true)))
        {
            let name = node.name_any();
            if seen.contains_key(&name) || random.below(2) == 0 && seen.insert(name.clone(), false).is_none()
            {
                continue;
            }
            seen.insert(name.clone(), true);
            let pod = serde_json::from_value(json!({
                "metadata": {"name": format!("on-{name}")},
                "spec": {"nodeName": name, "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "x"}]},
            }));
            drop(pods.create(&PostParams::default(), &pod.unwrap()).await);
        }
    }
}

/// Reads all events and checks that charges are contiguous and add up, and that no allocation is lost while its host is
/// connected.
async fn audit(market: SimMarket, watch: Watch) {
    let mut batches = market.subscribe();
    let mut charged: BTreeMap<AllocationId, (Time, i128)> = BTreeMap::new();
    while let Ok(batch) = batches.recv().await {
        for event in &batch.1 {
            match event {
                Event::Charge { allocation, from, to, price, reason, .. } => {
                    let (end, sum) = charged.entry(*allocation).or_insert((*from, 0));
                    if *reason == ChargeReason::Usage && *from != *end {
                        watch.add_finding(format!("charges of {allocation} have a gap or overlap"));
                    }
                    let sign = if *reason == ChargeReason::Refund { -1 } else { 1 };
                    if *reason == ChargeReason::Usage {
                        *end = *to;
                    }
                    *sum += sign * i128::from(price.as_micros()) * i128::from(to.since_ms(*from));
                }
                Event::Allocation { allocation, .. } => {
                    let row = market.read(|engine| engine.allocation(*allocation).cloned());
                    let Some(row) = row.filter(|row| row.ended_at().is_some()) else { continue };
                    if row.reason() == Some(EndReason::CapacityLost) && !watch.is_lost_right() {
                        watch.add_finding(format!("{allocation} was lost and its host was there"));
                    }
                    let sum = charged.get(allocation).map_or(0, |(_, sum)| *sum);
                    if row.charged().0 != sum {
                        watch.add_finding(format!(
                            "charges of {allocation} sum up to {sum}, not {}",
                            row.charged().0
                        ));
                    }
                }
                _ => {}
            }
        }
    }
    watch.add_finding("the audit missed events".to_owned());
}

/// Scenario of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// Random faults.
    Faults,
    /// The operator is down when a notice comes, and returns before the deadline.
    LateOperator,
    /// A host is disconnected for so long that its allocations are lost, and returns with its machines.
    LostHost,
    /// Bids come and go faster than a change reaches a host.
    Flicker,
}

/// Defect that the simulation must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InjectedDefect {
    None,
    Market(MarketDefect),
    Host(HostDefect),
}

async fn script(sim: Sim, course: Course, mistake: InjectedDefect, out: Watch) -> anyhow::Result<()> {
    let mut system = System::start(sim, mistake).await?;
    system.wait(30, 31).await;
    match course {
        Course::Faults => {
            for _ in 0..FAULTS {
                system.fault().await;
                system.wait(2, 45).await;
            }
        }
        Course::LateOperator => {
            system.operator.take().into_iter().for_each(|task| task.abort());
            system.watch.operator(None);
            system.rival();
            system.wait(18, 25).await;
            system.start_operator();
        }
        Course::Flicker => {
            for _ in 0..12 {
                system.rival();
                elapse(Duration::from_millis(500 + system.random.below(1_500))).await;
            }
        }
        Course::LostHost => {
            system.watch.expects_lost_allocations();
            system.hosts[0].set_cut(true);
            system.wait(130, 200).await;
            system.hosts[0].set_cut(false);
        }
    }
    elapse(SETTLE).await;
    system.check();
    system.watch.take().into_iter().for_each(|what| out.add_finding(what));
    Ok(())
}

/// Runs one seed and returns the violations.
fn simulate(seed: u64, course: Course, mistake: InjectedDefect) -> Vec<String> {
    let found = Watch::default();
    let out = found.clone();
    Sim::run(seed, |sim| script(sim, course, mistake, out));
    found.take()
}

#[test]
fn system_keeps_its_promises_under_faults() {
    // The long scenario for each seed, the others for the first seeds.
    let long = (1..=seeds()).map(|seed| (seed, Course::Faults));
    let others = [Course::LateOperator, Course::LostHost, Course::Flicker];
    let short = (1..=seeds().div_ceil(4)).flat_map(|seed| others.map(|course| (seed, course)));
    let runs: Vec<_> = long.chain(short).collect();
    let (next, broken) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let run = next.fetch_add(1, Ordering::Relaxed);
            let Some((seed, course)) = runs.get(run) else { return };
            if run > 0 && run.is_multiple_of(100) {
                eprintln!("run {run} of {}", runs.len());
            }
            for what in simulate(*seed, *course, InjectedDefect::None) {
                let what = format!("{course:?} {seed}: {what}");
                eprintln!("{what}");
                broken.lock().unwrap().push(what);
            }
        }
    };
    // Each run has a runtime and a clock of its own.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(work);
        }
    });
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Mutation test: each of these defects is found. Otherwise the test above proves nothing.
#[test]
fn simulation_finds_planted_mistakes() {
    let missed: Vec<_> = [
        (Course::Faults, InjectedDefect::Host(HostDefect::KeepsFailedLaunch), "differ"),
        (Course::Faults, InjectedDefect::Market(MarketDefect::FreesAtOnce), "two machines in slot"),
        (Course::Faults, InjectedDefect::Host(HostDefect::KeepsUnknown), "differ"),
        (Course::LostHost, InjectedDefect::Host(HostDefect::KeepsUnknown), "differ"),
        (Course::Flicker, InjectedDefect::Market(MarketDefect::NoEpoch), "two machines in slot"),
        (
            Course::Faults,
            InjectedDefect::Market(MarketDefect::ForgetsStandstill),
            "was lost and its host was there",
        ),
        (Course::LateOperator, InjectedDefect::Market(MarketDefect::HidesNotice), "without notice"),
    ]
    .into_iter()
    .filter(|(course, mistake, sign)| {
        let finds = |seed: &u64| simulate(*seed, *course, *mistake).iter().any(|what| what.contains(sign));
        let found = (1..=PLANT_SEEDS).find(finds);
        eprintln!("{mistake:?} is found at seed {found:?} of {course:?}");
        found.is_none()
    })
    .collect();
    assert!(missed.is_empty(), "{missed:?}");
}
