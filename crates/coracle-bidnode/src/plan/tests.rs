//! The rules as tables: a world in, the verbs of the steps out.

use coracle_api::bidnode::{BidNodeSpec, BidStrategy, names::annotation};

use super::*;
use crate::{
    facts::PodKind,
    mirror::{Bid, Unit, UnitState},
    settings::{Taint, parse},
    times::Times,
};

const NOW: i64 = 10_000_000;
const HERE: &str = "a100-4x/us-west-2";

fn price(dollars: &str) -> Price {
    Price::parse(dollars).unwrap()
}

/// A world with one market at rest and nothing bought.
struct World {
    object: BidNode,
    owner: Owner,
    quotes: BTreeMap<String, Quote>,
    nodes: Vec<NodeView>,
    need: Need,
    synced: bool,
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
        quotes: [(HERE.to_owned(), quote("2", "2", "3.2"))].into(),
        nodes: Vec::new(),
        need: Need::default(),
        synced: true,
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

    fn told(self, key: &str, value: &str) -> Self {
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

    /// A unit of bid `b`, with a Node that is Ready when it is active.
    fn unit(mut self, id: &str, state: UnitState, paid: &str) -> Self {
        self = if self.owner.bids.contains_key("b") { self } else { self.bid("b", HERE, "2.88", 0) };
        let bid = self.owner.bids.get_mut("b").unwrap();
        *match state {
            UnitState::Matched => &mut bid.matched,
            UnitState::Provisioning => &mut bid.provisioning,
            UnitState::Active => &mut bid.active,
            UnitState::Preempting => &mut bid.preempting,
        } += 1;
        let unit = Unit {
            bid: "b".into(),
            market: bid.market.clone(),
            lot: "lot".into(),
            state,
            limit: bid.limit,
            price: price(paid),
            active_ms: NOW - 1_000_000,
            preempt_ms: if state == UnitState::Preempting { NOW + 120_000 } else { 0 },
            node: format!("bn-{id}"),
            reason: if state == UnitState::Preempting { "Preempted".into() } else { String::new() },
            price_to_keep: Price::ZERO,
        };
        self.owner.units.insert(id.into(), unit);
        if matches!(state, UnitState::Active | UnitState::Preempting) {
            self.nodes.push(node(id));
        }
        self
    }

    /// The last Node.
    fn node(mut self, change: impl FnOnce(&mut NodeView)) -> Self {
        change(self.nodes.last_mut().unwrap());
        self
    }

    fn plan(&self) -> Plan {
        let settings = parse(&self.object);
        plan(&Observed {
            object: &self.object,
            settings: settings.as_ref().map_err(String::as_str),
            owner: &self.owner,
            quotes: &self.quotes,
            synced: self.synced,
            default_region: self.default_region.as_deref(),
            nodes: &self.nodes,
            need: &self.need,
            now_ms: NOW,
            times: &self.times,
        })
    }

    fn verbs(&self) -> String {
        let settled = self.plan();
        settled.steps.iter().map(verb).collect::<Vec<_>>().join(" ")
    }
}

/// A Node that has all that it is to have.
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
        Step::Hold => "hold".into(),
        Step::Place { limit, quantity, min_fill, .. } => {
            let block = if *min_fill > 1 { "!" } else { "" };
            format!("place{}{block}", amount(Some(*limit), Some(*quantity)))
        }
        Step::Amend { bid, limit, units, .. } => format!("amend:{bid}{}", amount(*limit, *units)),
        Step::Cancel { bid, .. } => format!("cancel:{bid}"),
        Step::Release { unit, .. } => format!("release:{unit}"),
        Step::Substitute { unit, other, .. } => format!("substitute:{unit}/{other}"),
        Step::Shape(change) => format!("shape:{}", change.name),
        Step::Notice { change, .. } => format!("notice:{}", change.name),
        Step::Drain(change) => format!("drain:{}", change.name),
        Step::Evict { name, .. } => format!("evict:{name}"),
        Step::End { name, .. } => format!("end:{name}"),
        Step::DeleteNode { name, .. } => format!("delete:{name}"),
        Step::LetGo { .. } => "let-go".into(),
    }
}

use UnitState::{Active, Matched, Preempting, Provisioning};

#[test]
fn buying_table() {
    for (why, world, want) in [
        ("the seed's test: one bid for both", world(2, 5), "place@2.8800×2"),
        (
            "the finalizer first",
            world(1, 5).with(|w| w.object.metadata.finalizers = None),
            "hold place@2.8800×1",
        ),
        ("what is open counts", world(2, 5).bid("x", HERE, "2.88", 2), ""),
        ("what boots counts", world(2, 5).unit("a", Provisioning, "2").unit("c", Matched, "2"), ""),
        ("what runs counts", world(1, 5).unit("a", Active, "2"), ""),
        (
            "what leaves does not, and one is bought",
            world(1, 5).unit("a", Preempting, "2"),
            "notice:bn-a place@2.8800×1",
        ),
        ("no node is wanted", world(0, 5), ""),
        ("paused", world(2, 5).told(annotation::PAUSED, "true"), ""),
        ("a gang", world(3, 5).told(annotation::GANG, "true"), "place@2.8800×3!"),
        ("a price that is not known", world(2, 5).with(|w| w.quotes.clear()), ""),
        ("a halted market", world(2, 5).with(|w| w.quotes.get_mut(HERE).unwrap().halted = true), ""),
        ("the market is away", world(2, 5).with(|w| w.synced = false), ""),
        ("the cap lets one pass", world(3, 5).told(annotation::MAX_HOURLY_COST, "3"), "place@2.8800×1"),
        ("the cap lets none pass", world(3, 5).told(annotation::MAX_HOURLY_COST, "2"), ""),
        (
            "a gang that the cap cuts",
            world(3, 5).told(annotation::GANG, "true").told(annotation::MAX_HOURLY_COST, "6"),
            "",
        ),
        ("pods wait", world(0, 5).with(|w| w.need.nodes = 3), "place@2.8800×3"),
        ("never more than the maximum", world(0, 5).with(|w| w.need.nodes = 30), "place@2.8800×5"),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

/// Each strategy in an idle market, a scarce one, and capped by maxBid: the limit to the micro-dollar.
#[test]
fn limit_table() {
    use BidStrategy::{AvailabilityOptimized as A, Balanced as B, CostOptimized as C};
    for (strategy, max_bid, seen, want) in [
        (C, 4.5, quote("2", "2", "3.2"), 2_080_000),
        (B, 4.5, quote("2", "2", "3.2"), 2_880_000),
        (A, 4.5, quote("2", "2", "3.2"), 3_840_000),
        (C, 4.5, quote("2", "4", "4"), 2_600_000),
        (B, 4.5, quote("2", "4", "4"), 3_600_000),
        (A, 4.5, quote("2", "4", "4"), 4_500_000),
        (C, 1.5, quote("2", "2", "3.2"), 1_500_000),
        (B, 1.5, quote("2", "2", "3.2"), 1_500_000),
        (A, 8.0, quote("2", "8", "8"), 8_000_000),
        (B, 4.5, quote("2", "2", "3.333333"), 2_999_900),
        (B, 2.12345, quote("2", "2", "3.2"), 2_123_400),
    ] {
        let w = world(1, 5).with(|w| {
            (w.object.spec.bid_strategy, w.object.spec.max_bid) = (strategy, max_bid);
            w.quotes.insert(HERE.into(), seen);
        });
        let limit = w.plan().facts.limit.map(Price::as_micros);
        assert_eq!(limit, Some(want), "{strategy:?} {max_bid}");
    }
}

#[test]
fn price_table() {
    let quoted = |price: &'static str, at: &'static str| {
        move |w: &mut World| {
            w.quotes.insert(HERE.into(), quote("2", price, at));
        }
    };
    let scarce = quoted("4", "4");
    let at_risk = |keep: &'static str| {
        move |w: &mut World| {
            scarce(w);
            w.owner.units.get_mut("a").unwrap().price_to_keep = price(keep);
        }
    };
    let strategy = |s: BidStrategy| move |w: &mut World| w.object.spec.bid_strategy = s;
    use BidStrategy::{AvailabilityOptimized, CostOptimized};
    for (why, world, want) in [
        ("an open bid follows", world(1, 5).bid("x", HERE, "2.88", 1).with(scarce), "amend:x@3.6000"),
        (
            "not when that is less than 2 %",
            world(1, 5).bid("x", HERE, "2.88", 1).with(quoted("2", "3.25")),
            "",
        ),
        (
            "not twice a minute",
            world(1, 5)
                .bid("x", HERE, "2.88", 1)
                .with(scarce)
                .with(|w| w.owner.amended_ms = [("x".to_owned(), NOW - 59_000)].into()),
            "",
        ),
        (
            "a lowered maxBid at once",
            world(1, 5).bid("x", HERE, "2.88", 1).with(|w| {
                w.object.spec.max_bid = 2.5;
                w.owner.amended_ms.insert("x".into(), NOW);
            }),
            "amend:x@2.5000",
        ),
        (
            "of running nodes too",
            world(1, 5).unit("a", Active, "2").with(|w| w.object.spec.max_bid = 2.5),
            "amend:b@2.5000",
        ),
        ("running nodes do not follow", world(1, 5).unit("a", Active, "2").with(scarce), ""),
        (
            "balanced: what is at risk is kept",
            world(1, 5).unit("a", Active, "2").with(at_risk("3.1")),
            "amend:b@3.1000",
        ),
        ("not above the quote", world(1, 5).unit("a", Active, "2").with(at_risk("4.1")), ""),
        (
            "not above maxBid",
            world(1, 5).unit("a", Active, "2").with(at_risk("3.1")).with(|w| w.object.spec.max_bid = 3.0),
            "",
        ),
        (
            "defend=false: as the article has it",
            world(1, 5).unit("a", Active, "2").with(at_risk("3.1")).told(annotation::DEFEND, "false"),
            "",
        ),
        (
            "cost-optimized lets go",
            world(1, 5).unit("a", Active, "2").with(at_risk("3.1")).with(strategy(CostOptimized)),
            "",
        ),
        (
            "availability-optimized: maxBid as soon as active",
            world(1, 5).unit("a", Active, "2").with(strategy(AvailabilityOptimized)),
            "amend:b@4.5000",
        ),
        (
            "but not before",
            world(1, 5).unit("a", Provisioning, "2").with(strategy(AvailabilityOptimized)),
            "",
        ),
        (
            "nor past the cap",
            world(1, 5)
                .unit("a", Active, "2")
                .with(strategy(AvailabilityOptimized))
                .told(annotation::MAX_HOURLY_COST, "4"),
            "",
        ),
        (
            "open units beside running ones leave, to be bought at their own limit",
            world(2, 5)
                .unit("a", Active, "2")
                .with(|w| w.owner.bids.get_mut("b").unwrap().open = 1)
                .with(scarce),
            "amend:b×1",
        ),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

#[test]
fn selling_table() {
    let busy = |v: &mut NodeView| (v.idle_ms, v.pods) = (None, vec![pod("p")]);
    let idle = |v: &mut NodeView| v.idle_ms = Some(NOW - 400_000);
    let all = |w: World| w.told(annotation::DISRUPTION_BUDGET, "100%");
    for (why, world, want) in [
        ("open units first", world(1, 5).bid("x", HERE, "2.88", 3), "amend:x×1"),
        ("whole bids are cancelled", world(0, 5).bid("x", HERE, "2.88", 3), "cancel:x"),
        (
            "then what has no seat",
            world(1, 5).unit("a", Matched, "2").unit("c", Provisioning, "2"),
            "release:a",
        ),
        ("then what boots", world(0, 5).unit("a", Provisioning, "2"), "release:a"),
        ("a node that was busy a moment ago stays", world(0, 5).unit("a", Active, "2"), ""),
        ("an idle one goes", world(0, 5).unit("a", Active, "2").node(idle), "drain:bn-a"),
        ("never below the minimum", world(1, 5).unit("a", Active, "2").node(idle), ""),
        (
            "idle before busy",
            all(world(1, 1).unit("a", Active, "3").node(busy).unit("c", Active, "2").node(idle)),
            "drain:bn-c",
        ),
        (
            "among equals the most expensive",
            all(world(0, 5).unit("a", Active, "2").node(idle).unit("c", Active, "3").node(idle)),
            "drain:bn-c drain:bn-a",
        ),
        (
            "one at a time by default",
            world(0, 5).unit("a", Active, "2").node(idle).unit("c", Active, "3").node(idle),
            "drain:bn-c",
        ),
        (
            "none with a budget of 0",
            world(0, 5).unit("a", Active, "2").node(idle).told(annotation::DISRUPTION_BUDGET, "0"),
            "",
        ),
        (
            "a pod that must not be moved keeps its node",
            world(1, 1)
                .unit("a", Active, "2")
                .node(busy)
                .unit("c", Active, "2")
                .node(busy)
                .node(|v| v.pods[0].keep = true),
            "drain:bn-a",
        ),
        (
            "consolidation=never",
            world(0, 5).unit("a", Active, "2").node(idle).told(annotation::CONSOLIDATION, "never"),
            "",
        ),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

#[test]
fn node_table() {
    let drained = |v: &mut NodeView| v.facts.draining_ms = Some(NOW - 1000);
    let noticed = |v: &mut NodeView| {
        v.facts.draining_ms = Some(NOW - 40_000);
        v.facts.taints =
            vec![Taint { key: names::PREEMPTING.into(), value: "1".into(), effect: "NoSchedule".into() }];
    };
    let ill = |ms: i64| move |v: &mut NodeView| (v.facts.ready, v.facts.since_ms) = (false, NOW - ms);
    let with = |pods: &'static [&'static str]| {
        move |v: &mut NodeView| v.pods = pods.iter().map(|p| pod(p)).collect()
    };
    for (why, world, want) in [
        ("an emptied node is given back", world(0, 5).unit("a", Active, "2").node(drained), "release:a"),
        (
            "first its pods go",
            world(0, 5).unit("a", Active, "2").node(drained).node(with(&["p", "q"])),
            "evict:p evict:q",
        ),
        (
            "what runs on every node stays",
            world(0, 5)
                .unit("a", Active, "2")
                .node(drained)
                .node(with(&["d"]))
                .node(|v| v.pods[0].kind = PodKind::Daemon),
            "release:a",
        ),
        ("a notice is told", world(0, 5).unit("a", Preempting, "2"), "notice:bn-a"),
        ("told once", world(0, 5).unit("a", Preempting, "2").node(noticed).node(with(&["p"])), "evict:p"),
        ("empty: given back at once", world(0, 5).unit("a", Preempting, "2").node(noticed), "release:a"),
        (
            "a replacement is waited for",
            world(1, 5)
                .unit("a", Preempting, "2")
                .node(noticed)
                .node(with(&["p"]))
                .node(|v| v.facts.draining_ms = Some(NOW - 1000))
                .unit("c", Provisioning, "2"),
            "",
        ),
        (
            "a pod whose grace ends with the notice is ended with all of it",
            world(0, 5)
                .unit("a", Preempting, "2")
                .node(noticed)
                .node(with(&["p"]))
                .with(|w| w.owner.units.get_mut("a").unwrap().preempt_ms = NOW + 39_000),
            "end:p",
        ),
        (
            "an idle sibling goes instead",
            world(1, 5)
                .unit("c", Active, "2")
                .unit("a", Preempting, "2")
                .node(with(&["p"]))
                .node(|v| v.idle_ms = None),
            "substitute:a/c",
        ),
        ("not Ready for a moment", world(1, 5).unit("a", Active, "2").node(ill(59_000)), ""),
        (
            "not Ready for a minute: replaced",
            world(1, 5).unit("a", Active, "2").node(ill(61_000)),
            "place@2.8800×1",
        ),
        (
            "for three: given up",
            world(1, 5).unit("a", Active, "2").node(ill(181_000)),
            "release:a place@2.8800×1",
        ),
        (
            "too many at once: held",
            world(2, 5).unit("a", Active, "2").node(ill(181_000)).unit("c", Active, "2").node(ill(181_000)),
            "",
        ),
        ("a Node without unit goes", world(0, 5).with(|w| w.nodes.push(node("z"))), "delete:bn-z"),
        (
            "not while it is new",
            world(0, 5).with(|w| w.nodes.push(node("z"))).node(|v| v.facts.created_ms = NOW - 9000),
            "",
        ),
        (
            "nor while the market is away",
            world(0, 5).with(|w| w.nodes.push(node("z"))).with(|w| w.synced = false),
            "",
        ),
        (
            "labels of the specification",
            world(1, 5)
                .unit("a", Active, "2")
                .with(|w| drop(w.object.spec.node_selector.insert("x".into(), "y".into()))),
            "shape:bn-a",
        ),
        (
            "the first taint goes when it is Ready",
            world(1, 5).unit("a", Active, "2").node(|v| {
                v.facts.taints = vec![Taint {
                    key: names::UNINITIALIZED.into(),
                    value: String::new(),
                    effect: "NoSchedule".into(),
                }];
            }),
            "shape:bn-a",
        ),
        (
            "and stays until then",
            world(1, 5).unit("a", Active, "2").node(|v| {
                v.facts.ready = false;
                v.facts.since_ms = NOW;
                v.facts.taints = vec![Taint {
                    key: names::UNINITIALIZED.into(),
                    value: String::new(),
                    effect: "NoSchedule".into(),
                }];
            }),
            "",
        ),
    ] {
        assert_eq!(world.verbs(), want, "{why}");
    }
}

/// Another type is asked for: replacements stand beside what they replace, and nothing leaves before one is Ready.
#[test]
fn drift_table() {
    let changed = |w: &mut World| {
        w.object.spec.instance_type = "l40s-4x".into();
        w.quotes = [("l40s-4x/us-west-2".to_owned(), quote("1.25", "1.25", "2"))].into();
    };
    let old = world(2, 2).unit("a", Active, "2").unit("c", Active, "2").with(changed);
    assert_eq!(old.verbs(), "place@1.8000×1", "one more than the maximum, as the disruption budget says");
    let waits = old.with(|w| {
        let market = "l40s-4x/us-west-2";
        w.owner.bids.insert(
            "n".into(),
            Bid { market: market.into(), open: 1, limit: price("1.8"), ..w.owner.bids["b"].clone() },
        );
        w.owner.bids.get_mut("n").unwrap().active = 0;
    });
    assert_eq!(waits.verbs(), "", "nothing leaves yet");
    let ready = waits.with(|w| {
        let bid = w.owner.bids.get_mut("n").unwrap();
        (bid.open, bid.active) = (0, 1);
        let unit = Unit { bid: "n".into(), market: bid.market.clone(), ..w.owner.units["a"].clone() };
        w.owner.units.insert("n".into(), unit);
        w.nodes.push(node("n"));
        w.nodes.last_mut().unwrap().facts.labels.insert(names::INSTANCE_TYPE.into(), "l40s-4x".into());
    });
    assert_eq!(ready.verbs(), "drain:bn-a", "one is Ready, one goes");
    let boots = world(1, 5).unit("a", Provisioning, "2").bid("x", HERE, "2.88", 1).with(changed);
    assert_eq!(boots.verbs(), "cancel:x release:a", "what waits or boots goes at once");
}

#[test]
fn region_table() {
    let free = |w: &mut World| {
        w.object.spec.region = None;
        w.quotes.insert("a100-4x/eu".into(), quote("2", "2", "3"));
    };
    let full = |w: &mut World| w.quotes.get_mut("a100-4x/eu").unwrap().free = 0;
    let of = |w: World| w.plan().facts.market.unwrap_or_default();
    assert_eq!(of(world(1, 5).with(free)), "a100-4x/eu", "the cheapest");
    assert_eq!(of(world(1, 5).with(free).with(full)), HERE, "free units before a low price");
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
        ("nothing is left", world(1, 5), "let-go"),
        ("never held", world(1, 5).with(|w| w.object.metadata.finalizers = None), ""),
        ("the market is away: it waits", world(1, 5).bid("x", HERE, "2", 1).with(|w| w.synced = false), ""),
        ("open bids go", world(1, 5).bid("x", HERE, "2", 1), "cancel:x"),
        ("what boots goes", world(1, 5).unit("a", Provisioning, "2"), "release:a"),
        ("nodes are emptied", world(1, 5).unit("a", Active, "2").node(full), "drain:bn-a"),
        ("by eviction", world(1, 5).unit("a", Active, "2").node(full).node(drained(0)), "evict:p"),
        (
            "and at last by force",
            world(1, 5).unit("a", Active, "2").node(full).node(drained(299_000)),
            "end:p",
        ),
        ("empty ones are given back", world(1, 5).unit("a", Active, "2").node(drained(0)), "release:a"),
        ("their Nodes go", world(1, 5).with(|w| w.nodes.push(node("z"))), "delete:bn-z"),
        (
            "force-delete asks nobody",
            world(1, 5)
                .unit("a", Active, "2")
                .told(annotation::FORCE_DELETE, "true")
                .with(|w| w.synced = false),
            "delete:bn-a let-go",
        ),
    ] {
        assert_eq!(world.with(gone).verbs(), want, "{why}");
    }
}

/// Nothing is decided on a mirror that is behind our last reply; a specification that cannot be obeyed buys nothing and
/// keeps what runs.
#[test]
fn nothing_is_bought_on_old_or_bad_news() {
    let bad = world(2, 5).unit("a", Active, "2").with(|w| w.object.spec.max_bid = 1.000_000_1);
    assert_eq!(bad.verbs(), "");
    assert!(bad.plan().facts.invalid.is_some_and(|why| why.contains("spec.maxBid")));
    let mirror = crate::mirror::Mirror::default();
    mirror.replied("u", HERE, 1, NOW, None);
    let behind = world(2, 5).with(|w| w.owner = mirror.owner("u"));
    assert_eq!((behind.verbs().as_str(), behind.plan().again), ("", Some(behind.times.wait)));
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 20_000, ..Default::default() })]

    /// Whatever there is: no plan takes `have` above the maximum, buys and sells at once, or passes the hourly cap.
    #[test]
    fn no_plan_buys_too_much(
        min in 0i32..6, spare in 0i32..6, open in 0u32..8, matched in 0u32..3, boots in 0u32..3, runs in 0u32..6,
        nodes in 0u32..12, cap in proptest::option::of(1i64..40), limit in 15_000i64..60_000,
    ) {
        let mut w = world(min, (min + spare).max(1));
        w.need.nodes = nodes;
        if let Some(cap) = cap {
            w = w.told(annotation::MAX_HOURLY_COST, &cap.to_string());
        }
        w = w.bid("b", HERE, "2.88", open);
        w.owner.bids.get_mut("b").unwrap().limit = Price::micros(limit * 100);
        for n in 0..matched { w = w.unit(&format!("m{n}"), Matched, "2"); }
        for n in 0..boots { w = w.unit(&format!("p{n}"), Provisioning, "2"); }
        for n in 0..runs { w = w.unit(&format!("r{n}"), Active, "2"); }
        let had = open + matched + boots + runs;
        let plan = w.plan();
        let bought: u32 = plan.steps.iter().map(|s| if let Step::Place { quantity, .. } = s { *quantity } else { 0 }).sum();
        let max = u32::try_from(w.object.spec.max_nodes).unwrap();
        if bought > 0 {
            proptest::prop_assert!(had + bought <= max, "{had} + {bought} > {max}");
            let sells = plan.steps.iter().any(|s| matches!(s, Step::Cancel { .. } | Step::Amend { .. }));
            proptest::prop_assert!(!sells);
            if let Some(cap) = cap {
                let price = plan.facts.limit.unwrap().as_micros();
                let sum = i64::from(had) * limit * 100 + i64::from(bought) * price;
                proptest::prop_assert!(sum <= cap * 1_000_000, "{sum} passes {cap}");
            }
        }
    }
}
