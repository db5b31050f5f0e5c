//! Screens of VMs.

use coracle_hypervisor::Driver as _;
use tokio::net::UnixStream;

use super::{Access, Host};
use crate::HostError;
use crate::vmm_config::vmm_config;

impl Host {
    /// A connection to the screen of a VM whose VMM runs, by exact name or id: RFB (RFC 6143) without authentication. Its guest
    /// need not be up.
    ///
    /// # Errors
    /// [`HostError::NotFound`]; [`HostError::Driver`] for a VM that is off or has no screen.
    pub async fn display(&self, vm: &str) -> Result<UnixStream, HostError> {
        let record = self.find(vm, Access::Change)?.record.clone();
        let node = &self.0.shared.node;
        let accelerator = record.accelerator.unwrap_or_else(|| node.accelerator(&record.driver));
        let shape = vmm_config(&node.config, &record, accelerator, None);
        let driver = |source| HostError::Driver { name: record.name.to_string(), source };
        node.driver.display(&shape).await.map_err(driver)
    }
}
