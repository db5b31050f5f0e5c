//! Limits on the VMs of a namespace: its quotas, and the public keys of its images.

use coracle_api::MikromVM;
use coracle_reconcile::WallTime as _;
use kube::ResourceExt as _;

use super::{ASSUMED_FOR, Fleet, Tables};
use crate::quota::{Quota, StaleUsage, exceeded};

impl Fleet {
    /// Returns why a VM that is about to be stored exceeds a quota of its namespace. Every other object of the namespace
    /// counts.
    #[must_use]
    pub fn exceeded_quota(&self, namespace: &str, vm: &MikromVM) -> Option<String> {
        let quotas: Vec<_> = self.lock().quotas_of(namespace).cloned().collect();
        if quotas.is_empty() {
            return None;
        }
        let vms = self.vms.state();
        let others = vms.iter().map(AsRef::as_ref);
        let others = others.filter(|other| is_in(other, namespace) && other.name_any() != vm.name_any());
        exceeded(&quotas, others, vm)
    }

    /// Waits until [`Self::stale_usage`] may have changed. Supports one waiter.
    pub(crate) async fn usage_changed(&self) {
        self.usage_changed.notified().await;
    }

    /// Returns the usage that the statuses of quotas lack. Every object of a namespace counts.
    pub(crate) fn stale_usage(&self) -> Vec<StaleUsage> {
        let quotas: Vec<_> = self.lock().quotas.rows.values().cloned().collect();
        let vms = if quotas.is_empty() { Vec::new() } else { self.vms.state() };
        let of = |namespace| vms.iter().map(AsRef::as_ref).filter(move |vm| is_in(vm, namespace));
        quotas.iter().filter_map(|quota| quota.stale(of(&quota.namespace))).collect()
    }

    /// Returns the public keys (PEM) of which one must have signed the images of a namespace; empty when no signature is
    /// required.
    pub(crate) fn image_keys(&self, namespace: &str) -> String {
        let tables = self.lock();
        let policy = tables.image_policy.rows.values().next();
        policy.map_or_else(String::new, |policy| policy.keys(namespace).to_owned())
    }

    /// Admits a VM that is about to be bound to a node. The VMs that are bound and those that were admitted recently count. The
    /// admission webhook sees only what is stored, and two objects may be stored at the same time; only this check sees all
    /// VMs.
    ///
    /// # Errors
    /// The quota that the VM exceeds.
    pub(crate) fn admit(&self, vm: &MikromVM) -> Result<(), String> {
        let (namespace, uid) = (vm.namespace().unwrap_or_default(), vm.uid().unwrap_or_default());
        let mut tables = self.lock();
        let quotas: Vec<_> = tables.quotas_of(&namespace).cloned().collect();
        if quotas.is_empty() {
            return Ok(());
        }
        let (vms, now) = (self.vms.state(), self.clock.timestamp());
        tables.admitted.retain(|_, until| now < *until);
        let counts = |other: &&MikromVM| {
            let id = other.uid().unwrap_or_default();
            let is_bound = other.status.as_ref().is_some_and(|status| !status.node_name.is_empty());
            id != uid && is_in(other, &namespace) && (is_bound || tables.admitted.contains_key(&id))
        };
        let others = vms.iter().map(AsRef::as_ref).filter(counts);
        if let Some(why) = exceeded(&quotas, others, vm) {
            return Err(why);
        }
        tables.admitted.insert(uid, now.saturating_add(ASSUMED_FOR).unwrap_or(now));
        Ok(())
    }
}

impl Tables {
    fn quotas_of(&self, namespace: &str) -> impl Iterator<Item = &Quota> {
        self.quotas.rows.values().filter(move |quota| quota.namespace == namespace)
    }
}

fn is_in(vm: &MikromVM, namespace: &str) -> bool {
    vm.metadata.namespace.as_deref() == Some(namespace)
}
