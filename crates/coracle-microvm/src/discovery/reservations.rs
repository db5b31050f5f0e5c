//! Resources that VMs use on nodes: those of the objects, and those of choices that no object shows yet. The sums are updated
//! with the objects, so that a choice reads one entry for each node instead of each VM. Pure.

use std::collections::HashMap;

use coracle_api::MikromVM;
use jiff::Timestamp;
use kube::ResourceExt as _;

use crate::placement::Capacity;

/// Resources of one VM, and its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reservation {
    node: String,
    namespace: String,
    size: Capacity,
}

impl Reservation {
    /// Returns the reservation of a VM on `node`.
    pub(super) fn new(vm: &MikromVM, node: &str) -> Self {
        Self { node: node.to_owned(), namespace: vm.namespace().unwrap_or_default(), size: size(vm) }
    }

    /// Returns the reservation of a VM on the node of its status or, before it is bound, on the node of its spec.
    fn stored(vm: &MikromVM) -> Option<Self> {
        let bound = vm.status.as_ref().map_or("", |status| status.node_name.as_str());
        let node = if bound.is_empty() { vm.spec.node_name.as_str() } else { bound };
        (!node.is_empty()).then(|| Self::new(vm, node))
    }
}

/// Sums of the reservations on one node.
#[derive(Debug, Default)]
struct OnNode {
    vcpus: u64,
    memory_mib: u64,
    /// Number of VMs by namespace.
    vms: HashMap<String, usize>,
}

/// Reservations by UID of the VM, and their sums by node.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    stored: HashMap<String, Reservation>,
    /// Choices until the store shows them, with their expiry. A VM that leaves its node counts there, too.
    assumed: HashMap<String, (Reservation, Timestamp)>,
    by_node: HashMap<String, OnNode>,
}

impl Reservations {
    /// Updates the reservation from the object, and removes a choice that the object shows.
    pub(super) fn store(&mut self, vm: &MikromVM) {
        let uid = vm.uid().unwrap_or_default();
        self.change(&uid, |all| {
            let now = Reservation::stored(vm);
            let shown =
                |(assumed, _): &(Reservation, _)| Some(&assumed.node) == now.as_ref().map(|r| &r.node);
            if all.assumed.get(&uid).is_some_and(shown) {
                all.assumed.remove(&uid);
            }
            match now {
                Some(now) => all.stored.insert(uid.clone(), now),
                None => all.stored.remove(&uid),
            };
        });
    }

    /// Replaces all reservations by a complete list of the objects.
    pub(super) fn replace<'a>(&mut self, vms: impl Iterator<Item = &'a MikromVM>) {
        let assumed = std::mem::take(self).assumed;
        for (uid, (reservation, until)) in assumed {
            self.assume(&uid, reservation, until);
        }
        vms.for_each(|vm| self.store(vm));
    }

    /// Adds a choice. It is removed when the store shows it, at the latest at `until`.
    pub(super) fn assume(&mut self, uid: &str, reservation: Reservation, until: Timestamp) {
        self.change(uid, |all| {
            all.assumed.insert(uid.to_owned(), (reservation, until));
        });
    }

    /// Removes the choices that have expired.
    pub(super) fn expire(&mut self, now: Timestamp) {
        let over = self.assumed.iter().filter(|(_, (_, until))| *until <= now);
        let over: Vec<_> = over.map(|(uid, _)| uid.clone()).collect();
        for uid in over {
            self.change(&uid, |all| drop(all.assumed.remove(&uid)));
        }
    }

    /// Removes a deleted VM.
    pub(super) fn remove(&mut self, uid: &str) {
        self.change(uid, |all| {
            all.stored.remove(uid);
            all.assumed.remove(uid);
        });
    }

    /// Returns the sum of a node and the number of VMs of `namespace` on it, both without the VM `except`.
    pub(super) fn on(&self, node: &str, namespace: &str, except: &str) -> (Capacity, usize) {
        let Some(sum) = self.by_node.get(node) else { return (Capacity::default(), 0) };
        let own = self.of(except).find(|own| own.node == node);
        let own_size = own.map(|own| own.size).unwrap_or_default();
        let own_vms = usize::from(own.is_some_and(|own| own.namespace == namespace));
        let size = Capacity {
            vcpus: u32::try_from(sum.vcpus.saturating_sub(own_size.vcpus.into())).unwrap_or(u32::MAX),
            memory_mib: sum.memory_mib.saturating_sub(own_size.memory_mib),
        };
        (size, sum.vms.get(namespace).copied().unwrap_or_default().saturating_sub(own_vms))
    }

    /// Returns the nodes with VMs.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &str> {
        self.by_node.keys().map(String::as_str)
    }

    /// Returns the node that was chosen for the VM and that the store does not show yet.
    pub(super) fn assumed_node(&self, uid: &str) -> Option<&str> {
        self.assumed.get(uid).map(|(assumed, _)| assumed.node.as_str())
    }

    /// Returns the reservations of one VM, each on a different node.
    fn of(&self, uid: &str) -> impl Iterator<Item = &Reservation> {
        let assumed = self.assumed.get(uid).map(|(assumed, _)| assumed);
        let stored = self.stored.get(uid).filter(|stored| assumed.is_none_or(|a| a.node != stored.node));
        assumed.into_iter().chain(stored)
    }

    /// Changes the reservations of one VM, and the sums with them.
    fn change(&mut self, uid: &str, change: impl FnOnce(&mut Self)) {
        let before: Vec<_> = self.of(uid).cloned().collect();
        change(self);
        let after: Vec<_> = self.of(uid).cloned().collect();
        if before != after {
            before.iter().for_each(|gone| self.subtract(gone));
            after.into_iter().for_each(|new| self.add(new));
        }
    }

    fn add(&mut self, new: Reservation) {
        let sum = self.by_node.entry(new.node).or_default();
        sum.vcpus += u64::from(new.size.vcpus);
        sum.memory_mib += new.size.memory_mib;
        *sum.vms.entry(new.namespace).or_default() += 1;
    }

    fn subtract(&mut self, gone: &Reservation) {
        let Some(sum) = self.by_node.get_mut(&gone.node) else { return };
        sum.vcpus -= u64::from(gone.size.vcpus);
        sum.memory_mib -= gone.size.memory_mib;
        if let Some(vms) = sum.vms.get_mut(&gone.namespace) {
            *vms -= 1;
            if *vms == 0 {
                sum.vms.remove(&gone.namespace);
            }
        }
        if sum.vms.is_empty() {
            self.by_node.remove(&gone.node);
        }
    }
}

/// Returns the resources that a VM requests.
pub(super) fn size(vm: &MikromVM) -> Capacity {
    let vcpus = u32::try_from(vm.spec.vcpu_count).unwrap_or(0);
    Capacity { vcpus, memory_mib: u64::try_from(vm.spec.memory_mib).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use coracle_api::{MikromVMSpec, MikromVMStatus};

    use super::*;

    fn vm(uid: &str, memory_mib: i32, node: &str) -> MikromVM {
        let spec = MikromVMSpec { vcpu_count: 1, memory_mib, ..MikromVMSpec::default() };
        let mut vm = MikromVM::new(uid, spec);
        vm.metadata.namespace = Some("team".into());
        vm.metadata.uid = Some(uid.into());
        vm.status = Some(MikromVMStatus { node_name: node.into(), ..MikromVMStatus::default() });
        vm
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn on(all: &Reservations, node: &str) -> (u64, usize) {
        let (size, vms) = all.on(node, "team", "");
        assert_eq!(usize::try_from(size.vcpus).unwrap(), vms, "each VM has one vCPU");
        (size.memory_mib, vms)
    }

    #[test]
    fn assumed_placement_counts_until_stored_or_expired() {
        let mut all = Reservations::default();
        let choose = |all: &mut Reservations, node: &str| {
            all.assume("a", Reservation::new(&vm("a", 100, ""), node), at(300));
        };
        all.store(&vm("a", 100, ""));
        assert_eq!(on(&all, "n1"), (0, 0), "unbound");
        choose(&mut all, "n1");
        all.store(&vm("a", 100, ""));
        assert_eq!((on(&all, "n1"), all.assumed_node("a")), ((100, 1), Some("n1")), "chosen");
        choose(&mut all, "n2");
        assert_eq!((on(&all, "n1"), on(&all, "n2")), ((0, 0), (100, 1)), "chosen again");
        all.expire(at(299));
        assert_eq!(on(&all, "n2"), (100, 1));
        all.expire(at(300));
        assert_eq!((on(&all, "n2"), all.assumed_node("a")), ((0, 0), None), "over");
        choose(&mut all, "n1");
        all.store(&vm("a", 100, "n1"));
        assert_eq!((on(&all, "n1"), all.assumed_node("a")), ((100, 1), None), "shown");
        all.store(&vm("a", 150, "n1"));
        assert_eq!(on(&all, "n1"), (150, 1), "resized");
        all.remove("a");
        assert_eq!(on(&all, "n1"), (0, 0));
        assert!(all.by_node.is_empty(), "nothing is kept of a node without VMs");
    }

    #[test]
    fn vm_that_leaves_its_node_counts_at_both() {
        let mut all = Reservations::default();
        let vms = [vm("a", 100, "lost"), vm("b", 50, "n2")];
        all.replace(vms.iter());
        all.assume("a", Reservation::new(&vms[0], "n2"), at(300));
        assert_eq!((on(&all, "lost"), on(&all, "n2")), ((100, 1), (150, 2)));
        assert_eq!(all.on("n2", "team", "a").0.memory_mib, 50, "without itself");
        all.store(&vms[0]); // a write that was under way
        all.replace(vms.iter());
        assert_eq!((on(&all, "lost"), on(&all, "n2")), ((100, 1), (150, 2)), "listed again");
        all.expire(at(300));
        assert_eq!((on(&all, "lost"), on(&all, "n2")), ((100, 1), (50, 1)), "the choice was never stored");
        all.assume("a", Reservation::new(&vms[0], "n2"), at(300));
        all.store(&vm("a", 100, "n2"));
        assert_eq!((on(&all, "lost"), on(&all, "n2")), ((0, 0), (150, 2)), "it has left");
        all.replace(vms[1..].iter());
        assert_eq!(on(&all, "n2"), (50, 1), "deleted while nothing was watched");
    }

    #[test]
    fn sum_is_without_the_vm_itself() {
        let mut all = Reservations::default();
        all.replace([vm("a", 100, "n1"), vm("b", 50, "n1")].iter());
        assert_eq!(all.on("n1", "team", "a"), (Capacity { vcpus: 1, memory_mib: 50 }, 1));
        assert_eq!(all.on("n1", "other", "b"), (Capacity { vcpus: 1, memory_mib: 100 }, 0));
        let named =
            MikromVM::new("c", MikromVMSpec { node_name: "n3".into(), memory_mib: 7, ..vm("c", 7, "").spec });
        all.store(&named);
        assert_eq!(all.on("n3", "", "x").0.memory_mib, 7, "bound by its spec");
    }
}
