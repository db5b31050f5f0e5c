//! Observes the VM and the snapshots of a pod.

use std::net::IpAddr;

use coracle_api::cocoon::fork_snapshot;
use coracle_host::{Access, View};
use coracle_types::VmState;

use crate::execute::{Executor, key};
use crate::facts::{ForkSource, Source, VmFacts, VmOwner, Wanted};
use crate::leases;
use crate::task::KnownPods;

impl Executor {
    /// Returns the state of the VM that the pod names.
    pub(crate) async fn vm(&self, wanted: &Wanted, known: &KnownPods) -> Option<VmFacts> {
        let name = match &wanted.source {
            Source::Static { id, .. } => id.as_str(),
            _ => wanted.vm.as_str(),
        };
        let view = self.view(name)?;
        let given = view.record.addresses();
        let ips =
            if given.is_empty() { self.leased_address(&view).await.into_iter().collect() } else { given };
        Some(self.facts_of(&view, ips, known))
    }

    fn facts_of(&self, view: &View, ips: Vec<IpAddr>, known: &KnownPods) -> VmFacts {
        let record = &view.record;
        VmFacts {
            id: record.id.clone(),
            state: record.state,
            message: record.message.clone(),
            owner: self.owner_of(view, known),
            is_woken: record.metadata.contains_key(key::WOKEN),
            ips,
            has_agent: view.guest.is_some(),
            exit: record.exit.clone(),
            oom_killed: record.oom_killed,
            started_at: record.started_at,
            finished_at: record.finished_at,
            boots: record.boots,
        }
    }

    /// Returns the address that a DHCP server of the node leased to the VM.
    async fn leased_address(&self, view: &View) -> Option<IpAddr> {
        let path = self.leases.clone()?;
        let read = tokio::task::spawn_blocking(move || leases::read(&path)).await;
        read.ok()?.ok()?.address_of(&view.record.mac.to_string())
    }

    /// Returns the owner of a VM. VM names are unique on a node, and pod names only in a namespace, so that the name alone does
    /// not identify the owner.
    fn owner_of(&self, view: &View, known: &KnownPods) -> VmOwner {
        let record = &view.record;
        let Some(uid) = record.metadata.get(key::UID) else {
            return VmOwner::Other("not of a pod of this node".to_owned());
        };
        if *uid == self.pod.uid {
            return VmOwner::ThisPod;
        }
        if record.owner.namespace != self.pod.namespace {
            return VmOwner::Other("in use by another namespace".to_owned());
        }
        match known(uid) {
            true => VmOwner::Other(format!("in use by pod {}", record.owner.name)),
            false => VmOwner::GonePod,
        }
    }

    /// Returns whether the snapshot to clone is on this node and shared with this namespace.
    pub(crate) async fn has_clone_source(&self, wanted: &Wanted) -> bool {
        let Ok(name) = self.clone_source(wanted).await else { return false };
        self.host.snapshot(&name).await.is_ok_and(|info| info.admits(&self.owner()))
    }

    /// Returns the source of a fork. A snapshot of an earlier VM of the same name does not count.
    pub(crate) async fn fork_source(&self, wanted: &Wanted) -> ForkSource {
        let Source::Fork { from } = &wanted.source else { return ForkSource::None };
        let saved = self.host.snapshot(&fork_snapshot(from.as_str())).await.ok();
        let saved = saved.filter(|info| info.admits(&self.owner()));
        let Ok(view) = self.host.find(from.as_str(), Access::Change) else {
            return if saved.is_some() { ForkSource::Saved } else { ForkSource::Absent };
        };
        let record = &view.record;
        if record.owner.namespace != self.pod.namespace {
            return ForkSource::Foreign;
        }
        let is_of_this_vm = |info: &coracle_host::SnapshotInfo| {
            info.owner.uid == record.owner.uid && info.taken_at >= record.created_at
        };
        match (saved.as_ref().is_some_and(is_of_this_vm), record.state) {
            (true, _) => ForkSource::Saved,
            (false, VmState::Running | VmState::Paused | VmState::Hibernated) => ForkSource::Live,
            (false, state) => ForkSource::Waiting(state),
        }
    }
}
