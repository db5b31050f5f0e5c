//! Index of the instances of a node by id, owner and uid: a node has thousands, and the start of each VM looks up its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use coracle_hypervisor::Jail;
use coracle_types::InstanceId;

use super::{Instance, InstanceOwner};

#[derive(Debug, Default)]
pub(super) struct Known {
    by_id: BTreeMap<InstanceId, Instance>,
    by_owner: HashMap<InstanceOwner, BTreeSet<InstanceId>>,
    /// Number of instances with this uid. Instances of earlier daemons may share one.
    uids: HashMap<u32, usize>,
}

impl Known {
    pub(super) fn get(&self, id: &InstanceId) -> Option<&Instance> {
        self.by_id.get(id)
    }

    pub(super) fn has_uid(&self, uid: u32) -> bool {
        self.uids.contains_key(&uid)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &InstanceId> {
        self.by_id.keys()
    }

    pub(super) fn ids_of(&self, owner: &InstanceOwner) -> impl Iterator<Item = &InstanceId> {
        self.by_owner.get(owner).into_iter().flatten()
    }

    pub(super) fn ids_where(&self, of: impl Fn(&InstanceOwner) -> bool) -> Vec<InstanceId> {
        self.by_id.iter().filter(|(_, i)| of(&i.owner)).map(|(id, _)| id.clone()).collect()
    }

    /// Adds the instance, or replaces its entry.
    pub(super) fn insert(&mut self, id: InstanceId, instance: Instance) {
        self.remove(&id);
        *self.uids.entry(Jail::uid_of(&id)).or_default() += 1;
        self.by_owner.entry(instance.owner.clone()).or_default().insert(id.clone());
        self.by_id.insert(id, instance);
    }

    pub(super) fn remove(&mut self, id: &InstanceId) {
        let Some(gone) = self.by_id.remove(id) else { return };
        if let Some(ids) = self.by_owner.get_mut(&gone.owner) {
            ids.remove(id);
            if ids.is_empty() {
                self.by_owner.remove(&gone.owner);
            }
        }
        let uid = Jail::uid_of(id);
        if let Some(count) = self.uids.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                self.uids.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instances::SCHEMA;

    #[test]
    fn instance_tables_follow_inserts_and_removals() {
        let vm = |name: &str| InstanceOwner::Vm(coracle_types::VmId::of_name(&name.parse().unwrap()));
        let instance = |owner| Instance { schema: SCHEMA, owner, driver: String::new(), cgroup_parent: None };
        let (a, b) = (InstanceId::new("a", 1), InstanceId::new("b", 1));
        let mut known = Known::default();
        let ids = |known: &Known, name| known.ids_of(&vm(name)).cloned().collect::<Vec<_>>();
        known.insert(a.clone(), instance(vm("web")));
        known.insert(b.clone(), instance(vm("web")));
        assert_eq!(ids(&known, "web"), [a.clone(), b.clone()]);
        known.insert(b.clone(), instance(vm("db")));
        assert_eq!((ids(&known, "web"), ids(&known, "db")), (vec![a.clone()], vec![b.clone()]));
        assert_eq!(known.ids_where(|owner| *owner == vm("db")), vec![b.clone()]);
        known.remove(&a);
        assert!(known.has_uid(Jail::uid_of(&a)), "the other has the same one");
        known.remove(&b);
        assert!(!known.has_uid(Jail::uid_of(&b)) && known.by_owner.is_empty() && known.get(&b).is_none());
    }
}
