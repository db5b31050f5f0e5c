//! Network without devices.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_net::{Assignment, Attachment, Endpoint, GuestNic, Ipam, Lease, NetError, Network, Subnet};
use coracle_types::{InstanceId, VmId};

/// Network that assigns addresses and creates no devices, for VMMs in memory.
#[derive(Debug)]
pub struct AddressOnly(Mutex<(Ipam, Subnet, Option<Subnet>)>);

impl AddressOnly {
    /// Returns a network that assigns addresses of `subnet`.
    #[must_use]
    pub fn new(subnet: Subnet) -> Self {
        Self(Mutex::new((Ipam::new(subnet), subnet, None)))
    }

    fn lock(&self) -> MutexGuard<'_, (Ipam, Subnet, Option<Subnet>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Network for AddressOnly {
    fn mode(&self) -> &'static str {
        "none"
    }

    fn subnet(&self) -> Option<Subnet> {
        Some(self.lock().1)
    }

    async fn assign(&self, subnet: Subnet) -> Result<Assignment, NetError> {
        self.lock().2 = Some(subnet);
        self.settle().await?;
        Ok(if self.subnet() == Some(subnet) { Assignment::Current } else { Assignment::Pending })
    }

    async fn settle(&self) -> Result<Option<Subnet>, NetError> {
        let mut now = self.lock();
        let next = now.2.filter(|_| now.0.is_empty());
        if let Some(subnet) = next {
            *now = (Ipam::new(subnet), subnet, None);
        }
        Ok(next)
    }

    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        self.lock().0.lease(id, wanted).map(Some)
    }

    fn claim_ports(&self, _: &VmId, _: &[Forward]) -> Result<(), NetError> {
        Ok(())
    }

    fn release(&self, id: &VmId) {
        self.lock().0.release(id);
    }

    async fn prepare(&self, _: &[GuestNic]) -> Result<(), NetError> {
        Ok(())
    }

    async fn create_interface(&self, _: &InstanceId) -> Result<Attachment, NetError> {
        Ok(Attachment::User)
    }

    async fn attach(&self, _: &InstanceId, _: &Endpoint) -> Result<Attachment, NetError> {
        Ok(Attachment::User)
    }

    async fn cut_off(&self, _: &InstanceId) -> Result<(), NetError> {
        Ok(())
    }

    async fn detach(&self, _: &InstanceId) -> Result<(), NetError> {
        Ok(())
    }

    async fn sweep(&self, _: &HashSet<InstanceId>) -> Result<Vec<String>, NetError> {
        Ok(vec![])
    }

    async fn teardown(&self) -> Result<(), NetError> {
        Ok(())
    }
}
