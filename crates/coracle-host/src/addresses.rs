//! Addresses that VMs borrow from other VMs: a pod keeps its address while the VMs of its disk containers come and go.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_net::{
    Assignment, Attachment, CniAddresses, Endpoint, GuestNic, Lease, NetError, Network, NetworkRequest,
    Subnet,
};
use coracle_record::Record;
use coracle_types::{InstanceId, VmId};

/// Network of a node in which a VM may use the lease and the ports of another VM. When a borrower releases them, they stay with
/// the lender.
#[derive(Debug)]
pub(crate) struct SharedAddresses {
    network: Arc<dyn Network>,
    lenders: Mutex<HashMap<VmId, VmId>>,
}

impl SharedAddresses {
    /// Loads the borrowers from the records.
    pub(crate) fn new(network: Arc<dyn Network>, records: &[Record]) -> Self {
        let lender = |record: &Record| Some((record.id.clone(), record.address_of.clone()?));
        Self { network, lenders: Mutex::new(records.iter().filter_map(lender).collect()) }
    }

    /// Makes `borrower` use the address of `lender`. Idempotent.
    pub(crate) fn borrow(&self, borrower: &VmId, lender: &VmId) {
        self.lenders().insert(borrower.clone(), lender.clone());
    }

    fn holder(&self, id: &VmId) -> VmId {
        self.lenders().get(id).unwrap_or(id).clone()
    }

    fn lenders(&self) -> MutexGuard<'_, HashMap<VmId, VmId>> {
        self.lenders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Network for SharedAddresses {
    fn mode(&self) -> &'static str {
        self.network.mode()
    }

    fn subnet(&self) -> Option<Subnet> {
        self.network.subnet()
    }

    async fn prepare(&self, guests: &[GuestNic]) -> Result<(), NetError> {
        self.network.prepare(guests).await
    }

    fn gives_addresses(&self) -> bool {
        self.network.gives_addresses()
    }

    async fn setup(&self, id: &VmId, request: &NetworkRequest) -> Result<(), NetError> {
        self.network.setup(&self.holder(id), request).await
    }

    /// Removes the VM's own network only: a borrower has none.
    async fn remove(&self, id: &VmId) -> Result<(), NetError> {
        self.network.remove(id).await
    }

    async fn collect(&self, keep: &HashSet<VmId>) -> Result<Vec<VmId>, NetError> {
        self.network.collect(keep).await
    }

    fn guest_network(&self, id: &VmId) -> Option<CniAddresses> {
        self.network.guest_network(&self.holder(id))
    }

    async fn assign(&self, subnet: Subnet) -> Result<Assignment, NetError> {
        self.network.assign(subnet).await
    }

    async fn settle(&self) -> Result<Option<Subnet>, NetError> {
        self.network.settle().await
    }

    fn pin(&self) {
        self.network.pin();
    }

    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        self.network.lease(&self.holder(id), wanted)
    }

    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError> {
        self.network.claim_ports(&self.holder(id), ports)
    }

    fn release(&self, id: &VmId) {
        let borrowed = self.lenders().remove(id).is_some();
        if !borrowed {
            self.network.release(id);
        }
    }

    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError> {
        self.network.create_interface(id).await
    }

    async fn attach(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<Attachment, NetError> {
        self.network.attach(id, endpoint).await
    }

    async fn cut_off(&self, id: &InstanceId) -> Result<(), NetError> {
        self.network.cut_off(id).await
    }

    async fn detach(&self, id: &InstanceId) -> Result<(), NetError> {
        self.network.detach(id).await
    }

    async fn sweep(&self, keep: &HashSet<InstanceId>) -> Result<Vec<String>, NetError> {
        self.network.sweep(keep).await
    }

    async fn teardown(&self) -> Result<(), NetError> {
        self.network.teardown().await
    }
}

#[cfg(test)]
mod tests {
    use coracle_hypervisor_testing::AddressOnly;
    use coracle_types::VmState;

    use super::*;

    fn id(name: &str) -> VmId {
        VmId::of_name(&name.parse().unwrap())
    }

    #[test]
    fn borrowed_address_stays_with_its_lender() {
        let inner = Arc::new(AddressOnly::new("10.100.0.0/29".parse().unwrap()));
        let mut restored = coracle_record::example("old", VmState::Created);
        restored.address_of = Some(id("pod"));
        let network = SharedAddresses::new(inner, &[restored]);
        let address = |name: &str| network.lease(&id(name), None).unwrap().unwrap().address;
        let of_pod = address("pod");
        assert_eq!(address("old"), of_pod, "as its record says");
        network.borrow(&id("new"), &id("pod"));
        assert_eq!(network.lease(&id("new"), Some(of_pod)).unwrap().unwrap().address, of_pod);
        network.release(&id("new"));
        assert_ne!(address("other"), of_pod, "the pod still has it");
        assert_ne!(address("new"), of_pod, "it does not borrow any more");
        network.release(&id("pod"));
        assert_eq!(network.lease(&id("next"), Some(of_pod)).unwrap().unwrap().address, of_pod);
    }
}
