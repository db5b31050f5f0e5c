//! Cache of Nodes and Pods, indexed by BidNode and by Node.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{ResourceExt as _, runtime::watcher};
use parking_lot::{Mutex, MutexGuard};

use super::facts::{NodeFacts, PodFacts};
use crate::plan::{NodeView, demand::Need};

/// Name prefix of Nodes that this controller creates; pods on other Nodes are ignored.
pub(crate) const NODE_PREFIX: &str = "bn-";

#[derive(Debug, Default)]
struct State {
    /// Nodes by BidNode (`namespace/name`), then by name.
    nodes: HashMap<String, BTreeMap<String, NodeFacts>>,
    /// BidNode of each Node.
    owners: HashMap<String, String>,
    /// Pods by Node, then by UID.
    pods: HashMap<String, BTreeMap<String, PodFacts>>,
    /// Node of each pod; `None` while it is pending.
    places: HashMap<String, Option<String>>,
    /// Unschedulable pods that wait for a node, by UID.
    pending: BTreeMap<String, PodFacts>,
    /// Nodes without workload, with the time since when.
    idle: HashMap<String, i64>,
    /// Pod that each DaemonSet's template describes, by UID of the DaemonSet.
    daemons: BTreeMap<String, PodFacts>,
    /// Nodes that waiting pods need, by UID of the BidNode.
    needs: HashMap<String, Need>,
    /// Names in a list that is not complete yet, for Nodes and for Pods.
    listed: [Option<BTreeSet<String>>; 2],
}

/// BidNodes and pods that a change of the cluster affects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    /// BidNodes, as `namespace/name`.
    pub(crate) owners: BTreeSet<String>,
    /// Whether pods must be packed again.
    pub(crate) demand: bool,
}

/// Cache of Nodes, Pods and DaemonSets.
#[derive(Debug, Default)]
pub(crate) struct ClusterCache(Mutex<State>);

impl ClusterCache {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Nodes of a BidNode with their pods.
    pub(crate) fn nodes(&self, owner: &str) -> Vec<NodeView> {
        let state = self.state();
        let nodes = state.nodes.get(owner).into_iter().flatten();
        let view = |(name, facts): (&String, &NodeFacts)| NodeView {
            facts: facts.clone(),
            pods: state.pods.get(name).into_iter().flat_map(|p| p.values().cloned()).collect(),
            idle_ms: state.idle.get(name).copied(),
        };
        nodes.map(view).collect()
    }

    pub(crate) fn need(&self, uid: &str) -> Need {
        self.state().needs.get(uid).cloned().unwrap_or_default()
    }

    /// Unschedulable pods.
    pub(crate) fn pending(&self) -> Vec<PodFacts> {
        self.state().pending.values().cloned().collect()
    }

    /// Stores the result of a packing. Returns the UIDs of BidNodes whose need changed.
    pub(crate) fn set_needs(&self, needs: HashMap<String, Need>) -> Vec<String> {
        let mut state = self.state();
        let old = std::mem::replace(&mut state.needs, needs);
        let all: BTreeSet<&String> = old.keys().chain(state.needs.keys()).collect();
        all.into_iter().filter(|uid| old.get(*uid) != state.needs.get(*uid)).cloned().collect()
    }

    /// Pods of DaemonSets, one for each DaemonSet.
    pub(crate) fn daemons(&self) -> Vec<PodFacts> {
        self.state().daemons.values().cloned().collect()
    }

    /// Stores or removes a DaemonSet. Returns whether something changed.
    pub(crate) fn put_daemon(&self, uid: String, pod: Option<PodFacts>) -> bool {
        let mut state = self.state();
        match pod {
            Some(pod) if state.daemons.get(&uid) == Some(&pod) => false,
            Some(pod) => {
                state.daemons.insert(uid, pod);
                true
            }
            None => state.daemons.remove(&uid).is_some(),
        }
    }

    /// Removes DaemonSets that a complete list does not contain.
    pub(crate) fn keep_daemons(&self, listed: &BTreeSet<String>) {
        self.state().daemons.retain(|uid, _| listed.contains(uid));
    }

    /// Whether more than a fifth of all Nodes that have been Ready, and at least two, have not been Ready for `lost_ms`.
    pub(crate) fn is_fleet_unhealthy(&self, now_ms: i64, lost_ms: i64) -> bool {
        let state = self.state();
        let nodes = state.nodes.values().flat_map(BTreeMap::values);
        let stay = |n: &&NodeFacts| {
            !n.deleting
                && n.draining_ms.is_none()
                && !n.is_tainted(coracle_api::bidnode::names::UNINITIALIZED)
        };
        let (mut all, mut ill) = (0usize, 0usize);
        for node in nodes.filter(stay) {
            all += 1;
            ill += usize::from(!node.ready && now_ms - node.since_ms >= lost_ms);
        }
        ill >= 2 && ill * 5 > all
    }

    /// Nodes by BidNode, as `namespace/name`.
    pub(crate) fn all_nodes(&self) -> Vec<(String, Vec<NodeFacts>)> {
        let state = self.state();
        state.nodes.iter().map(|(owner, nodes)| (owner.clone(), nodes.values().cloned().collect())).collect()
    }

    pub(crate) fn node_event(&self, event: &watcher::Event<Node>, now_ms: i64) -> Touched {
        let mut state = self.state();
        match event {
            watcher::Event::Apply(node) => state.put_node(NodeFacts::of(node), now_ms),
            watcher::Event::Delete(node) => state.drop_node(&node.name_any()),
            watcher::Event::Init => {
                state.listed[0] = Some(BTreeSet::new());
                Touched::default()
            }
            watcher::Event::InitApply(node) => {
                state.listed[0].get_or_insert_default().insert(node.name_any());
                state.put_node(NodeFacts::of(node), now_ms)
            }
            watcher::Event::InitDone => {
                let listed = state.listed[0].take().unwrap_or_default();
                let gone: Vec<_> = state.owners.keys().filter(|n| !listed.contains(*n)).cloned().collect();
                merge_touched(gone.iter().map(|name| state.drop_node(name)))
            }
        }
    }

    pub(crate) fn pod_event(&self, event: &watcher::Event<Pod>, now_ms: i64) -> Touched {
        let mut state = self.state();
        match event {
            watcher::Event::Apply(pod) => state.put_pod(PodFacts::of(pod), now_ms),
            watcher::Event::Delete(pod) => state.drop_pod(&pod.uid().unwrap_or_default(), now_ms),
            watcher::Event::Init => {
                state.listed[1] = Some(BTreeSet::new());
                Touched::default()
            }
            watcher::Event::InitApply(pod) => {
                state.listed[1].get_or_insert_default().insert(pod.uid().unwrap_or_default());
                state.put_pod(PodFacts::of(pod), now_ms)
            }
            watcher::Event::InitDone => {
                let listed = state.listed[1].take().unwrap_or_default();
                let gone: Vec<_> = state.places.keys().filter(|u| !listed.contains(*u)).cloned().collect();
                merge_touched(gone.iter().map(|uid| state.drop_pod(uid, now_ms)))
            }
        }
    }
}

fn merge_touched(all: impl Iterator<Item = Touched>) -> Touched {
    all.fold(Touched::default(), |mut sum, one| {
        sum.owners.extend(one.owners);
        sum.demand |= one.demand;
        sum
    })
}

impl State {
    fn put_node(&mut self, facts: NodeFacts, now_ms: i64) -> Touched {
        let (owner, name) = (facts.owner(), facts.name.clone());
        let mut touched = match self.owners.insert(name.clone(), owner.clone()) {
            Some(old) if old != owner => {
                let touched = self.drop_node(&name);
                self.owners.insert(name.clone(), owner.clone());
                touched
            }
            _ => Touched::default(),
        };
        if !self.has_work(&name) {
            self.idle.entry(name.clone()).or_insert(now_ms);
        }
        let old = self.nodes.entry(owner.clone()).or_default().insert(name, facts.clone());
        // A heartbeat changes only the resource version.
        let seen = |f: &NodeFacts| NodeFacts { version: String::new(), ..f.clone() };
        if old.is_none_or(|old| seen(&old) != seen(&facts)) {
            touched.owners.insert(owner);
            touched.demand = true;
        }
        touched
    }

    fn drop_node(&mut self, name: &str) -> Touched {
        self.idle.remove(name);
        let Some(owner) = self.owners.remove(name) else { return Touched::default() };
        if let Some(nodes) = self.nodes.get_mut(&owner) {
            nodes.remove(name);
            if nodes.is_empty() {
                self.nodes.remove(&owner);
            }
        }
        Touched { owners: [owner].into(), demand: true }
    }

    fn has_work(&self, node: &str) -> bool {
        self.pods.get(node).is_some_and(|pods| pods.values().any(PodFacts::is_workload))
    }

    fn put_pod(&mut self, pod: PodFacts, now_ms: i64) -> Touched {
        let ours = pod.node.as_ref().is_some_and(|n| n.starts_with(NODE_PREFIX));
        let known = match self.places.get(&pod.uid) {
            Some(Some(node)) => self.pods.get(node).and_then(|pods| pods.get(&pod.uid)),
            Some(None) => self.pending.get(&pod.uid),
            None => None,
        };
        if known == Some(&pod) {
            return Touched::default();
        }
        let mut touched = self.drop_pod(&pod.uid, now_ms);
        if let Some(node) = pod.node.clone().filter(|_| ours) {
            touched.owners.extend(self.owners.get(&node).cloned());
            touched.demand |= !self.pending.is_empty();
            if pod.is_workload() {
                self.idle.remove(&node);
            }
            self.places.insert(pod.uid.clone(), Some(node.clone()));
            self.pods.entry(node).or_default().insert(pod.uid.clone(), pod);
        } else if pod.unschedulable {
            touched.demand = true;
            self.places.insert(pod.uid.clone(), None);
            self.pending.insert(pod.uid.clone(), pod);
        }
        touched
    }

    fn drop_pod(&mut self, uid: &str, now_ms: i64) -> Touched {
        let mut touched = Touched::default();
        match self.places.remove(uid) {
            Some(Some(node)) => {
                if let Some(pods) = self.pods.get_mut(&node) {
                    pods.remove(uid);
                    if pods.is_empty() {
                        self.pods.remove(&node);
                    }
                }
                if !self.has_work(&node) && self.owners.contains_key(&node) {
                    self.idle.entry(node.clone()).or_insert(now_ms);
                }
                touched.owners.extend(self.owners.get(&node).cloned());
                touched.demand = !self.pending.is_empty();
            }
            Some(None) => {
                self.pending.remove(uid);
                touched.demand = true;
            }
            None => {}
        }
        touched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeFacts {
        let labels = [("kubebid.io/bidnode", "b"), ("kubebid.io/namespace", "n")];
        let labels = labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        NodeFacts { name: name.into(), labels, ..NodeFacts::default() }
    }

    fn pod(uid: &str, node: Option<&str>) -> PodFacts {
        let node = node.map(str::to_owned);
        PodFacts { uid: uid.into(), unschedulable: node.is_none(), node, ..PodFacts::default() }
    }

    #[test]
    fn node_is_idle_since_its_last_workload_left() {
        let mut state = State::default();
        assert_eq!(state.put_node(node("bn-1"), 10).owners, ["n/b".to_owned()].into());
        assert_eq!(state.idle["bn-1"], 10);
        assert_eq!(state.put_node(node("bn-1"), 11), Touched::default(), "a heartbeat changes nothing");
        assert!(state.put_pod(pod("p", None), 15).demand, "it waits");
        assert_eq!(state.pending.len(), 1);
        state.put_pod(pod("p", Some("bn-1")), 20);
        assert!(state.idle.is_empty() && state.pending.is_empty());
        assert_eq!(state.put_pod(pod("p", Some("bn-1")), 21), Touched::default());
        state
            .put_pod(PodFacts { kind: crate::observe::facts::PodKind::Daemon, ..pod("d", Some("bn-1")) }, 25);
        state.drop_pod("p", 30);
        assert_eq!(state.idle["bn-1"], 30, "pods of DaemonSets are not workload");
        assert_eq!(state.drop_node("bn-1").owners, ["n/b".to_owned()].into());
        assert!(state.nodes.is_empty());
    }
}
