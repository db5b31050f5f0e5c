//! Removal of temporary VMs.

use coracle_types::{VmId, VmState};

use super::Host;
use crate::HostError;
use crate::temporary::{Hold, RemoveWhen};

impl Host {
    /// Keeps the node from removing a temporary VM ([`crate::REMOVE_ANNOTATION`]), until the returned value is dropped.
    ///
    /// # Errors
    /// [`HostError::NotFound`].
    pub fn hold(&self, name: &str) -> Result<Hold, HostError> {
        let id = self.observe(name)?.borrow().record.id.clone();
        Ok(self.0.temporary.hold(id))
    }

    /// Removes a VM that no client holds, if its time has come. Returns whether the VM is gone. Idempotent.
    pub(super) async fn remove_unheld(&self, id: &VmId, when: RemoveWhen) -> bool {
        let Ok(view) = self.observe(id.as_str()) else { return true };
        let state = view.borrow().record.state;
        if when == RemoveWhen::Off && !is_off(state) {
            return false;
        }
        tracing::info!(vm = %id, %state, "removing a VM that no client holds");
        match self.delete(id.as_str(), true, None).await {
            Ok(()) | Err(HostError::NotFound { .. }) => true,
            Err(error) => {
                tracing::warn!(vm = %id, error = error.chain(), "remove a VM that no client holds failed");
                false
            }
        }
    }
}

/// Whether the VM is off for good: a hibernated VM will be woken.
fn is_off(state: VmState) -> bool {
    matches!(state, VmState::Created | VmState::Stopped | VmState::Failed)
}
