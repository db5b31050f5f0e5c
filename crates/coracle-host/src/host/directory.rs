//! The VMs of a host by id and by name, and the names that creations hold.

use std::collections::HashMap;
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
}

#[derive(Debug)]
enum Slot {
    /// Being created: name, memory and CPUs are taken.
    Reserved {
        memory: MemoryMib,
        vcpus: Vcpus,
    },
    Live(Handle),
}

impl Directory {
    pub(super) fn live(&self) -> impl Iterator<Item = &Handle> {
        self.by_id.values().filter_map(|slot| match slot {
            Slot::Live(handle) => Some(handle),
            Slot::Reserved { .. } => None,
        })
    }

    fn with_id(&self, id: &VmId) -> Option<&Handle> {
        match self.by_id.get(id)? {
            Slot::Live(handle) => Some(handle),
            Slot::Reserved { .. } => None,
        }
    }

    fn named(&self, name: &VmName) -> Option<&Handle> {
        self.with_id(self.by_name.get(name)?)
    }

    /// The VM with that id, else with that name: what [`resolve`] finds in all of them.
    fn exact(&self, wanted: &str) -> Option<&Handle> {
        let with_id = || self.with_id(&wanted.parse().ok()?);
        with_id().or_else(|| self.named(&wanted.parse().ok()?))
    }

    /// Memory in MiB and CPUs that VMs have declared. Sandboxes that ended do not count: an ended pod keeps its VM for as long
    /// as its object exists, and its node takes other pods meanwhile.
    pub(super) fn declared(&self) -> (u64, u32) {
        self.by_id.values().fold((0, 0), |(mib, cpus), slot| {
            let (memory, vcpus) = match slot {
                Slot::Reserved { memory, vcpus } => (*memory, *vcpus),
                Slot::Live(handle) => {
                    let view = handle.view.borrow();
                    if view.record.sandbox.is_some() && has_ended(view.record.state) {
                        return (mib, cpus);
                    }
                    (view.record.memory, view.record.vcpus)
                }
            };
            (mib + u64::from(memory.get()), cpus + u32::from(vcpus.get()))
        })
    }

    /// VMs, those that are being created included.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn insert(&mut self, name: VmName, handle: Handle) {
        self.by_name.insert(name, handle.id.clone());
        self.by_id.insert(handle.id.clone(), Slot::Live(handle));
    }

    pub(super) fn forget(&mut self, id: &VmId, name: &VmName) {
        self.by_id.remove(id);
        self.by_name.remove(name);
    }
}

fn has_ended(state: VmState) -> bool {
    matches!(state, VmState::Stopped | VmState::Failed)
}

/// Gives the name back when a creation fails or is dropped.
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
    /// Takes the name, the memory and the CPUs, or says who has them.
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
        directory.by_name.insert(name.clone(), id.clone());
        directory.by_id.insert(id.clone(), Slot::Reserved { memory, vcpus });
        Ok(Reservation { host: self.clone(), id: id.clone(), name: name.clone(), kept: false })
    }

    /// The VM with that name. Never waits.
    #[must_use]
    pub fn named(&self, name: &VmName) -> Option<Arc<View>> {
        Some(self.0.directory().named(name)?.view.borrow().clone())
    }

    /// The VM that a caller means by `name`.
    pub(super) fn handle(&self, name: &str, access: Access) -> Result<Handle, HostError> {
        let directory = self.0.directory();
        if let Some(handle) = directory.exact(name) {
            return Ok(handle.clone());
        }
        let live =
            directory.by_name.iter().filter_map(|(known, id)| Some((directory.with_id(id)?, id, known)));
        resolve(access, name, live).cloned()
    }
}
