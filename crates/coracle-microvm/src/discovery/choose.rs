//! Chooses nodes for VMs.

use std::collections::BTreeMap;

use coracle_api::{MikromVM, NodeSelectorTerm};
use coracle_reconcile::WallTime as _;
use kube::ResourceExt as _;

use super::{
    ASSUMED_FOR, Fleet,
    overlap::overlaps,
    reservations::{Reservation, size},
};
use crate::placement::{Candidate, Capacity, FitError, Request, place};

impl Fleet {
    /// Returns every live node with an agent, with the resources that VMs other than `except` have reserved on it.
    #[must_use]
    pub fn candidates(&self, namespace: &str, except: Option<&MikromVM>) -> Vec<Candidate> {
        let except = except.and_then(kube::ResourceExt::uid).unwrap_or_default();
        let now = self.clock.timestamp();
        let mut tables = self.lock();
        tables.reservations.expire(now);
        let mut nodes: BTreeMap<&str, Candidate> = BTreeMap::new();
        let overlaps = overlaps(tables.announcements().filter_map(|a| Some((a.node.as_str(), a.subnet?))));
        for a in tables.announcements() {
            let known = tables.nodes.rows.get(&format!("/{}", a.node));
            let lives = a.life.is_none_or(|life| life.is_alive(now)) && known.is_none_or(|n| n.ready);
            if !lives || nodes.contains_key(a.node.as_str()) {
                continue;
            }
            let cordoned = known.is_some_and(|n| n.cordoned).then(|| "is cordoned".to_owned());
            let (promised, namespace_vms) = tables.reservations.on(&a.node, namespace, &except);
            let candidate = Candidate {
                node: a.node.clone(),
                agent: a.agent.clone(),
                capacity: a.capacity.or_else(|| tables.reported_capacities.get(&a.agent.address).copied()),
                promised,
                namespace_vms,
                preference: 0,
                barred: cordoned.or_else(|| overlaps.get(a.node.as_str()).cloned()),
            };
            nodes.insert(&a.node, candidate);
        }
        nodes.into_values().collect()
    }

    /// Chooses a node for `vm` and reserves its resources until the store shows the binding, so that concurrent placements do
    /// not exceed the capacity. Nodes in `avoid` are not chosen. `claims` are the node selector terms of each of its claims.
    ///
    /// # Errors
    /// [`FitError`] when no node accepts the VM.
    pub fn choose(
        &self,
        vm: &MikromVM,
        claims: &[Vec<NodeSelectorTerm>],
        avoid: &[String],
    ) -> Result<Candidate, FitError> {
        let request = request(vm);
        let mut nodes = self.candidates(&request.namespace, Some(vm));
        self.constrain(vm, claims, &mut nodes);
        for node in nodes.iter_mut().filter(|node| avoid.contains(&node.node)) {
            node.barred = Some("refused this VM a moment ago".to_owned());
        }
        let chosen = place(&request, &nodes, self.overcommit)?.clone();
        let now = self.clock.timestamp();
        let until = now.saturating_add(ASSUMED_FOR).unwrap_or(now);
        let reservation = Reservation::new(vm, &chosen.node);
        self.lock().reservations.assume(&vm.uid().unwrap_or_default(), reservation, until);
        Ok(chosen)
    }
}

/// Returns the resources that `vm` requests.
#[must_use]
pub fn request(vm: &MikromVM) -> Request {
    let Capacity { vcpus, memory_mib } = size(vm);
    Request { vcpus, memory_mib, namespace: vm.namespace().unwrap_or_default() }
}
