//! Nodes and Pods as last heard, found by BidNode and by Node without a search.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{ResourceExt as _, runtime::watcher};

use crate::{
    demand::Need,
    facts::{NodeFacts, PodFacts},
    plan::NodeView,
};

/// Nodes of ours have names that begin so; other pods are nobody's concern here.
pub(crate) const NODE_PREFIX: &str = "bn-";

#[derive(Debug, Default)]
struct State {
    /// By BidNode (`namespace/name`), then by name.
    nodes: HashMap<String, BTreeMap<String, NodeFacts>>,
    /// BidNode by Node.
    owners: HashMap<String, String>,
    /// Pods by Node, then by UID.
    pods: HashMap<String, BTreeMap<String, PodFacts>>,
    /// Where each pod is: its Node, or nowhere yet.
    places: HashMap<String, Option<String>>,
    /// Pods that wait for a node, by UID.
    pending: BTreeMap<String, PodFacts>,
    /// Nodes without workload, since when.
    idle: HashMap<String, i64>,
    /// What waiting pods ask, by UID of the BidNode.
    needs: HashMap<String, Need>,
    /// What a list that began has named so far.
    listed: [Option<BTreeSet<String>>; 2],
}

/// What a change of the cluster concerns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    /// BidNodes, as `namespace/name`.
    pub(crate) owners: BTreeSet<String>,
    /// Pods must be packed anew.
    pub(crate) demand: bool,
}

/// The cluster as last heard.
#[derive(Debug, Default)]
pub(crate) struct World(Mutex<State>);

impl World {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Nodes of a BidNode and what is on them.
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

    /// The unit under the Node that a pod is on.
    pub(crate) fn unit_of_pod(&self, uid: &str) -> Option<String> {
        let state = self.state();
        let node = state.places.get(uid)?.as_ref()?;
        let facts = state.nodes.get(state.owners.get(node)?)?.get(node)?;
        Some(facts.allocation.clone())
    }

    pub(crate) fn need(&self, uid: &str) -> Need {
        self.state().needs.get(uid).cloned().unwrap_or_default()
    }

    /// Pods that wait.
    pub(crate) fn pending(&self) -> Vec<PodFacts> {
        self.state().pending.values().cloned().collect()
    }

    /// Takes in a packing; UIDs of BidNodes for which it is news.
    pub(crate) fn set_needs(&self, needs: HashMap<String, Need>) -> Vec<String> {
        let mut state = self.state();
        let old = std::mem::replace(&mut state.needs, needs);
        let all: BTreeSet<&String> = old.keys().chain(state.needs.keys()).collect();
        all.into_iter().filter(|uid| old.get(*uid) != state.needs.get(*uid)).cloned().collect()
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
                merged(gone.iter().map(|name| state.drop_node(name)))
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
                merged(gone.iter().map(|uid| state.drop_pod(uid, now_ms)))
            }
        }
    }
}

fn merged(all: impl Iterator<Item = Touched>) -> Touched {
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
        // A heartbeat changes nothing but the version.
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
    fn a_node_is_idle_since_its_last_workload_left() {
        let mut state = State::default();
        assert_eq!(state.put_node(node("bn-1"), 10).owners, ["n/b".to_owned()].into());
        assert_eq!(state.idle["bn-1"], 10);
        assert_eq!(state.put_node(node("bn-1"), 11), Touched::default(), "a heartbeat is no news");
        assert!(state.put_pod(pod("p", None), 15).demand, "it waits");
        assert_eq!(state.pending.len(), 1);
        state.put_pod(pod("p", Some("bn-1")), 20);
        assert!(state.idle.is_empty() && state.pending.is_empty());
        assert_eq!(state.put_pod(pod("p", Some("bn-1")), 21), Touched::default());
        state.put_pod(PodFacts { kind: crate::facts::PodKind::Daemon, ..pod("d", Some("bn-1")) }, 25);
        state.drop_pod("p", 30);
        assert_eq!(state.idle["bn-1"], 30, "what runs on every node is no workload");
        assert_eq!(state.drop_node("bn-1").owners, ["n/b".to_owned()].into());
        assert!(state.nodes.is_empty());
    }
}
