//! Snapshots on the nodes of the fleet, for the snapshot controllers.

use std::{fmt, sync::Arc};

use coracle_api::MikromVM;
use tonic::Code;

use super::{
    address::AgentAddress, call::Caller, client::NodeClient, dialer::Dialer, error::AgentError,
    snapshot_client::SavedSnapshot, snapshots::copy_snapshot, vm_info::Fence,
};
use crate::{
    Config, Fleet,
    step::{SnapshotRef, VmRef},
};

/// Calls about snapshots. Each call opens and closes a connection of its own, because such calls are rare and copies take long.
#[derive(Clone)]
pub struct NodeSnapshots {
    fleet: Fleet,
    dialer: Arc<Dialer>,
    config: Config,
}

impl fmt::Debug for NodeSnapshots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeSnapshots").finish_non_exhaustive()
    }
}

impl NodeSnapshots {
    /// Creates the calls for the nodes of `fleet`, with the connection settings of the VM controller.
    #[must_use]
    pub fn new(config: &Config, fleet: Fleet) -> Self {
        let (connect, tls) = (config.connect.clone(), config.tls.clone());
        let dialer = Arc::new(Dialer::new(connect, tls, config.deadlines, config.metrics.clone()));
        Self { fleet, dialer, config: config.clone() }
    }

    /// True while a node with that name announces its agent.
    #[must_use]
    pub fn is_announced(&self, node: &str) -> bool {
        self.fleet.resolve(node).is_some()
    }

    async fn connect(&self, node: &str) -> Result<(AgentAddress, Arc<dyn NodeClient>), AgentError> {
        let Some(agent) = self.fleet.resolve(node) else {
            let (deadlines, metrics) = (self.config.deadlines, self.config.metrics.clone());
            let caller = Caller { address: node.to_owned(), deadlines, metrics };
            return Err(caller.error(
                "connect",
                Code::Unavailable,
                "no node of that name is announced".into(),
            ));
        };
        let client = self.dialer.dial(&agent).await?.client;
        Ok((agent, client))
    }

    /// Copies memory and disk of the VM on its node, as snapshot `name`. Returns `Ok` when the node already has a snapshot with
    /// that name.
    ///
    /// # Errors
    /// [`AgentError`] of the node.
    pub async fn save(&self, vm: &MikromVM, name: &str) -> Result<(), AgentError> {
        let node = vm.status.as_ref().map(|status| status.node_name.clone()).unwrap_or_default();
        let (agent, client) = self.connect(&node).await?;
        let vm = VmRef { agent: agent.clone(), id: vm.vm_id(), fence: Fence::of(vm), grace: None };
        let snapshots = client.snapshots();
        snapshots
            .ok_or_else(|| AgentError::unsupported(&agent.address, "SaveSnapshot"))?
            .save(&vm, name)
            .await
    }

    /// Returns the snapshot with that name on a node; `None`: not found.
    ///
    /// # Errors
    /// [`AgentError`] of the node.
    pub async fn get(&self, node: &str, name: &str) -> Result<Option<SavedSnapshot>, AgentError> {
        let (agent, client) = self.connect(node).await?;
        let snapshots = client.snapshots();
        snapshots
            .ok_or_else(|| AgentError::unsupported(&agent.address, "GetSnapshot"))?
            .get_snapshot(name)
            .await
    }

    /// Copies a snapshot on its node, for VMs of `namespace`. Returns `Ok` when the node already has a snapshot with the name
    /// of the copy.
    ///
    /// # Errors
    /// [`AgentError`] of the node.
    pub async fn copy(
        &self,
        node: &str,
        (name, copy): (&str, &str),
        namespace: &str,
    ) -> Result<(), AgentError> {
        let (agent, client) = self.connect(node).await?;
        let snapshots =
            client.snapshots().ok_or_else(|| AgentError::unsupported(&agent.address, "ExportSnapshot"))?;
        let fence = Fence { uid: String::new(), object: format!("{namespace}/"), generation: 0 };
        let copy = SnapshotRef { name: copy.to_owned(), fence, cluster: None };
        copy_snapshot(snapshots, snapshots, name, &copy).await
    }

    /// Removes a snapshot from a node. Returns `Ok` for an unknown snapshot.
    ///
    /// # Errors
    /// [`AgentError`] of the node.
    pub async fn delete(&self, node: &str, name: &str) -> Result<(), AgentError> {
        let (agent, client) = self.connect(node).await?;
        let snapshots =
            client.snapshots().ok_or_else(|| AgentError::unsupported(&agent.address, "DeleteSnapshot"))?;
        snapshots.delete_snapshot(name).await
    }
}
