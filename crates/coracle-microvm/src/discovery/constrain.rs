//! Excludes nodes by the constraints of a VM.

use std::collections::HashMap;

use coracle_api::{MikromVM, NodeSelectorTerm, keys};
use coracle_vm_inputs::constraints::{
    Labels, Neighbour, NodeView, allows, allows_neighbours, has_neighbour_terms, preference,
};
use k8s_openapi::api::core::v1::Taint;
use kube::ResourceExt as _;

use super::{Fleet, Tables};
use crate::placement::Candidate;

/// Label that every node has, whether or not a kubelet runs there.
const HOSTNAME: &str = "kubernetes.io/hostname";

impl Fleet {
    /// Bars nodes by labels, taints and other VMs, and records which nodes the VM prefers.
    pub(super) fn constrain(&self, vm: &MikromVM, claims: &[Vec<NodeSelectorTerm>], nodes: &mut [Candidate]) {
        let views: HashMap<String, (Labels, Vec<Taint>)> = {
            let tables = self.lock();
            nodes.iter().map(|node| (node.node.clone(), tables.node_view(&node.node))).collect()
        };
        let bound = if has_neighbour_terms(&vm.spec) { self.neighbour_nodes(vm) } else { vec![] };
        let others: Vec<Neighbour<'_>> = bound
            .iter()
            .filter_map(|(labels, node)| Some(Neighbour { labels, node: &views.get(node)?.0 }))
            .collect();
        for candidate in nodes {
            let Some((labels, taints)) = views.get(&candidate.node) else { continue };
            let node = NodeView { labels, taints };
            candidate.preference = preference(&vm.spec, &node);
            let allowed = allows(&vm.spec, claims, &node)
                .and_then(|()| allows_neighbours(&vm.spec, vm.labels(), labels, &others));
            candidate.barred = candidate.barred.take().or(allowed.err());
        }
    }

    /// Returns labels and node of the other VMs of the namespace, including choices that the store does not show yet.
    fn neighbour_nodes(&self, vm: &MikromVM) -> Vec<(Labels, String)> {
        let tables = self.lock();
        let node_of = |other: &MikromVM| {
            let uid = other.uid()?;
            let stored =
                other.status.as_ref().map(|status| status.node_name.clone()).filter(|n| !n.is_empty());
            let assumed = || tables.reservations.assumed_node(&uid).map(str::to_owned);
            stored.or_else(assumed)
        };
        let all = self.vms.state().into_iter();
        let others = all.filter(|other| other.namespace() == vm.namespace() && other.uid() != vm.uid());
        others.filter_map(|other| Some((other.labels().clone(), node_of(&other)?))).collect()
    }
}

impl Tables {
    /// Returns labels and taints of a node: those of its Kubernetes Node, and those that it announces itself.
    fn node_view(&self, node: &str) -> (Labels, Vec<Taint>) {
        let announced = self.announcements().find(|a| a.node == node).map(|a| a.labels.clone());
        let mut labels = announced.unwrap_or_default();
        labels.insert(HOSTNAME.to_owned(), node.to_owned());
        labels.insert(keys::node::NODE_LABEL.to_owned(), node.to_owned());
        let known = self.nodes.rows.get(&format!("/{node}"));
        labels.extend(known.map(|known| known.labels.clone()).unwrap_or_default());
        (labels, known.map(|known| known.taints.clone()).unwrap_or_default())
    }
}
