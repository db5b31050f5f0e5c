//! Packing of twenty thousand waiting pods of many sizes for a hundred BidNodes.

use std::{collections::BTreeMap, time::Instant};

use coracle_auction::Price;
use coracle_bidnode::{
    demand::{Pool, assign, default_shapes},
    observe::facts::PodFacts,
};

const PODS: u32 = 20_000;
const POOLS: u32 = 100;
/// Number of active nodes, each with room for one pod.
const ACTIVE: u32 = 20;

/// Returns the milliseconds of the slowest of some packings. All requests differ, so that no result can be reused for the next
/// pod.
pub(crate) fn packing_ms() -> f64 {
    let shape = default_shapes().remove("a100-4x").unwrap_or_default();
    let thousandths = |n: u32| i128::from(n) * 1000;
    let pool = |n: u32| {
        let free: BTreeMap<_, _> = [("cpu", 4), ("memory", 64 << 20), ("nvidia.com/gpu", 1), ("pods", 10)]
            .map(|(name, amount)| (name.to_owned(), thousandths(amount)))
            .into();
        Pool {
            uid: format!("uid-{n}"),
            key: format!("ns/pool-{n:03}"),
            labels: [("pool".to_owned(), n.to_string())].into(),
            shape: shape.clone(),
            price: Price::micros(2_000_000),
            active: (0..ACTIVE).map(|node| (format!("node-{node}"), free.clone())).collect(),
            in_flight: 5,
            ..Pool::default()
        }
    };
    let pools: Vec<_> = (0..POOLS).map(pool).collect();
    let pod = |n: u32| PodFacts {
        namespace: format!("ns-{}", n % 10),
        name: format!("pod-{n:05}"),
        unschedulable: true,
        requests: [
            ("cpu", thousandths(1 + n % 7)),
            ("memory", thousandths((1 << 20) + n * 1000)),
            ("nvidia.com/gpu", thousandths(n % 3)),
            ("pods", 1000),
        ]
        .map(|(name, amount)| (name.to_owned(), amount))
        .into(),
        // Nine of ten pods may run in every pool, and all are packed where it is cheapest.
        selector: if n.is_multiple_of(10) {
            [("pool".to_owned(), (n / 10 % POOLS).to_string())].into()
        } else {
            BTreeMap::new()
        },
        ..PodFacts::default()
    };
    let pods: Vec<_> = (0..PODS).map(pod).collect();
    let mut slowest = 0.0f64;
    for _ in 0..5 {
        let began = Instant::now();
        let needs = assign(&pools, &pods);
        let took = began.elapsed().as_secs_f64() * 1000.0;
        let nodes: u32 = needs.values().map(|need| need.nodes).sum();
        eprintln!(
            "  {PODS} pods of {POOLS} BidNodes in {took:.0} ms: {nodes} nodes of {} BidNodes",
            needs.len()
        );
        slowest = slowest.max(took);
    }
    slowest
}
