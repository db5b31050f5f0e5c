//! Calls of the controller to a node, over either service of the node.

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

/// Calls to one node. Each call has a deadline and fails with an [`AgentError`].
#[tonic::async_trait]
pub(crate) trait NodeClient: fmt::Debug + Send + Sync {
    /// Returns the calls about snapshots; `None` when the node has no snapshots.
    fn snapshots(&self) -> Option<&dyn SnapshotClient> {
        None
    }

    /// Returns the VM with that id; `None`: not found. Coracle nodes return only a VM of that object.
    async fn get(&self, id: &str, fence: &Fence) -> Result<Option<VmInfo>, AgentError>;

    /// Creates the VM; coracle nodes boot it, too. Fails with ALREADY_EXISTS when a VM with that id exists.
    async fn create(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError>;

    /// Like [`NodeClient::create`], but coracle nodes leave the VM powered off.
    async fn create_stopped(&self, vm: &VmRef, spec: &VmSpec) -> Result<(), AgentError>;

    /// Starts the VM. Idempotent.
    async fn start(&self, vm: &VmRef) -> Result<(), AgentError>;

    /// Pauses, hibernates or powers off the VM within its grace period, or starts it.
    async fn set_power_state(&self, vm: &VmRef, state: PowerState) -> Result<(), AgentError>;

    /// Stops the VM by force. Returns `Ok` for an unknown VM.
    async fn stop(&self, vm: &VmRef) -> Result<(), AgentError>;

    /// Deletes the VM. Returns `Ok` for an unknown VM.
    async fn delete(&self, vm: &VmRef) -> Result<(), AgentError>;

    /// Returns the size of the node, before overcommit.
    async fn capacity(&self) -> Result<Capacity, AgentError>;

    /// Returns every VM of the node, with its id.
    async fn list(&self) -> Result<Vec<(String, VmInfo)>, AgentError>;

    /// Streams the ids of VMs that change from now on. The stream has no deadline; dropping it ends it.
    async fn watch(&self) -> Result<BoxStream<'static, Result<String, Status>>, AgentError>;
}
