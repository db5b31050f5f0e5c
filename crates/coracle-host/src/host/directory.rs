//! VMs of a host by id and by name, and the names that creations reserve.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use coracle_types::{MemoryMib, Vcpus, VmId, VmName, VmState};

use super::Host;
use super::resolve::{Access, resolve};
use crate::HostError;
use crate::vm::{Handle, View};

#[derive(Debug, Default)]
pub(super) struct Directory {
    by_id: HashMap<VmId, Slot>,
    by_name: HashMap<VmName, VmId>,
    /// Memory in MiB and CPUs of all slots. Kept as a sum, because a node has thousands of VMs and each creation needs it.
    declared: (u64, u32),
    /// Sandbox VMs, whose state decides whether they count.
    sandboxes: HashSet<VmId>,
}

/// Entry of a VM, which reserves memory and CPUs for as long as the VM exists.
#[derive(Debug)]
struct Slot {
    memory: MemoryMib,
    vcpus: Vcpus,
    /// Handle of the VM; `None` while the VM is being created, with name, memory and CPUs reserved.
    live: Option<Handle>,
}

impl Slot {
    fn size(&self) -> (u64, u32) {
        (u64::from(self.memory.get()), u32::from(self.vcpus.get()))
    }
}

impl Directory {
    pub(super) fn live(&self) -> impl Iterator<Item = &Handle> {
        self.by_id.values().filter_map(|slot| slot.live.as_ref())
    }

    fn with_id(&self, id: &VmId) -> Option<&Handle> {
        self.by_id.get(id)?.live.as_ref()
    }

    fn named(&self, name: &VmName) -> Option<&Handle> {
        self.with_id(self.by_name.get(name)?)
    }

    /// VM with this id, else with this name.
    fn find_exact(&self, wanted: &str) -> Option<&Handle> {
        let with_id = || self.with_id(&wanted.parse().ok()?);
        with_id().or_else(|| self.named(&wanted.parse().ok()?))
    }

    /// Memory in MiB and CPUs that VMs have declared. Sandboxes that have ended do not count: an ended pod keeps its VM for as
    /// long as its object exists, and the node accepts other pods meanwhile.
    pub(super) fn declared(&self) -> (u64, u32) {
        let ended = |id: &&VmId| self.with_id(id).is_some_and(|vm| has_ended(vm.view.borrow().record.state));
        let ended = self.sandboxes.iter().filter(ended).filter_map(|id| Some(self.by_id.get(id)?.size()));
        ended.fold(self.declared, |all, one| (all.0 - one.0, all.1 - one.1))
    }

    /// Number of VMs, including those that are being created.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn insert(&mut self, name: VmName, handle: Handle) {
        let id = handle.id.clone();
        let (memory, vcpus, is_sandbox) = {
            let record = &handle.view.borrow().record;
            (record.memory, record.vcpus, record.sandbox.is_some())
        };
        self.put(name, id.clone(), Slot { memory, vcpus, live: Some(handle) });
        if is_sandbox {
            self.sandboxes.insert(id);
        }
    }

    fn put(&mut self, name: VmName, id: VmId, slot: Slot) {
        self.forget(&id, &name);
        let size = slot.size();
        self.declared = (self.declared.0 + size.0, self.declared.1 + size.1);
        self.by_name.insert(name, id.clone());
        self.by_id.insert(id, slot);
    }

    pub(super) fn forget(&mut self, id: &VmId, name: &VmName) {
        if let Some(slot) = self.by_id.remove(id) {
            let size = slot.size();
            self.declared = (self.declared.0 - size.0, self.declared.1 - size.1);
        }
        self.sandboxes.remove(id);
        self.by_name.remove(name);
    }
}

fn has_ended(state: VmState) -> bool {
    matches!(state, VmState::Stopped | VmState::Failed)
}

/// Reservation of a creation. Dropping it releases name, memory and CPUs, unless it was kept.
pub(super) struct Reservation {
    host: Host,
    id: VmId,
    name: VmName,
    kept: bool,
}

impl Reservation {
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            self.host.0.directory().forget(&self.id, &self.name);
        }
    }
}

impl Host {
    /// Reserves name, memory and CPUs for a creation.
    pub(super) fn reserve(
        &self,
        id: &VmId,
        name: &VmName,
        vcpus: Vcpus,
        memory: MemoryMib,
    ) -> Result<Reservation, HostError> {
        let (cpus, total) = self.limits();
        let mut directory = self.0.directory();
        if directory.by_name.contains_key(name) || directory.by_id.contains_key(id) {
            return Err(HostError::AlreadyExists { name: name.to_string(), uid: String::new() });
        }
        if usize::from(vcpus.get()) > cpus {
            return Err(HostError::TooManyVcpus { wanted: vcpus.get(), total: cpus });
        }
        let wanted = u64::from(memory.get());
        let declared = directory.declared().0;
        if declared + wanted > total {
            return Err(HostError::NoCapacity { wanted, declared, total });
        }
        directory.put(name.clone(), id.clone(), Slot { memory, vcpus, live: None });
        Ok(Reservation { host: self.clone(), id: id.clone(), name: name.clone(), kept: false })
    }

    /// VM with this name. Never waits.
    #[must_use]
    pub fn named(&self, name: &VmName) -> Option<Arc<View>> {
        Some(self.0.directory().named(name)?.view.borrow().clone())
    }

    /// VM that a caller means by `name`.
    pub(super) fn handle(&self, name: &str, access: Access) -> Result<Handle, HostError> {
        let directory = self.0.directory();
        let live =
            directory.by_name.iter().filter_map(|(known, id)| Some((directory.with_id(id)?, id, known)));
        resolve(access, name, directory.find_exact(name), live).cloned()
    }
}
