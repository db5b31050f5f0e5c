//! Packing of waiting pods onto active nodes, nodes in flight, and nodes to be bought. Pure.
//!
//! First-fit decreasing: large pods first, each into the first node that has room; nodes that are paid for already come before
//! new ones. Each pod counts for one BidNode only: the one where its share of a node costs least.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use coracle_api::bidnode::names;
use coracle_auction::Price;
use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm};

use super::binpack::Bins;
use crate::{
    observe::facts::{PodFacts, Resources, thousandths},
    settings::{Settings, Taint},
};

/// Most new nodes of one packing.
const NEW_MAX: usize = 10_000;

/// Capacity of a node, by instance type.
pub type Shapes = BTreeMap<String, Resources>;

/// Default capacities of the instance types in the CRD.
#[must_use]
pub fn default_shapes() -> Shapes {
    [
        ("h100-8x", "192", "2Ti", "8"),
        ("h100-4x", "96", "1Ti", "4"),
        ("a100-8x", "96", "1Ti", "8"),
        ("a100-4x", "48", "512Gi", "4"),
        ("l40s-4x", "64", "512Gi", "4"),
    ]
    .into_iter()
    .map(|(name, cpu, memory, gpus)| {
        let all = [("cpu", cpu), ("memory", memory), ("nvidia.com/gpu", gpus), ("pods", "110")];
        let shape = all.into_iter().filter_map(|(key, q)| Some((key.to_owned(), thousandths(q)?)));
        (name.to_owned(), shape.collect())
    })
    .collect()
}

/// Labels of the Nodes of a BidNode.
#[must_use]
pub fn template(namespace: &str, name: &str, settings: &Settings, region: &str) -> BTreeMap<String, String> {
    let own = [
        (names::BIDNODE, name),
        (names::NAMESPACE, namespace),
        (names::CAPACITY_TYPE, names::AUCTION),
        (names::INSTANCE_TYPE, settings.instance_type.as_str()),
        (names::REGION, region),
    ];
    let own = own.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned()));
    own.chain(settings.labels.clone()).collect()
}

/// BidNode as input of the packing.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// UID of the BidNode.
    pub uid: String,
    /// `namespace/name` of the BidNode, which breaks ties.
    pub key: String,
    /// Labels of the nodes.
    pub labels: BTreeMap<String, String>,
    /// Label keys of which a pod must name one; empty: any pod may run on the nodes.
    pub named: BTreeSet<String>,
    /// Taints of the nodes.
    pub taints: Vec<Taint>,
    /// Capacity of one node.
    pub shape: Resources,
    /// Price of a node.
    pub price: Price,
    /// Free resources of the active nodes, by node name.
    pub active: Vec<(String, Resources)>,
    /// Number of nodes in flight.
    pub in_flight: usize,
    /// Number of nodes that may still be bought; `None`: any number.
    pub room: Option<usize>,
    /// UIDs of pods that the scheduler refused although their node was Ready. They do not count for this BidNode.
    pub refused: BTreeSet<String>,
    /// Time when the last node became Ready, in milliseconds since 1970; `None` while a node is in flight.
    pub settled_ms: Option<i64>,
}

impl Pool {
    /// Subtracts the requests of DaemonSet pods, which run on each node, from the capacity of a node.
    pub fn reserve(&mut self, daemons: &[PodFacts]) {
        for daemon in daemons {
            if runs_on(self, daemon) {
                take(&mut self.shape, &daemon.requests);
            }
        }
    }

    /// Whether buying nodes for a pod is given up: the pod was refused before the last node became Ready, it is still refused,
    /// and the node has been Ready for `patience_ms`.
    #[must_use]
    pub fn gives_up(&self, pod: &PodFacts, now_ms: i64, patience_ms: i64) -> bool {
        self.settled_ms.is_some_and(|ready| pod.refused_ms < ready && now_ms - ready >= patience_ms)
    }
}

/// Nodes that waiting pods need from a BidNode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Nodes in flight that the pods will use, and nodes to be bought.
    pub nodes: u32,
    /// Active nodes that a waiting pod was placed on.
    pub used: BTreeSet<String>,
    /// Nodes that were active at the packing. A node that became active since was in flight then.
    pub active: BTreeSet<String>,
}

/// Assigns every waiting pod to at most one BidNode, the cheapest that still has room for it, and packs the pods.
#[must_use]
pub fn assign(pools: &[Pool], pods: &[PodFacts]) -> HashMap<String, Need> {
    let mut choices: Vec<(&PodFacts, Vec<usize>)> =
        pods.iter().map(|pod| (pod, pools_by_price(pools, pod))).collect();
    let mut needs = HashMap::new();
    // Each round moves the pods of full pools to their next choice, so the number of pools bounds the rounds.
    for _ in 0..=pools.len() {
        let mut by_pool: BTreeMap<usize, Vec<&PodFacts>> = BTreeMap::new();
        for (pod, choice) in &choices {
            if let Some(n) = choice.first() {
                by_pool.entry(*n).or_default().push(pod);
            }
        }
        let mut left_out: BTreeSet<&str> = BTreeSet::new();
        needs = by_pool
            .into_iter()
            .map(|(n, pods)| {
                let (need, left) = pack_within(&pools[n], pods);
                left_out.extend(left.iter().map(|pod| pod.uid.as_str()));
                (pools[n].uid.clone(), need)
            })
            .collect();
        let mut moved = false;
        for (_, choice) in
            choices.iter_mut().filter(|(pod, choice)| choice.len() > 1 && left_out.contains(&*pod.uid))
        {
            choice.remove(0);
            moved = true;
        }
        if !moved {
            break;
        }
    }
    needs
}

/// Pools that accept a pod, ordered by quote ÷ number of such pods per node. Compared without a division, as q₁·fit₂ against
/// q₂·fit₁.
fn pools_by_price(pools: &[Pool], pod: &PodFacts) -> Vec<usize> {
    let accepting = |(_, pool): &(usize, &Pool)| !pool.refused.contains(&pod.uid) && accepts(pool, pod);
    let mut all: Vec<_> = pools.iter().enumerate().filter(accepting).collect();
    all.sort_by(|(_, a), (_, b)| {
        let (left, right) = (fits(&a.shape, &pod.requests), fits(&b.shape, &pod.requests));
        let (left, right) = (i128::from(a.price.as_micros()) * right, i128::from(b.price.as_micros()) * left);
        left.cmp(&right).then_with(|| a.key.cmp(&b.key))
    });
    all.into_iter().map(|(n, _)| n).collect()
}

/// Packs the pods of one pool, all of which the pool accepts.
#[must_use]
pub fn pack(pool: &Pool, pods: Vec<&PodFacts>) -> Need {
    pack_within(pool, pods).0
}

/// Like [`pack`]; also returns the pods that found no room because the pool may not buy more nodes.
fn pack_within<'a>(pool: &Pool, mut pods: Vec<&'a PodFacts>) -> (Need, Vec<&'a PodFacts>) {
    pods.sort_by_key(|pod| {
        let of = |name: &str| pod.requests.get(name).copied().unwrap_or(0);
        let extended: i128 = pod
            .requests
            .iter()
            .filter(|(name, _)| !matches!(name.as_str(), "cpu" | "memory" | "pods" | "ephemeral-storage"))
            .map(|(_, amount)| *amount)
            .sum();
        (Reverse((extended, of("cpu"), of("memory"))), &pod.namespace, &pod.name)
    });
    let mut bins = Bins::of(pods.iter().flat_map(|pod| pod.requests.keys()).map(String::as_str));
    pool.active.iter().for_each(|(_, free)| bins.push(free));
    let paid = pool.active.len();
    (0..pool.in_flight).for_each(|_| bins.push(&pool.shape));
    let active = pool.active.iter().map(|(name, _)| name.clone()).collect();
    let mut need = Need { active, ..Need::default() };
    let mut used = vec![false; paid + pool.in_flight];
    let most = paid + pool.in_flight + pool.room.unwrap_or(NEW_MAX).min(NEW_MAX);
    let mut left = Vec::new();
    for pod in pods {
        let mut place = bins.place(&pod.requests);
        if place.is_none() && used.len() < most && has_room(&pool.shape, &pod.requests) {
            bins.push(&pool.shape);
            used.push(false);
            place = bins.place(&pod.requests);
        }
        let Some(place) = place else {
            left.push(pod);
            continue;
        };
        used[place] = true;
        if let Some((name, _)) = pool.active.get(place) {
            need.used.insert(name.clone());
        }
    }
    need.nodes = u32::try_from(used[paid..].iter().filter(|used| **used).count()).unwrap_or(u32::MAX);
    (need, left)
}

/// Whether the free resources suffice.
#[must_use]
pub fn has_room(free: &Resources, wanted: &Resources) -> bool {
    wanted.iter().all(|(name, amount)| *amount == 0 || free.get(name).is_some_and(|f| f >= amount))
}

/// Subtracts resources, down to zero.
pub fn take(free: &mut Resources, wanted: &Resources) {
    for (name, amount) in wanted {
        if let Some(f) = free.get_mut(name) {
            *f = (*f - amount).max(0);
        }
    }
}

/// Number of pods with these requests that fit on an empty node.
fn fits(shape: &Resources, wanted: &Resources) -> i128 {
    let each = wanted.iter().filter(|(_, amount)| **amount > 0);
    each.map(|(name, amount)| shape.get(name).copied().unwrap_or(0) / amount)
        .min()
        .unwrap_or(i128::MAX)
        .max(1)
}

/// Whether the scheduler would place the pod on an empty node of the pool.
#[must_use]
pub fn accepts(pool: &Pool, pod: &PodFacts) -> bool {
    let names_it = pool.named.is_empty()
        || pool
            .named
            .iter()
            .any(|key| pod.selector.contains_key(key) || pod.terms.iter().any(|t| names(t, key)));
    names_it
        && pod.selector.iter().all(|(key, value)| pool.labels.get(key) == Some(value))
        && (pod.terms.is_empty() || pod.terms.iter().any(|term| holds(term, &pool.labels)))
        && pool.taints.iter().filter(|t| t.effect != "PreferNoSchedule").all(|t| tolerates(pod, t))
        && has_room(&pool.shape, &pod.requests)
}

/// Whether a pod of the DaemonSet would run on the nodes of the pool.
fn runs_on(pool: &Pool, daemon: &PodFacts) -> bool {
    daemon.selector.iter().all(|(key, value)| pool.labels.get(key) == Some(value))
        && (daemon.terms.is_empty() || daemon.terms.iter().any(|term| holds(term, &pool.labels)))
        && pool.taints.iter().filter(|t| t.effect != "PreferNoSchedule").all(|t| tolerates(daemon, t))
}

fn names(term: &NodeSelectorTerm, key: &str) -> bool {
    term.match_expressions.iter().flatten().any(|e| e.key == key)
}

/// Whether labels match a term of required node affinity. A term without expressions matches nothing (Kubernetes API,
/// NodeSelectorTerm).
fn holds(term: &NodeSelectorTerm, labels: &BTreeMap<String, String>) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let by_field = term.match_fields.as_ref().is_some_and(|f| !f.is_empty());
    !by_field && !expressions.is_empty() && expressions.iter().all(|e| agrees(e, labels))
}

fn agrees(e: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let value = labels.get(&e.key);
    let values = e.values.as_deref().unwrap_or_default();
    let number = |s: &String| s.parse::<i64>().ok();
    let bound = values.first().and_then(number);
    match e.operator.as_str() {
        "In" => value.is_some_and(|v| values.contains(v)),
        "NotIn" => value.is_none_or(|v| !values.contains(v)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => value.and_then(number).zip(bound).is_some_and(|(v, b)| v > b),
        "Lt" => value.and_then(number).zip(bound).is_some_and(|(v, b)| v < b),
        _ => false,
    }
}

/// Whether a pod tolerates a taint (Kubernetes documentation, "Taints and Tolerations").
pub(super) fn tolerates(pod: &PodFacts, taint: &Taint) -> bool {
    pod.tolerations.iter().any(|t| {
        let effect = t.effect.as_deref().unwrap_or_default();
        let key = t.key.as_deref().unwrap_or_default();
        let any = t.operator.as_deref() == Some("Exists");
        (effect.is_empty() || effect == taint.effect)
            && (key == taint.key || key.is_empty() && any)
            && (any || t.value.as_deref().unwrap_or_default() == taint.value)
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Toleration;

    use super::*;

    fn shape(gpus: i128, cpus: i128) -> Resources {
        [("nvidia.com/gpu", gpus), ("cpu", cpus), ("pods", 110)]
            .map(|(name, n)| (name.to_owned(), n * 1000))
            .into()
    }

    fn pod(name: &str, gpus: i128, cpus: i128) -> PodFacts {
        let mut requests = shape(gpus, cpus);
        requests.insert("pods".into(), 1000);
        PodFacts { name: name.into(), requests, unschedulable: true, ..PodFacts::default() }
    }

    fn pool(key: &str, price: i64, active: &[(&str, i128)], in_flight: usize) -> Pool {
        Pool {
            uid: key.into(),
            key: key.into(),
            shape: shape(4, 48),
            price: Price::micros(price),
            active: active.iter().map(|(name, gpus)| ((*name).to_owned(), shape(*gpus, 48))).collect(),
            in_flight,
            ..Pool::default()
        }
    }

    #[test]
    fn packing_table() {
        for (why, active, in_flight, pods, nodes, used) in [
            ("nothing waits", &[][..], 0, &[][..], 0, 0),
            ("one pod, one node", &[], 0, &[4], 1, 0),
            ("free room costs nothing", &[("n1", 4)], 0, &[4], 0, 1),
            ("a node that comes is used before one is bought", &[], 1, &[4], 1, 0),
            ("two fit one node", &[], 0, &[2, 2], 1, 0),
            ("large first: 3 + 1, 2 + 2", &[], 0, &[1, 2, 3, 2], 2, 0),
            ("what fits no node is not bought for", &[], 0, &[8], 0, 0),
            ("the rest is bought", &[("n1", 1)], 1, &[1, 4, 4], 2, 1),
        ] {
            let pods: Vec<_> = pods.iter().enumerate().map(|(n, g)| pod(&format!("p{n}"), *g, 1)).collect();
            let need = pack(&pool("a", 1, active, in_flight), pods.iter().collect());
            assert_eq!((need.nodes, need.used.len()), (nodes, used), "{why}");
        }
    }

    #[test]
    fn pods_without_requests_fit_one_node() {
        let pods = [PodFacts::default(), PodFacts::default()];
        assert_eq!(pack(&pool("a", 1, &[], 0), pods.iter().collect()).nodes, 1);
    }

    #[test]
    fn pod_is_assigned_only_to_the_cheapest_pool() {
        let pools = [pool("ns/b", 2, &[], 0), pool("ns/a", 2, &[], 0), pool("ns/c", 3, &[], 0)];
        let found = assign(&pools, &[pod("p", 1, 1)]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["ns/a"], "equal price: by name");
        let mut small = pool("ns/0", 2, &[], 0);
        small.shape = shape(1, 48);
        let found = assign(&[small, pool("ns/a", 4, &[], 0)], &[pod("p", 1, 1)]);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["ns/a"], "4 for four is less than 2 for one");
    }

    #[test]
    fn daemonset_pods_reduce_node_capacity() {
        let mut pool = pool("a", 1, &[], 0);
        let daemon = PodFacts { kind: crate::observe::facts::PodKind::Daemon, ..pod("d", 0, 2) };
        pool.reserve(&[daemon]);
        assert_eq!((pool.shape["cpu"], pool.shape["pods"]), (46_000, 109_000));
        assert!(!accepts(&pool, &pod("p", 1, 47)), "no node is bought that the pod does not fit");
    }

    #[test]
    fn pod_falls_through_to_the_next_pool_with_room() {
        let (mut cheap, dear) = (pool("ns/a", 1, &[], 0), pool("ns/b", 5, &[], 0));
        cheap.room = Some(1);
        let pods: Vec<_> = (0..3).map(|n| pod(&format!("p{n}"), 4, 1)).collect();
        let pods: Vec<_> = pods.into_iter().map(|p| PodFacts { uid: p.name.clone(), ..p }).collect();
        let needs = assign(&[cheap.clone(), dear], &pods);
        assert_eq!((needs["ns/a"].nodes, needs["ns/b"].nodes), (1, 2));
        cheap.refused = ["p0".to_owned()].into();
        assert_eq!(assign(&[cheap], &pods[..1]), HashMap::new(), "refused with a node there");
    }

    #[test]
    fn pod_is_given_up_when_its_node_was_ready_for_long() {
        let mut one = pool("a", 1, &[("n", 4)], 0);
        let pod = PodFacts { refused_ms: 1_000, ..pod("p", 1, 1) };
        for (why, settled, now, want) in [
            ("nodes are in flight", None, 999_000, false),
            ("the node is new", Some(5_000), 180_000, false),
            ("the scheduler had time", Some(5_000), 185_000, true),
            ("the pod came later", Some(500), 999_000, false),
        ] {
            one.settled_ms = settled;
            assert_eq!(one.gives_up(&pod, now, 180_000), want, "{why}");
        }
    }

    #[test]
    fn thirty_pods_of_mixed_sizes_take_the_predicted_nodes() {
        let pods: Vec<_> = (0..30).map(|n| pod(&format!("p{n:02}"), [1, 2, 4][n % 3], 1)).collect();
        let need = pack(&pool("a", 1, &[], 0), pods.iter().collect());
        assert_eq!(need.nodes, (10 + 20 + 40_u32).div_ceil(4), "70 GPUs in fours");
    }

    #[test]
    fn pool_accepts_pods_by_the_scheduler_rules() {
        let mut guarded = pool("a", 1, &[], 0);
        guarded.labels = [("workload".to_owned(), "ml".to_owned())].into();
        guarded.named = ["workload".to_owned()].into();
        guarded.taints =
            vec![Taint { key: "dedicated".into(), value: "ml".into(), effect: "NoSchedule".into() }];
        let mut p = pod("p", 1, 1);
        assert!(!accepts(&guarded, &p), "names no key of the selector");
        p.selector.insert("workload".into(), "ml".into());
        assert!(!accepts(&guarded, &p), "does not bear the taint");
        p.tolerations = vec![Toleration {
            key: Some("dedicated".into()),
            value: Some("ml".into()),
            ..Toleration::default()
        }];
        assert!(accepts(&guarded, &p));
        p.selector.insert("workload".into(), "other".into());
        assert!(!accepts(&guarded, &p), "wants another label");
        p.selector.clear();
        let expression = |operator: &str, values: &[&str]| NodeSelectorRequirement {
            key: "workload".into(),
            operator: operator.into(),
            values: Some(values.iter().map(|v| (*v).to_owned()).collect()),
        };
        for (operator, values, want) in [
            ("In", &["ml"][..], true),
            ("In", &["x"], false),
            ("NotIn", &["x"], true),
            ("Exists", &[], true),
            ("DoesNotExist", &[], false),
            ("Gt", &["1"], false),
        ] {
            p.terms = vec![NodeSelectorTerm {
                match_expressions: Some(vec![expression(operator, values)]),
                match_fields: None,
            }];
            assert_eq!(accepts(&guarded, &p), want, "{operator} {values:?}");
        }
    }
}
