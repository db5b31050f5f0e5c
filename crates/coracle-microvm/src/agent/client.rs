//! What the controller asks of a node, whichever service the node has.

use std::fmt;

use coracle_api::PowerState;
use futures_util::stream::BoxStream;
use tonic::Status;

use super::{
    error::AgentError,
    snapshot_client::SnapshotClient,
    vm_info::{Fence, VmInfo},
};
use crate::{placement::Capacity, step::VmRef, vm_spec::VmSpec};

/// The calls to one node. Each has a deadline and fails with an [`AgentError`].
#[tonic::async_trait]
pub(crate) trait NodeClient: fmt::Debug + Send + Sync {
    /// The calls about snapshots; `None`: the node has none.
    fn snapshots(&self) -> Option<&dyn SnapshotClient> {
        None
    }

    /// The VM with that id; `None`: not found. Our nodes return only the VM of that object.
    async fn get(&self, id: &str, fence: &Fence) -> Result<Option<VmInfo>, AgentError>;

    /// Creates the VM; our nodes boot it, too. ALREADY_EXISTS when there is one with that id.
    async fn create(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError>;

    /// As [`NodeClient::create`], but our nodes leave the VM powered off.
    async fn create_stopped(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError>;

    /// Starts the VM. Idempotent.
    async fn start(&self, vm: &VmRef) -> Result<(), AgentError>;

    /// Pauses, hibernates or powers off the VM, which gets its grace period; or starts it.
    async fn set_power_state(&self, vm: &VmRef, state: PowerState) -> Result<(), AgentError>;

    /// Stops the VM by force. An unknown VM is `Ok`.
    async fn stop(&self, vm: &VmRef) -> Result<(), AgentError>;

    /// Deletes the VM. An unknown VM is `Ok`.
    async fn delete(&self, vm: &VmRef) -> Result<(), AgentError>;

    /// Size of the node, before overcommit.
    async fn capacity(&self) -> Result<Capacity, AgentError>;

    /// Every VM of the node, by its id.
    async fn list(&self) -> Result<Vec<(String, VmInfo)>, AgentError>;

    /// Ids of VMs that change from now on. The stream has no deadline; dropping it ends it.
    async fn watch(&self) -> Result<BoxStream<'static, Result<String, Status>>, AgentError>;
}
