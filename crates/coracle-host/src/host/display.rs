//! Displays of VMs.

use coracle_hypervisor::Driver as _;
use tokio::net::UnixStream;

use super::{Access, Host};
use crate::HostError;
use crate::vmm_config::vmm_config;

impl Host {
    /// Connects to the display of a VM whose VMM runs, by exact name or id: RFB (RFC 6143) without authentication. The guest
    /// need not be up.
    ///
    /// # Errors
    /// [`HostError::NotFound`]; [`HostError::Invalid`] if the VM has no display; [`HostError::Driver`] if it is off.
    pub async fn display(&self, vm: &str) -> Result<UnixStream, HostError> {
        let record = self.find(vm, Access::Change)?.record.clone();
        if record.disk_image_vm.as_ref().is_none_or(|settings| settings.display.is_none()) {
            let message = format!(
                "VM {} has no screen: it gets one when it is made, by a size like 1024x768",
                record.name
            );
            return Err(HostError::Invalid { message });
        }
        let node = &self.0.shared.node;
        let accelerator = record.accelerator.unwrap_or_else(|| node.accelerator(&record.driver));
        let shape = vmm_config(&node.config, &record, accelerator, None);
        let driver = |source| HostError::Driver { name: record.name.to_string(), source };
        node.driver.display(&shape).await.map_err(driver)
    }
}
