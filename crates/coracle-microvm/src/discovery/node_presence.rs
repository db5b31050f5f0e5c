//! Presence of nodes, and which nodes are lost.

use std::collections::BTreeSet;

use coracle_reconcile::WallTime as _;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;

use super::{Fleet, Tables};
use crate::observed::Policy;

/// Presence of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodePresence {
    /// The node is present.
    Alive,
    /// The node is absent.
    Gone {
        /// Time since which the node is absent.
        since: Timestamp,
    },
}

impl Fleet {
    /// Returns whether `node` is present. A Ready Kubernetes Node outweighs an expired Lease: then only the agent is down.
    /// Records the time since which a name has no announcement.
    #[must_use]
    pub fn node_presence(&self, node: &str) -> NodePresence {
        self.lock().node_presence(node, self.clock.timestamp())
    }

    /// Returns the nodes with VMs that count as lost now.
    pub(crate) fn lost_nodes(&self, policy: &Policy) -> BTreeSet<String> {
        let now = self.clock.timestamp();
        let mut tables = self.lock();
        let mut nodes: BTreeSet<_> = tables.reservations.nodes().map(str::to_owned).collect();
        nodes.retain(|node| match tables.node_presence(node, now) {
            NodePresence::Alive => false,
            NodePresence::Gone { since } => policy.is_lost(since, now),
        });
        nodes
    }

    /// Queues the VMs that are bound to `node`.
    pub(crate) fn enqueue_bound(&self, node: &str) {
        let vms = self.vms.state().into_iter();
        for vm in vms.filter(|vm| vm.status.as_ref().is_some_and(|status| status.node_name == node)) {
            self.enqueue(ObjectRef::from_obj(vm.as_ref()));
        }
    }
}

impl Tables {
    fn node_presence(&mut self, node: &str, now: Timestamp) -> NodePresence {
        if let Some(known) = self.nodes.rows.get(&format!("/{node}")) {
            self.missing.remove(node);
            return if known.ready { NodePresence::Alive } else { NodePresence::Gone { since: known.since } };
        }
        let announced = self.announcements().filter(|a| a.node == node);
        // Several announcements are possible: the one that ended last counts, or one that has not ended.
        let gone = announced.map(|a| a.life.and_then(|life| life.gone_since(now)).unwrap_or(Timestamp::MAX));
        match gone.max() {
            Some(since) => {
                self.missing.remove(node);
                if since == Timestamp::MAX { NodePresence::Alive } else { NodePresence::Gone { since } }
            }
            None => NodePresence::Gone { since: *self.missing.entry(node.to_owned()).or_insert(now) },
        }
    }
}
