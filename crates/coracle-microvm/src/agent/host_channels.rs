//! Connections to the host services of nodes, for calls by users.

use std::{fmt, sync::Arc};

use coracle_api::MikromVM;
use kube::ResourceExt as _;
use tonic::transport::Channel;

use super::{call::Caller, dialer::Dialer, error::AgentError};
use crate::{Config, Fleet};

/// Reason why the host service of a VM's node cannot be called.
#[derive(Debug, thiserror::Error)]
pub enum NoHostService {
    /// The scheduler has not bound the VM.
    #[error("MikromVM {vm} is on no node yet")]
    Unplaced {
        /// Name of the VM.
        vm: String,
    },
    /// No Lease has the address of the VM's node.
    #[error("node {node} is not announced; agents that are not ours have no such calls")]
    Unannounced {
        /// Name of the node, or the address of its agent.
        node: String,
    },
    /// The node announces no host service, or the operator has no certificate that the service would accept.
    #[error("node {node} serves no calls of users: start it with --host-listen")]
    Absent {
        /// Name of the node.
        node: String,
    },
    /// The host service does not respond.
    #[error(transparent)]
    Unreachable(#[from] AgentError),
}

/// Opens a connection for each caller, which closes it by dropping it.
#[derive(Clone)]
pub struct HostChannels {
    fleet: Fleet,
    dialer: Arc<Dialer>,
    config: Config,
}

impl fmt::Debug for HostChannels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostChannels").finish_non_exhaustive()
    }
}

impl HostChannels {
    /// Creates channels to the nodes of `fleet`, with the connection settings of the VM controller.
    #[must_use]
    pub fn new(config: &Config, fleet: Fleet) -> Self {
        let (connect, tls) = (config.connect.clone(), config.tls.clone());
        let dialer = Arc::new(Dialer::new(connect, tls, config.deadlines, config.metrics.clone()));
        Self { fleet, dialer, config: config.clone() }
    }

    /// Connects to the host service of the node that a VM is bound to. Cancel-safe.
    ///
    /// # Errors
    /// [`NoHostService`] when the VM has no node, or its host service cannot be called.
    pub async fn open(&self, vm: &MikromVM) -> Result<Channel, NoHostService> {
        let status = vm.status.clone().unwrap_or_default();
        let node = match (status.node_name.as_str(), status.agent_address.as_str()) {
            ("", "") => return Err(NoHostService::Unplaced { vm: vm.name_any() }),
            ("", address) => self.fleet.node_of(address).unwrap_or_else(|| address.to_owned()),
            (node, _) => node.to_owned(),
        };
        let Some(agent) = self.fleet.resolve(&node) else {
            return Err(NoHostService::Unannounced { node });
        };
        let Some(address) = agent.host_service.clone().filter(|_| self.config.tls.is_some()) else {
            return Err(NoHostService::Absent { node });
        };
        let (deadlines, metrics) = (self.config.deadlines, self.config.metrics.clone());
        let caller = Caller { address: agent.address.clone(), deadlines, metrics };
        let (channel, _closed) = self.dialer.connect(&address, &agent, &caller).await?;
        Ok(channel)
    }
}
