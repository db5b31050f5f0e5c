//! Command of a disk image VM, which its guest agent starts once the system is up.

use std::sync::Arc;

use super::{Access, Host};
use crate::vmm_config::process;
use crate::{HostError, Record};

impl Host {
    /// Starts the command of a running disk image VM, if it has one, as [`Host::start`] does. Idempotent: the guest starts the
    /// command once per boot.
    ///
    /// # Errors
    /// Like [`Host::guest`].
    pub async fn start_command(&self, vm: &str) -> Result<(), HostError> {
        let record = self.find(vm, Access::Change)?.record.clone();
        self.start_command_of(Arc::unwrap_or_clone(record)).await.map(drop)
    }

    /// Like [`Host::start_command`], for a record.
    pub(super) async fn start_command_of(&self, record: Record) -> Result<Record, HostError> {
        let has_command = record.disk_image_vm.is_some() && !record.workload.argv.is_empty();
        if !has_command || record.exit.is_some() {
            return Ok(record);
        }
        let guest = self.guest(record.id.as_str()).await?;
        let started = guest.start_workload(process(&record)).await;
        let (name, operation) = (record.name.to_string(), "start the command");
        started.map_err(|source| HostError::Guest { name, operation, source })?;
        Ok(record)
    }
}
