//! Tests of the planner as tables: a world as input, names of the steps as output.

mod nodes;
mod trade;

use std::collections::BTreeMap;

use coracle_api::bidnode::{BidNode, BidNodeSpec, BidNodeStatus, BidStrategy, names::annotation};
use coracle_auction::AllocationState;

use super::{demand::Need, *};
use crate::{
    ids::MarketName,
    observe::{
        bids::{Allocation, Bid, Owner},
        facts::{NodeFacts, PodFacts, PodKind},
    },
    settings::{Taint, parse},
    times::Times,
};

const NOW: i64 = 10_000_000;
const HERE: &str = "a100-4x/us-west-2";

fn price(dollars: &str) -> Price {
    Price::parse(dollars).unwrap()
}

/// Planner input with one idle market and nothing bought.
#[derive(Clone)]
struct World {
    object: BidNode,
    owner: Owner,
    quotes: BTreeMap<MarketName, Quote>,
    nodes: Vec<NodeView>,
    need: Need,
    synced: bool,
    fleet_unhealthy: bool,
    default_region: Option<String>,
    times: Times,
}

fn world(min: i32, max: i32) -> World {
    let spec = BidNodeSpec {
        instance_type: "a100-4x".into(),
        region: Some("us-west-2".into()),
        max_bid: 4.5,
        min_nodes: min,
        max_nodes: max,
        ..BidNodeSpec::default()
    };
    let mut object = BidNode::new("ml", spec);
    object.metadata.namespace = Some("team".into());
    object.metadata.finalizers = Some(vec![names::FINALIZER.into()]);
    World {
        object,
        owner: Owner::default(),
        quotes: [(HERE.into(), quote("2", "2", "3.2"))].into(),
        nodes: Vec::new(),
        need: Need::default(),
        synced: true,
        fleet_unhealthy: false,
        default_region: None,
        times: Times::default(),
    }
}

fn quote(reserve: &str, clearing: &str, quote: &str) -> Quote {
    Quote {
        quote: price(quote),
        clearing: price(clearing),
        reserve: price(reserve),
        cap: price("8"),
        tick: Price::micros(100),
        free: 4,
        halted: false,
        next_call_ms: NOW + 1000,
    }
}

impl World {
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn with_annotation(self, key: &str, value: &str) -> Self {
        self.with(|w| {
            drop(w.object.metadata.annotations.get_or_insert_default().insert(key.into(), value.into()))
        })
    }

    fn bid(mut self, id: &str, market: &str, limit: &str, open: u32) -> Self {
        let bid = Bid {
            market: market.into(),
            limit: price(limit),
            open,
            matched: 0,
            provisioning: 0,
            active: 0,
            preempting: 0,
            held: false,
            placed_ms: NOW - 100_000,
        };
        self.owner.bids.insert(id.into(), bid);
        self
    }

    /// Adds an allocation of bid `b`; an active one gets a Ready Node.
    fn allocation(mut self, id: &str, state: AllocationState, paid: &str) -> Self {
        self = if self.owner.bids.contains_key("b") { self } else { self.bid("b", HERE, "2.88", 0) };
        let bid = self.owner.bids.get_mut("b").unwrap();
        *match state {
            AllocationState::Matched => &mut bid.matched,
            AllocationState::Provisioning => &mut bid.provisioning,
            AllocationState::Active => &mut bid.active,
            AllocationState::Preempting => &mut bid.preempting,
            AllocationState::Ended => panic!("ended allocations are not observed"),
        } += 1;
        let allocation = Allocation {
            bid: "b".into(),
            market: bid.market.clone(),
            lot: "lot".into(),
            state,
            limit: bid.limit,
            price: price(paid),
            active_ms: NOW - 1_000_000,
            preempt_ms: if state == AllocationState::Preempting { NOW + 120_000 } else { 0 },
            node: format!("bn-{id}"),
            reason: if state == AllocationState::Preempting { "Preempted".into() } else { String::new() },
            price_to_keep: Price::ZERO,
        };
        self.owner.allocations.insert(id.into(), allocation);
        if matches!(state, AllocationState::Active | AllocationState::Preempting) {
            self.nodes.push(node(id));
        }
        self
    }

    /// Changes the last Node.
    fn node(mut self, change: impl FnOnce(&mut NodeView)) -> Self {
        change(self.nodes.last_mut().unwrap());
        self
    }

    fn plan(&self) -> Plan {
        self.observed(plan)
    }

    fn observed<T>(&self, look: impl FnOnce(&Observed<'_>) -> T) -> T {
        let settings = parse(&self.object, &std::collections::BTreeSet::new());
        look(&Observed {
            object: &self.object,
            settings: settings.as_ref().map_err(String::as_str),
            owner: &self.owner,
            quotes: &self.quotes,
            synced: self.synced,
            default_region: self.default_region.as_deref(),
            nodes: &self.nodes,
            need: &self.need,
            fleet_unhealthy: self.fleet_unhealthy,
            now_ms: NOW,
            times: &self.times,
        })
    }

    fn verbs(&self) -> String {
        let settled = self.plan();
        settled.steps.iter().map(verb).collect::<Vec<_>>().join(" ")
    }
}

/// Node that already has its labels, taints and finalizer.
fn node(id: &str) -> NodeView {
    let labels = [
        (names::BIDNODE, "ml"),
        (names::NAMESPACE, "team"),
        (names::CAPACITY_TYPE, "auction"),
        (names::INSTANCE_TYPE, "a100-4x"),
        (names::REGION, "us-west-2"),
    ];
    NodeView {
        facts: NodeFacts {
            name: format!("bn-{id}"),
            allocation: id.into(),
            ready: true,
            finalizers: vec![NODE_FINALIZER.into()],
            labels: labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            given: r#"{"labels":{},"taints":[]}"#.into(),
            ..NodeFacts::default()
        },
        pods: Vec::new(),
        idle_ms: Some(NOW - 1000),
    }
}

fn pod(name: &str) -> PodFacts {
    PodFacts { name: name.into(), uid: name.into(), grace_s: 30, cost: 1, ..PodFacts::default() }
}

fn verb(step: &Step) -> String {
    let amount = |limit: Option<Price>, units: Option<u32>| {
        let limit = limit.map(|p| format!("@{p}")).unwrap_or_default();
        limit + &units.map(|n| format!("×{n}")).unwrap_or_default()
    };
    match step {
        Step::AddFinalizer => "add-finalizer".into(),
        Step::PlaceBid { limit, quantity, min_fill, .. } => {
            let block = if *min_fill > 1 { "!" } else { "" };
            format!("place{}{block}", amount(Some(*limit), Some(*quantity)))
        }
        Step::AmendBid { bid, limit, units, .. } => format!("amend:{bid}{}", amount(*limit, *units)),
        Step::CancelBid { bid, .. } => format!("cancel:{bid}"),
        Step::ReleaseAllocation(release) => format!("release:{}", release.allocation),
        Step::SubstituteVictim { victim, other } => format!("substitute:{victim}/{other}"),
        Step::PatchNode(change) => format!("patch:{}", change.name),
        Step::NotifyPreemption { change, .. } => format!("notice:{}", change.name),
        Step::DrainNode(change) => format!("drain:{}", change.name),
        Step::EvictPod { name, .. } => format!("evict:{name}"),
        Step::DeletePod { name, .. } => format!("end:{name}"),
        Step::DeleteNode { name, .. } => format!("delete:{name}"),
        Step::RemoveFinalizer { .. } => "remove-finalizer".into(),
    }
}

use AllocationState::{Active, Matched, Preempting, Provisioning};

#[test]
fn region_table() {
    let free = |w: &mut World| {
        w.object.spec.region = None;
        w.quotes.insert("a100-4x/eu".into(), quote("2", "2", "3"));
    };
    let full = |w: &mut World| w.quotes.get_mut("a100-4x/eu").unwrap().free = 0;
    let of = |w: World| w.plan().facts.market.unwrap_or_default().to_string();
    assert_eq!(of(world(1, 5).with(free)), "a100-4x/eu", "the cheapest");
    assert_eq!(of(world(1, 5).with(free).with(full)), HERE, "free slots before a low price");
    assert_eq!(
        of(world(1, 5).with(free).with(|w| w.default_region = Some("us-west-2".into()))),
        HERE,
        "the default"
    );
    assert_eq!(of(world(1, 5).with(free).bid("x", HERE, "2.88", 1)), HERE, "kept while it waits");
    let late = |w: &mut World| w.owner.bids.get_mut("x").unwrap().placed_ms = NOW - 301_000;
    let moved = world(1, 5).with(free).bid("x", HERE, "2.88", 1).with(late);
    assert_eq!(moved.verbs(), "cancel:x", "not for longer than five minutes");
    let unknown = world(1, 5).with(|w| w.object.spec.region = Some("moon".into())).plan();
    assert!(unknown.facts.unknown_market.is_some_and(|why| why.contains("moon") && why.contains(HERE)));
}

#[test]
fn deletion_table() {
    let gone = |w: &mut World| {
        let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH);
        w.object.metadata.deletion_timestamp = Some(time);
    };
    let drained = |ms: i64| move |v: &mut NodeView| v.facts.draining_ms = Some(NOW - ms);
    let full = |v: &mut NodeView| v.pods = vec![pod("p")];
    for (why, world, want) in [
        ("nothing is left", world(1, 5), "remove-finalizer"),
        ("never held", world(1, 5).with(|w| w.object.metadata.finalizers = None), ""),
        ("the market is away: it waits", world(1, 5).bid("x", HERE, "2", 1).with(|w| w.synced = false), ""),
        ("open bids go", world(1, 5).bid("x", HERE, "2", 1), "cancel:x"),
        ("starting allocations are released", world(1, 5).allocation("a", Provisioning, "2"), "release:a"),
        ("nodes are emptied", world(1, 5).allocation("a", Active, "2").node(full), "drain:bn-a"),
        ("by eviction", world(1, 5).allocation("a", Active, "2").node(full).node(drained(0)), "evict:p"),
        (
            "and at last by force",
            world(1, 5).allocation("a", Active, "2").node(full).node(drained(299_000)),
            "end:p",
        ),
        ("empty ones are given back", world(1, 5).allocation("a", Active, "2").node(drained(0)), "release:a"),
        ("their Nodes go", world(1, 5).with(|w| w.nodes.push(node("z"))), "delete:bn-z"),
        (
            "force-delete does not ask the market",
            world(1, 5)
                .allocation("a", Active, "2")
                .with_annotation(annotation::FORCE_DELETE, "true")
                .with(|w| w.synced = false),
            "delete:bn-a remove-finalizer",
        ),
    ] {
        assert_eq!(world.with(gone).verbs(), want, "{why}");
    }
}

/// Nothing is decided while the mirror is behind the last reply. An invalid specification buys nothing and keeps what runs.
#[test]
fn stale_mirror_or_invalid_spec_buys_nothing() {
    let bad = world(2, 5).allocation("a", Active, "2").with(|w| w.object.spec.max_bid = 1.000_000_1);
    assert_eq!(bad.verbs(), "");
    assert!(bad.plan().facts.invalid.is_some_and(|why| why.contains("spec.maxBid")));
    let mirror = crate::observe::mirror::Mirror::default();
    mirror.record_reply("u", &HERE.into(), 1, NOW, None);
    let behind = world(2, 5).with(|w| w.owner = mirror.owner("u"));
    assert_eq!((behind.verbs().as_str(), behind.plan().again), ("", Some(behind.times.wait)));
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 20_000, ..Default::default() })]

    /// No plan raises `have` above the maximum, buys and sells at once, or exceeds the hourly cap.
    #[test]
    fn plan_never_exceeds_max_nodes_or_hourly_cost(
        min in 0i32..6, spare in 0i32..6, open in 0u32..8, matched in 0u32..3, boots in 0u32..3, runs in 0u32..6,
        nodes in 0u32..12, cap in proptest::option::of(1i64..40), limit in 15_000i64..60_000,
    ) {
        let mut w = world(min, (min + spare).max(1));
        w.need.nodes = nodes;
        if let Some(cap) = cap {
            w = w.with_annotation(annotation::MAX_HOURLY_COST, &cap.to_string());
        }
        w = w.bid("b", HERE, "2.88", open);
        w.owner.bids.get_mut("b").unwrap().limit = Price::micros(limit * 100);
        for n in 0..matched { w = w.allocation(&format!("m{n}"), Matched, "2"); }
        for n in 0..boots { w = w.allocation(&format!("p{n}"), Provisioning, "2"); }
        for n in 0..runs { w = w.allocation(&format!("r{n}"), Active, "2"); }
        let had = open + matched + boots + runs;
        let plan = w.plan();
        let bought: u32 = plan.steps.iter().map(|s| if let Step::PlaceBid { quantity, .. } = s { *quantity } else { 0 }).sum();
        let max = u32::try_from(w.object.spec.max_nodes).unwrap();
        if bought > 0 {
            proptest::prop_assert!(had + bought <= max, "{had} + {bought} > {max}");
            let sells = plan.steps.iter().any(|s| matches!(s, Step::CancelBid { .. } | Step::AmendBid { .. }));
            proptest::prop_assert!(!sells);
            if let Some(cap) = cap {
                let price = plan.facts.limit.unwrap().as_micros();
                let sum = i64::from(had) * limit * 100 + i64::from(bought) * price;
                proptest::prop_assert!(sum <= cap * 1_000_000, "{sum} passes {cap}");
            }
        }
    }
}
